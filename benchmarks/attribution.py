"""How often is a sweep's conclusion right, wrong and confident, or an honest "cannot tell"? Sweeps with a known truth.

    python benchmarks/attribution.py --sweeps 5000 --out benchmarks/results/attribution.json

Attribution: each simulated sweep draws its factors and levels, a design (all cells, some of them, or two factors that
moved together), one to ten blocks in random order, a rate of failure of exposed runs (always, or flaky) and a truth:
levels of one factor; of two, together or either; of three together; rates that depend on a second factor; none of the
factors; or a change with time. In some sweeps runs that are not exposed fail now and then as well. A conclusion is
right if it names exactly the cells that the truth exposes, those that did not run included; it is wrong if it names
others, or a factor that has no part in it. Levels that never ran are outside of what any conclusion is about, and
that no factor matters is said of the cells that ran.

Speed: how often the intervals of `sweeper.analysis.effects` hold the true ratio, by noise, contexts and blocks, and
after `until` has stopped the blocks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sweeper.analysis.attribution import attribute
from sweeper.analysis.effects import estimate, main_effects
from sweeper.analysis.records import Record
from sweeper.analysis.stopping import enough

Cell = dict[str, str]
TRUTHS = ("levels", "both", "either", "three", "graded", "none", "time")
DESIGNS = ("all cells", "some cells", "moved together")
RATES = (1.0, 0.9, 0.6, 0.3, 0.1)
MOST_CELLS = 48
NOISES = ("normal", "heavy tails", "unequal contexts", "drift inside blocks")


@dataclass(frozen=True)
class Truth:
    """kind: of TRUTHS; factors that have a part in it; rates of failure by cell; since: of `time`, runs before it."""

    kind: str
    factors: tuple[str, ...]
    rates: dict[tuple[str, ...], float]
    exposed: frozenset[tuple[str, ...]]
    since: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=5000, help="simulated sweeps (default: 5000)")
    parser.add_argument("--draws", type=int, default=2000, help="draws for each coverage (default: 2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to keep the figures as JSON")
    options = parser.parse_args()
    found = {
        "sweeps": options.sweeps,
        "seed": options.seed,
        "attribution": attributions(options.sweeps, random.Random(options.seed)),
        "coverage": coverages(options.draws, np.random.default_rng(options.seed)),
        "until": stopped(options.draws // 4, np.random.default_rng(options.seed)),
    }
    print(text(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def attributions(sweeps: int, draw: random.Random) -> dict[str, Any]:
    """Shares of outcomes in all sweeps, by truth, by design and by rate; and the wrong ones, to look at."""
    counts: dict[str, Counter[str]] = {}
    wrong: list[dict[str, Any]] = []
    for _ in range(sweeps):
        truth, design, rate, runs, grid = sweep(draw)
        outcome, said = judged(truth, runs, grid)
        for group in ("all", f"truth: {truth.kind}", f"design: {design}", f"rate: {rate}"):
            counts.setdefault(group, Counter())[outcome] += 1
        if outcome == "wrong" and len(wrong) < 50:
            wrong.append({"truth": truth.kind, "factors": truth.factors, "design": design, "rate": rate, "said": said})
    order = [
        "all",
        *(f"truth: {t}" for t in TRUTHS),
        *(f"design: {d}" for d in DESIGNS),
        *(f"rate: {r}" for r in RATES),
    ]
    shares = {group: dict(counts[group]) for group in order if group in counts}
    return {"counts": shares, "wrong": wrong}


def sweep(draw: random.Random) -> tuple[Truth, str, float, list[tuple[Cell, bool]], list[Cell]]:
    """One simulated sweep: its truth, design and rate, its runs in order of start, and the grid of all its cells."""
    factors = {f"f{i}": [f"{i}{x}" for x in "abcd"[: draw.randint(2, 4)]] for i in range(draw.randint(2, 4))}
    grid = [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]
    design = draw.choice(DESIGNS)
    cells = grid
    if design == "moved together":
        one, other = draw.sample(sorted(factors), 2)
        follows = {level: draw.choice(factors[other]) for level in factors[one]}
        cells = [cell for cell in grid if follows[cell[one]] == cell[other]]
    elif design == "some cells":
        cells = draw.sample(grid, max(2, round(len(grid) * draw.uniform(0.4, 0.9))))
    if len(cells) > MOST_CELLS:
        cells = draw.sample(cells, MOST_CELLS)
    rate, blocks = draw.choice(RATES), draw.randint(1, 10)
    truth = drawn(draw, factors, grid, rate, len(cells) * blocks)
    background = draw.choice((0.0, 0.0, 0.0, 0.02))
    runs: list[tuple[Cell, bool]] = []
    for _ in range(blocks):
        for cell in draw.sample(cells, len(cells)):
            chance = truth.rates[tuple(cell.values())]
            if truth.kind == "time" and len(runs) < truth.since:
                chance = 0.0
            runs.append((cell, draw.random() < max(chance, background)))
    return truth, design, rate, runs, grid


def drawn(draw: random.Random, factors: dict[str, list[str]], grid: list[Cell], rate: float, runs: int) -> Truth:
    """A truth of a random kind that fits these factors."""
    kind = draw.choice([kind for kind in TRUTHS if kind != "three" or len(factors) > 2])
    wanted = {"levels": 1, "graded": 2, "both": 2, "either": 2, "three": 3}.get(kind, 0)
    chosen = tuple(draw.sample(sorted(factors), wanted))
    bad = {f: set(draw.sample(factors[f], draw.randint(1, len(factors[f]) - 1))) for f in chosen}
    rates: dict[tuple[str, ...], float] = {}
    weaker = {level: rate * draw.choice((1.0, 0.5)) for level in factors[chosen[1]]} if kind == "graded" else {}
    for cell in grid:
        hits = [cell[f] in bad[f] for f in chosen]
        exposed = hits[0] if kind == "graded" else any(hits) if kind == "either" else all(hits)
        rates[tuple(cell.values())] = (weaker[cell[chosen[1]]] if weaker else rate) if exposed else 0.0
    exposed_cells = frozenset(cell for cell, chance in rates.items() if chance > 0)
    return Truth(kind, chosen, rates, exposed_cells, draw.randint(1, max(1, runs - 1)))


def judged(truth: Truth, runs: Sequence[tuple[Cell, bool]], grid: Sequence[Cell]) -> tuple[str, Any]:
    """`right`, `wrong`, `part` (of its factors), `cannot tell`, or `nothing` to tell apart; and what was said."""
    if len({bad for _, bad in runs}) == 1:
        return "nothing", None
    found = attribute(runs)
    told = found.told
    if told is None:
        if not found.sure_factors:
            return "cannot tell", None
        return ("part" if set(found.sure_factors) <= set(truth.factors) else "wrong"), found.sure_factors
    said = told.to_dict()
    if told.kind == "none":
        exposures = {tuple(cell.values()) in truth.exposed for cell, _ in runs}
        return ("right" if truth.kind in ("none", "time") or len(exposures) == 1 else "wrong"), said
    if told.kind == "time":
        return ("right" if truth.kind == "time" and told.since > 0 else "wrong"), said
    ran = {factor: {cell[factor] for cell, _ in runs} for factor in grid[0]}
    grid = [cell for cell in grid if all(cell[factor] in levels for factor, levels in ran.items())]
    exposed = {tuple(cell.values()) for cell in grid if told.exposes(cell)}
    truly = {tuple(cell.values()) for cell in grid} & truth.exposed
    same = truth.kind not in ("none", "time") and exposed == truly
    return ("right" if same else "wrong"), said


def coverages(draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Share of intervals that hold the truth, nominally 95 %."""
    found = []
    for noise, contexts, blocks in itertools.product(NOISES, (1, 2, 4), (2, 3, 5, 10)):
        held = 0
        for _ in range(draws):
            low, high = interval(differences(rng, noise, contexts, blocks))
            held += low <= 0 <= high
        found.append({"noise": noise, "contexts": contexts, "blocks": blocks, "held": held / draws})
    return found


