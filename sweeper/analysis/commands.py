"""Commands to paste: the sweep that made the runs once more, for other cells or more repeats."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from sweeper.analysis.records import NO_LEVEL, UNSETTABLE, in_order

# Words of a sweep's command that the commands proposed here say anew or must not repeat.
SAID_ANEW = ("repeat", "until", "aa", "rerun", "dry", "wheel@cache_from")


class Commands:
    """Commands that run cells, with all else as in the command that made the runs."""

    def __init__(
        self, words: list[str], factors: Mapping[str, Sequence[str]], cells: Sequence[Mapping[str, str]]
    ) -> None:
        anew = {*factors, *SAID_ANEW}
        self._kept = [word for word in words if "=" in word and _key(word) not in anew]
        self._factors, self._cells = factors, cells

    def lines(self, new: Sequence[Mapping[str, str]], repeat: int) -> list[str]:
        """As few lines as may be for these new cells; what is done already is not run again."""
        new = [cell for cell in new if self._can_run(cell)]
        if not new:
            return []
        grids = [new] + [[cell] for cell in new]
        levels = {f: sorted({cell[f] for cell in new}, key=in_order) for f in self._factors}
        # One grid for all, unless it holds cells that nobody asked for.
        size = math.prod(map(len, levels.values()))
        chosen = grids[:1] if size == len(new) else grids[1:]
        return [self._line(cells, repeat) for cells in chosen]

    def again(self, repeat: int) -> list[str]:
        """The cells there are, more often."""
        levels = {f: list(several) for f, several in self._factors.items()}
        whole = math.prod(map(len, levels.values())) == len(self._cells)
        usable = whole and all(map(self._can_run, self._cells))
        return [self._line(list(self._cells), repeat)] if usable else []

    def _can_run(self, cell: Mapping[str, str]) -> bool:
        """Whether a command of today makes this cell: it cannot bring back older code, nor another host."""
        same = all(cell[factor] == self._cells[-1][factor] for factor in UNSETTABLE if factor in cell)
        return same and NO_LEVEL not in cell.values()

    def _line(self, cells: Sequence[Mapping[str, str]], repeat: int) -> str:
        levels = {f: sorted({cell[f] for cell in cells}, key=in_order) for f in self._factors if f not in UNSETTABLE}
        many = any(len(several) > 1 for several in levels.values()) or any(_several(word) for word in self._kept)
        words = [f"{factor}={','.join(map(_written, several))}" for factor, several in levels.items()]
        words += [*self._kept, f"repeat={repeat}"]
        return shlex.join(["python", "-m", "sweeper", *(["-m"] if many else []), *words])


def store_of(command: Sequence[str]) -> str:
    """The store that a command line names."""
    return next((word.partition("=")[2] for word in command if _key(word) == "store"), "runs")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _several(word: str) -> bool:
    """Whether a word of a command line gives several levels."""
    depth = 0
    for letter in word:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            return True
    return False


def _written(level: str) -> str:
    """A level as a command line writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(level, level)
