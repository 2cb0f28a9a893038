"""From when on a drafter's batches count as speed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Batches in a row at which the target waited for room that show it the faster side: when warm-up ends it may wait with
# one batch in its hands and have another made.
IN_A_ROW = 4


@dataclass
class Window:
    """Opens once and for all, behind the first batch that was made after warm-up; it closes with the last step.

    What targets piled up while drafters compiled is no speed of theirs: what waits when the window opens and no longer
    when it closes was used faster than it was made. How much time that saved is seen at the window's ends: a step's
    event tells its `lag`, from when its batch was made to its own end, and the window is taken to be longer by what the
    lag shrank in it (sweeper.measure.Opening). Then the figure is the slower side's, however the run began.

    Where the target waits for room batch after batch the age of what is used does not matter, and of a long queue much
    would have to be used up before a batch is young.
    """

    warm: float = inf  # when warm-up ended, Unix seconds
    _young: bool = False
    _open: bool = False
    _full: int = 0  # batches in a row

    def has(self, made: float, full: bool, round_: bool) -> bool:
        """Whether a batch made at `made` (Unix seconds) counts.

        `full`: its target waited for room before it was taken. `round_`: from the end of its step to the last one every
        target has its turn as often as the others (Layout.cycle). Targets that end at the same time deliver in bursts,
        and a window that begins or ends within one is too short or too long.
        """
        counts = self._open
        if self.warm < inf:
            self._full = self._full + 1 if full else 0
            self._young |= made > self.warm or self._full > IN_A_ROW
            self._open |= self._young and round_
        return counts
