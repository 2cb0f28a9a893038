"""What a checkpoint of a drafter holds: its weights in float32 by name, the optimiser, and what it belongs to.

Nothing else is needed to repeat training bit for bit: batches follow from the step, anchors from the seed and a
row's number, and no random numbers are drawn on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash import checkpoint
from dflash.checkpoint import Checkpoint
from dflash.drafter import Drafter
from dflash.optim import Master
from dflash.resume import refuse_other

WEIGHTS, OPTIMISER = "drafter", "optimiser"


def save(
    folder: Path,
    step: int,
    drafter: Drafter,
    master: Master,
    facts: dict[str, Any],
    identity: dict[str, Any],
    keep: int,
) -> Path:
    """Save a checkpoint of `step`; raises OSError when it cannot be written.

    `facts`: what `dflash export` needs to make a drafter's folder of it, `config` and `facts`.
    """
    state = master.state()
    flat = state.pop("master")
    names, shapes = zip(*((name, p.shape) for name, p in drafter.named_parameters()), strict=True)
    parts = flat.split([shape.numel() for shape in shapes])
    weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    return checkpoint.save(folder, step, {WEIGHTS: weights, OPTIMISER: state}, facts | {"identity": identity}, keep)


def find(folder: Path, identity: dict[str, Any], variant: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a variant, None without one, and a sentence about each that is damaged.

    Raises SettingError when it belongs to another job: a resumed run would be neither the one nor the other.
    """
    found, damaged = checkpoint.latest(folder)
    if found:
        refuse_other(identity, found.facts["identity"], f"the checkpoint in {found.folder}", variant)
    return found, damaged


def restore(found: Checkpoint, drafter: Drafter, master: Master) -> None:
    """Continue from a checkpoint."""
    weights = found.tensors(WEIGHTS)
    flat = torch.cat([weights[name].flatten() for name, _ in drafter.named_parameters()])
    master.load({"master": flat, **found.tensors(OPTIMISER)})
