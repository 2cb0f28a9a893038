"""From when on a drafter's batches count as speed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass
class Window:
    """Opens once and for all, with a batch that was made after warm-up and is no part of a backlog on the move.

    What targets piled up while drafters compiled is used up first, at the drafters' pace whatever the targets' is, and
    so is what targets make meanwhile. Either side is then at its own pace when its channel rests: the drafter finds
    nothing there, or the target waits for room. Where both are so alike that a channel does neither, the window
    opens after as many batches made since as there were made before; what is left of the backlog is little then.
    """

    warm: float = inf  # when warm-up ended, Unix seconds
    _before: int = 0
    _since: int = 0
    _open: bool = False

    def has(self, made: float, resting: bool) -> bool:
        """Whether a batch made at `made` (Unix seconds) counts; `resting`: its channel, before it was taken."""
        if self.warm != inf and not self._open:
            since = made > self.warm
            self._before += not since
            self._since += since
            self._open = since and (resting or self._since > self._before)
        return self._open
