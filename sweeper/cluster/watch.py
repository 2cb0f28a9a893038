"""The command that follows jobs: it submits what is missing, shows what they report and gives a verdict to those that
died without one. It may leave and come back at any time: all it knows stands in the store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.events import EVENTS_FILE, EventReader
from sweeper import here, run, spec, store, supervisor
from sweeper.cluster import settings, slurm, submit
from sweeper.cluster.job import STOP_FILE, from_words, may_follow, tail
from sweeper.cluster.submit import Watched
from sweeper.here import Numbered
from sweeper.verdict import Verdict, named

POLL_S, POLL_EACH_S = 1.0, 0.01  # between two looks into the store, and the more the more there is to look at
QUEUE_S, AWAY_S = 5.0, 30.0  # between two questions to Slurm, and to a Slurm that did not answer
# From a job's end, as Slurm tells it, to the belief that its records will not show up any more: shared file systems
# keep what they saw of a directory for some seconds, and a job shows that it lives every five.
SETTLE_S = 12.0
SILENT_S = 300.0  # without a sign of life, where Slurm says nothing of the job


def check(runs: Sequence[spec.Run], options: spec.Options) -> None:
    """Raise SettingError when Slurm would refuse the jobs of these runs."""
    submit.check([one for one in runs if not one.skip and not one.wheel.failure], settings.read(options.slurm or {}))


def carry_out(items: Sequence[Numbered], session: run.Session) -> None:
    """Do these runs as jobs; returns when each has a verdict, with detach=true once all are submitted."""
    with run.held(session, "submit", lambda: "waiting for another command that submits") as mine:
        if not mine:
            return
        watched = _start(items, session)
    if session.options.detach:
        _look(watched, session, slurm.queue())
        return
    _follow(watched, session)


def close_dead(folders: Iterable[Path]) -> list[Path]:
    """Give a verdict to those of these attempts whose job is gone; returns them."""
    waiting = [one for one in folders if (one / store.JOB_FILE).exists() and not (one / store.VERDICT_FILE).exists()]
    if not waiting:
        return []
    gone = {folder: _beat(folder) for folder in _gone(waiting, slurm.queue())}
    if gone:
        time.sleep(SETTLE_S)
    return [folder for folder, beat in gone.items() if _beat(folder) == beat and close(folder)]


def close(folder: Path) -> bool:
    """Give a verdict to an attempt whose job is gone, unless it has one by now."""
    if (folder / store.VERDICT_FILE).exists():
        return False
    verdict = _verdict(folder)
    with contextlib.suppress(OSError):  # a store that cannot be written now is closed by the next look
        store.close(folder, verdict)
    return True


def _verdict(folder: Path) -> Verdict:
    """What became of a job that left no verdict: its own log, what Slurm keeps of it, the end of the run's log."""
    job = store.read_json(folder / store.JOB_FILE) or {}
    name, log = str(job.get("id")), tail(str(job.get("log")))
    ends = slurm.accounted(name) or [slurm.shown(name).get("JobState", "")]
    end = next((one for one in reversed(ends) if one), "")
    match = from_words("\n".join([log, f"JobState={end}" if end else ""]))
    began = "started" in (store.read_json(folder / store.RUN_FILE) or {})
    if (folder / STOP_FILE).exists():
        match = "sweep.interrupted", "the command that watches asked for the end"
    if match is None:
        with contextlib.suppress(OSError):
            match = from_words(supervisor.tail(folder / supervisor.LOG_FILE))
    told = f"job {name} ended without a word of its own{f': Slurm says {end}' if end else ''}"
    if match:
        return Verdict("killed", named(*match), told if match[0] != "sweep.interrupted" else match[1])
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    words = "" if began else f"; it never began{f': {last[:200]}' if last else ''}"
    return Verdict("killed", named("scheduler.job_lost", "ended without a word"), told + words)


@dataclass
class _Follow:
    """A job that is being followed, and how far."""

    of: Watched
    events: EventReader
    shown: bool = False
    gone: float | None = None  # since when Slurm says that it is gone, and it has shown no sign of life
    beat: float | None = None
    over: bool = False


def _start(items: Sequence[Numbered], session: run.Session) -> list[Watched]:
    """Count what is done, do here what needs no job, pick up what Slurm has, submit the rest."""
    queue = slurm.queue()
    tried = {place: store.attempts(session.folder, item.run) for place, item in items if not item.done}
    last = {place: several[-1] for place, several in tried.items() if several}
    close_dead(one.folder for one in last.values())
    watched: list[Watched] = []
    missing: list[Numbered] = []
    for place, item in items:
        if item.done or item.run.skip or item.run.wheel.failure or here.answered(item, session):
            here.do(item, session, place)
        elif (one := last.get(place)) and (job := _job(one.folder)) and _alive([one.folder], queue):
            watched.append(Watched(place, item, one.folder, job))
        else:
            missing.append((place, item))
    if watched:
        session.display.note(f"{len(watched)} jobs of this sweep are with Slurm already")
    if missing and not session.interrupted():
        done = submit.submit(missing, watched, session)
        session.display.note(f"{len(done)} jobs submitted to Slurm")
        watched += done
    return watched


