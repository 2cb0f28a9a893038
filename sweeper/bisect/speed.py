"""A slow-down as a symptom: a run shows it when it is nearer to the bad end's speed than to the good end's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sweeper.bisect.search import Answer, stepped_over

LOOKS = (3, 4, 6, 8, 12, 16)  # measured runs of each end after which it is asked whether their speeds differ


def symptoms(
    speeds: Sequence[Sequence[float | None]], slower: float, error: float, most: int
) -> list[list[bool | None]] | int | Answer:
    """What each run showed (as `search.decide` takes it); or the end to run next; or that the ends do not differ.

    speeds: Ktok/s of the runs of each level, None where a run has none. slower: the least slow-down that counts
    (0.05: 5 %). Log speeds of the ends are compared by a t-test (Student 1908; equal numbers, so it bears unequal
    spreads) after 3 to 16 runs each, `error` shared equally among the looks, so that all of them together keep it.
    The line is drawn half-way between the ends' medians, on the log scale, and stays where it was drawn.
    """
    first, last = ([x for x in speeds[end] if x is not None] for end in (0, -1))
    for end, level in ((0, 0), (-1, len(speeds) - 1)):
        if stepped_over([None if x is None else False for x in speeds[end]]):
            return Answer("stuck", level=level)
    for count in (look for look in LOOKS if look <= min(len(first), len(last))):
        good, bad = ([math.log(x) for x in values[:count]] for values in (first, last))
        verdict = _differ(good, bad, -math.log1p(-slower), error / len(LOOKS))
        if verdict:
            line = math.exp((statistics.median(good) + statistics.median(bad)) / 2)
            return [[None if x is None else x < line for x in results] for results in speeds]
        if verdict is False or count == LOOKS[-1]:
            return Answer("alike", 1 - error)
    if sum(map(len, speeds)) >= most:
        return Answer("unsure", 0.0, 0, len(speeds) - 1)
    return 0 if len(first) < len(last) else len(speeds) - 1


def _differ(good: Sequence[float], bad: Sequence[float], least: float, error: float) -> bool | None:
    """Whether the bad end is slower, by at least `least` as far as can be seen; None if more runs are needed."""
    from scipy.stats import t

    count = len(good)
    spread = math.sqrt((statistics.variance(good) + statistics.variance(bad)) / count)
    reach = float(t.ppf(1 - error, 2 * count - 2)) * spread
    slower_by = statistics.fmean(good) - statistics.fmean(bad)
    if slower_by - reach > 0 and slower_by >= least:
        return True
    return False if slower_by + reach < least else None
