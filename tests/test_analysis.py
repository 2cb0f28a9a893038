"""What a sweep concludes from its runs: effects, failures, attribution, confounders, and the sentences that tell it."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import events, proof, write_run
from scipy import stats

from sweeper.analysis import __main__ as command
from sweeper.analysis import attribution, confounders, effects, failures, stopping
from sweeper.analysis.conclude import conclude
from sweeper.analysis.records import Record, of_sweep, read
from sweeper.analysis.sentences import sentences

RACE = "compile.fx_trace_race"
DEFAULTS = {"compile": "locked", "cache": "cold"}
Cell = dict[str, str]


def grid(**factors: Sequence[str]) -> list[Cell]:
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]


def swept(
    cells: Sequence[Cell],
    blocks: int,
    rate: Callable[[Cell], float] = lambda cell: 0.0,
    speed: Callable[[Cell], float] = lambda cell: 1.0,
    aa: bool = False,
    seed: int = 0,
) -> list[Record]:
    """Runs of a sweep in blocks of random order, 1 % of noise a run on a drift of 10 % a block."""
    draw, found = random.Random(seed), list[Record]()
    for block in range(1, blocks + 1):
        several = [(cell, False) for cell in cells] + ([(cells[0], True)] if aa else [])
        drift = draw.gauss(0, 0.1)
        for cell, copy in draw.sample(several, len(several)):
            bad, noise = draw.random() < rate(cell), draw.gauss(0, 0.01)
            record = Record(cell, block, "ok", ktok_s=speed(cell) * math.exp(drift + noise), copy=copy)
            record = replace(record, started=float(len(found)), sweep="s", proved=cell.get("cache", ""))
            found.append(replace(record, verdict="failed", cause=RACE, ktok_s=None) if bad else record)
    return found


# Effects


def test_an_interval_is_students() -> None:
    found = effects.estimate([[1.0, 2.0, 3.0]])
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), rel=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), rel=1e-6)
    assert effects.estimate([[1.0]]) == effects.Estimate(1.0, None, None, 1, "blocks")
    over = effects.estimate([[1.0], [3.0]])
    assert (over.mean, over.spread_over) == (2.0, "contexts")
    assert over.low == pytest.approx(2 - 12.7062, rel=1e-5)
    with pytest.raises(ValueError, match="no differences"):
        effects.estimate([[]])


def test_contexts_may_differ_and_only_the_spread_within_them_is_noise() -> None:
    found = effects.estimate([[1.0, 1.2, 0.8], [11.0, 11.2, 10.8]])
    assert found.mean == pytest.approx(6.0)
    # Welch and Satterthwaite with two equal variances of 0.04 and 2 + 2 degrees of freedom.
    assert found.high is not None
    assert found.high - 6 == pytest.approx(2.776445 * math.sqrt(2 * 0.04 / 3) / 2, rel=1e-6)


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.integers(0, 99))
def test_what_drifts_between_blocks_changes_no_effect(drifts: list[float], seed: int) -> None:
    runs = swept(grid(compile=["locked", "whole"], cache=["cold", "warm"]), 3, seed=seed)
    moved = [replace(run, ktok_s=(run.ktok_s or 0) * math.exp(drifts[run.block - 1])) for run in runs]
    for plain, drifted in zip(*(effects.main_effects(x, DEFAULTS) for x in (runs, moved)), strict=True):
        assert drifted.ratio == pytest.approx(plain.ratio)
        assert (drifted.low, drifted.high) == pytest.approx((plain.low, plain.high))


def test_an_effect_and_an_interaction_are_found() -> None:
    def speed(cell: Cell) -> float:
        both = cell["compile"] == "whole" and cell["cache"] == "warm"
        return (1.12 if cell["compile"] == "whole" else 1.0) * (1.5 if both else 1.0)

    runs = swept(grid(compile=["locked", "whole"], cache=["cold", "warm"]), 6, speed=speed)
    whole = next(e for e in effects.main_effects(runs, DEFAULTS) if e.factors == ("compile",))
    assert (whole.levels, whole.references, whole.pairs, whole.spread_over) == (("whole",), ("locked",), 12, "blocks")
    assert whole.low is not None
    assert whole.high is not None
    assert whole.low < 1.12 * math.sqrt(1.5) < whole.high < whole.low * 1.03
    (joint,) = effects.interactions(runs, DEFAULTS)
    assert joint.clear
    assert joint.ratio == pytest.approx(1.5, rel=0.03)
    assert joint.pairs == 6


def test_only_measurements_count_as_speed() -> None:
    runs = swept(grid(cache=["cold", "warm"], compile=["locked", "whole"]), 3)
    spoilt = [replace(run, proved="mixed") if run.levels["cache"] == "warm" and run.block == 1 else run for run in runs]
    spoilt = [replace(run, verdict="degraded") if run.block == 2 else run for run in spoilt]
    pairs = {effect.factors[0]: effect.pairs for effect in effects.main_effects(spoilt, DEFAULTS)}
    assert pairs == {"compile": 4, "cache": 2}, "a mixed cache is no warm one, but compile may be compared under it"


def test_a_start_that_is_mixed_by_nature_is_compared() -> None:
    runs = swept(grid(cache=["cold", "foreign:cu128"]), 3)
    runs = [replace(run, proved="cold" if run.levels["cache"] == "cold" else "mixed") for run in runs]
    (effect,) = effects.main_effects(runs, DEFAULTS)
    assert effect.pairs == 3


def test_pairs_that_did_not_run_side_by_side_are_told() -> None:
    runs = swept(grid(compile=["locked", "whole"]), 3)
    later = [replace(run, sweep="later") if run.levels["compile"] == "whole" else run for run in runs]
    assert effects.main_effects(later, DEFAULTS)[0].apart == 3
    assert "3 of these pairs did not run side by side" in sentences(conclude(later, DEFAULTS))


def test_a_cell_run_twice_shows_the_noise_and_counts_for_no_effect() -> None:
    runs = swept(grid(compile=["locked", "whole"]), 5, aa=True)
    twice = effects.same_twice(runs)
    assert twice is not None
    assert twice.pairs == 5
    assert not twice.clear
    assert effects.main_effects(runs, DEFAULTS)[0].pairs == 5
    text = sentences(conclude(runs, DEFAULTS))
    assert re.search(r"compile=whole is \d\.\d+x locked \(.* to .*, 5 pairs\); A/A .* to ", text)


# Failures


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(0, 10, 0, 0.3085), (10, 10, 0.6915, 1), (5, 10, 0.1871, 0.8129), (1, 20, 0.0013, 0.2487)],
)
def test_shares_have_the_published_intervals(k: int, n: int, low: float, high: float) -> None:
    found = failures.share(k, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 3, 5, 10])
def test_shares_cover_by_counting(n: int) -> None:
    shares = [failures.share(k, n) for k in range(n + 1)]
    for rate in np.linspace(0.001, 0.999, 97):
        held = sum(
            math.comb(n, one.k) * rate**one.k * (1 - rate) ** (n - one.k)
            for one in shares
            if one.low <= rate <= one.high
        )
        assert held >= 0.95


@given(st.integers(0, 8), st.integers(1, 8), st.integers(0, 8), st.integers(1, 8))
def test_one_stratum_is_fishers_test(k1: int, n1: int, k2: int, n2: int) -> None:
    k1, k2 = min(k1, n1), min(k2, n2)
    found = failures.exact_test([(k1, n1, k2, n2)])
    assert found == pytest.approx(stats.fisher_exact([[k1, n1 - k1], [k2, n2 - k2]]).pvalue)


def test_strata_are_added_up_exactly() -> None:
    """Against counting all ways in which each stratum's failures could have fallen on its runs."""
    tables = [(2, 3, 0, 2), (1, 2, 1, 4)]
    totals: dict[int, int] = {}
    ways = [list(itertools.combinations(range(n1 + n2), k1 + k2)) for k1, n1, k2, n2 in tables]
    for falls in itertools.product(*ways):
        total = sum(sum(i < n1 for i in fall) for fall, (_, n1, _, _) in zip(falls, tables, strict=True))
        totals[total] = totals.get(total, 0) + 1
    seen = totals[3]
    exact = sum(count for count in totals.values() if count <= seen) / sum(totals.values())
    assert failures.exact_test(tables) == pytest.approx(exact)


