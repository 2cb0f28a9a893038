"""Figures of a run from its events, whatever state the events are in."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import BEGAN, evaluated, events, fanout

from dflash.events import KINDS
from sweeper.measure import figures


def test_throughput_is_tokens_of_the_window_over_its_wall_time() -> None:
    found = figures(events(steps=13, pace=0.5, tokens=400, steady_after=3))
    assert found.steady_steps == 10
    assert found.steady_seconds == pytest.approx(5.0)  # from the end of step 3 to the end of step 13
    assert found.ktok_s == pytest.approx(10 * 400 / 5.0 / 1000)
    assert (found.steps, found.tokens) == (13, 13 * 400)


def test_time_between_steps_counts() -> None:
    """Waiting between two steps is wall time, though no step's own `seconds` hold it."""
    told = events(steps=5, steady_after=3)
    for event in told:
        if event.get("step") == 5:
            event["t"] += 8.0
    assert figures(told).ktok_s == pytest.approx(2 * 500 / 10.0 / 1000)


def test_waiting_before_the_first_step_of_the_window_counts() -> None:
    told = events(steps=5, steady_after=3)
    for event in told:
        if event.get("step", 0) >= 4:
            event["t"] += 8.0
    assert figures(told).steady_seconds == pytest.approx(10.0)


def test_of_two_events_for_one_step_the_first_counts() -> None:
    told = events()
    again = [e | {"tokens": 7, "t": e["t"] + 500.0, "loss": 0.0} for e in told if e.get("step") in (2, 12)]
    assert figures(told + again) == figures(told)


def test_window_without_a_step_before_it_opens_at_its_first_step() -> None:
    assert figures(events(steps=4, pace=2.0, steady_after=0)).steady_seconds == pytest.approx(8.0)


def test_other_figures() -> None:
    found = figures(events(steps=24))
    assert found.time_to_first_step_s == pytest.approx(21.0)
    assert (found.compile_s, found.peak_rss_bytes, found.peak_gpu_bytes) == (17.5, 3_000_000_000, None)
    assert found.loss_first == pytest.approx(5.0 - 0.2 * 5.5)  # the mean of steps 1 to 10
    assert found.loss_last == pytest.approx(5.0 - 0.2 * 19.5)  # of steps 15 to 24
    assert found.accept_last == pytest.approx(1.0 + 0.05 * 19.5)


def test_few_steps_average_all_of_them() -> None:
    found = figures(events(steps=3, steady_after=1))
    assert found.loss_first == found.loss_last == pytest.approx(4.6)


def test_processes_add_up_and_the_end_event_has_the_last_word() -> None:
    told = [
        {"t": 1, "event": "memory", "pid": 1, "rss_bytes": 100, "gpu_bytes": {"0": 5}},
        {"t": 2, "event": "memory", "pid": 1, "rss_bytes": 120, "gpu_bytes": {"0": 9}},
        {"t": 3, "event": "memory", "pid": 2, "rss_bytes": 50, "gpu_bytes": {"0": 1, "1": 30}},
        {"t": 4, "event": "counters", "pid": 1, "compile_seconds": 3},
        {"t": 5, "event": "counters", "pid": 2, "compile_seconds": 4},
    ]
    found = figures(told)
    assert (found.peak_rss_bytes, found.peak_gpu_bytes, found.compile_s) == (170, 30, 7)
    found = figures([*told, {"t": 6, "event": "end", "pid": 1, "status": "ok", "compile_seconds": 6.5}])
    assert (found.peak_rss_bytes, found.compile_s) == (170, 6.5)


def test_the_stream_of_a_fanout_counts_once_and_each_variant_learns_for_itself() -> None:
    alone, found = figures(events()), figures(fanout(events(), "b16", "b8"))
    for name in ("ktok_s", "steady_seconds", "steady_steps", "steady_tokens", "steps", "tokens"):
        assert getattr(found, name) == getattr(alone, name), name
    assert list(found.variants) == ["b16", "b8"]
    assert found.variants["b8"].loss_last == pytest.approx((alone.loss_last or 0) + 0.5)
    assert found.variants["b16"].accept_last == alone.accept_last
    assert (found.loss_last, found.accept_last) == (None, None)
    assert alone.variants == {}


def test_tau_is_the_last_of_each_set() -> None:
    told = [evaluated(12, 1.8, at=300), evaluated(6, 1.4, at=100), evaluated(6, 1.2, "humaneval")]
    found = figures(events() + told).tau
    assert {name: measured["tau"] for name, measured in found.items()} == {"gsm8k": 1.8, "humaneval": 1.2}
    assert {name: found["gsm8k"][name] for name in ("n", "temperature", "block")} == {
        "n": 32,
        "temperature": 0,
        "block": 8,
    }
    several = figures([*fanout(events(), "a", "b"), evaluated(12, 1.8, variant="b"), evaluated(12, 1.6, variant="a")])
    assert {name: learnt.tau["gsm8k"]["tau"] for name, learnt in several.variants.items()} == {"a": 1.6, "b": 1.8}


