"""What drafters add up each step, beside the gradient: one vector, summed in the same reduction.

Sums and not means, so that adding over batches and drafters and dividing once gives the joint batch's figures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dflash.devices import sent


@dataclass
class StepSums:
    """The sums of one step over all batches of a variant; in a vector they stand in this order."""

    # Counted where the drafter computes:
    loss: float
    weight: float
    correct: float
    accept: float  # acceptance lengths
    # Counted on the CPU:
    labelled: float  # slots with a label
    blocks: float  # without the empty ones
    tokens: float  # of context, without padding
    covered: float  # supervised tokens that were some slot's label
    supervised: float
    measured: float  # batches in the measured window
    stop: float  # drafters that were asked to end
    # By slot, from slot 1:
    loss_at: list[float]
    correct_at: list[float]
    labelled_at: list[float]

    @classmethod
    def of(cls, values: list[float]) -> StepSums:
        """From the numbers of a vector made by `vector`."""
        slots = (len(values) - len(SCALARS)) // 3
        lists = [values[at : at + slots] for at in range(len(SCALARS), len(values), slots)]
        named: dict[str, Any] = dict(zip(NAMES, [*values[: len(SCALARS)], *lists], strict=True))
        return cls(**named)


NAMES = tuple(f.name for f in fields(StepSums))
SCALARS = NAMES[:-3]
WEIGHT = SCALARS.index("weight")


def length(block: int) -> int:
    """Entries of the vector for blocks of B slots."""
    return len(SCALARS) + 3 * (block - 1)


def vector(computed: list[Tensor], counted: list[float], by_slot: Tensor) -> Tensor:
    """float32 [length(B)] from the values of StepSums in order: 0-d tensors, numbers, and [3, B - 1]."""
    assert len(computed) + len(counted) == len(SCALARS)
    head = torch.stack([value.detach().float() for value in computed])
    return torch.cat([head, sent(torch.tensor(counted, dtype=torch.float32), head.device), by_slot.float().flatten()])
