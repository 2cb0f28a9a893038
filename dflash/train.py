"""One training job, read top to bottom: load, lay out the workers, run them, save.

`isolation=threads`: all workers are threads of this process (the incident's shape). `isolation=processes`:
one process a worker, which share no interpreter state; this one only starts and watches them.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash import strategies
from dflash.data.dataset import Dataset
from dflash.data.dataset import load as load_dataset
from dflash.data.tokens import resolve_mask_token
from dflash.devices import Placement
from dflash.drafter import Drafter, Geometry
from dflash.events import EVENTS_FILE, EventWriter
from dflash.export import export_drafter, read_weights
from dflash.failure import report_failure
from dflash.geometry import starting_mask_token, starting_taps
from dflash.models import folder
from dflash.pipeline.average import Averager, PeerLost, ProcessAverager, ThreadAverager
from dflash.pipeline.batch import BatchSource
from dflash.pipeline.channel import Channel, ProcessChannel, ThreadChannel
from dflash.pipeline.workers import Channels, FrozenEnds, Tools, run_drafter, run_target
from dflash.probe import Probe
from dflash.settings import JobSettings, SettingError
from dflash.target import Target

DRAFTER_FOLDER = "drafter"
DATA_FOLDER = "data"
# How long workers that are told to end may take before the process leaves without them.
ABORT_GRACE_S = 15.0
# Exit status of a worker process that another's death ended.
PEER_LOST = 4


def train(job: JobSettings, placement: Placement, out: Path, events: EventWriter, probe: Probe) -> str:
    """Run the job; gives `ok`, `interrupted` or `failed`. What failed is in the events.

    Raises SettingError before any training when the settings do not fit the machine, the data or the target.
    """
    job = replace(job, target=replace(job.target, taps=starting_taps(job)))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    run = _train_in_threads if job.isolation == "threads" else _train_in_processes
    return run(job, placement, out, events, probe, stop)


# --- threads ---------------------------------------------------------------------------------------------


def _train_in_threads(
    job: JobSettings,
    placement: Placement,
    out: Path,
    events: EventWriter,
    probe: Probe,
    stop: threading.Event,
) -> str:
    strategy = _make_strategy(job, placement.kind, probe)
    tools = Tools(job, events, probe, strategy, stop.is_set)
    events.emit("stage", stage="load")
    targets = _load_targets(job, placement.targets, events)
    events.emit("stage", stage="data")
    plan = _plan(job, targets[0], out, events)
    source = BatchSource(plan.data.rows, job.train.rows, job.drafter.anchors, job.seed)

    made = [_make_drafter(job, plan, targets[0], strategy, device) for device in placement.drafters]
    limit = _channel_limit(job, len(targets))
    channels: Channels = {(t, d): ThreadChannel(limit) for t in range(len(targets)) for d in range(len(made))}
    averager = ThreadAverager(len(made))

    crew = Crew(events, probe, [strategy.abort, averager.abort, *(c.abort for c in channels.values())])
    for rank, (drafter, ends) in enumerate(made):
        crew.start(f"drafter{rank}", run_drafter, tools, rank, drafter, ends, channels, averager)
    for number, target in enumerate(targets):
        crew.start(f"target{number}", run_target, tools, number, target, source, channels)
    if not crew.wait():
        return "failed"
    events.emit("counters", at="end", **probe.counters())
    if job.train.save:
        events.emit("stage", stage="save")
        export_drafter(made[0][0], targets[0], plan.mask_token, out / DRAFTER_FOLDER)
    return "interrupted" if stop.is_set() else "ok"


class Crew:
    """Worker threads that end together: the first to fail is reported, the others are told to stop waiting."""

    def __init__(self, events: EventWriter, probe: Probe, aborts: list[Callable[[], None]]) -> None:
        self._events, self._probe, self._aborts = events, probe, aborts
        self._threads: list[threading.Thread] = []
        self._failed = threading.Event()
        self._first = threading.Lock()

    def start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=self._guard, args=(name, work, args), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, name: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            work(*args)
        except strategies.Aborted:
            return
        except BaseException as error:
            if self._first.acquire(blocking=False):  # later failures are this one's echoes
                report_failure(self._events, self._probe, name, error)
            self._failed.set()
            for abort in self._aborts:
                abort()

    def wait(self) -> bool:
        """Wait for all to end; False when one failed (then those that hang are left behind, as daemons)."""
        until = None
        while any(thread.is_alive() for thread in self._threads):
            if self._failed.is_set():
                until = until or time.monotonic() + ABORT_GRACE_S
                if time.monotonic() > until:
                    break
            elif not any(t.is_alive() for t in self._threads if t.name.startswith("drafter")):
                for abort in self._aborts:  # stopped early: targets need not fill their channels
                    abort()
            time.sleep(0.02)
        return not self._failed.is_set()


# --- processes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Post:
    """What a worker process is told at birth."""

    role: str
    number: int
    job: JobSettings
    plan: Plan
    out: Path
    devices: tuple[torch.device, ...]
    cpu_threads: int
    channels: dict[tuple[int, int], Channel]
    averager: Averager
    stop: Any  # multiprocessing.Event


def _train_in_processes(
    job: JobSettings,
    placement: Placement,
    out: Path,
    events: EventWriter,
    probe: Probe,
    stop: threading.Event,
) -> str:
    events.emit("stage", stage="data")
    outline = Target.outline(job.target, placement.targets[0][0])
    plan = _plan(job, outline, out, events)  # what cannot work is told here, before any worker exists
    size = (job.train.rows, job.data.row_tokens, outline.width)
    context = torch.multiprocessing.get_context("spawn")
    limit = _channel_limit(job, len(placement.targets))
    channels: dict[tuple[int, int], Channel] = {
        (t, d): ProcessChannel(limit, size, outline.embedding.dtype, context)
        for t in range(len(placement.targets))
        for d in range(len(placement.drafters))
    }
    averager = ProcessAverager(len(placement.drafters), out / "meeting")
    told = context.Event()
    events.emit("stage", stage="load")
    workers = {}
    places = {"drafter": [(device,) for device in placement.drafters], "target": placement.targets}
    for role, workers_of in places.items():
        for number, devices in enumerate(workers_of):
            post = Post(role, number, job, plan, out, devices, placement.cpu_threads, channels, averager, told)
            worker = context.Process(target=_worker_process, args=(post,), name=f"{role}{number}")
            worker.start()
            workers[worker.name] = worker
    drafters = [w for name, w in workers.items() if name.startswith("drafter")]
    try:
        while True:
            training = any(worker.is_alive() for worker in drafters)  # asked first: who dies later is seen next time
            dead = [w for w in workers.values() if w.exitcode not in (None, 0)]
            if dead:
                time.sleep(0.5)  # the culprit writes its own report; its echoes may come first by a little
                _report_silent_death(out, dead, events)
                return "failed"
            if not training:
                return "interrupted" if stop.is_set() else "ok"
            if stop.is_set():
                told.set()
            time.sleep(0.05)
    finally:
        for worker in workers.values():
            if worker.is_alive():
                worker.kill()
            worker.join()


def _report_silent_death(out: Path, dead: list[Any], events: EventWriter) -> None:
    """A worker that a signal ended could not report itself, and who lost it does not know why."""
    if '"event": "failure"' in (out / EVENTS_FILE).read_text(errors="replace"):
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


def _worker_process(post: Post) -> None:
    """The whole life of one worker process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent passes the wish on, at a step's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    name, job, plan = f"{post.role}{post.number}", post.job, post.plan
    events = EventWriter(post.out / EVENTS_FILE)
    probe = Probe(events)
    probe.install()
    try:
        torch.set_num_threads(post.cpu_threads)
        strategy = _make_strategy(job, post.devices[0].type, probe)
        tools = Tools(job, events, probe, strategy, post.stop.is_set)
        if post.role == "target":
            (target,) = _load_targets(job, [post.devices], events)
            source = BatchSource(plan.data.rows, job.train.rows, job.drafter.anchors, job.seed)
            run_target(tools, post.number, target, source, post.channels)
        else:
            target = Target.ends(job.target, post.devices[0])
            drafter, ends = _make_drafter(job, plan, target, strategy, post.devices[0])
            run_drafter(tools, post.number, drafter, ends, post.channels, post.averager)
            events.emit("counters", at="end", **probe.counters())
            events.emit("memory", **probe.memory())
            if post.number == 0 and job.train.save:
                events.emit("stage", stage="save")
                export_drafter(drafter, target, plan.mask_token, post.out / DRAFTER_FOLDER)
    except PeerLost as error:
        events.emit("warning", code="peer.lost", message=str(error))
        sys.exit(PEER_LOST)  # the parent knows who went first
    except BaseException as error:
        report_failure(events, probe, name, error)
        sys.exit(1)


