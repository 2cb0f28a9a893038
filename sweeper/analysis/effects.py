"""Effects on speed as ratios with intervals, from runs of one block that differ in nothing else.

A block is one repeat of every cell in random order, so what drifts between blocks (heat, neighbours, the clock) is
the same for both runs of a pair and falls out of their ratio; what drifts within a block is noise to all cells alike
(Box, Hunter and Hunter, Statistics for Experimenters, 2nd ed., chapters 3 and 4).

The difference of two log speeds has a distribution symmetric about the effect where both noises are alike, and
Student's t needs no more than two blocks; a sign-flip test has no 95 % interval below six. Where other factors vary
too, the pairs of each of their combinations (a context) may have an effect of their own: the main effect is the
mean over contexts, and only the spread within contexts is noise. Contexts may be unequally noisy, hence the degrees
of freedom of Welch (1947) and Satterthwaite (1946). `benchmarks/attribution.py` prints the coverage.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from sweeper.analysis.records import Record
from sweeper.caches import COLD, WARM

CONFIDENCE = 0.95
WIDE = 4.0  # high / low of an interval: half as fast and twice as fast are both inside
MOST_REPEATS = 30  # that are asked of a reader at once


@dataclass(frozen=True)
class Estimate:
    """A mean of log ratios with its interval; low and high are None where nothing tells of the noise.

    spread_over: `blocks`, repeats of the same pair; or `contexts`, where no pair was repeated: then a true
    difference between contexts widens the interval too.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    spread_over: str


