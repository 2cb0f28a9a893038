"""The store's folders: attempts of runs, their records, and what a harness that died left behind.

    runs/<slug>/   one attempt of one run      sweeps/<id>/   plan and table      locks/, snapshots/, models/

A record is written whole or not at all (beside, flushed, renamed), so whoever reads one reads the truth.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dflash.events import EVENTS_FILE, EventReader
from sweeper.measure import figures
from sweeper.spec import Run
from sweeper.verdict import Verdict, named

RUN_FILE = "run.json"
SPEC_FILE = "spec.json"
VERDICT_FILE = "verdict.json"
JOB_FILE = "slurm.json"  # of a run that a scheduler was given: which job it is; touched while the job works on it
CACHES = "caches"
PROFILES = "profile*"  # what a command left in its {out} under such a name is shown with the run
# A run's record is written at once after its directory is made; one that has none for so long will get none.
UNRECORDED_S = 60.0
# Ends that come from outside and say nothing of the run: it is done again by itself.
UNFINISHED = (
    *("sweep.interrupted", "sweep.harness_died", "sweep.code_changed", "scheduler.refused"),
    *("scheduler.preempted", "scheduler.node_failed", "scheduler.cancelled"),
)
RESUMED = (*UNFINISHED, "scheduler.time_limit")  # after which another attempt takes over the checkpoints

_NAME = re.compile(r"-([0-9a-f]{12})-r(\d+)\.a(\d+)$")


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, as recorded. `verdict` is None while it runs or when nobody wrote one."""

    folder: Path
    run: dict[str, Any]
    verdict: dict[str, Any] | None

    @property
    def number(self) -> int:
        match = _NAME.search(self.folder.name)
        return int(match[3]) if match else 0

    @property
    def cause(self) -> str:
        return str(((self.verdict or {}).get("signature") or {}).get("cause", ""))

    @property
    def done(self) -> bool:
        """True when this attempt need not be made again by itself."""
        return self.verdict is not None and self.cause not in UNFINISHED

    def matches(self, rerun: str) -> bool:
        """Whether `rerun=` asks to do this finished attempt again."""
        verdict = self.verdict or {}
        if rerun in ("none", "all"):
            return rerun == "all"
        if rerun == "failed":
            return verdict.get("verdict") in ("failed", "hung", "killed")
        return rerun in (self.cause, (verdict.get("signature") or {}).get("fingerprint"))


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write(path: Path, value: Any) -> None:
    """Write JSON (or text) whole: beside, flushed to disk, renamed. Raises OSError."""
    text = value if isinstance(value, str) else json.dumps(value, indent=1, default=str) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def claim(store: Path, run: Run) -> tuple[Path, int]:
    """Make the directory of the run's next attempt; no two callers ever get the same. Raises OSError.

    The caller holds the run's lock, so that one of its directories which has no record yet will get none: it is closed.
    """
    runs = store / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    before = attempts(store, run)
    for one in before:
        if not one.run and one.verdict is None:
            why = "the harness died, or could not write, before this run was recorded"
            with contextlib.suppress(OSError):
                close(one.folder, Verdict("killed", named("sweep.harness_died", why), why))
    number = max((one.number for one in before), default=0) + 1
    return _next(lambda number: runs / run.slug(number), number)


def claim_after(folder: Path) -> tuple[Path, int]:
    """The same for the run whose attempt this is. Raises OSError."""
    stem, _, _ = folder.name.rpartition(".a")
    return _next(lambda number: folder.with_name(f"{stem}.a{number}"), siblings(folder)[-1].number + 1)


def _next(named: Callable[[int], Path], number: int) -> tuple[Path, int]:
    while True:
        try:
            named(number).mkdir()
            return named(number), number
        except FileExistsError:
            number += 1


def siblings(folder: Path) -> list[Attempt]:
    """All attempts of the run that this directory is an attempt of, oldest first."""
    match = _NAME.search(folder.name)
    found = folder.parent.glob(f"*-{match[1]}-r{match[2]}.a*") if match else [folder]
    return sorted((attempt(one) for one in found), key=lambda one: one.number)


def attempts(store: Path, run: Run) -> list[Attempt]:
    """The attempts of one run, oldest first."""
    found = (store / "runs").glob(f"*-{run.identity[:12]}-r{run.repeat}.a*")
    return sorted((attempt(folder) for folder in found), key=lambda one: one.number)


def newest(store: Path, run: Run) -> Attempt | None:
    """The newest attempt of a run that has a verdict."""
    return latest(store, [run]).get(run.identity)


def latest(store: Path, runs: Iterable[Run]) -> dict[str, Attempt]:
    """The same for each of these runs that has one, by identity and in their order; the store is listed once."""
    folders: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in os.listdir(store / "runs") if (store / "runs").is_dir() else ():
        if match := _NAME.search(name):
            folders.setdefault((match[1], match[2]), []).append((int(match[3]), name))
    found = {}
    for run in runs:
        names = sorted(folders.get((run.identity[:12], str(run.repeat)), []), reverse=True)
        several = (attempt(store / "runs" / name) for _, name in names)
        if last := next((one for one in several if one.verdict), None):
            found[run.identity] = last
    return found


def history(store: Path) -> dict[str, list[Attempt]]:
    """Every recorded attempt in the store, by the run's identity, oldest first."""
    found: dict[str, list[Attempt]] = {}
    for folder in _folders(store):
        one = attempt(folder)
        if "identity" in one.run:
            found.setdefault(one.run["identity"], []).append(one)
    for several in found.values():
        several.sort(key=lambda one: one.number)
    return found