# --- shared ----------------------------------------------------------------------------------------------


def _make_strategy(job: JobSettings, device_type: str, probe: Probe) -> strategies.Strategy:
    try:
        strategy = strategies.make(job.compile, device_type, probe)
    except strategies.Unavailable as reason:
        raise SettingError("compile", job.compile, str(reason)) from None
    strategy.setup_process()
    return strategy


def _load_targets(job: JobSettings, places: list[tuple[torch.device, ...]], events: EventWriter) -> list[Target]:
    """One target a worker; replicas share their frozen weights where they stand on one device."""
    targets: list[Target] = []
    for number, devices in enumerate(places):
        targets.append(targets[0].replica(devices) if targets else Target.load(job.target, devices))
        events.emit("progress", what="targets", done=number + 1, total=len(places))
    return targets


@dataclass(frozen=True)
class Plan:
    """What follows from data, tokenizer and the target's shape."""

    data: Dataset
    geometry: Geometry
    mask_token: int


def _plan(job: JobSettings, target: Target, out: Path, events: EventWriter) -> Plan:
    """Read the data and settle what the settings leave open; raises SettingError where they cannot work."""
    from transformers import AutoTokenizer

    geometry = Geometry.settle(job.drafter, target)
    tokenizer = AutoTokenizer.from_pretrained(
        folder(job.target.model, job.target.models_dir),
        local_files_only=True,
        trust_remote_code=job.target.trust_remote_code,
    )
    mask_token = resolve_mask_token(starting_mask_token(job.drafter), tokenizer, target.vocab_size)

    def progress(done: int, total: int) -> None:
        events.emit("progress", what="bytes of data", done=done, total=total)

    data = load_dataset(
        job.data,
        tokenizer,
        embedding_rows=target.vocab_size,
        seed=job.seed,
        cache=out / DATA_FOLDER,
        progress=progress,
    )
    events.emit("data", **data.summary)
    return Plan(data, geometry, mask_token)