@dataclass(frozen=True)
class Effect:
    """How many times as fast runs are under `level` as under `reference`, all else equal.

    ratio, low, high: of speeds; pairs: of runs; apart: how many of them did not run in one block of one sweep, so
    that a drift of the machine does not fall out. levels and references of an interaction are those of two factors:
    its ratio is the first factor's ratio under the second's level over that under the second's reference.
    """

    factors: tuple[str, ...]
    levels: tuple[str, ...]
    references: tuple[str, ...]
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    spread_over: str
    apart: int = 0

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def width(self) -> float:
        """Width of the interval, high / low - 1; infinite without one."""
        return math.inf if self.low is None or self.high is None else self.high / self.low - 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Lead:
    """The level of a factor whose runs are fastest, all else equal.

    over: against the next one. clear: it is ahead of all others of the `levels`, which hold together with 95 %
    (Bonferroni over all pairs of levels, for which one leads was not known before). targets_waited, drafters_waited:
    medians over its runs, shares of the measured window.
    """

    factor: str
    level: str
    levels: int
    over: Effect
    clear: bool
    targets_waited: float | None
    drafters_waited: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(contexts: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> Estimate:
    """The mean over contexts of their mean differences. Raises ValueError without any difference.

    Exact for normal noise where there is one context; with several, Welch's approximation.
    """
    groups = [np.asarray(group, float) for group in contexts if len(group)]
    if not groups:
        raise ValueError("no differences")
    n, means = sum(map(len, groups)), np.array([group.mean() for group in groups])
    mean = float(means.mean())
    repeated = [group for group in groups if len(group) > 1]
    if repeated:
        spread_over = "blocks"
        freedom = np.array([len(group) - 1 for group in repeated])
        variances = np.array([group.var(ddof=1) for group in repeated])
        pooled = float((variances * freedom).sum() / freedom.sum())
        parts = variances / (freedom + 1)
        total = float(parts.sum()) + pooled * (len(groups) - len(repeated))
        error = math.sqrt(total) / len(groups)
        within = float((parts**2 / freedom).sum())
        degrees = min(float(freedom.sum()), total**2 / within) if within > 0 else float(freedom.sum())
    elif len(groups) > 1:
        spread_over = "contexts"
        error, degrees = float(means.std(ddof=1)) / math.sqrt(len(groups)), len(groups) - 1.0
    else:
        return Estimate(mean, None, None, n, "blocks")
    half = float(stdtrit(degrees, (1 + confidence) / 2)) * error
    return Estimate(mean, mean - half, mean + half, n, spread_over)


def too_wide(effect: Mapping[str, Any]) -> bool:
    """Whether an effect as a plain object has an interval that tells next to nothing: it holds 1 and is WIDE."""
    low, high = effect["low"], effect["high"]
    return low is not None and low <= 1 <= high and high > WIDE * low


def telling_repeat(effect: Mapping[str, Any], blocks: int) -> int:
    """From which repeat on the interval of an effect that is `too_wide` after so many blocks would not be, its noise
    being what it was; at most MOST_REPEATS.
    """
    contexts = max(1, round(effect["pairs"] / blocks))
    half = math.log(effect["high"] / effect["low"]) / 2 if effect["low"] > 0 else math.inf
    freedom = effect["pairs"] - contexts or max(1, contexts - 1)
    noise = half / float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(effect["pairs"])
    for repeat in range(blocks + 1, MOST_REPEATS):
        pairs = contexts * repeat
        if stdtrit(pairs - contexts, (1 + CONFIDENCE) / 2) * noise / math.sqrt(pairs) <= math.log(WIDE) / 2:
            return repeat
    return MOST_REPEATS


def main_effects(records: Sequence[Record], references: Mapping[str, str]) -> list[Effect]:
    """The effect of each level against its factor's reference, where a block has both with all else equal."""
    found = []
    for factor, levels in _levels(records).items():
        at = _by_rest(records, (factor,))
        for level in levels:
            if level == references[factor]:
                continue
            pairs = {
                rest: (cells[(level,)], cells[(references[factor],)])
                for rest, cells in at.items()
                if (level,) in cells and (references[factor],) in cells
            }
            if effect := _effect((factor,), (level,), (references[factor],), pairs, CONFIDENCE):
                found.append(effect)
    return found


def fastest(records: Sequence[Record]) -> list[Lead]:
    """Of each factor the level that leads, where each two of its levels have runs of one block with all else equal."""
    with_speed = [record for record in records if record.speed]
    leads = (_lead(with_speed, factor, levels) for factor, levels in _levels(with_speed).items())
    return [lead for lead in leads if lead]


def _lead(records: Sequence[Record], factor: str, levels: Sequence[str]) -> Lead | None:
    at = _by_rest(records, (factor,))
    confidence = 1 - (1 - CONFIDENCE) / math.comb(len(levels), 2)
    ahead: dict[str, list[Effect]] = {level: [] for level in levels}
    for level, other in itertools.permutations(levels, 2):
        pairs = {
            rest: (cells[(level,)], cells[(other,)])
            for rest, cells in at.items()
            if (level,) in cells and (other,) in cells
        }
        effect = _effect((factor,), (level,), (other,), pairs, confidence)
        if effect is None:
            return None
        ahead[level].append(effect)
    level = max(levels, key=lambda one: math.prod(effect.ratio for effect in ahead[one]))
    runs = [record for record in records if record.levels[factor] == level]
    return Lead(
        factor,
        level,
        len(levels),
        over=min(ahead[level], key=lambda effect: effect.ratio),
        clear=all(effect.low is not None and effect.low > 1 for effect in ahead[level]),
        targets_waited=_median(record.targets_waited for record in runs),
        drafters_waited=_median(record.drafters_waited for record in runs),
    )


def interactions(records: Sequence[Record], references: Mapping[str, str]) -> list[Effect]:
    """For each two factors, how much one's ratio changes with the other, where a block has all four cells.

    The intervals hold all together with 95 % (Bonferroni): among many interactions some would seem clear by chance.
    """
    levels = _levels(records)
    asked = [
        ((one, two), pair, (references[one], references[two]))
        for one, two in itertools.combinations(levels, 2)
        for pair in itertools.product(levels[one], levels[two])
        if pair[0] != references[one] and pair[1] != references[two]
    ]
    found = []
    for factors, (one, two), (first, second) in asked:
        corners = [(one, two), (first, two), (one, second), (first, second)]
        squares = {
            rest: tuple(cells[corner] for corner in corners)
            for rest, cells in _by_rest(records, factors).items()
            if all(corner in cells for corner in corners)
        }
        confidence = 1 - (1 - CONFIDENCE) / len(asked)
        if effect := _effect(factors, (one, two), (first, second), squares, confidence):
            found.append(effect)
    return found


def same_twice(records: Sequence[Record]) -> Effect | None:
    """The second copy of the first cell against the first: what a difference of nothing looks like here."""
    first = {(tuple(sorted(r.levels.items())), r.block): r for r in records if not r.copy and r.speed}
    pairs = {}
    for second in records:
        key = (tuple(sorted(second.levels.items())), second.block)
        if second.copy and second.speed and key in first:
            pairs[key] = (second, first[key])
    return _effect(("A/A",), ("again",), ("first",), pairs, CONFIDENCE)


def _levels(records: Sequence[Record]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for record in records:
        for factor, level in record.levels.items():
            found.setdefault(factor, set()).add(level)
    return {factor: sorted(levels) for factor, levels in found.items() if len(levels) > 1}


def _by_rest(records: Sequence[Record], factors: tuple[str, ...]) -> dict[Any, dict[tuple[str, ...], Record]]:
    """Runs that measured speed: {(the other factors' levels, block): {levels of `factors`: run}}."""
    found: dict[Any, dict[tuple[str, ...], Record]] = {}
    for record in records:
        if record.copy or not record.speed or ("cache" in factors and _spoilt(record)):
            continue
        rest = tuple(level for factor, level in sorted(record.levels.items()) if factor not in factors)
        found.setdefault((rest, record.block), {})[tuple(record.levels[factor] for factor in factors)] = record
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spoilt(record: Record) -> bool:
    """Whether a run was neither cold nor warm that should have been; foreign and standalone are mixed by nature."""
    return record.proved == "mixed" and record.levels["cache"] in (COLD, WARM)


def _effect(
    factors: tuple[str, ...],
    levels: tuple[str, ...],
    references: tuple[str, ...],
    together: Mapping[Any, Sequence[Record]],
    confidence: float,
) -> Effect | None:
    """From runs that belong together, signs alternating from plus: two of a pair, four of an interaction."""
    contexts: dict[Any, list[float]] = {}
    apart = 0
    for (rest, _), runs in together.items():
        logs = [math.log(run.speed or 1) for run in runs]
        signs = (1, -1) if len(runs) == 2 else (1, -1, -1, 1)
        contexts.setdefault(rest, []).append(sum(s * y for s, y in zip(signs, logs, strict=True)))
        apart += len({(run.sweep, run.attempt > 1) for run in runs}) > 1
    if not contexts:
        return None
    found = estimate(list(contexts.values()), confidence)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Effect(factors, levels, references, math.exp(found.mean), low, high, found.n, found.spread_over, apart)
