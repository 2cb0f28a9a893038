"""What a target worker does: features of its batches, in order, to all who use them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from dflash.pipeline.batch import Batch, BatchSource
from dflash.pipeline.spans import span
from dflash.pipeline.tools import Tools
from dflash.target import Target

# Batches that a device is given while the one before waits to be handed over: it never runs dry meanwhile.
AHEAD = {"cuda": 1}


def run_target(tools: Tools, number: int, target: Target, source: BatchSource) -> None:
    """Make the features of every batch that is this target's, once for all variants, until all drafters have left;
    raises Aborted when the run ends early.

    Not until the last batch is made: drafters that share a device or its host with targets would go through what is
    left in the channels faster than through all before.
    """
    tools.announce("target", number, target.device)
    tools.strategy.setup_thread()
    channels = [channel for (maker, _), channel in tools.channels.items() if maker == number]
    given: deque[_Given] = deque()
    batches = tools.layout.made_by(number, min(tools.done.values()))
    while not all(channel.left for channel in channels):
        try:
            given.append(_give(tools, target, source.batch(next(batches))))
            while len(given) > AHEAD.get(target.device.type, 0):
                _hand_over(tools, number, source, given.popleft().finished())
        except Exception:
            if not all(channel.left for channel in channels):  # else nobody wanted that batch
                raise


@dataclass(frozen=True)
class _Given:
    """A batch whose features a device is making."""

    batch: Batch
    seconds: float  # what the caller's thread took
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # when the device began and ended, if it is a GPU

    def finished(self) -> Batch:
        """The batch once its features are made."""
        seconds = self.seconds
        if self.events:
            began, ended = self.events
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1e3
        return replace(self.batch, made=time.time(), seconds=seconds)


def _give(tools: Tools, target: Target, batch: Batch) -> _Given:
    device, began, events = target.device, time.perf_counter(), None
    if device.type == "cuda":
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
    with tools.strategy.quiet(), span("target", device):
        if events:
            events[0].record(torch.cuda.current_stream(device))
        features = target.features(batch.tokens, batch.document, batch.position)
        if events:
            events[1].record(torch.cuda.current_stream(device))
    return _Given(replace(batch, features=features), time.perf_counter() - began, events)


def _hand_over(tools: Tools, number: int, source: BatchSource, batch: Batch) -> None:
    layout, variants = tools.layout, tools.job.variants()
    for worker, variant in zip(layout.users(batch.index), layout.variants, strict=True):
        if layout.step_of(batch.index) > tools.done[variant]:  # a variant may have been further when all were stopped
            anchored = source.anchored(batch, variants[variant].drafter.anchors)
            with span("hand over"):
                tools.channels[number, worker].put(anchored)