def _make_drafter(
    job: JobSettings, plan: Plan, target: Target, strategy: strategies.Strategy, device: torch.device
) -> tuple[Drafter, FrozenEnds]:
    """A drafter with weights drawn from the job's seed (so equal in every worker), and what it shares."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        drafter = Drafter(plan.geometry, strategy.prepare, strategy.attend)
    if job.drafter.init is not None:
        drafter.load_state_dict(read_weights(job.drafter.init, plan.geometry, "drafter.init"))
    else:
        # Logits begin with a spread of at most 1. A target that ties head and embedding has a head so large that
        # the drafter would otherwise begin by being sure of the mask token (loss 97 on SmolLM2 instead of 12).
        spread = target.head.float().pow(2).mean().sqrt().item() * target.hidden_size**0.5
        torch.nn.init.constant_(drafter.norm.weight, min(1.0, 1 / spread))
    ends = FrozenEnds(target.embedding.to(device), target.embedding_scale, target.head.to(device), plan.mask_token)
    return drafter.to(device=device, dtype=ends.head.dtype), ends


def _channel_limit(job: JobSettings, num_targets: int) -> int:
    """Bytes one channel may hold: the bound is per drafter, shared by the targets that feed it."""
    return int(job.train.queue_mib * (1 << 20)) // num_targets
