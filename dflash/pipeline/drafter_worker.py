"""What a drafter worker does: take batches, add up gradients with its peers, step, report, save, evaluate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.drafter import Drafter
from dflash.export import export_drafter
from dflash.geometry import to_config
from dflash.optim import Master, learning_rate
from dflash.pipeline import state, sums
from dflash.pipeline.average import Averager
from dflash.pipeline.batch import Batch
from dflash.pipeline.channel import Channel
from dflash.pipeline.clock import Clock
from dflash.pipeline.evaluation import Evaluation
from dflash.pipeline.layout import Seat
from dflash.pipeline.profile import profiled
from dflash.pipeline.report import Reporter
from dflash.pipeline.spans import span
from dflash.pipeline.step import FrozenEnds, gradient_step
from dflash.pipeline.sums import StepSums
from dflash.pipeline.tools import Tools
from dflash.pipeline.transfer import Underway
from dflash.pipeline.window import Window
from dflash.plan import Variant
from dflash.settings import JobSettings
from dflash.target import Target

# Steps whose figures are still to come when a device gets its next one: it never runs dry while they are read.
BEHIND = {"cuda": 1}


@dataclass(frozen=True)
class Work:
    """A drafter worker's own things."""

    seat: Seat
    variant: Variant
    drafter: Drafter
    ends: FrozenEnds
    averager: Averager
    evaluation: Evaluation | None  # of acceptance, at rank 0 if the job wants it
    target: Target  # for what the exported drafter says of it; weights are not used
    facts: dict[str, Any]

    @property
    def job(self) -> JobSettings:
        return self.variant.job


def draft(tools: Tools, work: Work) -> str:
    """Train, then export the drafter; gives the status that training ended with (`run_drafter`)."""
    status, figures = run_drafter(tools, work)
    if work.seat.rank == 0 and work.job.train.save:
        if work.seat.leads:
            tools.events.emit("stage", stage="save")
        facts = work.facts | figures
        export_drafter(work.drafter, work.target, work.variant.mask_token, work.variant.folder, facts)
    return status


def run_drafter(tools: Tools, work: Work) -> tuple[str, dict[str, Any]]:
    """Train for all steps, or until any drafter of the variant is asked to stop; gives status and last figures.

    `ok`, or `requeue` when it stopped and left a checkpoint, or `interrupted` when it stopped and could not.
    Every drafter has its own copy of the weights and of the optimiser, and all of a variant apply the same summed
    gradient, so the copies stay equal bit for bit. Raises Aborted when the run ends early.
    """
    seat, job, drafter, strategy = work.seat, work.job, work.drafter, tools.strategy
    device = work.ends.head.device
    name = tools.announce("drafter", seat.worker, device)
    strategy.setup_thread()
    with strategy.quiet():
        master = Master(list(drafter.parameters()), job.optim)
        if work.variant.begun:
            state.restore(work.variant.begun, drafter, master)
    reporter = Reporter(tools, seat, job) if seat.rank == 0 else None
    done = work.variant.done
    if work.variant.begun and reporter:
        where = str(work.variant.begun.folder)
        tools.events.emit("resume", variant=seat.variant, step=done, folder=where)
    forward = strategy.compile_forward(drafter)
    status = "ok"
    figures: dict[str, Any] = {"steps": done}
    window = Window()
    told: deque[_Told] = deque()  # steps whose figures are still on the device
    if done >= job.train.steps:
        _leave(tools, seat)
    clock = Clock(device)
    steps = range(done + 1, job.train.steps + 1)
    for step in profiled(steps, tools, device) if seat.leads else steps:
        if reporter:
            reporter.step_begins(step)
        total = _gradient(tools, work, name, master, forward, step, window, reporter)
        total = work.averager.total(seat.rank, total)
        with strategy.quiet(), span("optimiser", device):
            split = len(total) - sums.length(job.drafter.block)
            gradient, summed = total[:split], total[split:]
            lr = learning_rate(step, job.train.steps, job.optim)
            norm = master.step(gradient, lr, summed[sums.WEIGHT].clamp(min=torch.finfo(torch.float32).tiny))
            told.append(_Told(step, lr, Underway(torch.cat([norm[None], summed]), clock)))
            del total, gradient, summed
        last = step == job.train.steps
        due = bool(job.train.save_every) and step % job.train.save_every == 0
        evaluated = bool(job.eval.prompts) and (last or (bool(job.eval.every) and step % job.eval.every == 0))
        stop = False
        # All drafters of a variant read as late as each other, so that they stop after the same step.
        behind = 0 if last or due or evaluated else BEHIND.get(device.type, 0)
        while len(told) > behind or (stop and told):
            ended, (grad_norm, *values) = told[0].figures.read()
            seen, one = StepSums.of(values), told.popleft()
            if one.step == done + max(1, job.train.unmeasured):
                window.warm = ended
            if reporter:
                figures |= reporter.step_ended(one.step, ended, window.warm, seen, grad_norm, one.lr)
            stop |= bool(seen.stop) and not last
        if stop or last:
            _leave(tools, seat)
        saved = seat.rank == 0 and (due or (stop and job.train.save)) and _save(tools, work, step, master)
        if stop:
            status = "requeue" if saved or seat.rank else "interrupted"
            break
        if work.evaluation and evaluated:
            figures["acceptance"] = work.evaluation(tools, work.variant, drafter, step)
    return status, figures


