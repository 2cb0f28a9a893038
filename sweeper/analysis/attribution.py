"""Which levels a failure needs, and how sure that is: Bayes' rule over a closed family of explanations.

An explanation says which runs are exposed. Exposed runs fail at a rate that is not known, which may be small (the
cause is flaky) and may differ between cells; the others fail seldom or never. The family, with prior shares:

* one factor's levels: any set of them that is not all, small and large sets alike                        0.40
* two factors' levels, exposed where both hold                                                             0.15
* three factors' levels, exposed where all hold                                                            0.05
* two factors' levels, exposed where either holds                                                          0.05
* none of these factors: every run fails at one rate                                                       0.29
* time: failures begin or end with some run, whatever its levels                                           0.05
* something else of these factors: every cell has a rate of its own                                        0.01

The smallest set wins by itself: an explanation that needs a second factor, or more levels, shares its prior with more
like it (MacKay, Information Theory, Inference, and Learning Algorithms, chapter 28). Rates are integrated over beta
distributions. Explanations that expose the same runs fit equally well, so what never varied apart stays open, and
`told` is what has a posterior of at least SURE. How often that is wrong: `benchmarks/attribution.py`.

The certainty is that of the family: a cause outside of all factors that vary with them is out of its sight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, logsumexp

from sweeper.analysis.records import in_order

SURE = 0.99
PRIOR = {"levels": 0.40, "both": 0.15, "three": 0.05, "either": 0.05, "none": 0.29, "time": 0.05, "other": 0.01}
# Rates as mixtures of (share, a, b) of beta distributions; a or b of infinity is the rate 1 or 0.
ALWAYS, NEVER = (math.inf, 1.0), (1.0, math.inf)
EXPOSED = ((0.5, *ALWAYS), (0.5, 1.0, 1.0))
EXPOSED_CELL = ((0.5, *ALWAYS), (0.5, 2.0, 1.0))
SPARED = ((0.5, *NEVER), (0.5, 1.0, 19.0))
ONE_RATE = ((0.3, *ALWAYS), (0.35, 1.0, 1.0), (0.35, 1.0, 19.0))
ANY_RATE = ((0.1, *ALWAYS), (0.2, *NEVER), (0.7, 1.0, 1.0))
BY_CELL = 0.25  # prior share of exposed cells that fail at different rates
MOST_SETS = 60_000  # explanations by the same factors beyond which large sets of levels are left out
KEPT = 200  # explanations that are kept, the likeliest first

Array = NDArray[Any]


@dataclass(frozen=True)
class Explanation:
    """kind: a key of PRIOR. levels: {factor: levels}, exposed as the kind says. since: of `time`, the number of runs
    before the change, in order of start, negative where failures end with it."""

    kind: str
    posterior: float
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: int = 0

    def exposes(self, cell: Mapping[str, str]) -> bool:
        """Whether a run of this cell is exposed; True for explanations that name no level."""
        hits = [cell[factor] in levels for factor, levels in self.levels.items()]
        return any(hits) if self.kind == "either" else all(hits)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Attribution:
    """Explanations, the likeliest first, and the posterior that each factor is part of the explanation."""

    explanations: list[Explanation]
    involved: dict[str, float]

    @property
    def told(self) -> Explanation | None:
        """The explanation that is sure enough to be told; None for `cannot tell`."""
        first = self.explanations[0] if self.explanations else None
        if first and first.posterior >= SURE:
            return None if first.kind == "other" else first
        # That no factor matters can be sure where chance and a change with time cannot be told apart.
        neither = sum(one.posterior for one in self.explanations if one.kind in ("none", "time"))
        return Explanation("none", neither) if neither >= SURE else None

    @property
    def sure_factors(self) -> list[str]:
        """Factors that are part of the explanation for sure, even if it is not known which one is right."""
        return [factor for factor, posterior in self.involved.items() if posterior >= SURE]


def attribute(runs: Sequence[tuple[Mapping[str, str], bool]]) -> Attribution:
    """Explain which of `runs`, (levels, failed) in order of start, failed. No explanation without a failure.

    All runs have the same factors; only those with several levels can explain anything.
    """
    if not any(failed for _, failed in runs):
        return Attribution([], {})
    factors = {f: sorted({levels[f] for levels, _ in runs}, key=in_order) for f in (runs[0][0] if runs else {})}
    factors = {factor: levels for factor, levels in factors.items() if len(levels) > 1}
    cells = _Cells(runs, factors)
    found: list[tuple[float, Explanation]] = [
        (math.log(PRIOR["none"]) + float(_log_rate(cells.k.sum(), cells.n.sum(), ONE_RATE)), Explanation("none", 0)),
        (math.log(PRIOR["other"]) + float(_log_rate(cells.k, cells.n, ANY_RATE).sum()), Explanation("other", 0)),
        *_by_time([failed for _, failed in runs]),
    ]
    sets = {factor: _subsets(levels) for factor, levels in factors.items()}
    for factor, levels in sets.items():
        found += _single(cells, factor, levels, len(sets))
    for size, kinds in ((2, ("both", "either")), (3, ("three",))):
        groups = list(itertools.combinations(sets, size))
        for group in groups:
            several = [sets[factor] for factor in group]
            if math.prod(map(len, several)) > MOST_SETS:
                several = [_subsets(factors[factor], few=True) for factor in group]
            if math.prod(map(len, several)) <= MOST_SETS:
                found += _joint(cells, kinds, group, several, len(groups))
    logs = np.array([log for log, _ in found])
    shares = np.exp(logs - logsumexp(logs))
    involved = dict.fromkeys(factors, 0.0)
    for posterior, (_, explanation) in zip(shares, found, strict=True):
        for factor in explanation.levels:
            involved[factor] += float(posterior)
    best = np.argsort(-shares, kind="stable")[:KEPT]
    kept = [(float(shares[i]), found[i][1]) for i in best if shares[i] > 1e-6]
    return Attribution([Explanation(e.kind, p, e.levels, e.since) for p, e in kept], involved)


class _Cells:
    """Failures k and runs n of each cell, and which cells have which level."""

    def __init__(self, runs: Sequence[tuple[Mapping[str, str], bool]], factors: Mapping[str, Sequence[str]]) -> None:
        counts: dict[tuple[str, ...], list[int]] = {}
        for levels, failed in runs:
            count = counts.setdefault(tuple(levels[factor] for factor in factors), [0, 0])
            count[0] += failed
            count[1] += 1
        self.k, self.n = (np.array([count[i] for count in counts.values()], float) for i in (0, 1))
        self.by_cell = _log_rate(self.k, self.n, EXPOSED_CELL)
        self._levels = {f: np.array([cell[i] for cell in counts]) for i, f in enumerate(factors)}

    def members(self, factor: str, sets: Sequence[tuple[str, ...]]) -> Array:
        """(sets, cells): 1 where the cell's level is in the set."""
        return np.array([np.isin(self._levels[factor], levels) for levels in sets], float)