def test_levels_are_compared_where_all_else_is_equal() -> None:
    """Pooled, `a` fails more often; within each wheel it does not (Simpson)."""
    counts = {("old", "a"): (8, 10), ("old", "b"): (2, 2), ("new", "a"): (0, 2), ("new", "b"): (2, 10)}
    runs = [
        Record({"wheel": wheel, "compile": level}, 1, "failed" if i < k else "ok", RACE if i < k else "")
        for (wheel, level), (k, n) in counts.items()
        for i in range(n)
    ]
    assert failures.by_level(runs, RACE)["compile"]["a"].k > failures.by_level(runs, RACE)["compile"]["b"].k
    p = failures.compare(runs, RACE, "compile", "a", "b")
    assert p is not None
    assert p > 0.5
    assert failures.compare(runs, RACE, "compile", "a", "nothing") is None


def test_a_run_that_died_of_something_else_says_nothing() -> None:
    run = Record({}, 1, "failed", "memory.gpu_oom")
    assert failures.failed(run, RACE) is None
    assert failures.failed(run, failures.ANY) is True
    assert failures.failed(replace(run, verdict="killed", cause="sweep.interrupted"), failures.ANY) is None
    assert failures.failed(replace(run, verdict="degraded", cause="cache.warm_missed"), RACE) is False
    assert failures.causes([run, replace(run, cause=RACE), replace(run, cause=RACE)]) == [
        RACE,
        "memory.gpu_oom",
        failures.ANY,
    ]