def _leave(tools: Tools, seat: Seat) -> None:
    """Take no more batches, so that targets need not wait here: they may have other drafters, or be done."""
    for channel in _channels(tools, seat):
        channel.leave()


def _channels(tools: Tools, seat: Seat) -> list[Channel]:
    return [tools.channels[target, seat.worker] for target in range(tools.layout.targets)]


@dataclass(frozen=True)
class _Told:
    """What is reported of a step once its figures are here: the gradient's norm, then the sums."""

    step: int
    lr: float
    figures: Underway


def _gradient(
    tools: Tools,
    work: Work,
    name: str,
    master: Master,
    forward: Callable[..., Tensor],
    step: int,
    window: Window,
    reporter: Reporter | None,
) -> Tensor:
    """The gradient of all of a rank's batches of a step, with their sums behind it, float32 [n + length(B)]."""
    job, layout, strategy = work.job, tools.layout, tools.strategy
    device, total = work.ends.head.device, None
    for index in layout.used_by(work.seat.rank, step):
        channel = tools.channels[layout.maker(index), work.seat.worker]
        full = channel.full
        with span("wait"):
            batch = channel.get(device)
        if reporter:
            reporter.batch_arrived(batch)
        shape_class = (str(device), tuple(batch.tokens.shape), job.drafter.anchors, job.drafter.block)
        round_ = (job.train.steps - step) % layout.cycle == 0
        measured = window.has(batch.made, full, round_)
        stop = tools.stopping()

        def body(batch: Batch = batch, measured: bool = measured, stop: bool = stop) -> Tensor:
            return gradient_step(job, work.drafter, forward, work.ends, batch, measured, stop)

        with span("step", device):
            counted = strategy.run(name, shape_class, body)
        with strategy.quiet():
            here = master.gradient(counted)
            total = here if total is None else total.add_(here)
    assert total is not None
    return total


def _save(tools: Tools, work: Work, step: int, master: Master) -> bool:
    """Save a checkpoint and say whether that worked; a full disk costs the checkpoint, not the run."""
    variant, began = work.variant, time.perf_counter()
    try:
        with tools.strategy.quiet():
            config = to_config(variant.geometry, work.target, variant.mask_token)
            facts = {"config": config, "facts": work.facts | {"target_architectures": work.target.architectures}}
            keep = work.job.train.keep
            folder = state.save(variant.checkpoints, step, work.drafter, master, facts, variant.identity, keep)
    except OSError as error:
        message = f"no checkpoint of step {step} in {variant.checkpoints}: {error}"
        tools.events.emit("warning", code="checkpoint.failed", message=message)
        return False
    seconds = time.perf_counter() - began
    tools.events.emit("checkpoint", variant=variant.name, step=step, folder=str(folder), seconds=seconds)
    return True
