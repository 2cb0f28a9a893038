"""Runs on one machine share its GPUs without meeting, and say who was measured beside others."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import driver
from fakes.command import alive, runs, started, stepping, sweeper, until, workload

from dflash.settings import SettingError
from sweeper import leases, machine

GPUS = 4


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's tool that lists four GPUs, and a build of torch that could compute on them, as far as anybody asks."""
    for name, value in driver.gpus(tmp_path, GPUS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SWEEPER_LEASES", str(tmp_path / "leases"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@contextmanager
def command(store: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command in an interpreter of its own, which sees the made-up GPUs."""
    words = (*words, f"store={store}", "tracking=none", "report=false", "device=cuda")
    pipe = subprocess.PIPE
    line = [sys.executable, "-m", "sweeper", "-m", *words]
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def records(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(store.glob("runs/*/run.json"))]


def devices(run: dict[str, Any]) -> set[str]:
    return set(run["env"]["CUDA_VISIBLE_DEVICES"].split(","))


def test_as_many_runs_at_once_as_the_splits_allow_each_with_its_gpus(gpus: None, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with command(store, *workload("ok"), "split=1t1d", "seed=0,1,2,3", "jobs=auto") as one:
        out, err = one.communicate(timeout=120)
    assert one.returncode == 0, err
    verdicts = runs(store)
    assert [verdict["verdict"] for verdict in verdicts.values()] == ["ok"] * 4
    several = list(zip(records(store), verdicts.values(), strict=True))
    assert all(len(devices(run)) == 2 for run, _ in several)
    for run, _ in several:
        # While this one's child started, others may have been under way: on other GPUs.
        at_once = [r for r, v in several if r != run and r["started"] < run["started"] < r["started"] + v["child_s"]]
        assert all(not devices(run) & devices(r) for r in at_once)
    assert max(run["beside"] for run, _ in several) == 1
    assert "runs ran beside others on their machine" in out


def test_a_run_measured_alone_waits_for_another_sweep_until_its_processes_are_gone(gpus: None, tmp_path: Path) -> None:
    first, second, pids = tmp_path / "one", tmp_path / "two", tmp_path / "pids"
    # The first harness is killed; its run's tree lives on for the grace, and its GPUs are not free before that is over.
    with command(first, *workload("orphan", pids), "split=1t1d", "grace=2") as killed:
        until(lambda: first.exists() and stepping(first))
        with command(second, *workload("ok"), "split=1t1d") as waiting:
            line = next(line for line in waiting.stderr or [] if "waiting" in line)
            assert f"0,1,2,3 held by locked cold 1t1d threads in {first} (pid {killed.pid})" in line
            tree = [int(pid) for pid in pids.read_text().split()]
            os.kill(killed.pid, signal.SIGKILL)
            waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    (run,) = records(second)
    assert "CUDA_VISIBLE_DEVICES" not in run["env"], "a command of one's own, alone, sees the whole machine"
    assert run["beside"] == 0
    assert not any(alive(pid) for pid in tree)


def test_ctrl_c_ends_all_runs_and_each_has_its_verdict(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cells = ["-m", *workload("slow"), "seed=0,1,2,3", "jobs=3", "grace=20"]
    with started(store, *cells) as harness:
        until(lambda: len(list(store.glob("runs/*/events.jsonl"))) == 3 and stepping(store))
        time.sleep(0.5)
        harness.send_signal(signal.SIGINT)
        out, err = harness.communicate(timeout=60)
    assert harness.returncode == 130, err
    found = runs(store)
    assert [verdict["signature"]["cause"] for verdict in found.values()] == ["sweep.interrupted"] * 3
    assert {verdict["exit"]["code"] for verdict in found.values()} == {143}
    assert err.count("once more to end at once") == 1
    assert [run["beside"] for run in records(store)] == [2] * 3
    assert out.count("sweep.interrupted") >= 3


def test_a_warm_run_waits_for_the_cold_one_that_leaves_its_caches(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sweeper(store, "-m", *workload("ok"), "cache=cold,warm", "seed=0,1", "jobs=4")
    assert done.returncode == 0, done.stderr
    assert "priming" not in done.stderr
    assert sorted(verdict["cache"]["proved"] for verdict in runs(store).values()) == ["cold", "cold", "warm", "warm"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPER_LEASES", str(tmp_path / "leases"))
    monkeypatch.setattr(machine, "devices", lambda: {str(n): f"GPU-{n}" for n in range(GPUS)})


def never(why: str) -> bool:
    raise AssertionError(f"had to wait: {why}")


def test_who_finds_too_few_gpus_takes_none(here: None) -> None:
    said: list[str] = []

    def once(why: str) -> bool:
        said.append(why)
        return False

    with leases.held(3, False, "three", never) as three:
        assert three is not None
        assert three.devices == ("0", "1", "2")
        with leases.held(2, False, "two", once) as two:
            assert two is None
        assert said == [f"waiting for GPUs: 0,1,2 held by three (pid {os.getpid()})"]
        with leases.held(1, False, "one", never) as one:
            assert one is not None
            assert one.devices == ("3",)
            assert (one.beside(), three.beside()) == (1, 1)
        assert three.beside() == 0
    with leases.held(4, True, "all", never) as everything:
        assert everything is not None
        assert everything.devices is None, "sees what the harness sees"


@pytest.mark.parametrize(
    ("device", "trainer", "alone", "wanted"),
    [
        ("cpu", True, True, (0, False)),
        ("cuda", True, True, (4, False)),
        ("cuda", False, True, (4, True)),
        ("cuda", True, False, (3, False)),
        ("shared", True, False, (3, False)),
    ],
)
def test_what_a_run_takes(device: str, trainer: bool, alone: bool, wanted: tuple[int, bool]) -> None:
    spec = {"device": device, "split": "1t1d", "target": {"gpus": 2}}
    assert leases.wanted(spec, trainer, alone, ["0", "1", "2", "3"]) == wanted


def test_jobs_counts_what_fits() -> None:
    small, large = {"device": "cuda", "split": "1t1d"}, {"device": "cuda", "split": "5t3d"}
    assert leases.at_once("auto", [small, large], 8) == 4
    assert leases.at_once("auto", [large], 8) == 1
    assert leases.at_once("3", [large], 8) == 3
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(SettingError, match=rf"jobs={wrong}: must be auto or a whole number"):
            leases.check(wrong)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, {"0": "GPU-a", "1": "GPU-b"}),
        ("1", {"1": "GPU-b"}),
        ("GPU-b,GPU-a", {"GPU-b": "GPU-b", "GPU-a": "GPU-a"}),
        ("", {}),
    ],
)
def test_a_gpu_has_one_name_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: dict[str, str]
) -> None:
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-a)\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n"
    monkeypatch.setattr(machine, "_listed", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cached = (machine.gpu_names, machine.gpu_uuids, machine.gpus, machine.devices)
    for function in cached:
        function.cache_clear()
    try:
        assert machine.devices() == found
    finally:
        for function in cached:
            function.cache_clear()