# Attribution


def explained(records: Sequence[Record]) -> attribution.Attribution:
    return attribution.attribute([(record.levels, record.failed) for record in records])


def test_rates_are_integrated_to_chances() -> None:
    for mixture in (attribution.EXPOSED, attribution.SPARED, attribution.ONE_RATE, attribution.ANY_RATE):
        for n in (1, 4, 9):
            chances = [math.comb(n, k) * math.exp(float(attribution._log_rate(k, n, mixture))) for k in range(n + 1)]
            assert sum(chances) == pytest.approx(1)


@pytest.mark.parametrize("count", [2, 3, 5, 9, 20])
@pytest.mark.parametrize("few", [False, True])
def test_sets_of_levels_share_a_prior_of_one(count: int, few: bool) -> None:
    sets = attribution._subsets([str(i) for i in range(count)], few)
    assert sum(prior for _, prior in sets) == pytest.approx(1)
    assert len({chosen for chosen, _ in sets}) == len(sets)
    assert all(0 < len(chosen) < count for chosen, _ in sets)
    assert math.isclose(sum(attribution.PRIOR.values()), 1)


def test_a_level_that_fails_is_named() -> None:
    runs = swept(
        grid(compile=["locked", "whole", "unlocked"], cache=["cold", "warm"]), 6, lambda c: c["compile"] == "unlocked"
    )
    told = explained(runs).told
    assert told is not None
    assert (told.kind, told.levels) == ("levels", {"compile": ("unlocked",)})


def test_levels_that_fail_only_sometimes_are_named() -> None:
    cells = grid(compile=["locked", "unlocked", "firstlock"], wheel=["old", "new"], cache=["cold", "warm"])
    runs = swept(cells, 10, lambda cell: 0.4 if cell["compile"] != "locked" else 0.0)
    told = explained(runs).told
    assert told is not None
    assert told.levels == {"compile": ("firstlock", "unlocked")}


