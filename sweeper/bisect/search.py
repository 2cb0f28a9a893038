"""Which level of an ordered list is the first bad one, when a bad level fails only sometimes: pure functions.

The model: up to some level a run shows the symptom with a rate q, from there on with a higher rate p. Neither is
known. `believe` gives the exact posterior over that level, both rates summed out over a grid. `decide` first runs
the ends until they differ, then whatever level tells most about which one is the first bad (the expected loss of
entropy: Lindley, Ann. Math. Stat. 27, 1956; for search among noisy answers Jedynak, Frazier and Sznitman, J. Appl.
Probab. 49, 2012), until one level holds all but `error` of the posterior and both neighbours were run. A passing
level thus needs as many passes as the failure rate seen at the bad end demands: one or two where every bad run
fails, about 16 where every fourth does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NONE = 0.5  # share of the prior that holds no level to be the first bad one: no change at all, or one for the better
ALWAYS, NEVER = 0.999, 0.001
# Half of the prior on causes that always show and on good levels that never do, the rest even.
BAD_RATES = {ALWAYS: 0.5} | {round(0.05 * n, 2): 0.5 / 19 for n in range(1, 20)}
GOOD_RATES = {NEVER: 0.5} | dict.fromkeys((0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5), 0.5 / 9)
APART = 0.04  # p is at least this much above q
ENDS_ALIKE = 0.05  # below this probability that the ends are alike, the levels between them are looked at
CONFIRMED = 3  # runs that each end and each neighbour has at least
MARGIN = 2  # the posterior has to be surer than asked for by this factor, for the priors are not everybody's
TRIES = 2  # runs of a level without an answer, after which it is stepped over


@dataclass(frozen=True)
class Belief:
    """first_bad: probability that a level is the first bad one, (levels,), 0 for the first level.
    alike: probability that no level is; with first_bad it sums to 1. bad_rate, good_rate: expected p and q."""

    first_bad: tuple[float, ...]
    alike: float
    bad_rate: float
    good_rate: float


@dataclass(frozen=True)
class Answer:
    """The end of a search. found: `bad` is the first bad level, or one that was stepped over between `good` and it.
    alike: the ends do not differ, or were not seen to. stuck: `level` is an end and cannot be run. unsure: `most`
    runs are used up, and `bad` is the likeliest. sure: probability of what is said."""

    kind: str  # found | alike | stuck | unsure
    sure: float = 0.0
    good: int = 0
    bad: int = 0
    level: int = 0


def believe(bad: Sequence[int], good: Sequence[int], width: Sequence[int] | None = None) -> Belief:
    """The posterior, given how many runs of each level showed the symptom and how many did not.

    width: levels that each entry stands for (itself and those stepped over before it), which is its prior weight.
    """
    joint, none = _posterior(bad, good, width or [1] * len(bad))
    p, q, _ = _pairs()
    by_pair = joint.sum(axis=0) / joint.sum()
    return Belief(
        first_bad=tuple(float(x) for x in joint.sum(axis=1)),
        alike=float(none.sum()),
        bad_rate=float(by_pair @ p),
        good_rate=float(by_pair @ q),
    )


def decide(seen: Sequence[Sequence[bool | None]], error: float, most: int) -> int | Answer:
    """The level to run next, or the answer.

    seen: for each level, in order, what its runs showed: the symptom (True), not (False), or nothing that tells
    (None). error: probability with which an answer may be wrong. most: runs that may be used.
    """
    kept, counts = _kept(seen)
    for end in (0, len(seen) - 1):
        if end not in kept:
            return Answer("stuck", level=end)
    joint, none = _posterior(*counts, _widths(kept))
    first_bad, alike = joint.sum(axis=1), float(none.sum())
    runs = [sum(pair) for pair in zip(*counts, strict=True)]
    end = _end(counts[0], runs)
    best = int(np.argmax(first_bad))
    neighbour = min((best - 1, best), key=lambda place: runs[place])
    sure, enough = float(first_bad[best]), 1 - error / MARGIN
    if alike > ENDS_ALIKE or min(runs[0], runs[-1]) < CONFIRMED:
        following, answer = end, Answer("alike", alike)
        done = alike >= enough and min(runs[0], runs[-1]) >= CONFIRMED
    else:
        following = neighbour if sure >= enough else _most_telling(joint, none)
        done = sure >= enough and runs[neighbour] >= CONFIRMED
        answer = Answer("found" if done else "unsure", sure, kept[best - 1], kept[best])
    return answer if done or sum(map(len, seen)) >= most else kept[following]


def stepped_over(results: Sequence[bool | None]) -> bool:
    """Whether a level is given up: its runs keep ending without an answer."""
    silent = sum(one is None for one in results)
    return silent >= TRIES and 2 * silent > len(results)


def tally(seen: Sequence[Sequence[bool | None]]) -> Belief | None:
    """The belief over all levels; those stepped over have no probability of their own, but add to the next. None
    where an end is stepped over: then nothing can be said."""
    if stepped_over(seen[0]) or stepped_over(seen[-1]):
        return None
    kept, counted = _kept(seen)
    belief = believe(*counted, _widths(kept))
    first_bad = [0.0] * len(seen)
    for place, level in enumerate(kept):
        first_bad[level] = belief.first_bad[place]
    return Belief(tuple(first_bad), belief.alike, belief.bad_rate, belief.good_rate)


def _end(bad: Sequence[int], runs: Sequence[int]) -> int:
    """Place of the end to run next: both in turn, but the bad one alone until one of them shows the symptom at all,
    for how often it does says what a pass of the other is worth."""
    if runs[0] < CONFIRMED <= runs[-1]:
        return 0
    return -1 if not (bad[0] or bad[-1]) or runs[-1] <= runs[0] else 0


def _most_telling(joint: np.ndarray, none: np.ndarray) -> int:
    """The place whose next run leaves the least uncertainty, on average, about which level is the first bad one."""
    p, q, _ = _pairs()
    first, later = _none()[:2]
    levels = len(joint)
    reached = np.tri(levels, dtype=bool)  # [run at, first bad]: whether the run is of a bad level
    unchanged = np.where(np.arange(levels) == 0, none @ first, none @ later)
    fails = np.column_stack([np.where(reached, joint @ p, joint @ q), unchanged])
    passes = np.append(joint.sum(axis=1), none.sum()) - fails
    return int(np.argmin(_uncertainty(fails) + _uncertainty(passes)))


def _uncertainty(weights: np.ndarray) -> np.ndarray:
    """Entropy of each row times the row's sum, in nats."""
    logs = np.log(np.maximum(weights, 1e-300))
    total = weights.sum(axis=1)
    return total * np.log(np.maximum(total, 1e-300)) - (weights * logs).sum(axis=1)


