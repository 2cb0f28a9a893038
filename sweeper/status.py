"""What becomes of sweeps, also of those that nobody watches: `python -m sweeper.status [SWEEP] [--store runs]`.

Without SWEEP, the sweeps of the store, newest last; with one (its id, or the beginning of it), each of its runs: done,
under way with its stage and step, waiting in Slurm's queue and why, or still to be done. A run whose job died without
a verdict gets it here. Exit status: 0 all runs have a verdict, 3 some have none yet, 2 there is no such sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.events import EVENTS_FILE, EventReader
from sweeper import store, supervisor
from sweeper.display import Watch, duration
from sweeper.store import Attempt
from sweeper.words import leave, with_store

NOT_OVER, NO_SUCH = 3, 2


def main(arguments: list[str] | None = None) -> int:
    """Print and return the exit status."""
    parser = argparse.ArgumentParser("python -m sweeper.status", description="What becomes of sweeps.")
    parser.add_argument("sweep", nargs="?", help="id of a sweep, or the beginning of one")
    parser.add_argument("--store", type=Path, default=Path("runs"), help="the store, also as store=DIR (default: runs)")
    chosen = parser.parse_args(with_store(arguments))
    folder = chosen.store.expanduser().absolute()
    plans = _plans(folder)
    if not plans:
        print(f"store={chosen.store}: must be a folder in which a sweep was started", file=sys.stderr)
        return NO_SUCH
    asked = {name: plan for name, plan in plans.items() if name.startswith(chosen.sweep or "")}
    if chosen.sweep and len(asked) != 1:
        known = ", ".join(asked or plans)
        print(f"sweep={chosen.sweep}: must be one of {known}", file=sys.stderr)
        return NO_SUCH
    settled(folder)
    past = store.history(folder)
    if chosen.sweep is None:
        for name, plan in plans.items():
            states = Counter(_state(past.get(one["identity"], [])) for one in plan["runs"])
            told = ", ".join(f"{count} {state}" for state, count in states.items())
            print(
                f"{name}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(plan['written']))}  {told}  {plan['title']}"
            )
        over = True
    else:
        (plan,) = asked.values()
        over = _tell(plan, past)
    return 0 if over else NOT_OVER


def settled(folder: Path) -> None:
    """Give a verdict to every run of a store whose harness or job died; what cannot be written now is left."""
    from sweeper.cluster import watch

    with contextlib.suppress(OSError):
        store.reconcile(folder, supervisor.ended)
        watch.close_dead(one.folder for several in store.history(folder).values() for one in several[-1:])


def _plans(folder: Path) -> dict[str, dict[str, Any]]:
    """The plan of each sweep of a store, oldest first."""
    found = [plan for path in (folder / "sweeps").glob("*/plan.json") if (plan := store.read_json(path))]
    return {plan["sweep"]: plan for plan in sorted(found, key=lambda plan: plan["written"])}


def _tell(plan: dict[str, Any], past: dict[str, list[Attempt]]) -> bool:
    """A line for each run; returns whether all are over."""
    from sweeper.cluster import slurm

    several = {one["identity"]: past.get(one["identity"], []) for one in plan["runs"]}
    with_slurm = any(each and _job(each[-1]) and not each[-1].verdict for each in several.values())
    queue = slurm.queue() if with_slurm else None
    cells = [one["cell"] for one in plan["runs"]]
    varied = [name for name in cells[0] if len({cell.get(name) for cell in cells}) > 1] or list(cells[0])
    over = True
    for one in plan["runs"]:
        attempts = several[one["identity"]]
        words = " ".join(f"{name}={one['cell'].get(name)}" for name in varied)
        state = _state(attempts)
        over &= bool(attempts and attempts[-1].done)
        print(f"{state:<9} {words} r{one['repeat']}{_more(attempts, queue)}")
    words = shlex.join(plan["command"])
    print("all runs have a verdict" if over else f"not over; the same command goes on: python -m sweeper {words}")
    return over


def _state(attempts: Sequence[Attempt]) -> str:
    if not attempts:
        return "to do"
    last = attempts[-1]
    if last.verdict:
        return str(last.verdict.get("verdict"))
    return "running" if "started" in last.run else "waiting"


def _more(attempts: Sequence[Attempt], queue: Any) -> str:
    """What else there is to say of a run: its signature; its stage and step; Slurm's word on its job."""
    if not attempts:
        return ""
    last = attempts[-1]
    if last.verdict:
        return f": {last.cause} ({last.folder.name})" if last.cause else ""
    job = _job(last)
    told = []
    if job:
        said = queue.get(job) if queue is not None else None
        reason = f" ({said.reason})" if said and said.reason not in ("", "None") else ""
        told.append(f"job {job}{f' {said.state.lower()}{reason}' if said else ''}")
    if "started" in last.run:
        watch = Watch(0, "", None)
        for event in EventReader(last.folder / EVENTS_FILE).poll():
            watch.take(event)
        told += [watch.doing(), f"for {duration(time.time() - float(last.run['started']))}"]
    return f": {', '.join(told)}" if told else ""


def _job(one: Attempt) -> str:
    return str((store.read_json(one.folder / store.JOB_FILE) or {}).get("id") or "")


if __name__ == "__main__":
    leave(main)