def test_two_levels_that_fail_together_are_named() -> None:
    cells = grid(compile=["locked", "unlocked"], wheel=["old", "new"], cache=["cold", "warm"])
    runs = swept(cells, 6, lambda cell: (cell["compile"], cell["wheel"]) == ("unlocked", "old"))
    told = explained(runs).told
    assert told is not None
    assert (told.kind, told.levels) == ("both", {"compile": ("unlocked",), "wheel": ("old",)})


def test_what_moved_together_is_not_told_apart() -> None:
    cells = [{"wheel": "cu128", "cache": "warm"}, {"wheel": "cu130", "cache": "foreign"}]
    found = explained(swept(cells, 10, lambda cell: cell["wheel"] == "cu130"))
    assert found.told is None
    assert found.explanations[0].posterior == pytest.approx(found.explanations[1].posterior)
    assert {tuple(one.levels) for one in found.explanations[:2]} == {("wheel",), ("cache",)}
    assert not found.sure_factors


def test_failures_that_no_factor_explains_are_told_so() -> None:
    runs = swept(grid(compile=["locked", "whole"], cache=["cold", "warm"]), 80, lambda cell: 0.4)
    told = explained(runs).told
    assert told is not None
    assert told.kind == "none"


def test_a_machine_that_breaks_is_no_level() -> None:
    runs = swept(grid(compile=["locked", "whole"], cache=["cold", "warm"]), 10)
    broken = [replace(run, verdict="failed", cause=RACE) if run.started >= 18 else run for run in runs]
    told = explained(broken).told
    assert told is not None
    assert (told.kind, told.since) == ("time", 18)
    assert "Failures begin after run 18, whatever the levels" in sentences(conclude(broken))


def test_an_order_that_is_not_random_leaves_time_open() -> None:
    runs = swept(grid(compile=["locked", "unlocked"]), 8, lambda cell: cell["compile"] == "unlocked")
    first, then = ([run for run in runs if run.levels["compile"] == level] for level in ("locked", "unlocked"))
    certain = [explained(order).explanations[0].posterior for order in (runs, [*first, *then])]
    assert certain[1] < certain[0]


def test_few_runs_leave_it_open_and_no_failure_leaves_nothing() -> None:
    found = explained(swept(grid(compile=["locked", "unlocked"]), 1, lambda cell: cell["compile"] == "unlocked"))
    assert found.told is None
    assert found.explanations[0].levels == {"compile": ("unlocked",)}
    assert explained(swept(grid(compile=["locked", "unlocked"]), 3)).explanations == []


# Confounders


def test_factors_that_moved_together_are_named_with_the_one_run_that_separates_them() -> None:
    cells = [{"wheel": "cu128", "cache": "warm"}, {"wheel": "cu130", "cache": "cold"}]
    gaps = confounders.confounded(cells)
    assert {gap.factor for gap in gaps} == {"wheel", "cache"}
    assert all(gap.differ == {"wheel": ("cu128", "cu130"), "cache": ("warm", "cold")} for gap in gaps)
    (new,) = confounders.separating(cells)
    assert confounders.confounded([*cells, new]) == []
    (other,) = confounders.separating(cells, impossible=[new])
    assert other != new
    assert confounders.separating(cells, impossible=[new, other]) == []


@settings(deadline=None)
@given(st.sets(st.tuples(*[st.sampled_from("abc")] * 3), min_size=1, max_size=9))
def test_separating_runs_leave_nothing_confounded(chosen: set[tuple[str, ...]]) -> None:
    cells = [dict(zip("xyz", cell, strict=True)) for cell in sorted(chosen)]
    new = confounders.separating(cells)
    assert confounders.confounded([*cells, *new]) == []
    assert len(new) <= len(confounders.confounded(cells))


def test_a_grid_confounds_nothing() -> None:
    assert confounders.confounded(grid(a=["1", "2", "3"], b=["1", "2"], c=["1", "2"])) == []


