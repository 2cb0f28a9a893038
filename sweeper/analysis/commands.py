"""Commands to paste: the sweep that made the runs once more, for other cells or more repeats."""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sweeper.analysis.records import NO_LEVEL, UNSETTABLE, in_order

# Words of a sweep's command that the commands proposed here say anew or must not repeat.
SAID_ANEW = ("repeat", "until", "aa", "rerun", "dry", "cache_from", "wheel@cache_from")
MANY = ("-m", "--multirun")


class Commands:
    """Commands that run cells, with all else as in the command that made the runs.

    words: that command's. factors: what varies between the cells, with its levels. fixed: the level of every other
    factor, which all cells share.
    """

    def __init__(
        self,
        words: Sequence[str],
        factors: Mapping[str, Sequence[str]],
        cells: Sequence[Mapping[str, str]],
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        settings = [word for word in words if not word.startswith("-") and ("=" in word or word.startswith("~"))]
        self._flags = [word for word in words if word not in settings and word not in MANY]
        # ++ comes back by itself: the command puts it before the names that are their user's own.
        self._signs = {_key(word): "+" * (word[:1] == "+" != word[1:2]) for word in settings}
        # A level that the command named may be one of several of which one alone ran, and an experiment's file may
        # vary what no word names.
        shown = {*fixed} if fixed and "experiment" in self._signs else {*self._signs}
        self._fixed = {f: level for f, level in (fixed or {}).items() if f in shown and f not in UNSETTABLE}
        anew = {*factors, *self._fixed, *SAID_ANEW}
        self._kept = [word for word in settings if _key(word) not in anew]
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
        levels |= {factor: [level] for factor, level in self._fixed.items()}
        words = [f"{self._signs.get(f, '')}{f}={','.join(map(_level, several))}" for f, several in levels.items()]
        words += [*self._kept, f"repeat={repeat}"]
        return shlex.join(["python", "-m", "sweeper", *self._flags, *MANY[: int(many)], *words])


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


def _level(level: str) -> str:
    """A level, which records hold as Python prints it, in the grammar of Hydra's overrides."""
    if level[:1] in ("[", "{"):
        try:
            return _written(ast.literal_eval(level))
        except (ValueError, SyntaxError):
            pass
    elif level in ("None", "True", "False"):
        return _written(ast.literal_eval(level))
    return level if re.fullmatch(r"[\w.:/+@%*?|-]+", level) else _written(level)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()
    # A backslash means itself but before a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return f"'{quoted}'"
