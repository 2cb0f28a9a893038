"""One run as a job: what happens on the node that Slurm gave it.

The job is a harness of its own, for one run. It writes the same records as any harness, so its verdict stands in the
store whoever watches, and it hears Slurm's signals: the child is asked to save and end, the verdict says why, and a run
that can go on is put back into the queue, to be made as its next attempt from the same checkpoints.

Slurm signals every process of a job at once, the child too; its leash takes no notice, and a child that died of the
same signal did not fail (sweeper/supervisor.py). submitit's own handlers, which would answer on top of whatever the job
is doing, are replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from dflash.events import EVENTS_FILE, EventReader
from sweeper import run, spec, store, supervisor, wheels
from sweeper.cluster import slurm
from sweeper.cluster.settings import read
from sweeper.signatures import classify
from sweeper.tracking import Nothing
from sweeper.verdict import Evidence, Verdict, judge, named

BEGINS = "sweeper: the job starts"  # in its log
STOP_FILE = "stop"  # in a run's directory: the command that watches asked for its end
SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
REQUEUED = ("scheduler.preempted", "scheduler.time_limit")
EARLY_S = 75.0  # Slurm looks at its clock every minute, so a warning may come that much early
WORDS_TRIES = 4
KILL_S = 120.0  # that a job which was put back into the queue waits for its end


@dataclass(frozen=True)
class Job:
    """What submitit pickles: the run, and the directory that was claimed for it when it was submitted."""

    run: spec.Run
    options: spec.Options
    sweep: str
    folder: Path
    log: str  # what Slurm keeps of the job's own output, %j as in sbatch

    def __call__(self) -> str:
        """Do the run; gives the name of the directory of the attempt that was made."""
        return carry_out(self)


@dataclass
class Told:
    """The signals that came, and when."""

    heard: list[tuple[int, float]] = field(default_factory=list)

    def count(self) -> int:
        """Interrupts, as a run counts them: Slurm asks once, whatever it sends; after its patience it kills."""
        return min(1, len(self.heard))

    @contextmanager
    def listening(self) -> Iterator[Told]:
        def hear(number: int, frame: FrameType | None) -> None:
            self.heard.append((number, time.time()))

        before = {number: signal.signal(number, hear) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Beat(Nothing):
    """In place of tracking, which has one writer, the command that watches: shows that the job is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tick(self, run_dir: Path) -> None:
        for folder in {run_dir, self.folder}:  # a priming run comes before the job's own
            with contextlib.suppress(OSError):
                os.utime(folder / store.JOB_FILE)


class Log:
    """In place of a display: what is worth a line goes into the job's own log."""

    def note(self, text: str) -> None:
        print(f"sweeper: {text}", flush=True)

    def run_started(self, index: int, label: str, estimate_s: float | None = None) -> None:
        self.note(f"{label} begins")

    def run_ended(self, label: str, verdict: dict[str, Any], run: int | None = None) -> None:
        self.note(f"{label}: {verdict.get('verdict')}: {verdict.get('reason')}")

    def event(self, event: dict[str, Any], run: int | None = None) -> None:
        pass

    def log_line(self, line: str, run: int | None = None) -> None:
        pass


