"""What is trained: a command, what it is told, and how its progress is read (docs/COMMAND.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.settings import SettingError
from sweeper import caches, progress, supervisor

TRAINER = "dflash"  # the workload that is this project's own
LISTS = ("argv", "sections", "code", "standalone")
RUNS_OWN = ("python", "out", "spec")  # what a word in braces may stand for besides a setting
_PLACE = re.compile(r"\{([A-Za-z]\w*(?:\.\w+)*)\}")


@dataclass(frozen=True)
class Workload:
    """The training command. `{python}`, `{spec}`, `{out}` and `{setting}` in argv and env are filled in at a start.

    standalone: the command that fills the caches for cache=standalone, of the same form. env: variables beside
    those that every run has. pattern, tokens, warmup_lines: see `progress.Printed`; without a pattern, progress is
    what the command reports.
    """

    name: str
    argv: tuple[str, ...]
    sections: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    standalone: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    pattern: str = ""
    tokens: int = 0
    warmup_lines: int = 0

    @property
    def is_trainer(self) -> bool:
        return self.name == TRAINER


def read(given: Mapping[str, Any]) -> Workload:
    """The workload that the section of this name describes. Raises SettingError."""
    for name in LISTS:
        value = given.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise SettingError(f"workload.{name}", value, "must be a list of strings")
    if not given["argv"]:
        raise SettingError("workload.argv", "[]", "must be a command and its arguments")
    for path in given["code"]:
        if not Path(path).is_file():
            raise SettingError("workload.code", path, "must be existing files")
    pattern, tokens, warmup_lines = given.get("pattern"), given.get("tokens", 0), given.get("warmup_lines", 0)
    progress.check(pattern, tokens, warmup_lines)
    lists: dict[str, Any] = {name: tuple(given[name]) for name in LISTS}
    return Workload(
        given["name"],
        **lists,
        env=_environment(given.get("env") or {}),
        pattern=pattern or "",
        tokens=tokens,
        warmup_lines=warmup_lines,
    )


def arguments(given: Any, workload: Workload) -> dict[str, str]:
    """The section `args` as text. Raises SettingError for one that the command would not learn of."""
    found = _texts("args", given or {})
    words = [*workload.argv, *workload.standalone, *workload.env.values()]
    wanted = {name for word in words for name in _PLACE.findall(word)}
    for name, value in found.items():
        if not {f"args.{name}", "spec"} & wanted:
            raise SettingError(
                f"args.{name}", value, f"the command is not told of it; write {{args.{name}}} in workload.argv"
            )
    for name in sorted(wanted):
        if name.startswith("args.") and name.removeprefix("args.") not in found:
            raise SettingError("workload.argv", f"{{{name}}}", f"needs {name}=...")
    return found


def check_places(workload: Workload, told: Mapping[str, str]) -> None:
    """Raise SettingError for `{name}` in argv or env that stands for nothing; told: the settings of a run."""
    known = [*RUNS_OWN, *told]
    lists = {"argv": workload.argv, "standalone": workload.standalone}
    lists |= {f"env.{name}": (value,) for name, value in workload.env.items()}
    for where, words in lists.items():
        for name in (name for word in words for name in _PLACE.findall(word)):
            if name not in known:
                places = ", ".join(f"{{{one}}}" for one in known)
                own = f"braces of the command's own are handed over in an argument, args.x='{{{name}}}' and {{args.x}}"
                raise SettingError(f"workload.{where}", f"{{{name}}}", f"stands for nothing; known: {places}; {own}")


def fill(word: str, values: Mapping[str, str]) -> str:
    """Put values where `{name}` stands; other braces are the command's own."""
    return _PLACE.sub(lambda match: values.get(match[1], match[0]), word)


def values(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every setting that is one value, as text under its dotted name."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= values(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            found[prefix + name] = _text(value)
    return found


def _environment(given: Mapping[str, Any]) -> dict[str, str]:
    found = _texts("workload.env", given)
    for name, value in found.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise SettingError("workload.env", name, "must be the name of an environment variable")
        if any(word in name.upper() for word in supervisor.SECRET):
            raise SettingError(f"workload.env.{name}", "...", "looks like a secret, which a run's record would keep")
        if name in (*caches.environment(Path()), supervisor.RUN_MARK, supervisor.EVENTS_MARK):
            raise SettingError(f"workload.env.{name}", value, "is what the harness itself sets in each run")
    return found


def _texts(section: str, given: Mapping[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if isinstance(value, Mapping | list):
            raise SettingError(f"{section}.{name}", value, "must be one value")
    return {str(name): _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
