"""What a drafter worker counts as speed."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash import strategies
from dflash.data.rows import Row
from dflash.drafter import Drafter, Geometry
from dflash.events import EventReader, EventWriter
from dflash.pipeline import drafter_worker, target_worker
from dflash.pipeline.average import ThreadAverager
from dflash.pipeline.batch import Batch, BatchSource
from dflash.pipeline.channel import ChannelStats
from dflash.pipeline.drafter_worker import Work, run_drafter
from dflash.pipeline.layout import Layout
from dflash.pipeline.step import FrozenEnds
from dflash.pipeline.target_worker import run_target
from dflash.pipeline.tools import Tools
from dflash.pipeline.window import Window
from dflash.plan import Variant
from dflash.probe import Probe
from dflash.settings import JobSettings
from dflash.weights import draw

TARGET = SimpleNamespace(
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=8,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    taps=[1],
)


class Backlog:
    """A channel in which `waiting` batches lie since long ago; those after them are made when they are asked for."""

    def __init__(self, waiting: int) -> None:
        self.waiting, self.given = waiting, 0

    full = False

    def get(self, device: torch.device) -> Batch:
        row = torch.arange(16)[None]
        ones = torch.ones_like(row, dtype=torch.bool)
        batch = Batch(0, row, ones, row * 0, row, 16, torch.randn(1, 16, 8), anchors=torch.tensor([[2, 5]]))
        self.given += 1
        return replace(batch, made=1.0 if self.given <= self.waiting else time.time())

    def leave(self) -> None:
        """No target waits here."""

    def stats(self) -> ChannelStats:
        return ChannelStats(0, 0.0, 0.0)


def run(tmp_path: Path, waiting: int, steady_after: int, stop_at: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """Status and step events of a run of nine steps; asked to stop during step `stop_at`."""
    tmp_path.mkdir(exist_ok=True)
    torch.manual_seed(0)
    values = {
        "data": {"path": "-", "row_tokens": 16},
        "target": {"model": "-"},
        "drafter": {"block": 4, "anchors": 2, "layers": 1},
        "train": {"steps": 9, "steady_after": steady_after, "save": False},
        "compile": "eager",
    }
    job = JobSettings.from_dict(values)
    events = EventWriter(tmp_path / "events.jsonl")
    probe = Probe(events)
    strategy = strategies.make("eager", "cpu", probe)
    geometry = Geometry.settle(job.drafter, TARGET)
    drafter = Drafter(geometry, strategy.prepare, strategy.attend, draw(geometry, job.seed))
    ends = FrozenEnds(torch.randn(16, 8), 1.0, torch.randn(16, 8), 15)
    layout = Layout.of(job)
    channel = Backlog(waiting)
    tools = Tools(
        job, layout, {"": 0}, {(0, 0): channel}, events, probe, strategy, lambda: 0 < stop_at <= channel.given
    )
    variant = Variant("", job, geometry, 15, [1], tmp_path, tmp_path, {})
    work = Work(layout.seats[0], variant, drafter, ends, ThreadAverager(1), None, TARGET, {})
    status, _ = run_drafter(tools, work)
    return status, [e for e in EventReader(tmp_path / "events.jsonl").poll() if e["event"] == "step"]


def steady_steps(tmp_path: Path, waiting: int, steady_after: int) -> list[int]:
    status, steps = run(tmp_path, waiting, steady_after)
    assert status == "ok"
    return [e["step"] for e in steps if e["steady"]]


def test_the_measured_window_opens_after_warm_up_when_nothing_waits(tmp_path):
    assert steady_steps(tmp_path, waiting=0, steady_after=3) == [5, 6, 7, 8, 9]


def test_batches_that_piled_up_during_warm_up_are_no_speed(tmp_path):
    assert steady_steps(tmp_path, waiting=7, steady_after=3) == [9]


def test_the_window_opens_behind_the_first_batch_made_after_warm_up_and_stays_open():
    window = Window()
    assert not window.has(5.0, False, True), "warm-up is not over"
    window.warm = 10.0
    assert [window.has(made, False, True) for made in (9.0, 10.5, 9.5, 11.0)] == [False, False, True, True]


def test_the_window_has_as_many_turns_of_each_target():
    window = Window(warm=10.0)
    counted = [window.has(11.0, False, round_) for round_ in (False, False, True, False, False, True)]
    assert counted == [False] * 3 + [True] * 3


def test_a_backlog_that_never_shrinks_may_be_as_old_as_it_likes():
    window = Window(warm=10.0)
    full = [True, True, False, True, True, True, True, True, False]
    assert [window.has(1.0, one, True) for one in full] == [False] * 8 + [True], "after five in a row"


def test_a_step_tells_how_long_ago_its_batch_was_made(tmp_path):
    _, steps = run(tmp_path, waiting=5, steady_after=3)
    assert [e["lag"] is None for e in steps] == [True] * 5 + [False] * 4, "made before warm-up ended"
    assert all(0 < e["lag"] < e["seconds"] for e in steps[5:])


def test_a_run_that_only_uses_up_its_backlog_measures_nothing(tmp_path):
    assert steady_steps(tmp_path, waiting=9, steady_after=3) == []


def test_figures_read_a_step_late_are_those_of_their_step(tmp_path, monkeypatch):
    """On a GPU the next step is under way when a step's figures are read."""
    told = []
    for behind in (0, 1):
        monkeypatch.setitem(drafter_worker.BEHIND, "cpu", behind)
        status, steps = run(tmp_path / str(behind), waiting=0, steady_after=3)
        assert status == "ok"
        told.append([(e["step"], e["loss"], e["accept"], e["grad_norm"], e["lr"]) for e in steps])
    assert told[0] == told[1]
    assert [step for step, *_ in told[0]] == list(range(1, 10))