def _follow(watched: Sequence[Watched], session: run.Session) -> None:
    following = [_Follow(one, EventReader(one.folder / EVENTS_FILE)) for one in watched]
    session.display.at_once = max(1, len(following))
    asked, queue, told, stopped = 0.0, slurm.queue(), "", 0
    while following:
        if session.interrupted() > stopped:
            stopped = session.interrupted()
            _stop(following, ask=stopped == 1)
            if stopped > 1:
                time.sleep(POLL_S)
                queue = None
        if time.monotonic() >= asked:
            queue = slurm.queue()
            asked = time.monotonic() + (QUEUE_S if queue is not None else AWAY_S)
            if (line := _summary(following, queue)) != told:
                told = line
                session.display.note(line)
        for one in following:
            _step(one, session, queue, hurry=stopped > 1)
        following = [one for one in following if not one.over]
        if following:
            time.sleep(max(POLL_S, len(following) * POLL_EACH_S))


def _look(watched: Sequence[Watched], session: run.Session, queue: dict[str, slurm.Job] | None) -> None:
    """One look at jobs that are left to themselves."""
    following = [_Follow(one, EventReader(one.folder / EVENTS_FILE)) for one in watched]
    for one in following:
        if store.attempt(one.of.folder).verdict:
            session.tracking.finish(one.of.folder)
    session.display.note(_summary(following, queue))


def _step(one: _Follow, session: run.Session, queue: dict[str, slurm.Job] | None, hurry: bool) -> None:
    """Show what a job did since the last look; see whether its run is over, or is to be made again by the same job."""
    folder, place, label = one.of.folder, one.of.place, one.of.item.run.label
    if not one.shown and "started" in store.attempt(folder).run:
        one.shown = True
        session.display.run_started(place, label, one.of.item.estimate)
        session.tracking.start(folder)
    for event in one.events.poll():
        session.display.event(event, run=place)
    if one.shown:
        session.tracking.tick(folder)
    attempt = store.attempt(folder)
    beat = _beat(folder)
    # A job that Slurm has lost may go on all the same: its daemon on the node may have died, not the job.
    one.gone = (one.gone or time.monotonic()) if _over(one.of.job, folder, queue) and beat == one.beat else None
    one.beat = beat
    settled = hurry or (one.gone is not None and time.monotonic() - one.gone >= SETTLE_S)
    if attempt.verdict:
        newer = [each for each in store.siblings(folder) if each.number > attempt.number]
        if not newer and may_follow(attempt) and not settled:
            return  # the job may go back into the queue, and claim the next attempt when it starts
        session.tracking.finish(folder)
        session.display.run_ended(label, attempt.verdict, run=place)
        if newer:
            one.of.folder, one.shown, one.gone = newer[0].folder, False, None
            one.events = EventReader(one.of.folder / EVENTS_FILE)
        else:
            one.over = True
    elif settled:
        close(folder)


def _stop(following: Iterable[_Follow], ask: bool) -> None:
    """End all jobs: the first time so that runs can save."""
    for one in following:
        with contextlib.suppress(OSError):
            (one.of.folder / STOP_FILE).touch()
    slurm.cancel([one.of.job for one in following], ask=ask)


def _job(folder: Path) -> str:
    return str((store.read_json(folder / store.JOB_FILE) or {}).get("id") or "")


def _alive(folders: Sequence[Path], queue: dict[str, slurm.Job] | None) -> list[Path]:
    """Those whose job waits or runs, or may do so."""
    gone = set(_gone(folders, queue))
    return [folder for folder in folders if folder not in gone]


def _gone(folders: Sequence[Path], queue: dict[str, slurm.Job] | None) -> list[Path]:
    """Those whose job is over, as Slurm says; where it does not answer, those that showed no sign of life for long."""
    return [folder for folder in folders if _over(_job(folder), folder, queue)]


def _over(job: str, folder: Path, queue: dict[str, slurm.Job] | None) -> bool:
    if queue is None:
        return _silent(folder)
    return job not in queue or not queue[job].live


def _beat(folder: Path) -> float | None:
    """When the job last showed that it lives, by the file system's clock: good to be compared with itself alone."""
    try:
        return (folder / store.JOB_FILE).stat().st_mtime
    except OSError:
        return None


def _silent(folder: Path) -> bool:
    """Whether a job that had begun has shown no sign of life for so long that it must be dead."""
    if "started" not in (store.read_json(folder / store.RUN_FILE) or {}):
        return False
    beat = _beat(folder)
    return beat is not None and time.time() - beat > SILENT_S


def _summary(following: Sequence[_Follow], queue: dict[str, slurm.Job] | None) -> str:
    """How many jobs are in which state, and why some wait."""
    if queue is None:
        return "Slurm does not answer; going on with what the runs write"
    states: dict[str, int] = {}
    reasons: dict[str, Any] = {}
    for one in following:
        job = queue.get(one.of.job)
        state = job.state.lower() if job else "gone"
        states[state] = states.get(state, 0) + 1
        if job and job.state == "PENDING":
            reasons.setdefault(job.reason, None)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"Slurm: {told or 'no jobs'}" + (f" ({', '.join(reasons)})" if reasons else "")