def test_runs_are_proposed_where_explanations_disagree() -> None:
    cells = [{"wheel": "cu128", "cache": "warm"}, {"wheel": "cu130", "cache": "foreign"}]
    found = explained(swept(cells, 10, lambda cell: cell["wheel"] == "cu130"))
    first = confounders.telling(found.explanations, confounders.untried(cells))[0]
    assert first in ({"wheel": "cu128", "cache": "foreign"}, {"wheel": "cu130", "cache": "warm"})
    assert confounders.untried(cells, impossible=grid(wheel=["cu128", "cu130"], cache=["warm", "foreign"])) == []
    assert confounders.telling(found.explanations, cells) == [], "runs that are there tell no more"


def test_more_repeats_are_asked_only_of_cells_that_would_tell() -> None:
    cells = grid(compile=["locked", "whole", "eager", "unlocked", "firstlock"], cache=["cold", "warm"])
    rates = {"unlocked": 1.0, "firstlock": 0.4}
    found = conclude(swept(cells, 3, lambda cell: rates.get(cell["compile"], 0.0), seed=2), DEFAULTS)["failures"][0]
    assert found["told"] is None
    assert 1 <= len(found["next"]) <= 3
    assert not any("eager" in line and "locked,unlocked" in line for line in found["next"])


# Sentences


def test_the_conclusion_names_cause_levels_counts_and_certainty() -> None:
    runs = swept(
        grid(compile=["locked", "whole", "unlocked"], wheel=["t211", "t213"]),
        20,
        lambda cell: (cell["compile"] == "unlocked") * (1.0 if cell["wheel"] == "t211" else 0.5),
        lambda cell: 1.12 if cell["compile"] == "whole" else 1.0,
    )
    text = sentences(conclude(runs, DEFAULTS))
    assert re.search(rf"^{RACE}: \d\d of 120 runs \(\d+ %; \d+ to \d+ %\)\.$", text, re.MULTILINE)
    assert re.search(r"Fails under compile=unlocked: \d\d of 40 runs .*; else 0 of 80 runs \(0 %; 0 to 5 %\)", text)
    assert re.search(r"smallest set of levels that separates them; certainty (> )?99", text)
    assert re.search(r"How often depends on wheel: t211 20 of 20, t213 \d+ of 20", text)
    assert re.search(r"^compile=whole is 1\.1\d+x locked \(1\.\d+ to 1\.\d+, 40 pairs\)\.$", text, re.MULTILINE)
    assert json.loads(json.dumps(conclude(runs, DEFAULTS)))["failures"][0]["told"]["levels"] == {
        "compile": ["unlocked"]
    }


SPLITS = {"5t3d": (1.0, 0.0, 0.4), "6t2d": (1.08, 0.1, 0.05), "7t1d": (0.7, 0.6, 0.0), "4t4d": (1.0, 0.0, 0.5)}


def splits(speeds: dict[str, float], blocks: int) -> str:
    """What is said of a sweep over the splits; who waited is as in SPLITS."""
    cells = grid(compile=["locked", "triton"], split=list(SPLITS))
    runs = swept(cells, blocks, speed=lambda cell: speeds[cell["split"]])
    waits = [SPLITS[run.levels["split"]][1:] for run in runs]
    runs = [replace(run, targets_waited=t, drafters_waited=d) for run, (t, d) in zip(runs, waits, strict=True)]
    return sentences(conclude(runs, DEFAULTS))


def test_the_best_split_is_named_with_the_next_one_and_who_waited() -> None:
    text = splits({split: speed for split, (speed, *_) in SPLITS.items()}, 8)
    said = r"^The fastest split is 6t2d: 1\.\d+x (5t3d|4t4d) \(1\.0\d+ to 1\.1?\d+, 16 pairs\), which comes next; "
    assert re.search(said, text, re.MULTILINE)
    assert "there neither side is clearly the slower (targets waited 10 % of the time, drafters 5 %)." in text
    assert "fastest compile" not in text, "two levels are ranked by the effect of one"


def test_the_side_that_holds_the_best_split_back_is_named() -> None:
    text = splits(dict.fromkeys(SPLITS, 1.0) | {"7t1d": 1.2}, 5)
    assert "The fastest split is 7t1d: " in text
    assert "there drafters are the slower side (targets waited 60 % of the time, drafters 0 %)." in text


