"""Factors that never varied apart in these runs, and the fewest runs that would separate them.

Two levels of a factor are apart from all else where two cells differ in nothing but this factor; levels are joined
through others too, so that a factor is sound when its levels hang together. Where they fall into parts, the cells
nearest to each other across the gap say what moved along with the factor: its confounders (aliases, in Box, Hunter
and Hunter's words). One new cell can close the gaps of several factors; the cell that closes the most is taken first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeper.analysis.attribution import Explanation

Cell = Mapping[str, str]
MOST_CELLS = 2000  # of a grid that is searched for the run that tells most
MOST_OFFERS = 64  # new cells that are weighed against each other at a time
LEAST_GAIN = 0.1  # share of all that is open which a further cell must tell


@dataclass(frozen=True)
class Confounded:
    """Two levels of a factor that no two cells compare, and what else differs in the nearest two cells:
    {factor: (level in the one, level in the other)}, the factor itself included."""

    factor: str
    differ: dict[str, tuple[str, str]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def confounded(cells: Sequence[Cell]) -> list[Confounded]:
    """What keeps each factor's levels from hanging together, the fewest and nearest gaps of each."""
    found = []
    for factor in _factors(cells):
        for one, other in _gaps(cells, factor):
            differ = {f: (one[f], other[f]) for f in one if one[f] != other[f]}
            found.append(Confounded(factor, differ))
    return found


def separating(cells: Sequence[Cell], impossible: Collection[Cell] = ()) -> list[dict[str, str]]:
    """New cells, as few as a greedy search finds, after which no factor is confounded.

    `impossible` cells are never proposed; what only they could separate stays confounded.
    """
    known, chosen = [dict(cell) for cell in cells], list[dict[str, str]]()
    never = [dict(cell) for cell in impossible]
    while True:
        gaps = {factor: _gaps(known, factor) for factor in _factors(known)}
        offers: list[dict[str, str]] = []
        for factor, several in gaps.items():
            for one, other in several:
                offers += [dict(one) | {factor: other[factor]}, dict(other) | {factor: one[factor]}]
        offers = [cell for i, cell in enumerate(offers) if cell not in never + known and cell not in offers[:i]]
        left = [sum(len(_parts([*known, offer], factor)) - 1 for factor in gaps) for offer in offers[:MOST_OFFERS]]
        if not offers or min(left) >= sum(map(len, gaps.values())):
            return chosen
        best = offers[left.index(min(left))]
        known.append(best)
        chosen.append(best)


def untried(cells: Sequence[Cell], impossible: Collection[Cell] = ()) -> list[dict[str, str]]:
    """The cells of the grid of all levels that neither ran nor are impossible, those with near neighbours first.

    None of a grid of more than MOST_CELLS.
    """
    factors = _factors(cells)
    levels = [sorted({cell[factor] for cell in cells}) for factor in factors]
    if math.prod(map(len, levels)) > MOST_CELLS:
        return []
    done = {tuple(cell[f] for f in factors) for cell in [*cells, *impossible]}
    free = [dict(zip(factors, grid, strict=True)) for grid in itertools.product(*levels) if grid not in done]
    return sorted(free, key=lambda cell: min(sum(cell[f] != other[f] for f in factors) for other in cells))


def telling(explanations: Sequence[Explanation], offered: Sequence[Cell], most: int = 3) -> list[Cell]:
    """Of the cells offered, those whose outcomes would tell these explanations apart, the most telling first.

    A set of cells is worth the entropy of the groups into which it divides the explanations' posterior.
    """
    naming = [one for one in explanations if one.levels]
    if not naming:
        return []
    least = LEAST_GAIN * _entropy(naming, [(i,) for i in range(len(naming))])
    groups: list[tuple[int, ...]] = [() for _ in naming]
    chosen: list[Cell] = []
    while len(chosen) < most and offered:
        divided = [[(*group, one.exposes(cell)) for one, group in zip(naming, groups, strict=True)] for cell in offered]
        worth = [_entropy(naming, several) for several in divided]
        best = worth.index(max(worth))
        if worth[best] - _entropy(naming, groups) <= least:
            break
        chosen.append(offered[best])
        groups = divided[best]
    return chosen


def _factors(cells: Sequence[Cell]) -> list[str]:
    return [factor for factor in (cells[0] if cells else ()) if len({cell[factor] for cell in cells}) > 1]


def _parts(cells: Sequence[Cell], factor: str) -> list[set[str]]:
    """The factor's levels in groups that hang together: joined where two cells differ in nothing but them."""
    together: dict[tuple[str, ...], set[str]] = {}
    for cell in cells:
        rest = tuple(level for f, level in cell.items() if f != factor)
        together.setdefault(rest, set()).add(cell[factor])
    parts: list[set[str]] = []
    for levels in together.values():
        touched = [part for part in parts if part & levels]
        parts = [part for part in parts if not part & levels] + [levels.union(*touched)]
    return parts


def _gaps(cells: Sequence[Cell], factor: str) -> list[tuple[Cell, Cell]]:
    """The nearest pairs of cells that would join this factor's levels if nothing but it differed in them."""
    parts = _parts(cells, factor)
    if len(parts) == 1:
        return []
    of = {level: number for number, part in enumerate(parts) for level in part}
    across = [pair for pair in itertools.combinations(cells, 2) if of[pair[0][factor]] != of[pair[1][factor]]]
    gaps = []
    for one, other in sorted(across, key=lambda pair: sum(pair[0][f] != pair[1][f] for f in pair[0])):
        if (mine := of[one[factor]]) != (theirs := of[other[factor]]):
            of = {level: mine if number == theirs else number for level, number in of.items()}
            gaps.append((one, other))
    return gaps


def _entropy(explanations: Sequence[Explanation], groups: Sequence[tuple[int, ...]]) -> float:
    """Bits of the posterior's division into equal groups."""
    weights: dict[tuple[int, ...], float] = {}
    for one, group in zip(explanations, groups, strict=True):
        weights[group] = weights.get(group, 0.0) + one.posterior
    total = sum(weights.values())
    return -sum(w / total * math.log2(w / total) for w in weights.values() if w > 0)
