"""One run, told top to bottom: claim, caches, child, verdict, record. An outcome, never an exception."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from filelock import FileLock, Timeout

from dflash.events import CHECKPOINTS, EVENTS_FILE, EventWriter
from sweeper import caches, leases, machine, progress, store, supervisor, wheels, workload
from sweeper.caches import snapshots
from sweeper.leases import Lease
from sweeper.measure import figures
from sweeper.spec import Options, Run
from sweeper.verdict import Evidence, Verdict, judge, named

LEASE_POLL_S = 0.5


@dataclass
class Session:
    """What all runs of one harness share. `interrupted` counts the interrupts so far."""

    options: Options
    sweep: str
    display: Any
    tracking: Any
    interrupted: Callable[[], int]
    # Snapshot keys whose priming failed in this session, and why: it is not tried again for each repeat.
    unprimed: dict[str, snapshots.Fault] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    # Of a harness that is a job itself: what slurm.json says of it; and who asked for the end, as cause and in words.
    job: dict[str, Any] | None = None
    asked: Callable[[], tuple[str, str]] = lambda: ("sweep.interrupted", "interrupted")

    @property
    def folder(self) -> Path:
        return self.options.folder


def execute(
    run: Run,
    session: Session,
    index: int,
    estimate: float | None = None,
    *,
    lease: Lease | None = None,
    claimed: Path | None = None,
) -> Path | None:
    """Do `run` once and record it; returns its directory, None when an interrupt came before it started.

    `index` is its number among the runs of this session. It takes its GPUs by a lease of its own, or uses `lease`, and
    claims the directory of a new attempt, or uses `claimed`.
    Never raises on what the child does, nor on a disk that cannot be written: then the verdict says so.
    """
    if run.skip or run.wheel.failure:
        return _recorded(run, session, index, estimate, None, claimed, _without_child)
    missed = _ensure_snapshot(run, session, index, lease)
    with nullcontext(lease) if lease else _lease(run, session) as own:
        if own is None or session.interrupted():
            return None
        return _recorded(run, session, index, estimate, own, claimed, lambda record: _run_child(record, missed))


def _recorded(
    run: Run,
    session: Session,
    index: int,
    estimate: float | None,
    lease: Lease | None,
    claimed: Path | None,
    work: Callable[[_Record], dict[str, Any]],
) -> Path:
    """Claim a directory and do the work, which gives the verdict as written."""
    began = time.time()
    folder, attempt = (claimed, store.attempt(claimed).number) if claimed else store.claim(session.folder, run)
    session.display.run_started(index, run.label, estimate)
    record = _Record(run, session, folder, attempt, index, began, lease)
    try:
        verdict = work(record)
    except OSError as error:
        verdict = _unwritable(record, error)
    session.tracking.finish(folder)
    session.display.run_ended(run.label, verdict, run=index)
    return folder


def _lease(run: Run, session: Session) -> AbstractContextManager[Lease | None]:
    """The run's GPUs, waited for while others hold them. A job of Slurm has been given its own."""
    options, there = session.options, list(machine.devices())
    count, all_of_them = 0, False
    if options.slurm is None:
        alone = options.jobs == "1"
        count, all_of_them = leases.wanted(run.spec, run.workload.is_trainer, alone, there)
    said = False

    def wait(why: str) -> bool:
        nonlocal said
        if not said:
            session.display.note(f"{run.label}: {why}")
            said = True
        time.sleep(LEASE_POLL_S)
        return not session.interrupted()

    return leases.held(count, all_of_them, f"{run.label} in {session.folder}", wait)