def test_coverage_and_anchors_are_means() -> None:
    told = [e | {"coverage": 0.1 * e["step"], "anchors": 30} if e["event"] == "step" else e for e in events(steps=5)]
    found = figures(told)
    assert (found.coverage_mean, found.anchors_mean) == (pytest.approx(0.3), 30)


def test_waiting_is_a_share_of_the_window_for_each_side() -> None:
    waits = {"target0": 0.1, "target1": 0.3, "drafter0": 0.8}
    told = [e | {"wait_s": waits} if e["event"] == "step" else e for e in events(steps=13, steady_after=3)]
    found = figures(told)
    assert (found.targets_waited, found.drafters_waited) == (pytest.approx(0.2), pytest.approx(0.8))
    spread = fanout(told, "a", "b")
    assert figures(spread).targets_waited == pytest.approx(0.2), "told twice, waited once"
    own = [e | {"wait_s": {"drafter1": 0.4}} if e.get("variant") == "b" else e for e in spread]
    assert figures(own).drafters_waited == pytest.approx(0.6)
    assert figures(events()).targets_waited is None


def test_evaluations_inside_the_window_are_no_training_time() -> None:
    """Two variants are evaluated on two sets after step 8, one after the other."""
    told = []
    for event in fanout(events(steps=13, pace=1.0, steady_after=3), "a", "b"):
        later = 80.0 if event["event"] == "step" and event["step"] > 8 else 0.0
        waits = {"target0": 0.2 + later} if event.get("step") == 9 else {"target0": 0.2}
        told.append(event | {"t": event["t"] + later, "wait_s": waits})
    taken = (("a", "gsm8k", 68), ("a", "humaneval", 108), ("b", "gsm8k", 88), ("b", "humaneval", 98))
    measured = [evaluated(8, 1.5, prompts, variant, at=at) for variant, prompts, at in taken]
    found = figures(told + measured)
    assert found.steady_seconds == pytest.approx(10.0)
    assert found.ktok_s == pytest.approx(0.5)
    assert found.targets_waited == pytest.approx(0.2)
    others = figures(told + [e for e in measured if e["variant"] == "b"])
    assert others.steady_seconds == pytest.approx(20.0, rel=1e-2), "it stood still until 98, and so did the stream"


def test_variants_of_unequal_speed_have_the_slowest_ones_figure_whatever_their_order() -> None:
    """The fast one is ahead by what lies in the other's queue, and reads faster than the stream can go."""
    fast, slow = (fanout(events(steps=13, pace=pace, steady_after=3), "a") for pace in (0.8, 1.0))
    named = [event | {"variant": "b"} if "variant" in event else event for event in slow]
    assert figures([*fast, *named]).ktok_s == figures(slow).ktok_s
    assert figures([*named, *fast]) == figures([*fast, *named])


@pytest.mark.parametrize("told", [[], [{"event": "end", "t": BEGAN}], events()[:1]])
def test_nothing_known_gives_none(told: list[dict]) -> None:
    found = figures(told)
    assert found.ktok_s is None
    assert found.loss_first is None
    assert found.time_to_first_step_s is None


def test_order_and_duplicates_do_not_matter() -> None:
    told = events()
    right = figures(told)
    mixed = told + told[3:8]
    random.Random(0).shuffle(mixed)
    assert figures(mixed) == right


FIELDS = [
    "t",
    "step",
    "steps",
    "tokens",
    "loss",
    "accept",
    "seconds",
    "steady",
    "pid",
    "rss_bytes",
    "gpu_bytes",
]
FIELDS += ["compile_seconds", "nonfinite", "status", "variant", "set", "tau", "wait_s", "stage_tok_s", "loss_at"]
WORDS = st.sampled_from(["", "x", "1", "cuda:0"])
RUBBISH = st.one_of(
    st.none(),
    st.booleans(),
    WORDS,
    st.integers(),
    st.floats(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(WORDS, st.one_of(st.floats(), WORDS), max_size=2),
)
ODD_EVENTS = st.builds(
    lambda kind, body: body | {"event": kind},
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(FIELDS), RUBBISH),
)


@given(st.lists(ODD_EVENTS, max_size=6))
def test_rubbish_never_raises_and_never_gives_rubbish(told: list[dict]) -> None:
    found = figures(told).to_dict()
    json.dumps(found, allow_nan=False)
    learnt = {f"{v}.{name}": value for v, one in found.pop("variants").items() for name, value in one.items()}
    taus = [sets for name, sets in (found | learnt).items() if name.endswith("tau")]
    assert all(math.isfinite(number) for sets in taus for told in sets.values() for number in told.values())
    for name, value in {n: v for n, v in (found | learnt).items() if not n.endswith("tau")}.items():
        assert value is None or (isinstance(value, int | float) and math.isfinite(value)), name
    assert found["ktok_s"] is None or found["ktok_s"] > 0


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS[1:]), RUBBISH).map(lambda b: b | {"event": "stage", "t": 1.0})))
def test_events_of_other_kinds_change_no_figure(odd: list[dict]) -> None:
    assert figures(events() + odd) == figures(events())
