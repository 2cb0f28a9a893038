"""What a person at a terminal sees of a job."""

from pathlib import Path

import pytest

from dflash.console import Console, line
from dflash.events import EventWriter

STEP = {
    "variant": "",
    "steps": 9,
    "loss": 2.5,
    "accept": None,
    "seconds": 0.25,
    "stage_tok_s": {"target": 2000.0, "drafter": 1500.0},
}


def test_an_earlier_runs_events_are_not_told_again_and_the_last_step_always_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = EventWriter(tmp_path / "events.jsonl")
    events.emit("warning", code="x", message="long ago")
    console = Console(events.path)
    for step in range(1, 10):
        events.emit("step", step=step, **STEP)
    events.emit("end", status="ok")
    console.close()
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "step 1/9: loss 2.50, accepted -, 0.25 s, Ktok/s of each stage alone: target 2.0, drafter 1.5",
        "step 9/9: loss 2.50, accepted -, 0.25 s, Ktok/s of each stage alone: target 2.0, drafter 1.5",
        "ended: ok; after step 9/9: loss 2.50, accepted - (mean of the last 9 steps)",
    ]


def test_the_last_line_tells_what_each_variant_reached(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events = EventWriter(tmp_path / "events.jsonl")
    console = Console(events.path)
    for step in range(1, 21):
        for variant in ("b8", "b16"):
            figures = {"variant": variant, "steps": 20, "loss": 30.0 - step, "accept": 1 + step / 10}
            events.emit("step", step=step, **STEP | figures)
    events.emit("end", status="requeue")
    console.close()
    reached = "after step 20/20: loss 14.50, accepted 2.55 (mean of the last 10 steps)"
    assert capfd.readouterr().err.splitlines()[-1] == f"ended: requeue; b8 {reached}; b16 {reached}"


def test_tau_is_told_with_its_conditions() -> None:
    measured = {"tau": 2.0, "tau_low": 1.8, "tau_high": 2.2, "n": 40, "temperature": 0.0, "block": 8}
    more = {"tau_untrained": 1.0, "identical": 1.0, "distinct4": 0.9}
    assert line({"event": "eval", "variant": "b8", "step": 5, "set": "mine", **measured, **more}) == (
        "b8 step 5, mine: tau 2.00 (1.80 to 2.20, n=40, T=0, block 8), untrained 1.00, identical 1.00, distinct-4 0.90"
    )