def _posterior(bad: Sequence[int], good: Sequence[int], width: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Probability of (first bad level, pair of rates), and of each of `_none` if there is no such level; sum 1."""
    prior = np.array([0, *width[1:]], dtype=float)
    p, q, weight = _pairs()
    failed, passed = np.asarray(bad, dtype=float), np.asarray(good, dtype=float)
    below = np.cumsum(failed) - failed, np.cumsum(passed) - passed
    log = (
        np.outer(failed.sum() - below[0], np.log(p))
        + np.outer(passed.sum() - below[1], np.log1p(-p))
        + np.outer(below[0], np.log(q))
        + np.outer(below[1], np.log1p(-q))
        + np.log(weight)
    )
    with np.errstate(divide="ignore"):
        log += np.log((1 - NONE) * prior / prior.sum())[:, None]
    first, later, share = _none()
    none = (
        failed[0] * np.log(first)
        + passed[0] * np.log1p(-first)
        + failed[1:].sum() * np.log(later)
        + passed[1:].sum() * np.log1p(-later)
        + np.log(NONE * share)
    )
    top = max(log.max(), none.max())
    joint, none = np.exp(log - top), np.exp(none - top)
    total = joint.sum() + none.sum()
    return joint / total, none / total


def _kept(seen: Sequence[Sequence[bool | None]]) -> tuple[list[int], tuple[list[int], list[int]]]:
    """The levels that are not stepped over, and their (bad, good) counts."""
    kept = [level for level, results in enumerate(seen) if not stepped_over(results)]
    counts = [(seen[level].count(True), seen[level].count(False)) for level in kept]
    return kept, ([bad for bad, _ in counts], [good for _, good in counts])


def _widths(kept: Sequence[int]) -> list[int]:
    return [1, *(level - before for before, level in itertools.pairwise(kept))]


@functools.cache
def _pairs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rates p and q that may go together, and their prior weight, each (pairs,)."""
    pairs = [
        (p, q, weight_p * weight_q)
        for p, weight_p in BAD_RATES.items()
        for q, weight_q in GOOD_RATES.items()
        if p - q >= APART
    ]
    p, q, weight = np.array(pairs).T
    return p, q, weight / weight.sum()


@functools.cache
def _none() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rates of the first level and of all later ones where none is the first bad one, and their prior weight: one
    rate for all, or fewer failures after the first level, as in a list that is the wrong way round."""
    rates = np.array(sorted({*BAD_RATES, *GOOD_RATES}))
    one = np.where(rates == NEVER, 0.5, 0.5 / (len(rates) - 1))
    p, q, weight = _pairs()
    return np.concatenate([rates, p]), np.concatenate([rates, q]), np.concatenate([one, weight]) / 2
