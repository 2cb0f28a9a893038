"""From when on a drafter's batches count as speed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Largest share that a backlog may add to the tokens of a window.
BACKLOG = 0.05


@dataclass
class Window:
    """Opens once and for all, behind a batch that was made after warm-up and left no backlog on the move.

    What targets piled up while drafters compiled is used up first, at the drafters' pace whatever the targets' is, and
    so is what targets make meanwhile. Either side is then at its own pace when its channel rests: the drafter finds
    nothing there, or the target waits for room. The batch that shows it counts for the last time as warm-up, for part
    of it was made before. Where both sides are nearly alike, channels take long to rest: the window then opens when
    what waits is too little to matter.
    """

    warm: float = inf  # when warm-up ended, Unix seconds
    _open: bool = False

    def has(self, made: float, resting: bool, waiting: float, left: int) -> bool:
        """Whether a batch made at `made` (Unix seconds) counts.

        `resting`: its channel, before it was taken; `waiting`: batches then in all channels of this drafter; `left`:
        batches that the drafter has yet to take, this one included.
        """
        counts = self._open
        self._open |= made > self.warm and (resting or waiting <= BACKLOG * left)
        return counts
