"""List or prune the snapshots of compile caches in a store.

python -m sweeper.caches list                      what each was made from, its size, and which runs started from it
python -m sweeper.caches prune                     remove what is damaged, outgrown, half made or of another layout
python -m sweeper.caches prune --unused-for 30d    and what no run started from for 30 days
python -m sweeper.caches prune --down-to 10GB      and what was used longest ago, until 10 GB are left

A snapshot that a run is copying, or that a run which is not over started from, is never removed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash.settings import SettingError
from sweeper.caches import snapshots
from sweeper.caches.snapshots import Snapshot
from sweeper.words import leave, with_store

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(arguments: list[str] | None = None) -> int:
    """0 when done, 2 and one sentence when an option cannot work, 1 when the disk did not let it."""
    parser = argparse.ArgumentParser(
        "python -m sweeper.caches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    lists = commands.add_parser("list", help="every snapshot, last used first")
    prunes = commands.add_parser("prune", help="remove snapshots that are not in use")
    for command in (lists, prunes):
        command.add_argument("--store", default="./runs", help="the store, also as store=DIR (default ./runs)")
        command.add_argument("--json", action="store_true", help="one JSON object")
    prunes.add_argument("--older-than", metavar="TIME", help="made longer ago than this, such as 12h or 30d")
    prunes.add_argument("--unused-for", metavar="TIME", help="last used longer ago than this")
    prunes.add_argument("--down-to", metavar="SIZE", help="until they take no more than this, such as 500MB or 10GB")
    prunes.add_argument("--dry", action="store_true", help="say what would go, remove nothing")
    given = parser.parse_args(with_store(arguments))
    try:
        store = Path(given.store).expanduser().absolute()
        if not store.is_dir():
            raise SettingError("--store", given.store, "must be the folder of a sweep")
        return _list(store, given) if given.command == "list" else _prune(store, given)
    except SettingError as error:
        print(f"caches: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"caches: {error}", file=sys.stderr)
        return 1


def _list(store: Path, given: argparse.Namespace) -> int:
    found = snapshots.survey(store)
    if given.json:
        print(json.dumps({"store": str(store), "snapshots": [one.to_dict() for one in found]}))
        return 0
    for one in found:
        print("\n".join(_told(one)))
    print(f"{len(found)} snapshots, {_size(sum(one.bytes for one in found))}")
    return 0


def _prune(store: Path, given: argparse.Namespace) -> int:
    removed, kept = snapshots.prune(
        store,
        older_than=_number("--older-than", given.older_than, _SECONDS, "a time such as 12h or 30d"),
        unused_for=_number("--unused-for", given.unused_for, _SECONDS, "a time such as 12h or 30d"),
        down_to=_number("--down-to", given.down_to, _BYTES, "a size such as 500MB or 10GB", int),
        dry=given.dry,
    )
    if given.json:
        told: Any = [{"name": one.name, "why": why} for one, why in kept]
        print(json.dumps({"removed": [one.to_dict() for one in removed], "in_use": told, "dry": given.dry}))
        return 0
    for one in removed:
        print(f"{'would remove' if given.dry else 'removed'} {one.name} ({one.state}, {_size(one.bytes)})")
    for one, why in kept:
        print(f"kept {one.name}: {why}")
    verb = "would be removed" if given.dry else "removed"
    print(f"{len(removed)} snapshots {verb}, {_size(sum(one.bytes for one in removed))}")
    return 0


def _told(one: Snapshot) -> list[str]:
    """A snapshot in lines."""
    made, lines = one.made_from, [f"{one.name}  {_size(one.bytes)} in {one.files} files"]
    if one.state != "whole":
        lines[0] += f"  {one.state.upper()}"
    wheel, device, settings = made.get("wheel") or {}, made.get("device") or {}, made.get("settings") or {}
    cell = " ".join(f"{factor}={level}" for factor, level in (made.get("cell") or {}).items())
    drafter, versions = settings.get("drafter") or {}, wheel.get("versions") or {}
    rows = [(settings.get(section) or {}).get(name) for section, name in (("train", "rows"), ("data", "row_tokens"))]
    runs = f"{len(one.used_by)} run{'s' if len(one.used_by) != 1 else ''}"
    facts = {
        "made": f"{_when(one.made)} by {made['run']}" if made.get("run") else _when(one.made),
        "grown": f"from {', '.join(map(str, made.get('grown_from') or ()))}" if made.get("grown_from") else "",
        "command": " ".join(map(str, made.get("command") or ())),
        "cell": cell,
        "wheel": " ".join(f"{name} {versions[name]}" for name in ("python", "torch", "triton") if name in versions),
        "device": " ".join(map(str, device.get("gpus") or [device.get("device") or ""])),
        "drafter": " ".join(f"{name}={value}" for name, value in drafter.items() if value is not None),
        "rows": f"{rows[0]} of {rows[1]} tokens" if None not in rows else "",
        "target": str((settings.get("target") or {}).get("model") or ""),
        "used": f"{_when(one.last_used)}, {runs}: {', '.join(one.used_by)}" if one.used_by else "never",
        "in use": one.busy,
    }
    return lines + [f"  {name:8} {text}" for name, text in facts.items() if text]


def _number(
    option: str, text: str | None, units: dict[str, int], allowed: str, kind: Callable[[float], Any] = float
) -> Any:
    """A number with a unit, in seconds or bytes; None for none. Raises SettingError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    unit = units.get(match[2], units.get(match[2].upper())) if match else None
    if not match or unit is None:
        raise SettingError(option, text, f"must be {allowed}")
    return kind(float(match[1]) * unit)


def _size(size: int) -> str:
    unit = next((name for name in reversed(_BYTES) if size >= _BYTES[name]), "B")
    return f"{size / _BYTES[unit]:.3g} {unit}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


if __name__ == "__main__":
    leave(main)
