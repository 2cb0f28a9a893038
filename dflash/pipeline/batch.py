"""What travels from a target to a drafter."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dflash.blocks import sample_anchors
from dflash.data.rows import Rows


@dataclass(frozen=True)
class Batch:
    """R packed rows of S tokens with their anchors and, once a target has seen them, their features.

    tokens, document, position int64 [R, S]; loss_mask bool [R, S]; anchors int64 [R, N]; features
    [R, S, taps * H] on the device of whoever holds the batch; all else on the CPU.
    """

    index: int
    tokens: Tensor
    loss_mask: Tensor
    document: Tensor
    position: Tensor
    anchors: Tensor
    context_tokens: int  # without padding
    features: Tensor | None = None
    made: float = 0.0  # when the target had finished the features, Unix seconds

    def with_features(self, features: Tensor) -> Batch:
        return replace(self, features=features, made=self.made or time.time())

    @property
    def bytes(self) -> int:
        """Size of the features, which is all that counts: tokens are a thousandth of it."""
        return 0 if self.features is None else self.features.nbytes


@dataclass(frozen=True)
class BatchSource:
    """Makes batch b from the packed rows b*R .. b*R+R-1; the same batch for the same b, whoever asks."""

    rows: Rows
    rows_per_batch: int
    anchors: int
    seed: int

    def batch(self, index: int) -> Batch:
        numbers = range(index * self.rows_per_batch, (index + 1) * self.rows_per_batch)
        rows = [self.rows.row(n) for n in numbers]
        anchors = [
            sample_anchors(row.loss_mask, row.document, self.anchors, (self.seed, n))
            for n, row in zip(numbers, rows, strict=True)
        ]

        def stack(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.stack(arrays))

        return Batch(
            index=index,
            tokens=stack([r.tokens for r in rows]),
            loss_mask=stack([r.loss_mask for r in rows]),
            document=stack([r.document for r in rows]),
            position=stack([r.position for r in rows]),
            anchors=stack(anchors),
            context_tokens=sum(r.length for r in rows),
        )
