"""What a sweep will do: each run in its place, what is done already, which caches have to be filled first."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper import spec, store, wheels, words
from sweeper.analysis.records import in_order
from sweeper.caches import snapshots
from sweeper.store import Attempt
from sweeper.tracking.place import hidden


@dataclass(frozen=True)
class Planned:
    """A run in its place in the order; `done` is the attempt that already answers it."""

    run: spec.Run
    done: Attempt | None
    estimate: float | None


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep. `id` depends on the cells alone, so more repeats belong to the same sweep."""

    id: str
    items: list[Planned]
    primes: list[str]  # labels of cells whose caches have to be filled first

    @property
    def waiting(self) -> list[Planned]:
        return [item for item in self.items if item.done is None]

    @property
    def unbuilt(self) -> list[wheels.Pins]:
        """Pins of the environments that runs wait for, each once."""
        runs = [item.run for item in self.waiting if not item.run.skip]
        asked = [wheel for one in runs for wheel in (one.wheel, one.cache_wheel) if wheel and wheel.unbuilt]
        return list({wheel.pins.key: wheel.pins for wheel in asked if wheel.pins}.values())


def make_plan(cells: Sequence[spec.Run], options: spec.Options, past: dict[str, list[Attempt]]) -> Plan:
    """Order the runs and look up what is done; changes nothing.

    Cells that mean the same run once. Each block is one repeat of every cell, so that a drift of the machine
    hits all cells alike; the shuffle is seeded by the sweep, so that it is the same when started again.
    """
    unique = list({cell.cell_id: cell for cell in cells}.values())
    if options.aa:
        unique.append(unique[0].again())
    sweep_id = hashlib.sha256("\n".join(sorted(cell.cell_id for cell in unique)).encode()).hexdigest()[:12]
    items, seconds = [], store.estimates(past)
    for repeat in range(1, options.repeat + 1):
        block = [cell.repeated(repeat) for cell in unique]
        if options.order == "random":
            block.sort(key=lambda one: one.identity)
            random.Random(f"{sweep_id}:{repeat}").shuffle(block)
            _donors_first(block, options.folder)
        for one in block:
            last = next(iter(past.get(one.identity, [])[-1:]), None)
            done = last if last and last.done and not last.matches(options.rerun) else None
            items.append(Planned(one, done, seconds.get(one.cell_id)))
    return Plan(sweep_id, items, _primes(items, options.folder))


def _donors_first(block: list[spec.Run], folder: Path) -> None:
    """Where no snapshot exists yet, swap a run that wants one with the later cold run that can donate it.

    Saves a priming run per key, at the price of a fixed order of these two in one block.
    """
    wanted = [starts_from(one) for one in block]
    missing = {key for key in wanted if key and not snapshots.exists(folder, key)}
    left = [one.snapshot_key() if missing and not one.donor() else "" for one in block]
    for place, key in enumerate(wanted):
        if key in missing and key in left[place + 1 :]:
            later = left.index(key, place + 1)
            together: list[list[Any]] = [block, wanted, left]
            for several in together:
                several[place], several[later] = several[later], several[place]


def starts_from(one: spec.Run) -> str:
    """The key of the snapshot that a run starts from; empty if it starts from none."""
    donor = None if one.skip else one.donor()
    return donor.snapshot_key() if donor else ""


def _primes(items: Sequence[Planned], folder: Path) -> list[str]:
    """Labels of the cells that will find no snapshot, supposing that all runs before them end well."""
    there: set[str] = set()
    needed = []
    for item in items:
        if item.done or item.run.skip:
            continue
        key = starts_from(item.run)
        if key and key not in there and not snapshots.exists(folder, key):
            needed.append(item.run.label)
        there.add(key or item.run.snapshot_key())
    return needed


def describe(plan: Plan) -> str:
    """The plan in lines: place, cell, identity, state, estimated time."""
    rows = [("#", "cell", "identity", "state", "estimate")]
    for place, item in enumerate(plan.items, start=1):
        state = f"done: {item.done.verdict['verdict']}" if item.done and item.done.verdict else "to do"
        if item.run.skip and not item.done:
            state = f"will be skipped: {item.run.skip}"
        time_s = "-" if item.done or item.run.skip else _duration(item.estimate)
        rows.append((str(place), item.run.label, item.run.identity[:12], state, time_s))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    known = [item.estimate for item in plan.waiting if item.estimate is not None]
    unknown = sum(item.estimate is None and not item.run.skip for item in plan.waiting)
    total = _duration(sum(known)) if known else "unknown"
    lines += [
        "",
        f"sweep {plan.id}: {len(plan.items)} runs, {len(plan.items) - len(plan.waiting)} done, "
        f"{len(plan.waiting)} to do; time for those: {total}"
        + (f", and {unknown} runs of unknown time" if known and unknown else ""),
        f"priming runs needed: {len(plan.primes)}" + "".join(f"\n  {label}" for label in plan.primes),
        *(f"environment to build first: {pins.name} ({pins})" for pins in plan.unbuilt),
    ]
    return "\n".join(lines)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def title(plan: Plan) -> str:
    """The sweep in words: each factor with the levels it takes, in their order."""
    levels: dict[str, list[str]] = {}
    for item in plan.items:
        for name, level in item.run.cell.items():
            levels.setdefault(name, [])
            if level not in levels[name]:
                levels[name].append(level)
    varied = [
        f"{name}={','.join(sorted(several, key=in_order))}" for name, several in levels.items() if len(several) > 1
    ]
    return " ".join(varied) or plan.items[0].run.label


def record(plan: Plan, options: spec.Options) -> dict[str, Any]:
    return {
        "sweep": plan.id,
        "title": title(plan),
        "written": time.time(),
        "command": command_line(),
        "repeat": options.repeat,
        "order": options.order,
        "runs": [
            {
                "cell": item.run.cell,
                "cell_id": item.run.cell_id,
                "identity": item.run.identity,
                "repeat": item.run.repeat,
                "done": item.done.folder.name if item.done else None,
            }
            for item in plan.items
        ],
    }


def command_line() -> list[str]:
    """The words of the command line as typed, and as they may be kept: an address may hold a password."""
    return [hidden(word) for word in words.typed]
