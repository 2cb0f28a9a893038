"""What a target worker and a drafter worker do, whether they are threads or processes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dflash.attention import DFlashMask
from dflash.blocks import acceptance_lengths, gamma_for, make_blocks
from dflash.drafter import Drafter
from dflash.events import EventWriter
from dflash.loss import head_loss
from dflash.optim import learning_rate
from dflash.pipeline.average import Averager
from dflash.pipeline.batch import Batch, BatchSource
from dflash.pipeline.channel import Channel
from dflash.probe import Probe
from dflash.settings import JobSettings, Split
from dflash.strategies import Strategy
from dflash.target import Target

Channels = Mapping[tuple[int, int], Channel]  # by (target, drafter)


@dataclass(frozen=True)
class Tools:
    """What every worker of one process shares."""

    job: JobSettings
    events: EventWriter
    probe: Probe
    strategy: Strategy
    stopping: Callable[[], bool]  # asked to end after this step

    @property
    def split(self) -> Split:
        return Split.parse(self.job.split)


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head [V, H], which the drafter shares, and the mask token's id."""

    embedding: Tensor
    embedding_scale: float  # what the target multiplies embeddings by: 1, or Gemma's sqrt(H)
    head: Tensor
    mask_token: int


def run_target(tools: Tools, number: int, target: Target, source: BatchSource, channels: Channels) -> None:
    """Make the features of every batch that is this target's, in order; raises Aborted when the run ends."""
    _announce(tools, "target", number, target.device)
    tools.strategy.setup_thread()
    split = tools.split
    for index in range(number, tools.job.train.steps * split.drafters, split.targets):
        batch = source.batch(index)
        with tools.strategy.quiet():
            features = target.features(
                batch.tokens.to(target.device),
                batch.document.to(target.device),
                batch.position.to(target.device),
            )
            if features.is_cuda:
                torch.cuda.current_stream(features.device).synchronize()
        channels[number, index % split.drafters].put(batch.with_features(features))


@dataclass
class StepSums:
    """What drafters add up each step, beside the gradient."""

    loss: float = 0.0
    weight: float = 0.0
    labelled: float = 0.0
    correct: float = 0.0
    accept: float = 0.0
    blocks: float = 0.0
    tokens: float = 0.0
    fresh: float = 0.0  # drafters whose batch was made after warm-up ended
    stop: float = 0.0


def run_drafter(
    tools: Tools, rank: int, drafter: Drafter, ends: FrozenEnds, channels: Channels, averager: Averager
) -> None:
    """Train for all steps, or until any drafter is asked to stop; raises Aborted when the run ends early.

    Every drafter has its own copy of the weights and of the optimiser, and all apply the same averaged
    gradient, so the copies stay equal bit for bit.
    """
    job, strategy, split = tools.job, tools.strategy, tools.split
    device = ends.head.device
    name = _announce(tools, "drafter", rank, device)
    strategy.setup_thread()
    parameters = list(drafter.parameters())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=job.optim.lr,
        betas=(job.optim.betas[0], job.optim.betas[1]),
        weight_decay=job.optim.weight_decay,
    )
    forward = strategy.compile_forward(drafter)
    reporter = Reporter(tools, channels) if rank == 0 else None
    warm = float("inf")  # when warm-up ended
    for step in range(1, job.train.steps + 1):
        if reporter:
            reporter.step_begins(step)
        index = (step - 1) * split.drafters + rank
        batch = channels[index % split.targets, rank].get(device)
        shape_class = (str(device), tuple(batch.tokens.shape), job.drafter.anchors, job.drafter.block)

        def body(batch: Batch = batch) -> StepSums:
            return _forward_backward(job, drafter, forward, ends, batch)

        sums = strategy.run(name, shape_class, body)
        sums.fresh = float(batch.made > warm)
        sums.stop = float(tools.stopping())
        with strategy.quiet():
            vector = torch.cat([*(p.grad.flatten() for p in parameters if p.grad is not None), _pack(sums, device)])
        total = averager.total(rank, vector)
        with strategy.quiet():
            sums = _unpack(total)
            lr = learning_rate(step, job.train.steps, job.optim)
            norm = _apply(optimizer, parameters, total, sums.weight, job.optim.clip, lr)
        if reporter:
            reporter.step_ended(step, sums, norm, lr)
        if step == max(1, job.train.steady_after):
            warm = time.time()
        if sums.stop:
            break


