"""What Hydra and OmegaConf say of a bad command line, in one sentence: setting, value, what is allowed."""

from __future__ import annotations

import difflib
import re

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from dflash.settings import SettingError
from sweeper import help

# OmegaConf's words for a value of the wrong type, and ours.
_TYPES = {
    "converted to Integer": "must be a whole number",
    "converted to Float": "must be a number",
    "not a valid bool": "must be true or false",
    "Incompatible value 'None'": "must not be null",
}


def sentence(error: BaseException, arguments: list[str]) -> str:
    """One line of text for an error that the person at the keyboard can cure."""
    if isinstance(error, SettingError):
        return _flat(str(error))
    missing = _cause(error, MissingConfigException)
    if isinstance(missing, MissingConfigException):
        return _wrong_level(missing, arguments)
    parse = _cause(error, OverrideParseException)
    if isinstance(parse, OverrideParseException):
        return (
            f"{parse.override.removeprefix('++')}: no readable key=value ({_first(parse)}); special signs need quotes"
        )
    mandatory = _cause(error, MissingMandatoryValue)
    if mandatory is not None:
        key = getattr(mandatory, "full_key", None) or _first(mandatory)
        return f"{key}=???: must be given" + (", such as 'workload.argv=[python,train.py]'" if "argv" in key else "")
    lost = re.search(r"Interpolation key '([^']+)'", str(_cause(error, InterpolationKeyError)))
    if lost and any(word.partition("=")[0] == f"~{lost[1]}" for word in arguments):
        return f"{lost[1]}=removed: this setting is required"
    text = str(error)
    if "INTERVAL_SWEEP" in text:
        word = next((word for word in arguments if "interval(" in word), "interval(")
        return f"{word}: an interval has no list of levels; write them out, or as range(FROM,TO,STEP)"
    if "struct" in text or "Could not override" in text:
        return _unknown_key(text, arguments)
    key, value = _culprit(error, arguments)
    said = _first(_deepest(error))
    allowed = next((words for pattern, words in _TYPES.items() if re.search(pattern, said)), said)
    return f"{key}={value}: {allowed}" if key else said


def _wrong_level(error: MissingConfigException, arguments: list[str]) -> str:
    group, _, level = (error.missing_cfg_file or "").rpartition("/")
    known = [name for name in error.options or [] if name]
    if not group:
        return _flat(str(error))
    near = difflib.get_close_matches(level, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    for name, _, given in (word.partition("=") for word in arguments):
        if name.startswith(f"{group}@") and level in given.split(","):  # cache_from=, a level of the group wheel
            group = name.partition("@")[2]
    return f"{group}={level}: unknown level; {hint}known: {', '.join(known)}"


def _unknown_key(text: str, arguments: list[str]) -> str:
    match = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    key = match[1] if match else "?"
    value = next((a.partition("=")[2] for a in arguments if a.lstrip("+~").partition("=")[0] == key), "")
    if key.startswith("slurm.") and "hydra/launcher=slurm" not in arguments:
        return f"{key}={value}: needs hydra/launcher=slurm"
    chosen = next(
        (a.partition("=")[2] for a in reversed(arguments) if a.startswith("workload=")), help.defaults()["workload"]
    )
    if chosen in (levels := help.levels("workload")):
        having = [level for level in levels if key in help.known_keys(level)]
        if having:
            return (
                f"{key}={value}: workload={chosen} has no {key}, workload={having[0]} has; "
                f"it has {', '.join(help.own_keys(chosen))}"
            )
    known = help.known_keys(chosen if chosen in levels else "")
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.7) or [k for k in known if k.rpartition(".")[2] == last]
    if not near:
        inside = key.rpartition(".")[0]
        near = [k for k in known if inside and k.startswith(inside + ".")]
        hint = f"known in {inside}: {', '.join(near)}" if near else "sweeper --help and --cfg job list what there is"
    else:
        hint = f"did you mean {' or '.join(near)}?"
    return f"{key}={value}: unknown setting; {hint}"


def _culprit(error: BaseException, arguments: list[str]) -> tuple[str, str]:
    """The setting that an error is about, with the value that the command line gave it."""
    key = getattr(_cause(error, OmegaConfBaseException), "full_key", None) or ""
    for argument in reversed(arguments):
        name, _, value = argument.lstrip("+~").partition("=")
        if (key and name == key) or (not key and argument in str(error)):
            return name, value
    return key, "" if not key else "?"


def _cause(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, kind):
            return at
        at = at.__cause__ or at.__context__
    return None


def _deepest(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _flat(text: str) -> str:
    return " ".join(text.split())
