"""Matrix -> plan -> what is not done yet, on this machine or on Slurm -> a table and what it says."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from dflash.settings import SettingError
from sweeper import help, here, leases, run, spec, store, supervisor, wheels, words
from sweeper.composed import Composed
from sweeper.here import Numbered
from sweeper.plan import Plan, Planned, command_line, describe, make_plan, record, title
from sweeper.store import Attempt

OK, FAULT, NOT_OK, INTERRUPTED = 0, 1, 3, 130
WIDTH = 160  # of the table that is kept, or printed where there is no terminal


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
    if options.slurm is not None:
        from sweeper.cluster import watch

        watch.check([item.run for item in plan.waiting], options)
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
    if plan.waiting:
        _load_what_comes_last(options)
    with opened(plan, options, interrupts) as session:
        why = ""
        wanted: list[spec.Run] = []
        # A number for each that is to be done; those that are done have that of the one before.
        numbers = itertools.accumulate(int(item.done is None) for item in plan.items)
        numbered = list(zip(numbers, plan.items, strict=True))
        blocks = itertools.groupby(numbered, lambda each: each[1].run.repeat) if options.width else [(1, numbered)]
        for _, block in blocks:
            items = list(block)
            wanted += [item.run for _, item in items]
            _where(options)(items, session)
            sure, why = _enough(wanted, session)
            if sure:
                break
        if options.detach and (left := _with_slurm(wanted, session)):
            print(
                f"{left} of {len(wanted)} runs are with Slurm; `python -m sweeper.status {plan.id} --store "
                f"{options.store}` tells of them, the same command picks them up"
            )
            return {}, True
        found = conclude(wanted, session, why)
        over = sum(verdict != "killed" for verdict in found.values())
        if interrupts.look() and over < len(plan.items):
            session.display.note(
                f"stopped with {over} of {len(plan.items)} runs over; the same command goes on from there"
            )
        return found, all(one.identity in found for one in wanted)


def _load_what_comes_last(options: spec.Options) -> None:
    """Import what a sweep needs at its end: by then its files may have been changed, and not fit what is loaded."""
    for name in ("analysis.conclude", "analysis.records", "analysis.sentences", "analysis.stopping", "report.page"):
        importlib.import_module(f"sweeper.{name}")
    if options.report:
        importlib.import_module("sweeper.report.charts")


def _with_slurm(runs: Sequence[spec.Run], session: run.Session) -> int:
    """How many of these runs are not over yet."""
    there = store.latest(session.folder, runs)
    return sum(not (one.identity in there and there[one.identity].done) for one in runs)


def _enough(runs: Sequence[spec.Run], session: run.Session) -> tuple[bool, str]:
    """Whether `until` asks for no further block after these runs, and why."""
    width = session.options.width
    if width is None or session.interrupted():
        return False, ""
    from sweeper.analysis import records, stopping

    found = records.read(last.folder for last in store.latest(session.folder, runs).values())
    return stopping.enough(found, width, help.defaults())


@contextmanager
def opened(plan: Plan, options: spec.Options, interrupts: Interrupts) -> Iterator[run.Session]:
    """The display, the tracking and the folder of a sweep while its runs are done."""
    from sweeper import display, tracking

    screen = display.make(len(plan.waiting), options.verbose)
    interrupts.on_first = lambda: screen.note(
        "stopping what runs; the rest stays for the next start; once more to end at once"
    )
    tracker = tracking.make(options.tracking, options.folder)
    try:
        for closed in store.reconcile(options.folder, partial(_ended, options, screen, interrupts)):
            screen.note(f"{closed.name}: its harness died; verdict killed")
            tracker.finish(closed)
        folder = options.folder / "sweeps" / plan.id
        try:
            folder.mkdir(parents=True, exist_ok=True)
            store.write(folder / "plan.json", record(plan, options))
        except OSError as error:
            raise SettingError("store", options.folder, f"must have room for the plan ({error.strerror})") from None
        if plan.waiting or not tracker.knows(plan.id):
            tracker.open_sweep(plan.id, title(plan), len({item.run.cell_id for item in plan.items}))
        _say_what_is_done(plan, screen)
        yield run.Session(options, plan.id, screen, tracker, interrupts.look)
    finally:
        screen.close()
        # Tracking is only a view and catches up later: whoever presses again does not wait for it.
        interrupts.limit = min(interrupts.limit, interrupts.count + 1)
        if interrupts.count < 2:
            tracker.close()


def _ended(options: spec.Options, screen: Any, interrupts: Interrupts, folder: Path) -> bool:
    """Whether the processes of a run whose harness died are gone, for which it waits."""
    if not supervisor.ended(folder):
        screen.note(f"{folder.name}: its harness died; waiting for its processes to end")
    # A second more than the leash gives them.
    return supervisor.end_left(folder, options.grace + 1, interrupts.look)


def do(item: Planned, session: run.Session, place: int) -> None:
    """Do one planned run, unless it is done, where the options say. `place`: its number among those to be done."""
    _where(session.options)([(place, item)], session)


def _where(options: spec.Options) -> Callable[[Sequence[Numbered], run.Session], None]:
    """What carries out numbered runs: this machine, or Slurm."""
    if options.slurm is None:
        return here.carry_out
    from sweeper.cluster import watch

    return watch.carry_out


def conclude(runs: Iterable[spec.Run], session: run.Session, why: str = "") -> dict[str, str]:
    """Print and keep the table of these runs and what it says; returns the verdict per identity.

    `why` tells why no more blocks were run.
    """
    from sweeper.analysis.conclude import conclude as analysed
    from sweeper.analysis.records import read
    from sweeper.analysis.sentences import sentences
    from sweeper.report import page, table

    # What a repeat or a rerun left on disk is what counts, whoever made it.
    latest = store.latest(session.folder, runs)
    rows = table.rows([last.folder for last in latest.values()])
    analysis = analysed(read(last.folder for last in latest.values()), help.defaults(), command_line())
    said = sentences(analysis, why)
    session.display.close()
    shown = table.render(rows, WIDTH)
    words.say((table.render(rows, shutil.get_terminal_size().columns) if sys.stdout.isatty() else shown) + "\n")
    words.say(said)
    folder = session.folder / "sweeps" / session.sweep
    found = json.loads(json.dumps(analysis | {"stopped": why}, default=str))
    # Drawing a page takes seconds; where all was done before, and nothing is told otherwise, it is there.
    known = found == store.read_json(folder / "conclusion.json") and not _since(folder / page.HTML, latest.values())
    kept = {"table.txt": shown + "\n", "conclusion.txt": said, "conclusion.json": found}
    try:
        for name, content in kept.items():
            store.write(folder / name, content)
    except OSError as error:
        session.display.note(f"the table could not be kept in {folder} ({error})")
    if session.options.report and not known and session.interrupted() < 2:  # who asks twice does not wait for a page
        session.display.note(page.kept(folder, why))
    session.tracking.close_sweep(session.sweep)  # shows what the folder holds
    return {identity: last.verdict["verdict"] for identity, last in latest.items() if last.verdict}


def _since(page: Path, latest: Iterable[Attempt]) -> bool:
    """Whether a run's verdict is newer than the report, or there is none."""
    try:
        drawn = page.stat().st_mtime
        return any((last.folder / store.VERDICT_FILE).stat().st_mtime >= drawn for last in latest)
    except OSError:
        return True


def _say_what_is_done(plan: Plan, screen: Any) -> None:
    done = len(plan.items) - len(plan.waiting)
    if done:
        screen.note(f"sweep {plan.id}: {done} of {len(plan.items)} runs are done already (rerun=all does them again)")


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
    try:
        leases.folder()
    except OSError as error:
        place = os.environ.get(leases.FOLDER, "not set")
        raise SettingError(
            leases.FOLDER, place, f"must be a folder of your own, for leases on GPUs ({error})"
        ) from None


class Interrupts:
    """Counts Ctrl-C and SIGTERM while entered; number `limit` ends the harness there and then."""

    def __init__(self) -> None:
        self.count = 0
        self.on_first: Any = lambda: None
        self.limit = 3
        self._telling = threading.Lock()

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
        if self.count and self._telling.acquire(blocking=False):  # never given back: told once
            self.on_first()
        return self.count