def _forward_backward(job: JobSettings, drafter: Drafter, forward: Any, ends: FrozenEnds, batch: Batch) -> StepSums:
    """One drafter's gradient of the weighted loss sum; can be run again from the start."""
    for parameter in drafter.parameters():
        parameter.grad = None
    device = ends.head.device
    blocks = make_blocks(
        batch.tokens,
        batch.loss_mask,
        batch.document,
        batch.position,
        batch.anchors,
        block=job.drafter.block,
        mask_token=ends.mask_token,
        gamma=job.loss.gamma or gamma_for(job.drafter.block),
    )
    x = torch.nn.functional.embedding(blocks.inputs.to(device), ends.embedding) * ends.embedding_scale
    mask = DFlashMask(batch.document.to(device), batch.anchors.to(device), job.drafter.block)
    hidden = forward(batch.features, batch.position.to(device), x, blocks.position.to(device), mask)
    at = blocks.weight.flatten().nonzero().squeeze(-1)  # on the CPU: no device synchronisation
    labels, weight = blocks.labels.flatten()[at].to(device), blocks.weight.flatten()[at].to(device)
    slots = at.to(device)
    block = slots // job.drafter.block
    result = head_loss(hidden.flatten(0, 1)[slots], ends.head, labels, weight, job.loss, block=block)
    result.total.backward()
    right = (result.predicted == labels).cpu()
    correct = torch.zeros(blocks.weight.numel(), dtype=torch.bool)
    correct[at] = right
    accept = acceptance_lengths(correct.view_as(blocks.weight), blocks.weight, blocks.anchors, job.drafter.block)
    return StepSums(
        loss=result.total.item(),
        weight=result.weight_sum.item(),
        labelled=len(at),
        correct=right.sum().item(),
        accept=accept.sum().item(),
        blocks=len(accept),
        tokens=batch.context_tokens,
    )


def _apply(
    optimizer: torch.optim.Optimizer,
    parameters: list[Any],
    total: Tensor,
    weight: float,
    clip: float,
    lr: float,
) -> float:
    """Step with the joint batch's gradient, clipped; gives its norm before clipping."""
    gradient = total[: -len(fields(StepSums))].div_(weight)
    norm = gradient.norm().item()
    if norm > clip:
        gradient.mul_(clip / norm)
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm


def _pack(sums: StepSums, device: torch.device) -> Tensor:
    return torch.tensor([getattr(sums, f.name) for f in fields(sums)], dtype=torch.float32, device=device)


def _unpack(total: Tensor) -> StepSums:
    return StepSums(*total[-len(fields(StepSums)) :].tolist())


def _announce(tools: Tools, role: str, number: int, device: torch.device) -> str:
    name = f"{role}{number}"
    threading.current_thread().name = name
    tools.events.emit("thread", name=name, role=role, ident=f"{threading.get_ident():#x}", device=str(device))
    return name


class Reporter:
    """The first drafter's voice: stages, steps, counters."""

    def __init__(self, tools: Tools, channels: Channels) -> None:
        self.tools, self.channels = tools, channels
        self.began = time.perf_counter()
        self.waited: dict[str, float] = {}
        self.memory_at = 0.0

    def step_begins(self, step: int) -> None:
        train = self.tools.job.train
        if step == 1:
            self.tools.events.emit("stage", stage="warmup")
        if step == train.steady_after + 1:
            self.tools.probe.steady = True
            self.tools.events.emit("counters", at="steady", **self.tools.probe.counters())
            self.tools.events.emit("stage", stage="train")
        self.began = time.perf_counter()

    def step_ended(self, step: int, sums: StepSums, grad_norm: float, lr: float) -> None:
        job, events = self.tools.job, self.tools.events
        waiting = {key: channel.stats() for key, channel in self.channels.items()}
        waited: dict[str, float] = defaultdict(float)
        for (t, d), channel in waiting.items():
            waited[f"target{t}"] += channel.target_waited
            waited[f"drafter{d}"] += channel.drafter_waited
        events.emit(
            "step",
            step=step,
            steps=job.train.steps,
            tokens=int(sums.tokens),
            loss=sums.loss / sums.weight,
            accept=sums.accept / sums.blocks,
            accuracy=sums.correct / sums.labelled,
            lr=lr,
            grad_norm=grad_norm,
            seconds=time.perf_counter() - self.began,
            # A backlog that targets made while drafters compiled is no speed: it is used up first.
            steady=sums.fresh == self.tools.split.drafters,
            queue_bytes=sum(s.bytes for s in waiting.values()),
            wait_s={who: seconds - self.waited.get(who, 0.0) for who, seconds in waited.items()},
        )
        self.waited = waited
        if time.monotonic() - self.memory_at > 5:
            self.memory_at = time.monotonic()
            events.emit("memory", **self.tools.probe.memory())
