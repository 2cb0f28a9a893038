"""Environments that runs use: which there are, building one beforehand, throwing away what is not used.

python -m sweeper.wheels list
python -m sweeper.wheels build cu130 cpu213        (settings as for a sweep: wheels.dir=/fast/wheels)
python -m sweeper.wheels prune --unused-for 30d
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from dflash.settings import SettingError
from sweeper import help, wheels
from sweeper.wheels.build import BuildFailure, build
from sweeper.words import leave

BAD_INPUT, FAILED, INTERRUPTED = 2, 3, 130
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 2 a setting cannot work; 3 an environment could not be built; 130 interrupted."""
    parser = argparse.ArgumentParser("python -m sweeper.wheels", description="Environments of the factor wheel.")
    commands = parser.add_subparsers(dest="command", required=True)
    settings = "settings as for a sweep, such as store=DIR, wheels.dir=DIR, wheels.find_links=[DIR]"
    listing = commands.add_parser("list", help="environments that are built, and levels that are not")
    listing.add_argument("--json", action="store_true", help="one JSON object an environment")
    building = commands.add_parser("build", help="build levels now, or say that they are there")
    building.add_argument("names", nargs="+", metavar="LEVEL", help="levels of wheel=, then settings (key=value)")
    pruning = commands.add_parser(
        "prune", help="delete environments that no run used for some time, and what killed builds left"
    )
    pruning.add_argument("--unused-for", default="30d", metavar="TIME", help="such as 30d, 12h or 0m; default 30d")
    for one in (listing, building, pruning):
        one.add_argument("--config-dir", metavar="DIR", help="a folder with levels of your own, wheel/NAME.yaml")
        if one is not building:
            one.add_argument("names", nargs="*", metavar="key=value", help=settings)
    chosen, more = parser.parse_known_args(arguments)  # settings may also follow an option
    if flags := [word for word in more if word.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    chosen.names += more
    levels = [word for word in chosen.names if "=" not in word]
    overrides = [word for word in chosen.names if "=" in word]
    try:
        if levels and chosen.command != "build":
            raise SettingError("wheel", levels[0], f"{chosen.command} takes settings only, as key=value")
        if chosen.command == "build":
            return _build(levels, overrides, chosen.config_dir)
        _, sources = _level("current", overrides, chosen.config_dir)
        if chosen.command == "list":
            _list(sources, overrides, chosen)
        else:
            _prune(sources, _seconds(chosen.unused_for))
    except SettingError as error:
        print(f"sweeper.wheels: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _level(name: str, overrides: Sequence[str], folder: str | None) -> tuple[wheels.Pins | None, wheels.Sources]:
    """The pins of a level and where to build, as a sweep's command line would have them. Raises SettingError."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from sweeper.__main__ import _hydras, _resolvers
    from sweeper.complaints import sentence

    words = [f"wheel={name}", *map(_hydras, overrides)]
    if folder:
        words.append(f"hydra.searchpath=[file://{Path(folder).absolute()}]")
    with tempfile.TemporaryDirectory(prefix="sweeper-") as scratch:
        _resolvers(scratch)
        try:
            with initialize_config_dir(str(help.CONF), version_base="1.3"):
                config = compose("config", words)
            places = OmegaConf.to_container(config.wheels, resolve=True)
            given = OmegaConf.merge(OmegaConf.structured(wheels.Sources), places)
            sources: Any = OmegaConf.to_object(given)
            level: Any = OmegaConf.to_container(config.wheel, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            setting, _, rest = sentence(error, words).partition("=")
            value, _, allowed = rest.partition(": ")
            raise SettingError(setting, value, allowed) from None
    sources.check()
    return wheels.read(name, level), sources


def _build(names: Sequence[str], overrides: Sequence[str], folder: str | None) -> int:
    asked = [_level(name, overrides, folder) for name in names]  # all, before the first is begun
    status = 0
    for name, (pins, sources) in zip(names, asked, strict=True):
        try:
            wheel = build(pins, sources, say=print) if pins else wheels.current()
        except BuildFailure as failure:
            print(failure, file=sys.stderr)
            status = FAILED
            continue
        if wheel:
            print(f"{name}: torch {wheel.versions.get('torch', 'none')}, {wheel.python}")
    return status


def _list(sources: wheels.Sources, overrides: Sequence[str], chosen: argparse.Namespace) -> None:
    there = list(wheels.whole(sources.folder))
    told = [_facts(folder, record) for folder, record in there]
    if chosen.json:
        for one in told:
            print(json.dumps(one))
        return
    rows = [("environment", "torch", "CUDA", "python", "own MB", "last used")]
    for one in told:
        cuda, days = one["cuda"] or "-", (time.time() - one["used"]) / _UNITS["d"]
        size = f"{one['bytes'] / 1e6:.0f}"
        rows.append(
            (one["name"], one["torch"], cuda, one["python"], size, f"{days:.0f} days ago" if days >= 1 else "today")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"in {sources.folder}; own MB: what deleting it would free, files shared with others or uv's cache left out")
    keys = {key for _, record in there for key in record["keys"]}
    for name in _names(chosen.config_dir):
        if name in (wheels.CURRENT, "pins"):
            continue
        pins, _ = _level(name, overrides, chosen.config_dir)
        if pins and pins.key not in keys:
            print(f"not built: {name} ({pins})")


def _names(folder: str | None) -> list[str]:
    own = Path(folder, "wheel").glob("*.yaml") if folder else ()
    return sorted({*help.levels("wheel"), *(path.stem for path in own)})


def _facts(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    files = [path.lstat() for path in folder.rglob("*")]
    return {
        "name": folder.name,
        "folder": str(folder),
        "torch": record["torch"]["version"],
        "git_version": record["torch"]["git_version"],
        "cuda": record["torch"]["cuda"],
        "python": record["versions"]["python"],
        "versions": record["versions"],
        "requirements": record["requirements"],
        "index": record["index"],
        "fingerprint": record["fingerprint"],
        "built": record["built"],
        "used": (folder / wheels.RECORD).stat().st_mtime,
        "bytes": sum(one.st_size for one in files if one.st_nlink == 1),
    }


def _prune(sources: wheels.Sources, seconds: float) -> None:
    busy = _busy()
    for folder, record in wheels.whole(sources.folder):
        if time.time() - (folder / wheels.RECORD).stat().st_mtime < seconds:
            continue
        if any(word.startswith(f"{folder}{os.sep}") for word in busy):
            print(f"kept {folder.name}: a process runs in it")
            continue
        size = _facts(folder, record)["bytes"]
        # Out of sight first: what is half deleted must not be found.
        away = folder.with_name(f".{folder.name}-{os.getpid()}")
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)
        print(f"deleted {folder.name}: {size / 1e6:.0f} MB")
    for left in sources.folder.glob(".*-*"):
        if left.name.startswith(".shown-") or not left.is_dir():
            continue
        try:
            with FileLock(sources.folder / f"{left.name.rpartition('-')[0]}.lock", timeout=0):
                shutil.rmtree(left, ignore_errors=True)
                print(f"deleted {left.name}, left by a build that was killed")
        except Timeout:
            continue  # it is being built


def _busy() -> list[str]:
    """First words of the command lines of all processes: the interpreters at work."""
    found = []
    for process in psutil.process_iter():
        try:
            found += process.cmdline()[:1]
        except psutil.Error:
            continue
    return found


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dhm])", text)
    if not match:
        raise SettingError("--unused-for", text, "must be a time such as 30d, 12h or 5m")
    return float(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    leave(main)
