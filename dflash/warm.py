"""A job's attention compiled alone, as a warm-up script in front of the job compiles it.

One thread, one device after the other: a drafter's forward, in which the attention alone is compiled, and its
backward, on random hidden states of the job's shapes. Neither data nor the target's weights are read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dflash import strategies
from dflash.attention import DFlashMask
from dflash.devices import Placement, compute_dtype
from dflash.drafter import Drafter
from dflash.events import EventWriter
from dflash.geometry import Geometry
from dflash.pipeline.layout import Layout
from dflash.plan import settle_taps, whole_target
from dflash.probe import Probe
from dflash.settings import JobSettings
from dflash.strategies import Strategy
from dflash.target import Target
from dflash.weights import draw


def warm(job: JobSettings, placement: Placement, out: Path, events: EventWriter, probe: Probe) -> str:
    """Compile for every device and variant of the job; gives `ok`. Raises SettingError."""
    job = settle_taps(job)
    events.emit("stage", stage="load")
    target = Target.outline(job.target, placement.targets[0][0], whole_target(job))
    variants = job.variants()
    geometries = {name: Geometry.settle(variant.drafter, target) for name, variant in variants.items()}
    strategy = strategies.make("unlocked", placement.kind, probe)  # eager forward, compiled attention, no discipline
    strategy.setup_process()
    strategy.setup_thread()
    events.emit("stage", stage="warmup")
    wanted = {(seat.variant, device) for seat, device in zip(Layout.of(job).seats, placement.drafters, strict=True)}
    for number, (name, device) in enumerate(sorted(wanted, key=str), start=1):
        _forward_and_backward(variants[name], geometries[name], strategy, device)
        events.emit("progress", what="attentions", done=number, total=len(wanted))
    events.emit("counters", at="end", **probe.counters())
    return "ok"


def _forward_and_backward(job: JobSettings, geometry: Geometry, strategy: Strategy, device: torch.device) -> None:
    rows, context, anchors, block = job.train.rows, job.data.row_tokens, job.drafter.anchors, job.drafter.block
    dtype = compute_dtype(job.train.precision, device)
    weights = draw(geometry, job.seed, device, dtype)
    drafter = Drafter(geometry, strategy.prepare, strategy.attend, weights, strategy.attend_alike)
    places = torch.arange(1, anchors + 1, device=device).clamp(max=context - 1).expand(rows, -1)
    mask = DFlashMask(torch.zeros(rows, context, dtype=torch.int64, device=device), places.contiguous(), block)
    features = torch.randn(rows, context, geometry.num_taps * geometry.hidden, dtype=dtype, device=device)
    x = torch.randn(geometry.hidden, dtype=dtype, device=device).expand(rows, anchors * block, -1)
    position = torch.arange(context, device=device).expand(rows, -1)
    slots = (places[..., None] + torch.arange(block, device=device)).flatten(1)

    def body() -> None:
        drafter(features, position, x, slots, mask, alike=True).float().sum().backward()

    strategy.run("main", (str(device), (rows, context), anchors, block), body)