@pytest.mark.parametrize(("blocks", "said"), [(1, "once each)"), (6, "12 pairs)")])
def test_splits_that_are_alike_have_no_fastest(blocks: int, said: str) -> None:
    text = splits(dict.fromkeys(SPLITS, 1.0), blocks)
    (line,) = [line for line in text.splitlines() if "fastest" in line]
    assert re.match(r"No split is shown to be the fastest: \dt\dd leads, 1\.0\d+x \dt\dd \(", line)
    assert said in line


def test_one_run_a_split_ranks_nothing_for_sure_and_a_split_that_never_ran_beside_the_others_none() -> None:
    cells = grid(split=list(SPLITS))
    assert "No split is shown to be the fastest: 6t2d leads, 1.18x 5t3d (1 pair)." in sentences(
        conclude(swept(cells, 1, speed=lambda cell: SPLITS[cell["split"]][0] ** 2), DEFAULTS)
    )
    apart = [replace(run, block=run.block + 9 * (run.levels["split"] == "6t2d")) for run in swept(cells, 3)]
    assert "fastest" not in sentences(conclude(apart, DEFAULTS))


def test_an_interval_that_tells_nothing_is_not_printed_but_the_repeat_that_would_tell() -> None:
    speeds = {("0", 1): 1.0, ("7", 1): 3.0, ("0", 2): 1.0, ("7", 2): 0.4}
    runs = [Record({"seed": seed}, block, "ok", ktok_s=speed) for (seed, block), speed in speeds.items()]
    text = sentences(conclude(runs, {"seed": "0"}))
    # Of log 3 and log 0.4 the deviation is 1.42; 2.101 x 1.42 / sqrt(19) is the first below log 2 (t tables).
    assert "seed=7 is 1.10x seed=0 (2 pairs, too few runs to tell: try repeat=19).\n" in text
    assert " to " not in text.split("is 1.10x")[1].replace("to tell", "")
    alike = [replace(run, levels={"split": {"0": "1t1d", "7": "2t1d"}[run.levels["seed"]]}) for run in runs]
    text = sentences(conclude(alike, {"split": "1t1d"}))
    leads = (
        "No split is shown to be the fastest: 2t1d leads, 1.10x 1t1d (2 pairs, too few runs to tell: try repeat=19)."
    )
    assert leads in text


def test_the_repeat_that_would_tell_does_with_the_same_noise() -> None:
    draw = random.Random(1)
    logs = [[draw.gauss(0, 0.5) for _ in range(3)] for _ in range(2)]
    found = effects.estimate(logs)
    assert found.low is not None
    assert found.high is not None
    seen = {"low": math.exp(found.low), "high": math.exp(found.high), "pairs": 6}
    assert effects.too_wide({"low": 0.4, "high": 1.7})
    assert not effects.too_wide({"low": 0.6, "high": 1.7})
    assert not effects.too_wide({"low": 1.1, "high": 9.0}), "that it is faster is known"
    half = (found.high - found.low) / 2 / stats.t.ppf(0.975, 4) * math.sqrt(6)  # of one pair
    repeat = effects.telling_repeat(seen, 3)
    assert stats.t.ppf(0.975, 2 * repeat - 2) * half / math.sqrt(2 * repeat) <= math.log(2)


def test_the_command_to_paste_keeps_what_the_sweep_was_told() -> None:
    cells = [{"wheel": "cu128", "cache": "warm"}, {"wheel": "cu130", "cache": "foreign"}]
    words = ["-m", "wheel=cu128,cu130", "data.path=my chats.jsonl", "repeat=3", "rerun=all", "compile=unlocked"]
    found = conclude(swept(cells, 3), DEFAULTS, words)
    (line,) = found["separate"]
    python, module, name, *rest = shlex.split(line)
    assert [python, module, name] == ["python", "-m", "sweeper"]
    assert rest[-3:] == ["data.path=my chats.jsonl", "compile=unlocked", "repeat=3"]
    assert rest[:2] in (["cache=foreign", "wheel=cu128"], ["cache=warm", "wheel=cu130"])
    text = sentences(found)
    assert "Not told apart: cache and wheel moved together (cache=" in text
    assert line in text
    assert "\nThen, of all runs together: python -m sweeper.analysis runs\n" in text


