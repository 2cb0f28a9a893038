"""Room for batches of one shape in memory that two processes share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.pipeline.batch import Batch
from dflash.pipeline.transfer import fetched, lock_pages, stored

NUMBERS = {"index": int, "context_tokens": int, "made": float, "seconds": float}
ALIGNED = 64  # bytes: where a tensor begins, so that a GPU copies whole lines of memory


class _Part(NamedTuple):
    """Where in a slot a tensor lies."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: torch.Size


class Slots:
    """`count` slots, each for a batch of the shapes of `like` (batch_outline).

    One piece of memory, for every piece costs every process that is told of it a file descriptor. GPUs copy features
    into it and out of it beside their computing: each end locks its pages at its first batch. (Memory of a GPU shared
    between processes would save the way over the host, which is hidden anyhow, at the price of rules about who may
    end when.)
    """

    def __init__(self, count: int, like: Batch) -> None:
        self._parts: dict[str, _Part] = {}
        size = 0
        numbers = torch.empty(len(NUMBERS), dtype=torch.float64, device="meta")  # whole numbers below 2^53 exactly
        for name, tensor in {**like.tensors, "numbers": numbers}.items():
            self._parts[name] = _Part(size, size + tensor.nbytes, tensor.dtype, tensor.shape)
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        self._memory = torch.empty(count, size, dtype=torch.uint8).share_memory_()
        self._locked = False

    def __len__(self) -> int:
        return len(self._memory)

    def write(self, slot: int, batch: Batch) -> None:
        """Returns when all of the batch is there."""
        there = self._tensors(slot)
        for name, tensor in batch.tensors.items():
            self._lock(tensor.device)
            stored(tensor, there[name])
        there["numbers"].copy_(torch.tensor([getattr(batch, name) for name in NUMBERS], dtype=torch.float64))

    def read(self, slot: int, device: torch.device) -> Batch:
        """The batch, its features on `device`; the slot may be written again when this returns."""
        self._lock(device)
        there = self._tensors(slot)
        numbers = there.pop("numbers").tolist()
        told: dict[str, Any] = {name: kind(n) for (name, kind), n in zip(NUMBERS.items(), numbers, strict=True)}
        for name, tensor in there.items():
            told[name] = fetched(tensor, device) if name == "features" else tensor.clone()
        return Batch(**told)

    def _tensors(self, slot: int) -> dict[str, Tensor]:
        memory = self._memory[slot]
        return {name: memory[p.begin : p.end].view(p.dtype).view(p.shape) for name, p in self._parts.items()}

    def _lock(self, device: torch.device) -> None:
        if device.type == "cuda" and not self._locked:
            lock_pages(self._memory, device)
            self._locked = True
