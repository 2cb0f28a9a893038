"""All workers as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash.devices import Placement
from dflash.events import EventWriter
from dflash.failure import report_failure
from dflash.pipeline import spans
from dflash.pipeline.average import ThreadAverager
from dflash.pipeline.batch import BatchSource
from dflash.pipeline.channel import ThreadChannel
from dflash.pipeline.drafter_worker import Work, draft
from dflash.pipeline.evaluation import Evaluation
from dflash.pipeline.shared import channel_limit, make_strategy, overall
from dflash.pipeline.target_worker import run_target
from dflash.pipeline.tools import Tools
from dflash.plan import Plan, make_drafter, whole_target
from dflash.probe import Probe
from dflash.strategies import Aborted
from dflash.target import Target

# How long workers that are told to end may take before the process leaves without them.
ABORT_GRACE_S = 15.0


def run_in_threads(
    plan: Plan,
    placement: Placement,
    out: Path,
    events: EventWriter,
    probe: Probe,
    stop: threading.Event,
) -> str:
    """Run a job to its end; gives its status (dflash.train.train)."""
    job, layout = plan.job, plan.layout
    strategy = make_strategy(job, placement.kind, probe)
    targets: list[Target] = []  # replicas share their frozen weights where they stand on one device
    for number, devices in enumerate(placement.targets):
        first = not targets
        targets.append(Target.load(job.target, devices, whole_target(job)) if first else targets[0].replica(devices))
        events.emit("progress", what="targets", done=number + 1, total=layout.targets)
    channels = {pair: ThreadChannel(channel_limit(job)) for pair in layout.pairs}
    averagers = {name: ThreadAverager(layout.ranks) for name in layout.variants}
    tools = Tools(job, layout, plan.done, channels, events, probe, strategy, stop.is_set)
    evaluation = Evaluation(job, placement.drafters[0]) if job.eval.prompts else None
    works = []
    for seat, device in zip(layout.seats, placement.drafters, strict=True):
        variant = plan.variants[seat.variant]
        made = make_drafter(variant, targets[0], strategy, device)
        measures = evaluation if seat.rank == 0 else None
        works.append(Work(seat, variant, *made, averagers[seat.variant], measures, targets[0], plan.facts_of(variant)))

    aborts = [strategy.abort, *(a.abort for a in averagers.values()), *(c.abort for c in channels.values())]
    if plan.spans:
        spans.start()
    crew = Crew(events, probe, aborts)
    for work in works:
        crew.start(f"drafter{work.seat.worker}", draft, tools, work)
    source = BatchSource(plan.data.rows, job.train.rows, job.seed)
    for number, target in enumerate(targets):
        crew.start(f"target{number}", run_target, tools, number, target, source)
    if not crew.wait():
        return "failed"
    spans.report(events)
    events.emit("counters", at="end", **probe.counters())
    strategy.close()
    return overall(result for result in crew.results if result is not None)


class Crew:
    """Worker threads that end together: the first to fail is reported, the others are told to stop waiting."""

    def __init__(self, events: EventWriter, probe: Probe, aborts: list[Callable[[], None]]) -> None:
        self._events, self._probe, self._aborts = events, probe, aborts
        self._threads: list[threading.Thread] = []
        self._failed = threading.Event()
        self._first = threading.Lock()
        self.results: list[Any] = []

    def start(self, name: str, work: Callable[..., Any], *args: Any) -> None:
        thread = threading.Thread(target=self._guard, args=(name, work, args), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, name: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self.results.append(work(*args))
        except Aborted:
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
                for abort in self._aborts:  # targets need not hand over what they are at
                    abort()
            time.sleep(0.02)
        return not self._failed.is_set()
