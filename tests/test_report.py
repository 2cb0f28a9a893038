"""The table of cells and the curves, read from run directories."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import add_events, evaluated, events, fanout, proof, write_run

from sweeper.report import curves
from sweeper.report.table import median_interval, render, rows

LOCKED = {"wheel": "current", "compile": "locked", "cache": "cold"}
UNLOCKED = {"wheel": "current", "compile": "unlocked", "cache": "cold"}
RACE = {
    "t": 1_790_000_030.0,
    "event": "failure",
    "type": "RuntimeError",
    "message": "Detected that you are using FX to symbolically trace a dynamo-optimized function.",
    "traceback": "",
    "worker": "drafter-1",
    "holders": [{"thread": "drafter-0", "path": "aot_autograd > make_fx", "seconds_before": 0.04, "open": True}],
}


def test_a_cell_is_its_repeats(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path, LOCKED, repeat=r, told=events(pace=pace)) for r, pace in ((1, 1.0), (2, 0.5), (3, 2.0))
    ]
    (row,) = rows(folders)
    assert row["n"] == 3
    assert row["verdicts"] == {"ok": 3}
    assert row["ktok_s"]["median"] == pytest.approx(0.5)
    assert (row["ktok_s"]["low"], row["ktok_s"]["high"]) == pytest.approx((0.25, 1.0))
    assert row["ktok_s"]["coverage"] == pytest.approx(0.75)
    assert row["cache"] == {"cold": 3}
    assert "75.0% at n=3" in render([row])


def test_failures_are_told_with_who_held_the_flag(tmp_path: Path) -> None:
    told = [*events(steps=2)[:-1], RACE]
    good = write_run(tmp_path, LOCKED)
    bad = write_run(tmp_path, UNLOCKED, told=told, exit_code=1)
    text = render(rows([good, bad]), 140)
    assert max(map(len, text.splitlines()[:3])) <= 140
    assert "failed: compile=unlocked r1: compile.fx_trace_race" in text
    assert "flag held by drafter-0 in aot_autograd > make_fx (still open)" in text
    (_, failed) = rows([good, bad])
    assert failed["ktok_s"] is None  # a run that failed has no throughput to compare


def test_primes_are_left_out_and_the_last_attempt_counts(tmp_path: Path) -> None:
    first = write_run(tmp_path, LOCKED, told=[], exit_code=3)
    second = write_run(tmp_path, LOCKED, attempt=2)
    prime = write_run(tmp_path, {**LOCKED, "cache": "warm"}, role="prime")
    (row,) = rows([second, prime, first])
    assert row["verdicts"] == {"ok": 1}
    assert row["runs"] == [second.name]


def test_a_directory_without_verdict_is_told_not_dropped(tmp_path: Path) -> None:
    good = write_run(tmp_path, LOCKED)
    open_ = write_run(tmp_path, UNLOCKED, finished=False)
    assert "1 run directories have no readable" in render(rows([good, open_]))
    assert render(rows([])) == "no runs\n"


def test_runs_that_shared_their_machine_are_told(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, LOCKED, repeat=repeat) for repeat in (1, 2)]
    run = json.loads((folders[1] / "run.json").read_text())
    (folders[1] / "run.json").write_text(json.dumps(run | {"beside": 3}))
    assert "1 of 2 runs ran beside others on their machine" in render(rows(folders))
    assert "beside" not in render(rows(folders[:1]))


def test_mixed_cache_states_show(tmp_path: Path) -> None:
    warm = {**LOCKED, "cache": "warm"}
    one = write_run(tmp_path, warm, repeat=1, cache=proof("warm"))
    two = write_run(tmp_path, warm, repeat=2, cache=proof("warm", "mixed"))
    (row,) = rows([one, two])
    assert row["cache"] == {"warm": 1, "mixed": 1}
    assert "cache.warm_missed" in render([row], 100)


def test_tau_is_a_column_where_it_was_measured(tmp_path: Path) -> None:
    told = [[*events(), evaluated(12, tau, at=99)] for tau in (1.5, 1.7, 1.9)]
    measured = [write_run(tmp_path, LOCKED, repeat=r, told=one) for r, one in enumerate(told, 1)]
    plain = write_run(tmp_path, UNLOCKED)
    assert "tau" not in render(rows([plain]))
    head, locked, unlocked, *notes = render(rows([*measured, plain])).splitlines()
    assert "tau" in head
    assert "1.70 [1.50, 1.90]" in locked
    assert " -" in unlocked
    assert not any("loss" in line for line in notes), "one set needs no second table"
    conditions = "32 prompts, T=0, block 8, at most 128 tokens, untrained 1, distinct-4 0.8"
    assert f"tau on gsm8k: {conditions}, share identical to plain decoding 1" in notes


def test_several_sets_and_variants_are_told_apart_below(tmp_path: Path) -> None:
    told = [*events(), evaluated(12, 1.5, "gsm8k"), evaluated(12, 2.5, "humaneval")]
    text = render(rows([write_run(tmp_path, LOCKED, told=told)]))
    assert "2.00" in text.splitlines()[1], "the mean of the sets"
    assert text.splitlines()[3].split() == ["loss", "accept", "tau", "gsm8k", "tau", "humaneval"]
    assert text.splitlines()[4].split() == ["3.500", "1.375", "1.50", "2.50"]
    told = [*fanout(events(), "b8", "b16"), evaluated(12, 1.5, variant="b8"), evaluated(12, 1.6, variant="b16")]
    text = render(rows([write_run(tmp_path, UNLOCKED, told=told)]))
    found = [line.split() for line in text.splitlines()]
    assert ["b8", "3.500", "1.375", "1.50"] in found
    assert ["b16", "4.000", "1.375", "1.60"] in found


@pytest.mark.parametrize(
    ("waited", "said"),
    [
        ((0.05, 0.6), "targets are the slower side: compile=locked cache=cold: "),
        ((0.7, 0.1), "drafters are the slower side: compile=locked cache=cold: "),
        ((0.5, 0.4), ""),
        ((0.01, 0.1), ""),
    ],
)
def test_the_side_that_starves_is_told_when_clear(tmp_path: Path, waited: tuple[float, float], said: str) -> None:
    waits = {"wait_s": dict(zip(("target0", "drafter0"), waited, strict=True))}
    told = [e | waits if e["event"] == "step" else e for e in events()]
    text = render(rows([write_run(tmp_path, {"compile": "locked", "cache": "cold"}, told=told)]))
    numbers = f"targets waited {waited[0]:.0%} of the window for room, drafters {waited[1]:.0%} for batches"
    assert (f"{said}{numbers}" in text) if said else ("slower" not in text)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_interval_holds_the_median_within_the_values(values: list[float]) -> None:
    found = median_interval(values)
    assert found is not None
    assert min(values) <= found["low"] <= found["median"] <= found["high"] <= max(values)
    assert found["coverage"] is None if len(values) < 3 else 0.75 <= found["coverage"] < 1
    assert len(values) < 6 or found["coverage"] >= 0.95


@pytest.mark.parametrize("n", [3, 5, 6, 9, 12])
def test_coverage_is_right_by_counting(n: int) -> None:
    """Each value falls below or above the true median like a coin; the interval misses it when too few do."""
    found = median_interval([float(i) for i in range(n)])
    assert found is not None
    low, high = int(found["low"]), int(found["high"])
    held = sum(low < sum(below) <= high for below in itertools.product((0, 1), repeat=n))
    assert found["coverage"] == pytest.approx(held / 2**n)


def test_interval_covers_in_simulation() -> None:
    draw = random.Random(7)
    hits = 0
    for _ in range(2000):
        found = median_interval([draw.expovariate(1.0) for _ in range(7)])
        assert found is not None
        hits += found["low"] <= math.log(2) <= found["high"]
    assert 0.96 < hits / 2000 < 1.0  # n = 7: the range holds the median with 98.4 %


def test_curves_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path, LOCKED), write_run(tmp_path, UNLOCKED, told=[], finished=False)]
    out = tmp_path / "curves.png"
    assert curves.main([*map(str, folders), "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    told = [*fanout(events(), "b8", "b16"), evaluated(6, 1.5, variant="b8"), evaluated(12, 1.8, variant="b8")]
    wider = tmp_path / "wider.png"
    assert curves.main([str(write_run(tmp_path, {"compile": "whole"}, told=told)), "-o", str(wider)]) == 0
    widths = [int.from_bytes(image.read_bytes()[16:20]) for image in (out, wider)]
    assert widths[1] == 1.5 * widths[0], "a third panel, for tau"
    assert folders[1].name in capsys.readouterr().err
    assert curves.main([str(folders[1]), "-o", str(out)]) == 2
    assert "none of these runs has steps" in capsys.readouterr().err


def test_smoothing_is_a_trailing_mean() -> None:
    values = [float(n) for n in range(1, 11)]
    assert curves.smooth(values) == [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5.5, 6.5]


def test_unreadable_failure_events_do_not_break_the_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path, UNLOCKED, told=[], exit_code=1)
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"t": 1, "event": "failure", "holders": ["rubbish", 3]}\n')
    add_events(folder, [RACE])
    assert "failed" in render(rows([folder]))


def test_runs_whose_caches_are_neither_cold_nor_warm_are_named(tmp_path: Path) -> None:
    foreign = {**LOCKED, "cache": "foreign"}
    told = [write_run(tmp_path, foreign, repeat=n, cache=proof("foreign", "mixed")) for n in (1, 2)]
    text = render(rows([*told, write_run(tmp_path, LOCKED)]))
    assert "mixed: cache=foreign: as counted (runs: 2)" in text
    assert "Mixed are 2 of 3 runs, neither proved cold nor proved warm" in text


def test_a_window_too_short_for_a_speed_is_told_with_the_way_out(tmp_path: Path) -> None:
    few = write_run(tmp_path, {"seed": "0"}, told=events(steps=7))  # four steps in the window
    quick = write_run(tmp_path, {"seed": "1"}, told=events(steps=40, pace=0.04))  # 37 steps in 1.48 s
    enough = write_run(tmp_path, {"seed": "2"}, told=events(steps=13))
    text = render(rows([few, quick, enough]))
    assert "2 of 3 runs were measured for less than 10 steps or 2 s (the shortest: 4 steps, 4.0 s)" in text
    assert "(train.steps=, or those of your command)" in text
    assert "less than 10 steps" not in render(rows([enough]))


def test_checkpoints_that_were_lost_are_told_of_a_run_that_is_ok(tmp_path: Path) -> None:
    lost = {"t": 1_790_000_025.0, "event": "warning", "code": "checkpoint.failed"}
    told = [*events(), *(lost | {"message": f"no checkpoint of step {step} in /x: disk full"} for step in (4, 8))]
    folder = write_run(tmp_path, LOCKED, repeat=2, told=told)
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["verdict"] == "ok"
    assert verdict["reason"] == "2 checkpoints could not be written, the last: no checkpoint of step 8 in /x: disk full"
    assert "compile=locked cache=cold r2: 2 of its checkpoints\n" in render(rows([folder]))
