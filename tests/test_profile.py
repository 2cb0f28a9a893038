"""What `train.profile` leaves of the steps that a drafter takes, whole or not at all."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash.events import EventReader, EventWriter
from dflash.pipeline import profile
from dflash.pipeline.profile import TABLE, TRACE, profiled
from dflash.pipeline.spans import span
from dflash.settings import JobSettings, SettingError

CPU = torch.device("cpu")


FULL = {"the trace": (profile.shutil, "copyfileobj"), "the table": (profile.os, "replace")}


def tools(folder: Path, steady_after: int = 2, **train: int) -> SimpleNamespace:
    values = {"data": {"path": "-"}, "target": {"model": "-"}, "train": {"steady_after": steady_after} | train}
    return SimpleNamespace(job=JobSettings.from_dict(values), events=EventWriter(folder / "events.jsonl"))


def take(step: int) -> None:
    with span("step"):
        torch.ones(step, 7).mul(2)


def trace(folder: Path) -> list[dict]:
    with gzip.open(folder / TRACE) as file:
        return json.load(file)["traceEvents"]


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in EventReader(folder / "events.jsonl").poll() if event["event"] == kind]


def left(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - {"events.jsonl"}


def test_the_steps_after_warm_up_are_in_the_trace_and_in_the_table(tmp_path):
    done = []
    for step in profiled(range(1, 9), tools(tmp_path, profile=3), CPU):
        take(step)
        done.append(step)
    assert done == list(range(1, 9))
    assert left(tmp_path) == {TRACE, TABLE}
    assert sum(event["name"] == "step" for event in trace(tmp_path) if event["ph"] == "X") == 3
    text = (tmp_path / TABLE).read_text()
    assert text.startswith("Steps 3 to 5 on cpu, torch ")
    assert "aten::mul" in text
    (told,) = events(tmp_path, "profile")
    assert (told["first"], told["last"], told["trace"]) == (3, 5, str(tmp_path / TRACE))


def test_a_job_that_goes_on_from_a_checkpoint_is_profiled_after_its_own_warm_up(tmp_path):
    for step in profiled(range(41, 49), tools(tmp_path, profile=1), CPU):
        take(step)
    assert (tmp_path / TABLE).read_text().startswith("Steps 43 to 43 ")


def test_without_the_setting_nothing_is_recorded(tmp_path):
    for step in profiled(range(1, 9), tools(tmp_path, profile=0), CPU):
        take(step)
        assert not torch.autograd.profiler._is_profiler_enabled
    assert left(tmp_path) == set()


@pytest.mark.parametrize("how", ["fails", "stops"])
def test_a_run_that_ends_while_it_is_profiled_leaves_no_part_of_one(tmp_path, how):
    def run() -> None:
        for step in profiled(range(1, 9), tools(tmp_path, profile=3), CPU):
            take(step)
            if step == 4 and how == "stops":
                break
            assert step < 4, "a made-up failure"

    if how == "fails":
        with pytest.raises(AssertionError, match="made-up"):
            run()
    else:
        run()
    assert left(tmp_path) == set()
    assert not events(tmp_path, "profile")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # another can begin


@pytest.mark.parametrize("what", FULL)
def test_a_profile_that_cannot_be_written_costs_the_profile_not_the_run(tmp_path, monkeypatch, what):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*FULL[what], full)
    done = 0
    for step in profiled(range(1, 9), tools(tmp_path, profile=3), CPU):
        take(step)
        done = step
    assert done == 8
    assert left(tmp_path) == set()
    (told,) = events(tmp_path, "warning")
    assert told["code"] == "profile.failed"
    assert "No space left" in told["message"]


def test_a_trace_that_torch_could_not_write_holds_no_room(tmp_path, monkeypatch):
    """On a full disk torch prints that it failed, and keeps open what it began until the process ends."""
    begun = []

    def full(_: object, path: str) -> None:
        begun.append(os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT))
        os.write(begun[0], b"a beginning")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    for step in profiled(range(1, 9), tools(tmp_path, profile=3), CPU):
        take(step)
    assert os.fstat(begun[0]).st_size == 0
    os.close(begun[0])
    assert left(tmp_path) == set()
    (told,) = events(tmp_path, "warning")
    assert "torch could not write its trace" in told["message"]


def test_a_profile_leaves_steps_to_measure():
    def checked(**train: int) -> JobSettings:
        job = JobSettings.from_dict({"data": {"path": "-"}, "target": {"model": "-"}, "train": train})
        job.check()
        return job

    assert checked(steps=60).train.unmeasured == 3
    assert checked(steps=60, profile=5).train.unmeasured == 9
    assert checked(steps=10, profile=5)
    with pytest.raises(SettingError, match=r"^train\.profile=5: needs more than train\.steps=9: .* begins at step 10$"):
        checked(steps=9, profile=5)
    with pytest.raises(SettingError, match=r"train\.profile=101: must be from 0 to 100"):
        checked(steps=900, profile=101)