def interval(groups: list[list[float]]) -> tuple[float, float]:
    found = estimate(groups)
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def differences(rng: np.random.Generator, noise: str, contexts: int, blocks: int) -> list[list[float]]:
    """Differences of log speeds of pairs whose true effect is 0 on average over contexts, blocks drifting freely."""
    effect = rng.normal(0, 0.05, contexts)
    effect -= effect.mean()
    spread = 0.02 * (4.0 ** np.arange(contexts) if noise == "unequal contexts" else np.ones(contexts))
    found: list[list[float]] = [[] for _ in range(contexts)]
    for _ in range(blocks):
        places = rng.permutation(2 * contexts)
        trend = rng.normal(0, 0.03) if noise == "drift inside blocks" else 0.0
        for c in range(contexts):
            made = rng.standard_t(3, 2) if noise == "heavy tails" else rng.normal(size=2)
            drift = trend * (places[2 * c] - places[2 * c + 1])
            found[c].append(float(effect[c] + spread[c] * (made[0] - made[1]) + drift))
    return found


def stopped(draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Coverage of the effect of a sweep that `until` stopped, and the blocks it took."""
    found = []
    for sigma, width in itertools.product((0.01, 0.02, 0.04), (0.05, 0.1)):
        held, blocks = 0, []
        for _ in range(draws):
            low, high, took = until(functools.partial(rng.normal, 0, sigma), width)
            held += low <= 1 <= high
            blocks.append(took)
        found.append({"sigma": sigma, "width": width, "held": held / draws, "median_blocks": float(np.median(blocks))})
    return found


def until(noise: Callable[[], float], width: float, most: int = 60) -> tuple[float, float, int]:
    """Blocks of two cells of equal speed until the sweep would stop: interval of their ratio, and blocks."""
    records: list[Record] = []
    one = Record({"compile": "locked"}, 1, "ok")
    for block in range(1, most + 1):
        drift = noise()
        for level in ("locked", "whole"):
            speed = float(np.exp(drift + noise()))
            records.append(replace(one, levels={"compile": level}, block=block, ktok_s=speed))
        if enough(records, width, {"compile": "locked"})[0]:
            break
    (effect,) = main_effects(records, {"compile": "locked"})
    return effect.low or 0.0, effect.high or 0.0, block


def text(found: dict[str, Any]) -> str:
    """The figures as tables."""
    names = ("right", "wrong", "part", "cannot tell")
    lines = [f"{'sweeps in which runs differed':34} {'n':>6} " + " ".join(f"{name:>12}" for name in names)]
    for group, counts in found["attribution"]["counts"].items():
        n = sum(counts.get(name, 0) for name in names)
        shares = " ".join(f"{counts.get(name, 0) / max(n, 1):12.1%}" for name in names)
        lines.append(f"{group:34} {n:6} {shares}")
    lines += ["", f"{'intervals (95 %) that hold':34} " + " ".join(f"{n:>3} blocks" for n in (2, 3, 5, 10))]
    for noise, contexts in itertools.product(NOISES, (1, 2, 4)):
        held = [one["held"] for one in found["coverage"] if one["noise"] == noise and one["contexts"] == contexts]
        lines.append(f"{f'{noise}, contexts {contexts}':34} " + " ".join(f"{share:10.1%}" for share in held))
    lines += ["", f"{'stopped by until':34} {'held':>10} {'blocks':>10}"]
    for one in found["until"]:
        name = f"noise {one['sigma']:.0%} a run, ci<{one['width']:.0%}"
        lines.append(f"{name:34} {one['held']:10.1%} {one['median_blocks']:10.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
