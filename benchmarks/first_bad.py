"""How often does `python -m sweeper.bisect` name the right level, and with how many runs? Simulated histories.

    python benchmarks/first_bad.py --histories 400 --json benchmarks/results/first-bad.json

A history is a list of 2 to 64 levels with one change at a random place. Its runs are drawn, not done: a run before
the change shows the symptom with rate q, one after it with rate p; or it has a speed whose logarithm is normal, now
and then an outlier. `decide` gets what an oracle says until it answers. right: the level, or the shortest stretch
round it that levels which cannot be run leave open; wrong: another one, or an answer where nothing changes; cannot
tell: neither (the share that says so). Every history has its own seed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sweeper.bisect import search, speed
from sweeper.bisect.search import Answer


@dataclass(frozen=True)
class History:
    """One kind of history. broken: share of the levels that cannot be run. noise: spread of log speed; slower: the
    slow-down at the change, None for failures; outliers: share of runs that are slower by up to a half."""

    name: str
    p: float = 1.0
    q: float = 0.0
    broken: float = 0.0
    changes: bool = True
    slower: float | None = None
    noise: float = 0.0
    outliers: float = 0.0
    asked: float = 0.05


KINDS = [
    History("fails always"),
    History("fails 3 in 4", p=0.75),
    History("fails 1 in 2", p=0.5),
    History("fails 1 in 4", p=0.25),
    History("fails 1 in 10", p=0.1),
    History("fails always, 1 in 20 before", p=1.0, q=0.05),
    History("fails 3 in 4, 1 in 10 before", p=0.75, q=0.1),
    History("fails always, every fifth level broken", broken=0.2),
    History("nothing changes, never fails", p=0.0, changes=False),
    History("nothing changes, fails 1 in 10", p=0.1, q=0.1, changes=False),
    History("nothing changes, fails 1 in 2", p=0.5, q=0.5, changes=False),
    History("slower by 20 %, spread 3 %", slower=0.2, noise=0.03),
    History("slower by 10 %, spread 3 %", slower=0.1, noise=0.03),
    History("slower by 6 %, spread 3 %", slower=0.06, noise=0.03),
    History("slower by 10 %, spread 3 %, 1 in 20 runs an outlier", slower=0.1, noise=0.03, outliers=0.05),
    History("no slow-down, spread 3 %", slower=0.0, noise=0.03, changes=False),
    History("no slow-down, spread 10 %", slower=0.0, noise=0.1, changes=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=400, help="of each kind")
    parser.add_argument("--error", type=float, default=0.01)
    parser.add_argument("--most", type=int, default=200, help="runs a history may use")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"error {options.error:.0%}, at most {options.most} runs, {options.histories} histories of each kind\n")
    print(f"{'':52} right   wrong   cannot tell   runs: median   9 of 10 within")
    with ProcessPoolExecutor(options.jobs) as pool:
        for kind in KINDS:
            ask = partial(one, kind, options.error, options.most)
            found = list(pool.map(ask, range(options.histories), chunksize=20))
            rows.append(row(kind, found))
            r = rows[-1]
            print(
                f"{kind.name:52} {r['right']:5.1%}  {r['wrong']:5.1%}  {r['cannot tell']:12.1%}"
                f"  {r['runs_median']:13.0f}  {r['runs_90']:16.0f}",
                flush=True,
            )
    if options.json:
        told = {name: getattr(options, name) for name in ("histories", "error", "most")}
        options.json.write_text(json.dumps({**told, "kinds": rows}, indent=1) + "\n")


def row(kind: History, found: list[tuple[str, int]]) -> dict[str, float | str | int]:
    outcomes, runs = Counter(outcome for outcome, _ in found), sorted(runs for _, runs in found)
    shares = {name: outcomes[name] / len(found) for name in ("right", "wrong", "cannot tell")}
    return {
        "kind": kind.name,
        "histories": len(found),
        **shares,
        "runs_median": statistics.median(runs),
        "runs_90": runs[math.ceil(0.9 * len(runs)) - 1],
    }


def one(kind: History, error: float, most: int, seed: int) -> tuple[str, int]:
    """What became of one history, and how many runs it took."""
    draw = random.Random(f"{kind.name}:{seed}")
    levels = round(math.exp(draw.uniform(math.log(2), math.log(64))))
    change = draw.randrange(1, levels) if kind.changes else levels
    broken = {level for level in range(1, levels - 1) if draw.random() < kind.broken}
    if kind.slower is None:
        answer, runs = failures(levels, change, broken, kind, error, most, draw)
    else:
        answer, runs = slow_downs(levels, change, kind, error, most, draw)
    if answer.kind != "found":
        return "cannot tell", runs
    if not kind.changes:
        return "wrong", runs
    good = max(level for level in range(change) if level not in broken)
    bad = min(level for level in range(change, levels) if level not in broken)
    return "right" if (answer.good, answer.bad) == (good, bad) else "wrong", runs


def failures(
    levels: int, change: int, broken: set[int], kind: History, error: float, most: int, draw: random.Random
) -> tuple[Answer, int]:
    seen: list[list[bool | None]] = [[] for _ in range(levels)]
    while not isinstance(step := search.decide(seen, error, most), Answer):
        rate = kind.p if step >= change else kind.q
        seen[step].append(None if step in broken else draw.random() < rate)
    return step, sum(map(len, seen))


def slow_downs(
    levels: int, change: int, kind: History, error: float, most: int, draw: random.Random
) -> tuple[Answer, int]:
    seen: list[list[float | None]] = [[] for _ in range(levels)]
    assert kind.slower is not None
    while True:
        step: int | Answer | list[list[bool | None]] = speed.symptoms(seen, kind.asked, error, most)
        if isinstance(step, list):
            step = search.decide(step, error, most)
        if isinstance(step, Answer):
            return step, sum(map(len, seen))
        ktok_s = (1 - kind.slower if step >= change else 1.0) * math.exp(draw.gauss(0, kind.noise))
        seen[step].append(ktok_s * (draw.uniform(0.5, 1) if draw.random() < kind.outliers else 1))


if __name__ == "__main__":
    main()
