"""What `--help` prints, and which settings there are: read from conf/ without Hydra, to come at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from dflash.settings import FANOUT_SECTIONS, JobSettings

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = {
    "compile": "how the drafter's forward becomes callable",
    "cache": "what the compile caches hold when a run starts",
    "isolation": "what a worker is",
    "wheel": "which Python environment runs it",
    "workload": "what is trained",
    "tracking": "where else the results go",
}
FANOUT = (
    "several drafters on one stream of features, NAME each: what differs in "
    f"{', '.join(FANOUT_SECTIONS)}; split= needs drafters for all"
)
EXAMPLES = """\
usage: sweeper [-m] [-v] [key=value ...]          (or: python -m sweeper ...)

  sweeper                                         train one drafter with the defaults
  sweeper -m compile=locked,whole cache=warm,cold a run for each combination; start it again to resume
  sweeper -m compile=locked,unlocked repeat=5     five repeats of each cell, in shuffled blocks
  sweeper -m compile=locked,whole repeat=20 'until=ci<5%' aa=true    until the difference is known, and the noise
  sweeper -m compile=locked,whole dry=true        the plan: order, what is done, estimated time
  sweeper -m compile=locked,whole rerun=failed    do failed runs again
  sweeper drafter.layers=5 data.path=my.jsonl     any setting of the trainer, listed below
  sweeper split=1t2d fanout.a.drafter.block=8 fanout.b.drafter.block=16     two drafters on one stream of features
  sweeper -m +experiment=incident wheel=cu128,cu130    the incident replayed: what fails, how often, what cures it
  sweeper -m workload=command 'workload.argv=["{python}",train.py,--lr,"{args.lr}"]' args.lr=0.1,0.01    any command
  sweeper -m jobs=auto compile=locked,whole split=1t1d,2t2d     several runs at once on one machine, each with its GPUs
  sweeper -m hydra/launcher=slurm slurm.partition=gpu detach=true split=5t3d   each run a job of Slurm (docs/CLUSTER.md)
  python -m sweeper.bisect --help                 which torch, commit, value of an ordered list is the first bad one
"""
NOTES = """\
exit status: 0 every planned run has a verdict, 2 a setting cannot work, 3 strict=true and some run is not ok,
             1 a fault of the harness, 130 interrupted (Ctrl-C once: end this run cleanly; twice: at once)
more:        --cfg job  composed settings    --info  where they come from    --hydra-help  Hydra's own options
             tab completion: eval "$(sweeper -sc install=bash)"
"""


def text() -> str:
    """The whole help text."""
    usual = defaults()
    parts = [EXAMPLES, "factors and their levels (* is the default):"]
    for group, what in GROUPS.items():
        parts.append(f"  {group}: {what}")
        for level in levels(group):
            mark = "*" if usual.get(group) == level else " "
            parts.append(f"   {mark}{level:<11} {about(group, level)}")
    parts.append("\nsettings:")
    for name, (value, comment) in top_level().items():
        parts.append(
            f"  {name + '=' + value:<19} {comment}" if len(value) < 14 else f"  {name}\n{'':<22}{comment}; {value}"
        )
    return "\n".join([*parts, *_trainer(), "", NOTES])


def _trainer() -> list[str]:
    """A paragraph for each section of the trainer's settings; what dflash/settings.py says of one, in its words."""
    written = _load(CONF / "workload" / "smollm2.yaml")
    job = typing.get_type_hints(JobSettings)
    parts = []
    for section in written["workload"]["sections"]:
        kind = job[section]
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            parts.append(f"\n{section}.NAME.SECTION.SETTING\n  {FANOUT}")
            continue
        said = _comments(kind)
        parts.append(f"\n{section}: {(kind.__doc__ or '').splitlines()[0]}")
        for name, value in written[section].items():
            default = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            parts.append(f"  {f'{section}.{name}={default}':<29} {said.get(name, '')}".rstrip())
    return [line.replace("None", "null") for line in parts]  # as a command line writes it


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field in the source of a dataclass."""
    found = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE)
    return dict(found)


def levels(group: str) -> list[str]:
    """The levels of a config group: its files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def defaults() -> dict[str, str]:
    """The level of each factor that a command line need not name."""
    named = {name: level for entry in _config()["defaults"] if isinstance(entry, dict) for name, level in entry.items()}
    return named | {"split": top_level()["split"][0]}


def about(group: str, level: str) -> str:
    """The one line that a level's file says of itself."""
    content = _load(CONF / group / f"{level}.yaml")
    return str(content.get("about") or content.get("workload", {}).get("about", ""))


def top_level() -> dict[str, tuple[str, str]]:
    """Settings of conf/config.yaml: {name: (default as written, the comment above it)}."""
    found, comment = {}, ""
    for line in (CONF / "config.yaml").read_text().splitlines():
        if line.startswith("# "):
            comment = line[2:]
        elif line and not line.startswith((" ", "#")):
            name, _, value = line.partition(":")
            if value.strip():
                found[name] = (value.strip(), comment)
            comment = ""
    return found


@functools.cache
def known_keys(workload: str = "") -> list[str]:
    """Every key that a command line can set, dotted; with a level of `workload` those that it has."""
    keys: set[str] = set(GROUPS)
    workloads = (CONF / "workload").glob(f"{workload or '*'}.yaml")
    for path in [CONF / "config.yaml", CONF / "hydra" / "launcher" / "slurm.yaml", *workloads]:
        prefix = "" if path.name == "config.yaml" or "_global_" in path.read_text().split("\n")[0] else "workload."
        keys.update(_flatten(_load(path), prefix))
    return sorted(key for key in keys if not key.startswith(("hydra", "defaults")) and not key.endswith("about"))


def own_keys(workload: str) -> list[str]:
    """What a command line can set with this level of `workload` and not with every other: sections, and its command."""
    content = _load(CONF / "workload" / f"{workload}.yaml")
    inside = [f"workload.{name}" for name in content.get("workload", {}) if name not in ("about", "name", "sections")]
    return [*(f"{name}.NAME" for name in content if name not in ("workload", "defaults")), *inside]


def _flatten(values: dict[str, Any], prefix: str) -> list[str]:
    found = []
    for key, value in values.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{key}.")
    return found


def _config() -> dict[str, Any]:
    return _load(CONF / "config.yaml")


def _load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    return content if isinstance(content, dict) else {}
