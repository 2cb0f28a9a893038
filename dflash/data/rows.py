"""Documents packed into rows of one length, and the order in which training meets the rows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash.data.tokens import Document

PADDING = -1


@dataclass
class Row:
    """One packed row of S tokens, padding at its end.

    tokens int64 [S] (0 on padding), loss_mask bool [S], document int64 [S] (number of the document within the
    row, -1 on padding), position int64 [S] (from 0 in every document, 0 on padding), length: tokens without
    padding.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    document: np.ndarray
    position: np.ndarray
    length: int


def eligible_anchors(loss_mask: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Where a block may be anchored: bool [..., S] from loss_mask bool [..., S] and document int [..., S].

    An anchor is a supervised token whose successor is supervised too and of the same document, so that its
    block has at least one label.
    """
    eligible = np.zeros_like(loss_mask)
    eligible[..., :-1] = (
        loss_mask[..., :-1]
        & loss_mask[..., 1:]
        & (document[..., :-1] == document[..., 1:])
        & (document[..., :-1] != PADDING)
    )
    return eligible


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Document numbers for each row: whole documents, none twice, at most `row_tokens` tokens together.

    Best fit, longest first: each document goes to the fullest row that still holds it. Every length must be
    from 1 to row_tokens. Equal input gives equal rows.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left, row; sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left, row = free.pop(at)
        rows[row].append(number)
        bisect.insort(free, (left - length, row))
    return rows


@dataclass
class Rows:
    """The rows of a data set, without end: row `i` is number i % len of epoch i // len, shuffled anew each
    epoch.

    The order follows from (seed, epoch) alone, so an index is all that is needed to go on where a run
    stopped.
    """

    documents: list[Document]
    packed: list[list[int]]
    row_tokens: int
    seed: int

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.packed)

    def row(self, i: int) -> Row:
        """The i-th row of training, from 0."""
        epoch, at = divmod(i, len(self.packed))
        return self.build(int(_order(self.seed, epoch, len(self.packed))[at]))

    def build(self, packed_row: int) -> Row:
        """One packed row by its place in `packed`, whatever the epoch."""
        size = self.row_tokens
        row = Row(
            tokens=np.zeros(size, dtype=np.int64),
            loss_mask=np.zeros(size, dtype=bool),
            document=np.full(size, PADDING, dtype=np.int64),
            position=np.zeros(size, dtype=np.int64),
            length=0,
        )
        for place, number in enumerate(self.packed[packed_row]):
            document = self.documents[number]
            part = slice(row.length, row.length + len(document.tokens))
            row.tokens[part] = document.tokens
            row.loss_mask[part] = document.loss_mask
            row.document[part] = place
            row.position[part] = np.arange(len(document.tokens))
            row.length = part.stop
        return row


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)