@pytest.mark.parametrize(
    ("cells", "blocks", "rate", "said"),
    [
        (1, 1, 0.0, "Nothing failed in 1 run"),
        (1, 3, 1.0, "there is nothing to compare it with"),
        (4, 3, 0.0, "Nothing failed in 12 runs (0 to 26 %)"),
        (4, 3, 1.0, "Every run that could show it did"),
        (200, 2, 0.1, "of 400 runs"),
    ],
)
def test_it_reads_well_for_any_sweep(cells: int, blocks: int, rate: float, said: str) -> None:
    several = grid(a=[str(i) for i in range(max(1, cells // 8))], b=["1", "2"], c=["1", "2"], d=["1", "2"])[:cells]
    text = sentences(conclude(swept(several, blocks, lambda cell: rate), DEFAULTS))
    assert said in text
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) < 200
    assert "nan" not in text


def test_nothing_that_ran_says_so() -> None:
    skipped = Record({"compile": "triton"}, 1, "skipped")
    assert sentences(conclude([skipped])) == "No run says anything: 1 skipped.\n"
    assert sentences(conclude([])) == "No run says anything: there is none.\n"
    both = sentences(conclude([skipped, Record({"compile": "locked"}, 1, "ok", ktok_s=1.0)]))
    assert "Not counted: 1 skipped." in both


# When to stop


def test_blocks_end_when_every_interval_is_narrow_and_not_before_five() -> None:
    cells = grid(compile=["locked", "whole"])
    assert not stopping.enough(swept(cells, 4), 10.0, DEFAULTS)[0]
    sure, why = stopping.enough(swept(cells, 5), 10.0, DEFAULTS)
    assert sure
    assert re.search(r"Stopped after 5 blocks: .* narrower than 1e\+03% \(widest: compile=whole against locked, ", why)
    sure, why = stopping.enough(swept(cells, 9), 0.0001, DEFAULTS)
    assert not sure
    assert "not reached after 9 blocks: compile=whole against locked is the widest" in why


def test_a_level_that_always_fails_is_not_waited_for() -> None:
    runs = swept(grid(compile=["locked", "whole", "unlocked"]), 6, lambda cell: cell["compile"] == "unlocked")
    assert stopping.enough(runs, 0.2, DEFAULTS)[0]
    alone = swept(grid(compile=["locked", "unlocked"]), 6, lambda cell: cell["compile"] == "unlocked")
    assert stopping.enough(alone, 0.2, DEFAULTS) == (
        False,
        "until=ci<20%: after 6 blocks there is no effect on speed to know.",
    )


# Run directories


def described(folder: Path, **facts: Any) -> None:
    """Give a made-up run the record of what it computed from."""
    run = json.loads((folder / "run.json").read_text())
    changed = facts.pop("settings", {"optim": {"lr": 0.1}})
    run["facts"] = {"settings": changed, "workload": "dflash", "code": "c0de", "argv": []} | facts
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "spec.json").write_text(json.dumps(changed))


def test_records_are_read_from_run_directories(tmp_path: Path) -> None:
    cell = {"compile": "locked", "cache": "warm"}
    first = write_run(tmp_path, cell, told=[], exit_code=3)
    write_run(tmp_path, cell, role="prime", attempt=7)
    warm = write_run(tmp_path, cell, repeat=2, told=events(pace=0.5), cache=proof("warm", "mixed"))
    open_ = write_run(tmp_path, cell, repeat=3, finished=False)
    found = sorted(read([warm, first, open_, *tmp_path.glob("runs/*a7")]), key=lambda record: record.block)
    assert [(r.block, r.verdict, r.proved) for r in found] == [(1, "failed", "cold"), (2, "degraded", "mixed")]
    assert found[0].cause
    assert found[1].ktok_s == pytest.approx(1.0)
    assert found[1].speed is None
    assert dict(found[0].levels) == cell


def test_a_hang_is_told_with_the_budget_that_called_it_one(tmp_path: Path) -> None:
    hung = {"ended_by": "hung", "exit_code": None, "signal": 9}
    for repeat, stage in enumerate(("warmup", "warmup", "train", ""), start=1):
        one = {"hung_stage": stage, "reason": f"no progress for 60 s in stage {stage}", **hung} if stage else {}
        write_run(tmp_path, {"compile": "whole"}, repeat=repeat, told=[] if stage else events(), **one)
    text = sentences(conclude(read((tmp_path / "runs").iterdir())))
    assert text.startswith("process.hung: 3 of 4 runs (75 %; 19 to 99 %).\n  Hung means here: no progress for 60 s in ")
    assert "for 60 s in stage train (budget.train) or no progress for 60 s in stage warmup (budget.warmup)." in text


def test_a_setting_that_no_cell_names_is_a_factor_where_it_differs(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path, {"compile": level, "cache": "cold"}) for level in ("locked", "whole"))
    described(one, settings={"optim": {"lr": 0.1}, "compile": "locked", "seed": 0})
    described(two, settings={"optim": {"lr": 0.2}, "compile": "whole", "seed": 0}, code="0ther")
    found = read([one, two])
    assert {factor for r in found for factor in r.levels} == {"compile", "cache", "optim.lr", "code"}
    text = sentences(conclude(found))
    assert "code and compile and optim.lr moved together" in text
    described(two, settings={"optim": {"lr": 0.1}, "compile": "whole", "seed": 0}, code="c0de")
    assert {factor for r in read([one, two]) for factor in r.levels} == {"compile", "cache"}


def test_the_build_of_a_wheel_is_a_factor_only_where_the_wheel_does_not_tell_it(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, {"wheel": "pins", "wheel.torch": torch}) for torch in ("2.13.0", "2.14.1")]
    folders.append(write_run(tmp_path, {"wheel": "pins", "wheel.torch": "2.14.1"}, repeat=2))
    for folder, fingerprint in zip(folders, ("a", "b", "b"), strict=True):
        described(folder)
        run = json.loads((folder / "run.json").read_text())
        run["wheel"]["fingerprint"] = fingerprint
        (folder / "run.json").write_text(json.dumps(run))
    assert {factor for r in read(folders) for factor in r.levels} == {"wheel", "wheel.torch"}
    run["wheel"]["fingerprint"] = "c"
    (folders[-1] / "run.json").write_text(json.dumps(run))
    assert {factor for r in read(folders) for factor in r.levels} == {"wheel", "wheel.torch", "wheel.build"}


def test_the_command_prints_a_sweep_or_a_whole_store_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [{"compile": level, "cache": "cold"} for level in ("locked", "whole")]
    folders = [write_run(tmp_path, cell, repeat=r, told=events(pace=1 + r / 100)) for r in (1, 2, 3) for cell in cells]
    (tmp_path / "sweeps" / "few").mkdir(parents=True)
    identities = [json.loads((folder / "run.json").read_text())["identity"] for folder in folders[:4]]
    plan = {"written": 1.0, "command": ["-m"], "runs": [{"identity": one} for one in identities]}
    (tmp_path / "sweeps" / "few" / "plan.json").write_text(json.dumps(plan))
    assert command.main([str(tmp_path)]) == 0
    assert "Nothing failed in 6 runs" in capsys.readouterr().out
    assert command.main([str(tmp_path / "sweeps" / "few"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["told"] == 4
    assert len(of_sweep(tmp_path / "sweeps" / "few")) == 4
    (tmp_path / "sweeps" / "few" / "plan.json").write_text("{}")
    for path in (tmp_path / "sweeps" / "few", tmp_path / "nowhere"):
        assert command.main([str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"path={path}: ")
        assert len(said.splitlines()) == 1