def job_id() -> str:
    """This job's id as squeue lists it: 123, or 123_4 in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else os.environ.get("SLURM_JOB_ID", "")


def carry_out(job: Job) -> str:
    """Do the run of this job and see to it that its attempt has a verdict, whatever happens."""
    me, began = job_id(), time.time()
    log = job.log.replace("%j", me)
    folder = _turn(job.folder, me, log)
    if folder is None:
        return ""
    print(f"{BEGINS} on {os.uname().nodename} with {folder.name}", flush=True)
    told = Told()
    with told.listening():
        record = {"id": me, "log": log, "restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}
        session = run.Session(
            job.options,
            job.sweep,
            Log(),
            Beat(folder),
            told.count,
            job=record,
            asked=lambda: why(told, record, began, job.options, folder),
        )
        try:
            run.execute(_on_this_node(job.run), session, 1, claimed=folder)
            if store.attempt(folder).verdict is None:  # asked to end before it began
                cause, words = why(told, record, began, job.options, folder)
                store.close(folder, Verdict("killed", named(cause, words), words))
        except Exception:
            said = traceback.format_exc()
            evidence = Evidence(1, None, "itself", None, [], 0, said, "", None, "the harness itself failed in its job")
            store.close(folder, judge(evidence))
            raise
        cause = store.attempt(folder).cause
        if cause in REQUEUED and _goes_on(cause, job.run, folder):
            Log().note(f"{cause}: back into the queue")
            heard, until = len(told.heard), time.monotonic() + KILL_S
            if slurm.requeue(me):
                # To end by itself, before Slurm ends it, would be to have completed.
                while len(told.heard) == heard and time.monotonic() < until:
                    time.sleep(0.1)
    return folder.name


def _on_this_node(one: spec.Run) -> spec.Run:
    """The run with the interpreter in use here: in a container it lies elsewhere than on the machine that submits."""
    if one.wheel.name != wheels.CURRENT or os.path.exists(one.wheel.python):
        return one
    return replace(one, wheel=replace(one.wheel, python=sys.executable))


def _turn(claimed: Path, me: str, log: str) -> Path | None:
    """The attempt that this start of the job makes; None when there is nothing left to do.

    A start that finds the attempt begun follows one that was killed before it had a verdict, by Slurm or with its node.
    """
    last = store.siblings(claimed)[-1]
    if last.verdict is None and "started" not in last.run:
        return last.folder
    if last.verdict is None:
        if left := store.harness(last.run):
            left.kill()  # Slurm lost it with its daemon on this node; its leash ends the rest
        cause, words = _killed(me, log)
        store.close(last.folder, Verdict("killed", named(cause, words), words))
    elif not may_follow(last) or not os.environ.get("SLURM_RESTART_COUNT"):
        Log().note(f"{last.folder.name} has its verdict, {last.verdict.get('verdict')}: nothing to do")
        return None
    folder, number = store.claim_after(last.folder)
    kept = {name: value for name, value in last.run.items() if name != "started"}
    store.write(folder / store.RUN_FILE, kept | {"attempt": number, "argv": [], "env": {}, "beside": 0})
    store.write(folder / store.JOB_FILE, {"id": me, "log": log})
    return folder


def may_follow(attempt: store.Attempt) -> bool:
    """Whether the same job may make another attempt after this one, if Slurm starts it again."""
    return attempt.cause in store.RESUMED and not (attempt.folder / STOP_FILE).exists()


def _killed(me: str, log: str) -> tuple[str, str]:
    """Why the start of this job before the present one was killed."""
    ends = [end for end in slurm.accounted(me) if not end.startswith(("RUNNING", "PENDING"))]
    match = from_words("\n".join([tail(log), *(f"JobState={end}" for end in ends[-1:])]))
    if match:
        return match
    return "scheduler.node_failed", "Slurm started the job again and says nothing of what ended it"


def why(told: Told, job: dict[str, Any], began: float, options: spec.Options, folder: Path) -> tuple[str, str]:
    """Who asked this job to end, as a cause and in words."""
    if (folder / STOP_FILE).exists():
        return "sweep.interrupted", "the command that watches asked for the end"
    settings = read(options.slurm or {})
    shown = slurm.shown(job["id"])
    if shown.get("PreemptTime", "None") not in ("None", "N/A", "Unknown"):
        return "scheduler.preempted", "Slurm needs the place for a job of higher priority"
    if _signalled(told, signal.SIGUSR2):
        ends = _time(shown.get("EndTime", "")) or began + 60.0 * settings.time
        if not shown or ends - time.time() <= settings.warning + EARLY_S:
            return "scheduler.time_limit", f"Slurm's time limit of {settings.time} minutes"
        return "scheduler.preempted", "Slurm warned the job long before its time limit"
    for _ in range(WORDS_TRIES):  # Slurm's daemon on the node writes its words into the log while it signals
        if match := from_words(f"{tail(job['log'])}\nJobState={slurm.shown(job['id']).get('JobState')}"):
            return match
        time.sleep(0.5)
    return "scheduler.cancelled", "the job was cancelled"


def from_words(text: str) -> tuple[str, str] | None:
    """The cause that Slurm's own words name, and the line that does."""
    match = classify(text)
    return (match.cause, match.evidence) if match and match.failed else None


def tail(path: str) -> str:
    """The end of a job's log, what its last start left there; empty if there is none."""
    try:
        return supervisor.tail(Path(path)).rpartition(BEGINS)[2]
    except OSError:
        return ""


def _goes_on(cause: str, one: spec.Run, folder: Path) -> bool:
    """Whether another start of the job makes sense: after a time limit only for a run that got further and saved it."""
    if cause != "scheduler.time_limit":
        return True
    if not (one.spec.get("train") or {}).get("save_every"):
        return False
    return any(event.get("event") == "checkpoint" for event in EventReader(folder / EVENTS_FILE).poll())


def _signalled(told: Told, number: int) -> bool:
    return any(heard == number for heard, _ in told.heard)


def _time(text: str) -> float | None:
    """Unix seconds of a local time as Slurm writes it."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