def planned(sweep: Path) -> list[Attempt]:
    """Of each run that a sweep planned and that has a verdict, the newest such attempt, in the plan's order.

    `sweep` is its folder below sweeps/. Raises OSError, ValueError, KeyError, TypeError on a bad plan.json.
    """
    wanted = dict.fromkeys(one["identity"] for one in json.loads((sweep / "plan.json").read_text())["runs"])
    past = history(sweep.parent.parent)
    last = (next((one for one in reversed(past.get(identity, [])) if one.verdict), None) for identity in wanted)
    return [one for one in last if one]


def estimates(past: dict[str, list[Attempt]]) -> dict[str, float]:
    """Seconds that a run of each known cell will take, by the cell's id: the median of its finished runs."""
    known: dict[str, list[float]] = {}
    for one in itertools.chain.from_iterable(past.values()):
        if one.verdict and one.done and "cell_id" in one.run:
            known.setdefault(one.run["cell_id"], []).append(float(one.verdict["wall_s"]))
    return {cell: statistics.median(seconds) for cell, seconds in known.items()}


def adopted(old: Attempt, run: Run, sweep: str) -> bool:
    """Whether `adopt` has nothing to record."""
    return sweep in (old.verdict or {}).get("sweeps", []) and old.run.get("cell", {}).items() >= run.cell.items()


def adopt(old: Attempt, run: Run, sweep: str) -> None:
    """Record that `sweep` counts this attempt as its own. Raises OSError."""
    assert old.verdict is not None
    if sweep not in old.verdict.get("sweeps", []):
        old.verdict["sweeps"] = [*old.verdict.get("sweeps", []), sweep]
        write(old.folder / VERDICT_FILE, old.verdict)
    # Another sweep may vary a setting that this run's first sweep did not name; both names are true of it.
    cell = old.run.get("cell", {}) | run.cell
    if cell != old.run.get("cell"):
        old.run["cell"] = cell
        write(old.folder / RUN_FILE, old.run)


def reconcile(store: Path, ended: Callable[[Path], bool]) -> list[Path]:
    """Give every run whose harness died its verdict; returns their directories.

    `ended` says whether no process of such a run is left: what it still saves, the next attempt goes on from.
    """
    closed = []
    for folder in _folders(store):
        if (folder / VERDICT_FILE).exists() or alive(folder) or not ended(folder):
            continue
        why = "the harness died before this run had a verdict"
        try:
            close(folder, Verdict("killed", named("sweep.harness_died", why), why))
        except OSError:
            continue  # one directory that cannot be written holds up no other; the next start tries again
        closed.append(folder)
    return closed


def close(folder: Path, verdict: Verdict) -> None:
    """Give a verdict to a run that nobody is at work on any more. Raises OSError."""
    run = read_json(folder / RUN_FILE) or {}
    events = list(EventReader(folder / EVENTS_FILE).poll())
    started = float(run.get("started") or folder.stat().st_mtime)
    ended = float(events[-1]["t"]) if events else started
    shutil.rmtree(folder / CACHES, ignore_errors=True)
    write(
        folder / VERDICT_FILE,
        {
            **verdict.to_dict(),
            "figures": figures(events).to_dict(),
            "cache": None,
            "exit": {"code": None, "signal": None},
            "ended_by": "harness",
            "started": started,
            "ended": ended,
            "wall_s": round(ended - started, 3),
            "child_s": None,
            "overhead_s": None,
            "attempt": run.get("attempt"),
            "sweeps": [run["sweep"]] if run.get("sweep") else [],
        },
    )


def holder(store: Path, run: Run) -> int | None:
    """Pid of the harness that is at work on this run, if its record says so."""
    for one in reversed(attempts(store, run)):
        if one.verdict is None and "harness_pid" in one.run:
            return int(one.run["harness_pid"])
    return None


def who_am_i() -> dict[str, Any]:
    """What tells this harness from any other, also after its pid is used again."""
    return {
        "host": socket.gethostname(),
        "harness_pid": os.getpid(),
        "harness_started": psutil.Process().create_time(),
    }


def alive(folder: Path) -> bool:
    """Whether the harness that recorded this attempt still runs, as far as can be told from here."""
    run = read_json(folder / RUN_FILE)
    if (folder / JOB_FILE).exists():
        return True  # sweeper.cluster asks the scheduler
    if run is None:
        return time.time() - folder.stat().st_mtime < UNRECORDED_S
    if run.get("host") != socket.gethostname():
        return True  # not ours to judge from here
    return harness(run) is not None


def harness(run: dict[str, Any]) -> psutil.Process | None:
    """The process that is at work on a run with this record, if it lives and is on this host."""
    try:
        found = psutil.Process(run["harness_pid"])
        return found if run["host"] == socket.gethostname() and found.create_time() == run["harness_started"] else None
    except (psutil.Error, KeyError):
        return None


def _folders(store: Path) -> Iterator[Path]:
    runs = store / "runs"
    if runs.is_dir():
        yield from sorted(entry for entry in runs.iterdir() if _NAME.search(entry.name) and entry.is_dir())


def profiles(folder: Path) -> list[Path]:
    """The profiles that a run's command left in its directory, by name."""
    return sorted(path for path in folder.glob(PROFILES) if path.is_file())


def attempt(folder: Path) -> Attempt:
    """What a run directory records; empty records where they cannot be read."""
    return Attempt(folder, read_json(folder / RUN_FILE) or {}, read_json(folder / VERDICT_FILE))
