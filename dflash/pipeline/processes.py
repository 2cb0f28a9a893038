"""Each worker as a process of its own; this one starts and watches them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash.devices import Placement
from dflash.events import EVENTS_FILE, EventWriter
from dflash.failure import report_failure
from dflash.pipeline import spans
from dflash.pipeline.average import PeerLost, ProcessAverager
from dflash.pipeline.batch import BatchSource, batch_outline
from dflash.pipeline.channel import Channel, ProcessChannel
from dflash.pipeline.drafter_worker import Work, draft
from dflash.pipeline.evaluation import Evaluation
from dflash.pipeline.layout import Seat
from dflash.pipeline.shared import channel_limit, make_strategy, overall
from dflash.pipeline.target_worker import run_target
from dflash.pipeline.tools import Tools
from dflash.plan import Plan, make_drafter, whole_target
from dflash.probe import Probe
from dflash.target import Target

TARGETS_END_S = 10.0  # after that they are killed, for nothing they do is of use
# Exit status of a worker process that another's death ended, and of a drafter worker by the status it ended with.
PEER_LOST = 4
EXIT = {"ok": 0, "requeue": 5, "interrupted": 6}


@dataclass(frozen=True)
class Post:
    """What a worker process is told at birth; a target has a number, a drafter a seat."""

    name: str
    plan: Plan
    out: Path
    devices: tuple[torch.device, ...]
    cpu_threads: int
    channels: dict[tuple[int, int], Channel]
    stop: Any  # multiprocessing.Event
    target: int | None = None
    seat: Seat | None = None
    averager: ProcessAverager | None = None


def run_in_processes(
    plan: Plan,
    placement: Placement,
    out: Path,
    events: EventWriter,
    probe: Probe,
    stop: threading.Event,
) -> str:
    """Run a job to its end; gives its status (dflash.train.train)."""
    job, layout = plan.job, plan.layout
    context = torch.multiprocessing.get_context("spawn")

    def channel(drafter: int) -> Channel:
        anchors = plan.variants[layout.seats[drafter].variant].job.drafter.anchors
        rows, tokens = job.train.rows, job.data.row_tokens
        like = batch_outline(rows, tokens, anchors, plan.feature_width, plan.feature_dtype)
        return ProcessChannel(channel_limit(job), like, context)

    channels = {(target, drafter): channel(drafter) for target, drafter in layout.pairs}
    # A name of this process's own: one that an earlier run left would make the drafters meet its ghosts.
    meetings = [out / f".meeting-{os.getpid()}-{number}" for number in range(len(layout.variants))]
    averagers = {
        name: ProcessAverager(layout.ranks, meeting) for name, meeting in zip(layout.variants, meetings, strict=True)
    }
    stopping = context.Event()
    post = partial(
        Post,
        plan=plan,
        out=out,
        cpu_threads=placement.cpu_threads,
        channels=channels,
        stop=stopping,
    )
    posts = [
        post(name=f"drafter{seat.worker}", devices=(device,), seat=seat, averager=averagers[seat.variant])
        for seat, device in zip(layout.seats, placement.drafters, strict=True)
    ]
    posts += [
        post(name=f"target{number}", devices=devices, target=number) for number, devices in enumerate(placement.targets)
    ]
    already = events.path.stat().st_size
    workers = {told.name: context.Process(target=_work, args=(told,), name=told.name) for told in posts}
    drafters = [worker for name, worker in workers.items() if name.startswith("drafter")]
    targets = [worker for worker in workers.values() if worker not in drafters]
    try:
        for worker in workers.values():
            worker.start()
        while True:
            training = any(worker.is_alive() for worker in drafters)  # asked first: who dies later is seen next time
            dead = [w for w in workers.values() if w.exitcode not in (None, *EXIT.values())]
            if dead:
                time.sleep(0.5)  # the culprit writes its own report; its echoes may come first by a little
                _report_silent_death(out, already, dead, events)
                return "failed"
            if not training:
                for worker in targets:  # all drafters have left: they end with the batch they are at
                    worker.join(TARGETS_END_S)
                return overall(next(s for s, code in EXIT.items() if code == w.exitcode) for w in drafters)
            if stop.is_set():
                stopping.set()
            time.sleep(0.05)
    finally:
        for worker in workers.values():
            if worker.is_alive():
                worker.kill()
            if worker.pid is not None:
                worker.join()
        for meeting in meetings:
            meeting.unlink(missing_ok=True)


def _report_silent_death(out: Path, already: int, dead: list[Any], events: EventWriter) -> None:
    """A worker that a signal ended could not report itself, and who lost it does not know why."""
    with open(out / EVENTS_FILE, "rb") as file:
        file.seek(already)
        if b'"event": "failure"' in file.read():
            return
    worker = min(dead, key=lambda w: (w.exitcode == PEER_LOST, w.exitcode))
    how = f"signal {signal.Signals(-worker.exitcode).name}" if worker.exitcode < 0 else f"status {worker.exitcode}"
    events.emit(
        "failure",
        worker=worker.name,
        type="WorkerDied",
        message=f"worker process {worker.name} ended by {how}",
        traceback="",
        holders=[],
        stacks="",
    )


def _work(post: Post) -> None:
    """The whole life of one worker process."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):  # the parent passes the wish on, at a step's end
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    plan, job = post.plan, post.plan.job
    events = EventWriter(post.out / EVENTS_FILE)
    probe = Probe(events)
    probe.install()
    if plan.spans:
        spans.start()
    try:
        torch.set_num_threads(post.cpu_threads)
        strategy = make_strategy(job, post.devices[0].type, probe)
        tools = Tools(job, plan.layout, plan.done, post.channels, events, probe, strategy, post.stop.is_set)
        if post.target is not None:
            target = Target.load(job.target, post.devices, whole_target(job))
            run_target(tools, post.target, target, BatchSource(plan.data.rows, job.train.rows, job.seed))
            spans.report(events)
            return
        assert post.seat is not None
        assert post.averager is not None
        variant = plan.variants[post.seat.variant]
        ends = Target.ends(job.target, post.devices[0], whole_target(job))
        made = make_drafter(variant, ends, strategy, post.devices[0])
        evaluation = Evaluation(job, post.devices[0]) if job.eval.prompts and post.seat.rank == 0 else None
        status = draft(tools, Work(post.seat, variant, *made, post.averager, evaluation, ends, plan.facts_of(variant)))
        post.averager.close()
        spans.report(events)
        events.emit("counters", at="end", **probe.counters())
        events.emit("memory", **probe.memory())
        sys.exit(EXIT[status])
    except PeerLost as error:
        events.emit("warning", code="peer.lost", message=str(error))
        sys.exit(PEER_LOST)  # the parent knows who went first
    except Exception as error:
        report_failure(events, probe, post.name, error)
        sys.exit(1)
