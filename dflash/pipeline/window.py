"""From when on a drafter's batches count as speed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Largest share that a backlog may add to the tokens of a window.
BACKLOG = 0.05
# Batches in a row at which the target waited for room that show it the faster side: when warm-up ends it may wait with
# one batch in its hands and have another made.
ROWS = 4


@dataclass
class Window:
    """Opens once and for all, behind a batch that was made after warm-up and left no backlog that shrinks.

    What targets piled up while drafters compiled is used up first, at the drafters' pace whatever the targets' is, and
    so is what targets make meanwhile. That is over when the drafter finds its channel empty, and it was none when the
    target waits for room or as much waits as did when warm-up ended. The batch that shows it counts for the last time
    as warm-up, for part of it was made before. Where both sides are nearly alike none of this happens for long: the
    window then opens when what waits is too little to matter. Where the target waits batch after batch, the age of
    what is used does not matter.
    """

    warm: float = inf  # when warm-up ended, Unix seconds
    _open: bool = False
    _full: int = 0  # batches in a row
    _waited: float | None = None  # batches that waited when warm-up ended

    def has(self, made: float, full: bool, empty: bool, waiting: float, left: int) -> bool:
        """Whether a batch made at `made` (Unix seconds) counts.

        Before it was taken, `full`: its target waited for room in its channel; `empty`: nothing was there; `waiting`:
        batches in all channels of this drafter. `left`: batches that it has yet to take, this one included.
        """
        counts = self._open
        if self.warm == inf:
            return False
        if self._waited is None:
            self._waited = waiting
        self._full = self._full + 1 if full else 0
        at_rest = full or empty or waiting >= self._waited or waiting <= BACKLOG * left
        self._open |= (made > self.warm and at_rest) or self._full > ROWS
        return counts
