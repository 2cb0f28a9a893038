"""What travels from a target to a drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dflash.blocks import sample_anchors
from dflash.data.rows import Rows


@dataclass(frozen=True)
class Batch:
    """R packed rows of S tokens; their features, once a target has seen them; anchors, once a drafter is known.

    tokens, document, position int64 [R, S]; loss_mask bool [R, S]; anchors int64 [R, N]; features [R, S, width]
    (Target.width) on the device of whoever holds the batch; all else on the CPU.
    """

    index: int
    tokens: Tensor
    loss_mask: Tensor
    document: Tensor
    position: Tensor
    context_tokens: int  # without padding
    features: Tensor | None = None
    made: float = 0.0  # when the target had finished the features, Unix seconds
    seconds: float = 0.0  # what the features took the target
    anchors: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those it has, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def bytes(self) -> int:
        """Of all tensors; nearly all of it are features."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def batch_outline(rows: int, tokens: int, anchors: int, width: int, dtype: torch.dtype) -> Batch:
    """A batch of these shapes that holds nothing: its tensors are on the meta device, features of type `dtype`."""
    with torch.device("meta"):
        whole = torch.empty(rows, tokens, dtype=torch.int64)
        return Batch(
            index=0,
            tokens=whole,
            loss_mask=whole.bool(),
            document=whole,
            position=whole,
            context_tokens=0,
            features=torch.empty(rows, tokens, width, dtype=dtype),
            anchors=torch.empty(rows, anchors, dtype=torch.int64),
        )


@dataclass(frozen=True)
class BatchSource:
    """Makes batch b from the packed rows b*R .. b*R+R-1; the same batch for the same b, whoever asks."""

    rows: Rows
    rows_per_batch: int
    seed: int

    def batch(self, index: int) -> Batch:
        rows = [self.rows.row(n) for n in self._numbers(index)]
        return Batch(
            index=index,
            tokens=_stack([r.tokens for r in rows]),
            loss_mask=_stack([r.loss_mask for r in rows]),
            document=_stack([r.document for r in rows]),
            position=_stack([r.position for r in rows]),
            context_tokens=sum(r.length for r in rows),
        )

    def anchored(self, batch: Batch, anchors: int) -> Batch:
        """The batch with `anchors` anchors a row; the same ones for the same batch and number."""
        drawn = [
            sample_anchors(loss_mask.numpy(), document.numpy(), anchors, (self.seed, n))
            for n, loss_mask, document in zip(self._numbers(batch.index), batch.loss_mask, batch.document, strict=True)
        ]
        return replace(batch, anchors=_stack(drawn))

    def _numbers(self, index: int) -> range:
        return range(index * self.rows_per_batch, (index + 1) * self.rows_per_batch)


def _stack(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(arrays))
