"""Whatever is killed, whenever: the same command again goes on, and nothing is lost, doubled or left behind."""

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import kill_anywhere
import pytest
from fakes.command import alive, only, runs, started, stepping, sweeper, until, workload

TREE = ["workload.sections=[train]", "+train={save_every:3}", "report=false"]


@pytest.mark.slow
def test_a_sweep_killed_anywhere_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(4)
    with kill_anywhere.opened("local", tmp_path / "local") as place:
        rounds = [kill_anywhere.play(place, number, rng) for number in (1, 2)]
    assert [one.faults for one in rounds] == [[], []]
    assert all(one.strikes for one in rounds)


def test_a_run_whose_harness_died_is_made_again_only_when_its_processes_are_gone(tmp_path: Path) -> None:
    # The job takes no notice of being asked, so it has the whole grace, in which another would save a checkpoint.
    with started(store, *workload("stubborn"), "report=false", "grace=3") as first:
        until(lambda: store.exists() and stepping(store))
        first.kill()
        first.wait()
    folder = next((store / "runs").iterdir())
    tree = [process for process, _ in kill_anywhere.processes(store)]
    assert tree
    with started(store, *workload("stubborn"), "report=false", "grace=3") as second:
        line = next(line for line in second.stderr if "waiting for its processes" in line)
        assert folder.name in line
        until(lambda: len(runs(store)) == 2)
        assert not any(alive(process.pid) for process in tree)
        assert runs(store)[folder.name]["signature"]["cause"] == "sweep.harness_died"
        second.send_signal(signal.SIGINT)
        second.send_signal(signal.SIGINT)
        second.wait(30)


def test_nothing_outlives_a_harness_and_a_leash_that_are_killed_together(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [*workload("resumable"), *TREE]
    with started(store, *command) as first:
        until(lambda: store.exists() and stepping(store))
        tree = list(kill_anywhere.processes(store))
        (leash,) = (process for process, kind in tree if kind == "leash")
        first.kill()
        leash.kill()
    assert {kind for _, kind in tree} == {"leash", "child", "helper"}
    assert sweeper(store, *command).returncode == 0
    assert not any(alive(process.pid) for process, _ in tree), "the helper has a session of its own"
    assert [one["verdict"] for one in runs(store).values()] == ["killed", "ok"]


def test_checkpoints_are_found_past_a_directory_whose_harness_was_killed_at_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [*workload("resumable"), *TREE]
    with started(store, *command, "grace=0") as first:
        until(lambda: list(store.glob("runs/*/checkpoints/*")))
        first.kill()
    (folder,) = (store / "runs").iterdir()
    folder.with_name(folder.name.replace(".a1", ".a2")).mkdir()
    again = sweeper(store, *command)
    assert f"goes on from the checkpoints of {folder.name}" in again.stderr
    assert [one.get("verdict") for one in runs(store).values()] == ["killed", "killed", "ok"]


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of two megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a disk that can be filled has to be mounted")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """A file that takes what is left of a disk, but for some pages."""
    path = disk / "full"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with open(path, "r+b") as file:
        file.truncate(max(0, path.stat().st_size - 4096 * leave))
    return path


def test_a_disk_that_is_full_for_a_while_costs_what_ran_and_nothing_more(disk: Path) -> None:
    store = disk / "store"
    command = ["-m", *workload("resumable"), *TREE, "seed=1,2,3"]
    with started(store, *command) as first:
        until(lambda: store.exists() and stepping(store))
        full = fill(disk)
        out, err = first.communicate(timeout=60)
    assert first.returncode in (0, 1), err
    assert "Traceback" not in err
    assert "No space left on device" in err
    refused = sweeper(store, *command)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert "No space left on device" in refused.stderr
    full.unlink()
    assert sweeper(store, *command, "rerun=host.disk_full").returncode == 0
    through(store, 3)


@pytest.mark.parametrize("leave", [1, 3, 6, 9])
def test_a_disk_that_is_nearly_full_is_told_in_sentences(disk: Path, leave: int) -> None:
    store = disk / "store"
    command = ["-m", *workload("resumable"), *TREE, "seed=1,2"]
    full = fill(disk, leave)
    done = sweeper(store, *command)
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
    full.unlink()
    assert sweeper(store, *command, "rerun=host.disk_full").returncode == 0
    through(store, 2)


def through(store: Path, count: int) -> None:
    """Each of `count` runs has one verdict that counts, and it is ok."""
    counts: dict[str, list[str]] = {}
    for name, verdict in runs(store).items():
        assert verdict, name
        counts.setdefault(name.rpartition(".a")[0], []).append(verdict["verdict"])
    assert len(counts) == count
    assert all(several[-1] == "ok" for several in counts.values()), counts
