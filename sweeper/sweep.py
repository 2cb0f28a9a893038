"""Matrix -> repeats -> blocks in random order -> what is not done yet, one run after another -> a table."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dflash.settings import SettingError
from sweeper import help, run, spec, store, wheels
from sweeper.caches import snapshots
from sweeper.composed import Composed
from sweeper.store import Attempt

OK, FAULT, NOT_OK, INTERRUPTED = 0, 1, 3, 130


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


@dataclass(frozen=True)
class Result:
    """Exit status of the command, and per configuration given the verdicts of its repeats."""

    status: int
    verdicts: list[list[str]]


def sweep(configs: Sequence[Composed]) -> Result:
    """Do all that the composed configurations ask for. Raises SettingError, before anything is started."""
    options, cells = spec.read(configs)
    past = store.history(options.folder)
    _check_rerun(options.rerun, past)
    plan = make_plan(cells, options, past)
    if options.dry:
        print(describe(plan))
        return Result(OK, [[] for _ in cells])
    prepare(options.folder)
    with Interrupts() as interrupts:
        if plan.unbuilt:
            options, cells = spec.read(configs, build_wheels(plan, options, interrupts))
            plan = make_plan(cells, options, past)
        found, whole = _carry_out(plan, options, interrupts)
    verdicts = [
        [found[i] for n in range(options.repeat) if (i := cell.repeated(n + 1).identity) in found] for cell in cells
    ]
    if interrupts.count:
        status = INTERRUPTED
    elif not whole:
        status = FAULT
    elif options.strict and any(verdict != "ok" for verdict in found.values()):
        status = NOT_OK
    else:
        status = OK
    return Result(status, verdicts)


def make_plan(cells: Sequence[spec.Run], options: spec.Options, past: dict[str, list[Attempt]]) -> Plan:
    """Order the runs and look up what is done; changes nothing.

    Cells that mean the same run once. Each block is one repeat of every cell, so that a drift of the machine
    hits all cells alike; the shuffle is seeded by the sweep, so that it is the same when started again.
    """
    unique = list({cell.cell_id: cell for cell in cells}.values())
    if options.aa:
        unique.append(unique[0].again())
    sweep_id = hashlib.sha256("\n".join(sorted(cell.cell_id for cell in unique)).encode()).hexdigest()[:12]
    items = []
    for repeat in range(1, options.repeat + 1):
        block = [cell.repeated(repeat) for cell in unique]
        if options.order == "random":
            block.sort(key=lambda one: one.identity)
            random.Random(f"{sweep_id}:{repeat}").shuffle(block)
            _donors_first(block, options.folder)
        for one in block:
            last = next(iter(past.get(one.identity, [])[-1:]), None)
            done = last if last and last.done and not last.matches(options.rerun) else None
            items.append(Planned(one, done, store.estimate(past, one)))
    return Plan(sweep_id, items, _primes(items, options.folder))


def _donors_first(block: list[spec.Run], folder: Path) -> None:
    """Where no snapshot exists yet, swap a run that wants one with the later cold run that can donate it.

    Saves a priming run per key, at the price of a fixed order of these two in one block.
    """
    wanted = [_wanted(one) for one in block]
    missing = {key for key in wanted if key and not snapshots.exists(folder, key)}
    left = [one.snapshot_key() if missing and not one.donor() else "" for one in block]
    for place, key in enumerate(wanted):
        if key in missing and key in left[place + 1 :]:
            later = left.index(key, place + 1)
            together: list[list[Any]] = [block, wanted, left]
            for several in together:
                several[place], several[later] = several[later], several[place]


def _wanted(one: spec.Run) -> str:
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
        key = _wanted(item.run)
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


def build_wheels(plan: Plan, options: spec.Options, interrupts: Interrupts) -> dict[str, str]:
    """Build the environments that runs wait for; says which could not be, by the key of their pins, and why.

    All before the first run: a build beside a run would slow it, and what a run is called depends on what its
    environment holds. `spec.read` with the answer gives the runs that can be done.
    """
    from sweeper.wheels.build import BuildFailure, build

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    failures = {}
    for pins in plan.unbuilt:
        try:
            build(pins, options.wheels, interrupted=interrupts.look, say=say)
        except BuildFailure as failure:
            failures[pins.key] = str(failure)
            say(wheels.brief(str(failure)))
    return failures


def _carry_out(plan: Plan, options: spec.Options, interrupts: Interrupts) -> tuple[dict[str, str], bool]:
    """Run what is not done; returns the verdict per identity, and whether every run that was wanted has one."""
    with opened(plan, options, interrupts) as session:
        place, why = 0, ""
        wanted: list[spec.Run] = []
        for _, block in itertools.groupby(plan.items, lambda item: item.run.repeat):
            for item in block:
                wanted.append(item.run)
                if not interrupts.look():
                    place += item.done is None
                    do(item, session, place)
            sure, why = _enough(wanted, session)
            if sure:
                break
        found = conclude(wanted, session, why)
        return found, all(one.identity in found for one in wanted)


def _enough(runs: Sequence[spec.Run], session: run.Session) -> tuple[bool, str]:
    """Whether `until` asks for no further block after these runs, and why."""
    width = session.options.width
    if width is None or session.interrupted():
        return False, ""
    from sweeper.analysis import records, stopping

    found = records.read(last.folder for one in runs if (last := newest(session.folder, one)))
    return stopping.enough(found, width, help.defaults())


@contextmanager
def opened(plan: Plan, options: spec.Options, interrupts: Interrupts) -> Iterator[run.Session]:
    """The display, the tracking and the folder of a sweep while its runs are done."""
    from sweeper import display, tracking

    screen = display.make(len(plan.waiting), options.verbose)
    interrupts.on_first = lambda: screen.note(
        "stopping this run; the rest stays for the next start; once more to end at once"
    )
    tracker = tracking.make(options.tracking, options.folder)
    try:
        for closed in store.reconcile(options.folder):
            screen.note(f"{closed.name}: its harness died; verdict killed")
            tracker.finish(closed)
        folder = options.folder / "sweeps" / plan.id
        folder.mkdir(parents=True, exist_ok=True)
        store.write(folder / "plan.json", _plan_record(plan, options))
        tracker.open_sweep(plan.id, _title(plan), len({item.run.cell_id for item in plan.items}))
        _say_what_is_done(plan, screen)
        yield run.Session(options, plan.id, screen, tracker, interrupts.look)
    finally:
        screen.close()
        # Tracking is only a view and catches up later: whoever presses again does not wait for it.
        interrupts.limit = min(interrupts.limit, interrupts.count + 1)
        if interrupts.count < 2:
            tracker.close()


def do(item: Planned, session: run.Session, place: int) -> None:
    """Do one planned run, unless it is done; a store that cannot be written is told, not raised."""
    try:
        _one(item, session, place)
    except OSError as error:
        session.display.note(f"{item.run.label}: not run, the store cannot be written ({error})")


def conclude(runs: Iterable[spec.Run], session: run.Session, why: str = "") -> dict[str, str]:
    """Print and keep the table of these runs and what it says; returns the verdict per identity.

    `why` tells why no more blocks were run.
    """
    from sweeper.analysis.conclude import conclude as analysed
    from sweeper.analysis.records import read
    from sweeper.analysis.sentences import sentences
    from sweeper.report import table

    # What a repeat or a rerun left on disk is what counts, whoever made it.
    latest = [(one.identity, last) for one in runs if (last := newest(session.folder, one))]
    rows = table.rows([last.folder for _, last in latest])
    analysis = analysed(read(last.folder for _, last in latest), help.defaults(), _command())
    said = sentences(analysis, why)
    session.tracking.close_sweep(session.sweep, rows, said)
    session.display.close()
    print(table.render(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    print(said, end="")
    folder = session.folder / "sweeps" / session.sweep
    kept = {"table.txt": table.render(rows, 160) + "\n", "conclusion.txt": said, "conclusion.json": analysis}
    try:
        for name, content in kept.items():
            store.write(folder / name, content)
    except OSError as error:
        session.display.note(f"the table could not be kept in {folder} ({error})")
    return {identity: last.verdict["verdict"] for identity, last in latest if last.verdict}


def _one(item: Planned, session: run.Session, place: int) -> None:
    """Do one planned run unless it is done by now; another harness may be at it."""

    def waiting() -> str:
        pid = store.holder(session.folder, item.run)
        return f"waiting for pid {pid or 'unknown'}, which runs {item.run.label}"

    with run.held(session, item.run.identity[:24], waiting) as mine:
        if not mine:
            return
        last = newest(session.folder, item.run)
        # An attempt that was not there when the plan was made is newer than the wish to do it again.
        fresh = last and last.done and (item.done or not last.matches(session.options.rerun) or _newer(last, session))
        if last and fresh:
            store.adopt(last, item.run, session.sweep)
            session.tracking.finish(last.folder)
        else:
            run.execute(item.run, session, place, item.estimate)


def _newer(last: Attempt, session: run.Session) -> bool:
    return float(last.run.get("started", 0.0)) > session.began


def newest(folder: Path, one: spec.Run) -> Attempt | None:
    """The newest attempt that has a verdict."""
    return next((each for each in reversed(store.attempts(folder, one)) if each.verdict), None)


def _say_what_is_done(plan: Plan, screen: Any) -> None:
    done = len(plan.items) - len(plan.waiting)
    if done:
        screen.note(f"sweep {plan.id}: {done} of {len(plan.items)} runs are done already (rerun=all does them again)")


def _title(plan: Plan) -> str:
    """The sweep in words: each factor with the levels it takes."""
    levels: dict[str, list[str]] = {}
    for item in plan.items:
        for name, level in item.run.cell.items():
            levels.setdefault(name, [])
            if level not in levels[name]:
                levels[name].append(level)
    varied = [f"{name}={','.join(several)}" for name, several in levels.items() if len(several) > 1]
    return " ".join(varied) or plan.items[0].run.label


def _plan_record(plan: Plan, options: spec.Options) -> dict[str, Any]:
    return {
        "sweep": plan.id,
        "title": _title(plan),
        "written": time.time(),
        "command": _command(),
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


def _command() -> list[str]:
    """The words of the command line that may be kept: an address of a tracking server may hold a password."""
    return [word for word in sys.argv[1:] if not word.lstrip("+").startswith("tracking.")]


def _check_rerun(rerun: str, past: dict[str, list[Attempt]]) -> None:
    """`rerun` must be a word, a known cause, or a fingerprint that occurs in the store."""
    from sweeper.signatures import rules

    if rerun in ("none", "all", "failed") or rerun in rules():
        return
    prints = {
        (one.verdict.get("signature") or {}).get("fingerprint")
        for several in past.values()
        for one in several
        if one.verdict
    }
    if rerun not in prints:
        near = [cause for cause in rules() if rerun and set(re.split(r"[._]", rerun)) & set(re.split(r"[._]", cause))]
        hint = f"; did you mean {', '.join(near[:3])}?" if near else ""
        raise SettingError(
            "rerun",
            rerun,
            f"must be none, all, failed, a cause or a fingerprint that the store's runs show{hint}",
        )


def prepare(folder: Path) -> None:
    """Make the folders of a store. Raises SettingError when they cannot be written."""
    try:
        for name in ("runs", "sweeps", "locks", "snapshots"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise SettingError("store", folder, f"must be a folder that can be written ({error.strerror})") from None


class Interrupts:
    """Counts Ctrl-C and SIGTERM while entered; number `limit` ends the harness there and then."""

    def __init__(self) -> None:
        self.count = 0
        self.on_first: Any = lambda: None
        self.limit = 3
        self._told = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= self.limit:
            os._exit(INTERRUPTED)

    def look(self) -> int:
        """The count so far; tells the person once that it was heard, outside the signal handler."""
        if self.count and not self._told:
            self._told = True
            self.on_first()
        return self.count
