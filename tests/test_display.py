"""What a person sees of a sweep, on a terminal and in a file."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import BEGAN, evaluated, events, fanout
from test_measure import ODD_EVENTS

from sweeper import display
from sweeper.display import Display, LiveDisplay, duration, make

OK = {"verdict": "ok", "figures": {"ktok_s": 1.234, "time_to_first_step_s": 9.0}, "wall_s": 61.0, "reason": ""}


def test_plain_lines_tell_cell_stage_speed_and_verdict() -> None:
    out = io.StringIO()
    shown = Display(2, False, out)
    shown.run_started(1, "locked warm", 120.0)
    shown.event({"event": "stage", "stage": "load", "t": BEGAN})
    shown.event({"event": "stage", "stage": "train", "t": BEGAN})
    for event in events(steps=12, pace=1.0, tokens=500):
        shown.event(event)
    shown.log_line("not shown")
    shown.run_ended("locked warm", OK)
    shown.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "[1/2] locked warm (about 2:00 min)"
    assert any(line.strip().startswith("load") for line in lines)
    assert any("step 12/12, 0.500 Ktok/s" in line for line in lines)
    assert lines[-1] == "  ok: 1.234 Ktok/s, first step after 9.0 s, 61 s in all"
    assert "not shown" not in out.getvalue()


def test_steps_do_not_flood_a_file() -> None:
    out = io.StringIO()
    shown = Display(1, False, out)
    shown.run_started(1, "cell", None)
    for event in events(steps=500, pace=0.01):
        shown.event(event)
    assert len(out.getvalue().splitlines()) <= 4


def test_verbose_streams_the_log() -> None:
    out = io.StringIO()
    shown = Display(1, True, out)
    shown.log_line("loading weights\n")
    assert out.getvalue() == "  | loading weights\n"


def test_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = Display(3, False, io.StringIO())
    shown.run_started(1, "first", None)
    assert shown.left() is None  # nothing to go by yet
    now[0] += 50.0
    shown.run_ended("first", OK)
    shown.run_started(2, "second", None)
    for event in [e for e in events(steps=10, pace=2.0) if e.get("step", 0) <= 4]:
        shown.event(event)
    assert shown.watch is not None
    assert shown.watch.left() == pytest.approx(12.0)  # six steps of two seconds
    assert shown.left() == pytest.approx(62.0)  # and one more run like the first


def test_warnings_and_failures_are_shown() -> None:
    out = io.StringIO()
    shown = Display(1, False, out)
    shown.run_started(1, "cell", None)
    shown.event({"event": "warning", "code": "rows.skipped", "message": "3 rows have no assistant turn", "t": 1})
    signature = {"cause": "compile.fx_trace_race", "fingerprint": "0123456789ab"}
    shown.run_ended("cell", {"verdict": "failed", "signature": signature, "reason": "exit\nstatus 1", "figures": None})
    assert "rows.skipped: 3 rows have no assistant turn" in out.getvalue()
    assert "failed: compile.fx_trace_race (0123456789ab), exit status 1" in out.getvalue()


def test_lines_of_several_runs_say_which_they_are() -> None:
    out = io.StringIO()
    shown = Display(3, True, out)
    shown.at_once = 2
    shown.run_started(1, "first", None)
    shown.run_started(2, "second", None)
    shown.event({"event": "stage", "stage": "load", "t": BEGAN}, run=1)
    shown.log_line("a line", run=2)
    shown.run_ended("first", OK, run=1)
    shown.event({"event": "stage", "stage": "load", "t": BEGAN}, run=2)
    shown.event({"event": "stage", "stage": "data", "t": BEGAN}, run=1)  # over: nobody asks
    told = out.getvalue().splitlines()[2:]
    assert told[:2] == ["  [1/3] load", "  [2/3] | a line"]
    assert told[2].startswith("  [1/3] first: ok: ")
    assert told[3:] == ["  load"], "the only one left"


def test_a_fanout_advances_once_a_step() -> None:
    shown = Display(1, False, io.StringIO())
    shown.run_started(1, "cell", None)
    for event in fanout(events(steps=12, pace=1.0, tokens=500), "b16", "b8"):
        shown.event(event)
    assert shown.watch is not None
    assert shown.watch.doing().endswith("step 12/12, 0.500 Ktok/s")


def test_an_evaluation_is_shown_with_its_conditions() -> None:
    out = io.StringIO()
    shown = Display(1, False, out)
    shown.run_started(1, "cell", None)
    shown.event(evaluated(500, 2.1, variant="b8"))
    shown.event({"event": "eval", "t": BEGAN, "step": 9, "set": "bare", "tau": 1.5})
    shown.event({"event": "resume", "t": BEGAN, "step": 400, "folder": "/out/step-400"})
    said = "tau of b8 2.10 [2.00, 2.20] on gsm8k (32 prompts, 4000 tokens, 8 slots a block, T=0, untrained 1.00)"
    assert f"  step 500: {said}\n  step 9: tau 1.50 on bare\n" in out.getvalue()
    assert "goes on after step 400 from /out/step-400" in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = make(1, False)
    assert isinstance(shown, LiveDisplay)
    shown.run_started(1, "locked [warm]", 5.0)  # brackets are no markup
    for event in events(steps=12):
        shown.event(event)
    shown._progress.refresh()
    shown.note("a note")
    shown.run_ended("locked [warm]", OK)
    shown.close()
    shown.close()
    text = out.getvalue()
    for part in ("locked [warm]", "step 12/12", "0.500 Ktok/s", "a note", "1.234 Ktok/s"):
        assert part in text


def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert type(make(1, False)) is Display


def test_a_closed_output_does_not_stop_the_sweep() -> None:
    out = io.StringIO()
    shown = Display(1, True, out)
    out.close()
    shown.run_started(1, "cell", None)
    shown.run_ended("cell", OK)


@given(st.lists(ODD_EVENTS, max_size=6))
def test_odd_events_never_raise(told: list[dict]) -> None:
    shown = Display(2, False, io.StringIO())
    shown.event({"event": "step"})  # before any run
    shown.run_started(1, "cell", 3.0)
    for event in told:
        shown.event(event)
    shown.left()
    shown.run_ended("cell", {"verdict": None, "figures": None, "wall_s": "x"})


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (185, "3:05 min"), (7325, "2:02 h")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_speed_is_shown_of_measured_steps_only() -> None:
    shown = Display(1, False, io.StringIO())
    shown.run_started(1, "cell", None)
    assert shown.watch is not None
    told = [event for event in events(steps=8, tokens=500, steady_after=5) if event["event"] == "step"]
    for event in told[:5]:
        shown.event(event | {"t": BEGAN + event["step"] / 100})  # fast, before the window opens
    assert shown.watch.doing() == "train, step 5/8"
    for event in told[5:]:
        shown.event(event | {"t": BEGAN + 0.05 + event["step"] - 5})
    assert shown.watch.doing() == "train, step 8/8, 0.500 Ktok/s"
