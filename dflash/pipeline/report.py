"""A variant's voice: stages, steps, counters, told by its rank 0."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import nan
from statistics import fmean

from dflash.events import ENDS
from dflash.pipeline.batch import Batch
from dflash.pipeline.layout import Seat
from dflash.pipeline.sums import StepSums
from dflash.pipeline.tools import Tools
from dflash.settings import JobSettings

_MEMORY_EVERY_S = 5.0


class Reporter:
    """Turns what one rank sees of a step into events; the leading one also tells of stages and of the process."""

    def __init__(self, tools: Tools, seat: Seat, job: JobSettings) -> None:
        self.tools, self.seat, self.job = tools, seat, job
        self.first = tools.done[seat.variant] + 1
        self.underway: deque[_Step] = deque()  # begun and not yet ended: on a GPU two at times
        self.ended = 0.0  # when the last step did
        self.waited: dict[str, float] = {}
        self.memory_at = 0.0
        self.ends: deque[dict[str, float]] = deque(maxlen=ENDS)

    def step_begins(self, step: int) -> None:
        events, probe = self.tools.events, self.tools.probe
        if self.seat.leads and step == self.first:
            events.emit("stage", stage="warmup")
        if self.seat.leads and step == self.first + self.job.train.unmeasured:
            probe.steady = True
            events.emit("counters", at="steady", **probe.counters())
            events.emit("stage", stage="train")
        self.underway.append(_Step(time.time()))

    def batch_arrived(self, batch: Batch) -> None:
        self.underway[-1].batches.append((batch.context_tokens, batch.seconds))
        self.underway[-1].made = batch.made

    def step_ended(
        self, step: int, ended: float, warm: float, sums: StepSums, grad_norm: float, lr: float
    ) -> dict[str, float]:
        """Report a step that ended at `ended`, perhaps a while ago, warm-up at `warm` (Unix seconds, infinite if it has
        not); gives what a drafter trained so far is known by: its steps, and means over the last ones.
        """
        layout, events = self.tools.layout, self.tools.events
        one = self.underway.popleft()
        seconds = ended - max(one.began, self.ended)
        self.ended = ended
        waiting = {pair: channel.stats() for pair, channel in self.tools.channels.items()}
        waited: dict[str, float] = defaultdict(float)
        for (t, d), channel in waiting.items():
            waited[f"target{t}"] += channel.target_waited
            waited[f"drafter{d}"] += channel.drafter_waited
        wait_s = {who: total - self.waited.get(who, 0.0) for who, total in waited.items()}
        self.waited = waited
        figures = {  # D-PACE can weigh all slots with nothing: then there is no loss
            "loss": sums.loss / sums.weight if sums.weight else nan,
            "accept": sums.accept / sums.blocks if sums.blocks else nan,
        }
        events.emit(
            "step",
            t=round(ended, 4),
            variant=self.seat.variant,
            step=step,
            steps=self.job.train.steps,
            tokens=int(sums.tokens),
            **figures,
            accuracy=_ratio(sums.correct, sums.labelled),
            loss_at=[_ratio(*pair) for pair in zip(sums.loss_at, sums.labelled_at, strict=True)],
            accuracy_at=[_ratio(*pair) for pair in zip(sums.correct_at, sums.labelled_at, strict=True)],
            anchors=int(sums.blocks),
            coverage=_ratio(sums.covered, sums.supervised),
            lr=lr,
            grad_norm=grad_norm,
            seconds=seconds,
            lag=ended - one.made if one.made > warm else None,
            steady=sums.measured == layout.batches_a_step,
            queue_bytes=sum(channel.bytes for channel in waiting.values()),
            wait_s=wait_s,
            stage_tok_s=_stage_rates(one.batches, seconds - wait_s[f"drafter{self.seat.worker}"]),
        )
        if self.seat.leads and time.monotonic() - self.memory_at > _MEMORY_EVERY_S:
            self.memory_at = time.monotonic()
            events.emit("memory", **self.tools.probe.memory())
        self.ends.append(figures)
        return {"steps": step, **{name: fmean(one[name] for one in self.ends) for name in figures}}


@dataclass
class _Step:
    """One that has begun: when, when its last batch was made, and context tokens and seconds in the target of each."""

    began: float
    made: float = 0.0
    batches: list[tuple[int, float]] = field(default_factory=list)


def _stage_rates(batches: list[tuple[int, float]], drafting: float) -> dict[str, float]:
    """Context tokens a second of one rank's batches, by who had them: in the target, and in the drafter."""
    tokens = sum(tokens for tokens, _ in batches)
    spent = {"target": sum(seconds for _, seconds in batches), "drafter": drafting}
    return {who: tokens / seconds for who, seconds in spent.items() if seconds > 0}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