@pytest.mark.parametrize(("behind", "last"), [(0, 4), (1, 5)])
def test_a_run_asked_to_stop_ends_after_the_step_under_way_and_tells_it(tmp_path, monkeypatch, behind, last):
    monkeypatch.setitem(drafter_worker.BEHIND, "cpu", behind)
    status, steps = run(tmp_path, waiting=0, steady_after=3, stop_at=4)
    assert status == "interrupted"  # nothing was to be saved
    assert [e["step"] for e in steps] == list(range(1, last + 1))


class Taken(list):
    """A channel that keeps what it is given, and whose drafter leaves after four batches."""

    put = list.append

    @property
    def left(self):
        return len(self) >= 4


def make_batches(tmp_path, features):
    """What a target with these features hands over until its drafter leaves."""
    job = JobSettings.from_dict({"data": {"path": "-", "row_tokens": 16}, "target": {"model": "-"}})
    tokens = np.arange(16)
    row = Row(tokens, tokens >= 0, tokens * 0, tokens, 16)
    source = BatchSource(SimpleNamespace(row=lambda number: replace(row, tokens=tokens + number)), 1, 0)
    target = SimpleNamespace(device=torch.device("cpu"), features=features)
    events = EventWriter(tmp_path / "events.jsonl")
    probe = Probe(events)
    strategy = strategies.make("eager", "cpu", probe)
    channel = Taken()
    tools = Tools(job, Layout.of(job), {"": 0}, {(0, 0): channel}, events, probe, strategy, lambda: False)
    run_target(tools, 0, target, source)
    return channel


def test_a_target_that_is_a_batch_ahead_of_itself_hands_over_the_same_ones(tmp_path, monkeypatch):
    """As on a GPU, which has its next batch to do before the last one is handed over."""
    handed = []
    for ahead in (0, 1):
        monkeypatch.setitem(target_worker.AHEAD, "cpu", ahead)
        channel = make_batches(tmp_path, lambda tokens, document, position: tokens[..., None])
        handed.append([(b.index, b.features.flatten().tolist(), b.anchors.tolist()) for b in channel])
    assert handed[0] == handed[1]
    assert [(index, features[0]) for index, features, _ in handed[0]] == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(("last", "ends"), [(4, True), (3, False)])
def test_only_a_batch_that_somebody_waits_for_can_fail_a_target(tmp_path, monkeypatch, last, ends):
    """The drafter leaves with four batches; a target ahead of itself is at a fifth by then."""
    monkeypatch.setitem(target_worker.AHEAD, "cpu", 1)
    made, channel = [], []
    monkeypatch.setattr(Taken, "left", property(lambda self: len(made) > 4))

    def features(tokens, document, position):
        made.append(tokens)
        if len(made) > last:
            raise RuntimeError("out of memory")
        return tokens[..., None]

    with nullcontext() if ends else pytest.raises(RuntimeError, match="out of memory"):
        channel = make_batches(tmp_path, features)
    assert [b.index for b in channel] == ([0, 1, 2] if ends else [])