def _single(
    cells: _Cells, factor: str, sets: Sequence[tuple[tuple[str, ...], float]], factors: int
) -> list[tuple[float, Explanation]]:
    members = cells.members(factor, [levels for levels, _ in sets])
    logs = _log_likelihood(cells, members @ cells.k, members @ cells.n, members @ cells.by_cell)
    return [
        (math.log(PRIOR["levels"] / factors * prior) + log, Explanation("levels", 0, {factor: levels}))
        for (levels, prior), log in zip(sets, logs, strict=True)
        if log > -math.inf
    ]


def _joint(
    cells: _Cells,
    kinds: Sequence[str],
    group: Sequence[str],
    sets: Sequence[Sequence[tuple[tuple[str, ...], float]]],
    groups: int,
) -> list[tuple[float, Explanation]]:
    """Of several factors together: `sets` of levels for each, exposed where all of them hold, or any of two."""
    members = [cells.members(factor, [s for s, _ in one]) for factor, one in zip(group, sets, strict=True)]
    priors = functools.reduce(np.multiply.outer, [np.array([prior for _, prior in one]) for one in sets])
    counted = (cells.k, cells.n, cells.by_cell)
    axes = "abc"[: len(group)]
    how = f"{','.join(axis + 'z' for axis in axes)},z->{axes}"
    together = [np.einsum(how, *members, x, optimize=True) for x in counted]
    found: list[tuple[float, Explanation]] = []
    for kind in kinds:
        sums = together
        if kind == "either":
            alone = [(members[0] @ x)[:, None] + (members[1] @ x)[None, :] for x in counted]
            sums = [apart - shared for apart, shared in zip(alone, together, strict=True)]
        logs = _log_likelihood(cells, *sums) + np.log(PRIOR[kind] / groups * priors)
        # Those that no reader will see are dropped; there may be ten thousands.
        for place in np.argwhere((logs > logs.max() - 14) & np.isfinite(logs)):
            levels = {factor: one[i][0] for factor, one, i in zip(group, sets, place, strict=True)}
            found.append((float(logs[tuple(place)]), Explanation(kind, 0, levels)))
    return found


