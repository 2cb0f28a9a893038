"""Documents packed into rows of one length, and the order in which training meets the rows."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dflash.data.document import PADDING, count_anchors
from dflash.data.store import Documents


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


@dataclass
class Pieces:
    """What of the documents fits into rows: P pieces, each a document or a part of one, none without an
    eligible anchor.

    starts, lengths, supervised, eligible int64 [P] (start among all tokens of the folder); cut, split:
    documents that were shortened or became several; skipped: documents and parts left out, by reason.
    """

    starts: np.ndarray
    lengths: np.ndarray
    supervised: np.ndarray
    eligible: np.ndarray
    cut: int
    split: int
    skipped: Counter[str] = field(default_factory=Counter)


def pieces(documents: Documents, row_tokens: int, too_long: str) -> Pieces:
    """Apply data.too_long (skip, cut or split) to documents longer than a row.

    The parts of a split document are each row_tokens long, but for the last one.
    """
    lengths = documents.lengths
    long = lengths > row_tokens
    if too_long == "split":
        parts = -(-lengths // row_tokens)
    else:
        parts = np.where(long & (too_long == "skip"), 0, 1)
    owner = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = documents.starts[owner] + number * row_tokens
    sizes = np.minimum(lengths[owner] - number * row_tokens, row_tokens)
    supervised, eligible = documents.supervised[owner], documents.eligible[owner]
    for at in np.flatnonzero(long[owner]):
        mask = documents.loss_mask[starts[at] : starts[at] + sizes[at]]
        supervised[at], eligible[at] = mask.sum(), count_anchors(mask)
    kept = eligible > 0
    skipped = Counter({"longer than a row": int((parts == 0).sum()), "no place for an anchor": int((~kept).sum())})
    return Pieces(
        starts[kept],
        sizes[kept],
        supervised[kept],
        eligible[kept],
        cut=int((long[owner] & kept).sum()) if too_long == "cut" else 0,
        split=len(np.unique(owner[long[owner] & kept])) if too_long == "split" else 0,
        skipped=+skipped,
    )


def pack(lengths: Sequence[int] | np.ndarray, row_tokens: int) -> list[list[int]]:
    """Piece numbers for each row: whole pieces, none twice, at most `row_tokens` tokens together.

    Best fit, longest first: each piece goes to the fullest row that still holds it. Every length must be
    from 1 to row_tokens. Equal input gives equal rows.
    """
    rows: list[list[int]] = []
    sizes = np.asarray(lengths, dtype=np.int64)
    free: dict[int, list[int]] = {}  # tokens left -> rows
    lefts: list[int] = []  # its keys, sorted: there are far fewer of them than rows
    for number in np.argsort(-sizes, kind="stable").tolist():
        length = int(sizes[number])
        at = bisect.bisect_left(lefts, length)
        if at == len(lefts):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left = lefts[at]
            row = free[left].pop()
            if not free[left]:
                del free[left], lefts[at]
        rows[row].append(number)
        if left := left - length:
            if left not in free:
                free[left] = []
                bisect.insort(lefts, left)
            free[left].append(row)
    return rows


@dataclass
class Rows:
    """The rows of a data set, without end: row `i` is number i % len of epoch i // len, shuffled anew each
    epoch.

    The order follows from (folder, row_tokens, too_long, seed) and the epoch alone, so an index is all that is
    needed to go on where a run stopped. Pickles as these four: who opens it elsewhere maps the files there.
    """

    folder: Path
    row_tokens: int
    too_long: str
    seed: int

    @cached_property
    def documents(self) -> Documents:
        return Documents(self.folder)

    @cached_property
    def pieces(self) -> Pieces:
        return pieces(self.documents, self.row_tokens, self.too_long)

    @cached_property
    def _packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Piece numbers in the order of the rows, and where each row begins among them."""
        rows = pack(self.pieces.lengths, self.row_tokens)
        return np.fromiter(chain.from_iterable(rows), dtype=np.int64), np.cumsum([0, *map(len, rows)])

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._packed[1]) - 1

    def row(self, i: int) -> Row:
        """The i-th row of training, from 0."""
        epoch, at = divmod(i, len(self))
        return self.build(int(_order(self.seed, epoch, len(self))[at]))

    def build(self, number: int) -> Row:
        """One packed row by its number, from 0, whatever the epoch."""
        size = self.row_tokens
        row = Row(
            tokens=np.zeros(size, dtype=np.int64),
            loss_mask=np.zeros(size, dtype=bool),
            document=np.full(size, PADDING, dtype=np.int64),
            position=np.zeros(size, dtype=np.int64),
            length=0,
        )
        order, firsts = self._packed
        for place, piece in enumerate(order[firsts[number] : firsts[number + 1]]):
            start, length = int(self.pieces.starts[piece]), int(self.pieces.lengths[piece])
            part, source = slice(row.length, row.length + length), slice(start, start + length)
            row.tokens[part] = self.documents.tokens[source]
            row.loss_mask[part] = self.documents.loss_mask[source]
            row.document[part] = place
            row.position[part] = np.arange(length)
            row.length = part.stop
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "row_tokens", "too_long", "seed")}


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)
