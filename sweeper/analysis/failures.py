"""How often runs fail: counts with exact intervals, and an exact comparison of two levels.

Intervals are those of Clopper and Pearson (1934): they hold the true share at least 95 times in 100, for any n.
Two levels are compared within strata in which all other factors are equal, by the exact conditional test that adds
the strata's hypergeometric distributions up (Cox 1958; Gart 1970); with one stratum it is Fisher's exact test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import betaincinv, gammaln

from sweeper.analysis.records import FAILED, Record

CONFIDENCE = 0.95
ANY = "any failure"


@dataclass(frozen=True)
class Share:
    """`k` of `n` runs, and the interval of the share."""

    k: int
    n: int
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def share(k: int, n: int, confidence: float = CONFIDENCE) -> Share:
    """The exact interval of a share; raises ValueError unless 0 <= k <= n and n > 0."""
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"{k} of {n}")
    tail = (1 - confidence) / 2
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return Share(k, n, low, high)


def causes(records: Iterable[Record]) -> list[str]:
    """What went wrong in these runs, the most frequent first; ANY where failures have several causes or none."""
    counts: dict[str, int] = {}
    failed = [r for r in records if r.told and r.verdict != "ok"]
    for record in failed:
        if record.cause:
            counts[record.cause] = counts.get(record.cause, 0) + 1
    ordered = sorted(counts, key=lambda cause: (-counts[cause], cause))
    several = {record.cause for record in failed if record.verdict in FAILED}
    return ordered + [ANY] * (len(several) > 1 or several == {""})


def failed(record: Record, cause: str) -> bool | None:
    """Whether the run failed by `cause`; None where it cannot say: skipped, or ended early by something else."""
    if not record.told:
        return None
    if cause == ANY:
        return record.failed
    if record.cause == cause:
        return True
    return None if record.failed else False


def by_level(records: Sequence[Record], cause: str) -> dict[str, dict[str, Share]]:
    """{factor: {level: share of runs that failed}}."""
    counts: dict[str, dict[str, list[int]]] = {}
    for record in records:
        if (bad := failed(record, cause)) is not None:
            for factor, level in record.levels.items():
                count = counts.setdefault(factor, {}).setdefault(level, [0, 0])
                count[0] += bad
                count[1] += 1
    return {
        factor: {level: share(k, n) for level, (k, n) in sorted(levels.items())} for factor, levels in counts.items()
    }


def compare(records: Sequence[Record], cause: str, factor: str, one: str, other: str) -> float | None:
    """p-value of `one` and `other` failing equally often, all else equal; None where nothing compares them."""
    strata: dict[Any, list[int]] = {}
    for record in records:
        bad, level = failed(record, cause), record.levels.get(factor)
        if bad is not None and level in (one, other):
            rest = tuple(sorted((f, v) for f, v in record.levels.items() if f != factor))
            table = strata.setdefault(rest, [0, 0, 0, 0])
            table[0 if level == one else 2] += bad
            table[1 if level == one else 3] += 1
    tables = [(k1, n1, k2, n2) for k1, n1, k2, n2 in strata.values() if n1 and n2]
    return exact_test(tables) if tables else None


def exact_test(tables: Sequence[tuple[int, int, int, int]]) -> float:
    """Two-sided p-value over strata (k1, n1, k2, n2): the chance, were both sides alike, of a total of the k1 that
    is no likelier than the one seen, given how many failed in each stratum."""
    chances, least, seen = np.ones(1), 0, 0
    for k1, n1, k2, n2 in tables:
        k, n = k1 + k2, n1 + n2
        of_first = np.arange(max(0, k - n2), min(k, n1) + 1)
        logs = _log_choose(n1, of_first) + _log_choose(n2, k - of_first) - _log_choose(n, k)
        chances = np.convolve(chances, np.exp(logs))
        least += int(of_first[0])
        seen += k1
    return float(min(1.0, chances[chances <= chances[seen - least] * (1 + 1e-7)].sum()))


def _log_choose(n: Any, k: Any) -> Any:
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