def _by_time(failed: Sequence[bool]) -> list[tuple[float, Explanation]]:
    """Failures that begin with some run, and that end with some: each with the likeliest place of the change."""
    bad, n = np.cumsum(failed).astype(float), len(failed)
    if n < 2:
        return []
    before = np.arange(1, n, dtype=float)
    prior = math.log(PRIOR["time"] / (2 * (n - 1)))
    found = []
    for sign, k_in, n_in in ((1, bad[-1] - bad[:-1], n - before), (-1, bad[:-1], before)):
        logs = _log_rate(k_in, n_in, EXPOSED) + _log_rate(bad[-1] - k_in, n - n_in, SPARED)
        place = sign * (int(np.argmax(logs)) + 1)
        found.append((prior + float(logsumexp(logs)), Explanation("time", 0, since=place)))
    return found


def _subsets(levels: Sequence[str], few: bool = False) -> list[tuple[tuple[str, ...], float]]:
    """Sets of levels that are neither empty nor all, with prior shares: each size as likely as any other.

    With `few`, or more than 12 levels: single levels, all but one, and the first or last so many in order.
    """
    count = len(levels)
    if count <= 12 and not few:
        sets = [s for size in range(1, count) for s in itertools.combinations(levels, size)]
        return [(chosen, 1 / (count - 1) / math.comb(count, len(chosen))) for chosen in sets]
    some = {(level,) for level in levels} | {tuple(x for x in levels if x != level) for level in levels}
    some |= {tuple(levels[:i]) for i in range(1, count)} | {tuple(levels[i:]) for i in range(1, count)}
    sizes = [len(chosen) for chosen in some]
    return [(chosen, 1 / len(set(sizes)) / sizes.count(len(chosen))) for chosen in sorted(some)]


def _log_likelihood(cells: _Cells, k: Array, n: Array, by_cell: Array) -> Array:
    """Of explanations that expose `n` runs of which `k` failed; -inf where they expose no failure."""
    one_rate = math.log(1 - BY_CELL) + _log_rate(k, n, EXPOSED)
    exposed = np.logaddexp(one_rate, math.log(BY_CELL) + by_cell)
    logs = exposed + _log_rate(cells.k.sum() - k, cells.n.sum() - n, SPARED)
    return np.where(k > 0, logs, -np.inf)


def _log_rate(k: Any, n: Any, mixture: Sequence[tuple[float, float, float]]) -> Array:
    """Log chance of exactly these k failures among n runs, the rate integrated over a mixture of betas."""
    k, n = np.asarray(k, float), np.asarray(n, float)
    parts = []
    for share, a, b in mixture:
        if math.isinf(a):
            log = np.where(k == n, 0.0, -np.inf)
        elif math.isinf(b):
            log = np.where(k == 0, 0.0, -np.inf)
        else:
            log = betaln(k + a, n - k + b) - betaln(a, b)
        parts.append(math.log(share) + log)
    found: Array = logsumexp(parts, axis=0)
    return found


def runs_to_see(rate: float, sure: float = SURE) -> int:
    """Runs among which a failure of this rate shows at least once with chance `sure`."""
    return 1 if rate >= 1 else max(1, math.ceil(math.log(1 - sure) / math.log1p(-rate))) if rate > 0 else 1