@dataclass
class _Record:
    """The files of one attempt that the harness writes."""

    run: Run
    session: Session
    folder: Path
    attempt: int
    index: int
    began: float
    lease: Lease | None = None
    written: dict[str, Any] = field(default_factory=dict)  # run.json

    @property
    def caches(self) -> Path:
        return self.folder / store.CACHES

    def open(self, argv: list[str], env: dict[str, str]) -> None:
        self.written = {
            **described(self.run, self.session.sweep, self.attempt),
            "argv": argv,
            "env": env,
            "started": self.began,
            "beside": self.lease.beside() if self.lease else 0,
            **store.who_am_i(),
        }
        store.write(self.folder / store.RUN_FILE, self.written)
        store.write(self.folder / store.SPEC_FILE, self.run.spec)
        if self.session.job:
            store.write(self.folder / store.JOB_FILE, self.session.job)

    def look_beside(self) -> None:
        """Keep the largest number of other runs that were seen on this machine at a time."""
        if self.lease:
            self.written["beside"] = max(self.written["beside"], self.lease.beside())

    def close(self, outcome: supervisor.Outcome, cache: dict[str, Any] | None) -> dict[str, Any]:
        """Judge and write the verdict; returns what was written."""
        if outcome.ended_by == "skipped":
            self.open([], {})
        asked, why = self.session.asked() if outcome.ended_by == "interrupt" else ("", "")
        verdict = judge(
            Evidence(
                exit_code=outcome.exit_code,
                signal=outcome.signal,
                ended_by=cast(Literal["itself", "hung", "interrupt", "skipped"], outcome.ended_by),
                hung_stage=outcome.hung_stage,
                events=outcome.events,
                bad_events=outcome.bad_events,
                log_tail=outcome.log_tail,
                stacks=outcome.stacks,
                cache=cache,
                reason=why or outcome.reason,
                asked=asked,
            )
        )
        self.look_beside()
        if self.written["beside"]:
            store.write(self.folder / store.RUN_FILE, self.written)
        if self.caches.exists():
            self._hand_on(verdict, cache or {}, outcome.events)
        shutil.rmtree(self.caches, ignore_errors=True)
        ended = time.time()
        child = outcome.ended - outcome.started
        told = {
            **verdict.to_dict(),
            "figures": figures(outcome.events, outcome.started or None).to_dict(),
            "cache": cache,
            "exit": {"code": outcome.exit_code, "signal": outcome.signal},
            "ended_by": outcome.ended_by,
            "hung_stage": outcome.hung_stage,
            "bad_events": outcome.bad_events,
            "started": self.began,
            "ended": ended,
            "wall_s": round(ended - self.began, 3),
            "child_s": round(child, 3),
            "overhead_s": round(ended - self.began - child, 3),
            "attempt": self.attempt,
            "sweeps": [self.session.sweep],
        }
        store.write(self.folder / store.VERDICT_FILE, told)
        return told

    def _hand_on(self, verdict: Verdict, cache: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Give the caches of this run to others, if they are of use.

        Those of a cold run become the snapshot of its key, if there is none yet. A warm one that did start from the
        snapshot, with nothing wrong but that it missed, leaves what the next would miss: its caches take the
        snapshot's place.
        """
        run, made_by, donor = self.run, cache.get("made_by"), self.run.donor()
        cause = verdict.signature.cause if verdict.signature else ""
        if run.state == caches.COLD and verdict.verdict == "ok":
            key = run.snapshot_key()
            try:
                snapshots.donate(self.session.folder, key, self.caches, self._made_from(events))
            except snapshots.Fault as fault:
                self.session.unprimed[key] = fault
                self.session.display.note(f"{self.folder.name}: {fault}")
        # Of a warm run that ended well; it is the last of all doubts, so where it is the cause there is no other.
        elif donor and made_by and cause == "cache.warm_missed":
            try:
                key = donor.snapshot_key()
                if snapshots.grow(self.session.folder, key, self.caches, self._made_from(events), made_by):
                    self.session.display.note(f"{self.folder.name}: what it compiled is there for the next")
            except snapshots.Fault as fault:  # the one before is still there
                self.session.display.note(f"{self.folder.name}: {fault}")

    def _made_from(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        """What a snapshot of this run's caches says of itself."""
        run = self.run
        start: dict[str, Any] = next((e for e in events if e.get("event") == "start"), {})
        return {
            "run": self.folder.name,
            "command": list(run.workload.argv),
            "cell": run.cell,
            "wheel": run.wheel.to_dict(),
            "device": {name: start.get(name) for name in ("device", "gpus", "torch", "cuda", "triton")},
            "settings": run.facts["settings"],
        }


def described(run: Run, sweep: str, attempt: int) -> dict[str, Any]:
    """What a run's record says of it before it starts."""
    donor = run.donor()
    return {
        "identity": run.identity,
        "cell_id": run.cell_id,
        "cell": run.cell,
        "repeat": run.repeat,
        "attempt": attempt,
        "role": run.role,
        "sweep": sweep,
        "wheel": run.wheel.to_dict(),
        "facts": run.facts,
        "snapshot": donor.snapshot_key() if donor else None,
    }


def _without_child(record: _Record) -> dict[str, Any]:
    if record.run.skip:
        return record.close(supervisor.Outcome(ended_by="skipped", reason=record.run.skip), None)
    return _unbuilt(record)


def _run_child(record: _Record, missed: snapshots.Fault | None) -> dict[str, Any]:
    run, session, folder = record.run, record.session, record.folder
    caches.layout(record.caches)
    told = _told(record)
    argv = [workload.fill(word, told) for word in run.workload.argv]
    own = {name: workload.fill(word, told) for name, word in run.workload.env.items()}
    env = supervisor.environment(folder, own | caches.environment(record.caches) | _wheel(record) | _devices(record))
    record.open(argv, env)
    if changed := run.changed():
        return _of_other_code(record, changed)
    start = _fill_caches(record, missed)
    _take_checkpoints(record)
    session.tracking.start(folder)
    before = caches.count(record.caches)
    if session.interrupted():
        now = time.time()
        return record.close(supervisor.Outcome(ended_by="interrupt", started=now, ended=now), None)

    def tick() -> None:
        record.look_beside()
        session.tracking.tick(folder)

    with _reading(record) as printed:
        outcome = supervisor.supervise(
            argv,
            folder,
            env,
            budget=session.options.budget,
            grace=session.options.grace,
            interrupted=session.interrupted,
            printed=printed,
            keep=record.lease.files if record.lease else (),
            on_event=lambda event: session.display.event(event, run=record.index),
            on_log=(lambda line: session.display.log_line(line, run=record.index)) if session.options.verbose else None,
            on_tick=tick,
        )
    after = caches.count(record.caches)
    cache = caches.proof(run.cell["cache"], before, after, outcome.events, start, run.workload.is_trainer)
    return record.close(outcome, cache)


def _wheel(record: _Record) -> dict[str, str]:
    """Variables of the run's environment. One of its own holds what the trainer needs, and is shown the trainer."""
    wheel = record.run.wheel
    env = wheel.environment()
    if env and record.run.workload.name == "dflash":
        env["PYTHONPATH"] = str(wheels.shown(record.session.options.wheels))
    wheels.mark_used(wheel)
    return env


def _devices(record: _Record) -> dict[str, str]:
    """The GPUs of the run's lease and no other."""
    chosen = record.lease.devices if record.lease else None
    return {} if chosen is None else {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _of_other_code(record: _Record, changed: list[str]) -> dict[str, Any]:
    """The verdict of a run that would not be what it is named after, for its code was changed since it was planned."""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    why = f"{changed[0]}{more} changed since the sweep began; started again it runs what is there now"
    store.close(record.folder, Verdict("skipped", named("sweep.code_changed", why, "code changed"), why))
    return store.attempt(record.folder).verdict or {}


def _unbuilt(record: _Record) -> dict[str, Any]:
    """The verdict of a run whose environment could not be built; what was said of it stands in the run's log."""
    said = record.run.wheel.failure
    record.open([], {})
    store.write(record.folder / supervisor.LOG_FILE, said + "\n")
    now = time.time()
    outcome = supervisor.Outcome(log_tail=said, reason=wheels.brief(said), started=now, ended=now)
    return record.close(outcome, None)


def _take_checkpoints(record: _Record) -> None:
    """Let a run that saves checkpoints go on from those of its attempt before, if that was ended early.

    A run that saves none is an experiment of some minutes, and repeated whole. Raises OSError.
    """
    if not (record.run.spec.get("train") or {}).get("save_every"):
        return
    # A directory without a record is of a harness that was killed before it took anything over.
    earlier = [one for one in store.siblings(record.folder) if one.number < record.attempt and one.run]
    if not earlier or earlier[-1].cause not in store.RESUMED:
        return
    before = earlier[-1].folder
    if (before / CHECKPOINTS).is_dir():
        (before / CHECKPOINTS).rename(record.folder / CHECKPOINTS)
        record.session.display.note(f"goes on from the checkpoints of {before.name}")


def _told(record: _Record) -> dict[str, str]:
    """What may stand in braces in the workload's command: its settings and the paths of this attempt."""
    return workload.values(record.run.spec) | {
        "python": record.run.wheel.python,
        "spec": str(record.folder / store.SPEC_FILE),
        "out": str(record.folder),
    }


@contextmanager
def _reading(record: _Record) -> Iterator[progress.Printed | None]:
    """What turns the command's output into events, if the workload says how; it writes them beside the command's."""
    told = record.run.workload
    if not told.pattern:
        yield None
        return
    events = EventWriter(record.folder / EVENTS_FILE)
    try:
        yield progress.Printed(told.pattern, told.tokens, told.warmup_lines, events.emit)
    finally:
        events.close()


def _ensure_snapshot(run: Run, session: Session, index: int, lease: Lease | None) -> snapshots.Fault | None:
    """See to it that `run` finds the snapshot that it starts from, by a priming run if need be; else why there is none.

    One harness primes at a time: who asks meanwhile waits and finds the snapshot made.
    """
    donor = run.donor()
    if donor is None or snapshots.exists(session.folder, key := donor.snapshot_key()):
        return None
    if key in session.unprimed:
        return session.unprimed[key]
    with held(session, f"snapshot-{key[:24]}", lambda: f"waiting for another harness that primes {run.label}") as mine:
        if not mine or snapshots.exists(session.folder, key):
            return None
        session.display.note(f"no snapshot for {run.label}: priming first")
        folder = execute(donor, session, index, lease=lease)
        if session.interrupted() or snapshots.exists(session.folder, key):
            return None
        if key not in session.unprimed:
            assert folder is not None
            verdict = store.attempt(folder).verdict or {}
            cause = (verdict.get("signature") or {}).get("cause", "")
            why = f"no snapshot: the priming run {folder.name} ended {verdict.get('verdict')} {cause}".strip()
            session.unprimed[key] = snapshots.Fault(why)
        return session.unprimed[key]


def _fill_caches(record: _Record, missed: snapshots.Fault | None) -> caches.Start:
    """Copy the snapshot that the run starts from; one that is damaged or gone is made again, once."""
    run, session = record.run, record.session
    donor = run.donor()
    if donor is None:
        return caches.Start()
    key = donor.snapshot_key()

    def take() -> caches.Start:
        try:
            return caches.Start(made_by=snapshots.take(session.folder, key, record.caches))
        except snapshots.Fault as fault:
            session.display.note(f"{record.folder.name}: {fault}")
            return caches.Start(missed=str(fault), cause=fault.cause)

    first = caches.Start(missed=str(missed), cause=missed.cause) if missed else take()
    if missed or not first.missed or session.interrupted():
        return first
    missed = _ensure_snapshot(run, session, record.index, record.lease)
    second = caches.Start(missed=str(missed), cause=missed.cause) if missed else take()
    # Also of one that could not be made again: why that was is another thing than what became of the first.
    return second if second.missed == first.missed else replace(second, note=f"{first.cause}: {first.missed}")


def _unwritable(record: _Record, error: OSError) -> dict[str, Any]:
    """The verdict of a run whose directory could not be written; room is made first, to record it."""
    session = record.session
    shutil.rmtree(record.caches, ignore_errors=True)
    session.display.note(f"{record.folder.name}: the harness could not write ({error})")
    said = f"OSError: {error}"
    evidence = Evidence(None, None, "itself", None, [], 0, said, "", None, f"the harness could not write: {error}")
    told = {
        **judge(evidence).to_dict(),
        "figures": figures([]).to_dict(),
        "cache": None,
        "exit": {"code": None, "signal": None},
        "ended_by": "harness",
        "started": record.began,
        "ended": time.time(),
        "wall_s": round(time.time() - record.began, 3),
        "child_s": None,
        "overhead_s": None,
        "attempt": record.attempt,
        "sweeps": [session.sweep],
    }
    try:
        store.write(record.folder / store.VERDICT_FILE, told)
    except OSError:
        session.display.note(f"{record.folder.name}: nor its verdict, {told['verdict']}: {told['reason']}")
    return told


@contextmanager
def held(session: Session, name: str, waiting: Callable[[], str]) -> Iterator[bool]:
    """Hold a lock between the harnesses of one store; False when an interrupt came first.

    `waiting` says, once, what is waited for.
    """
    locks = session.folder / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{name}.lock")
    said = False
    while not session.interrupted():
        try:
            lock.acquire(timeout=0 if not said else 0.5)
            break
        except Timeout:
            if not said:
                session.display.note(waiting())
                said = True
    try:
        yield lock.is_locked
    finally:
        lock.release()
