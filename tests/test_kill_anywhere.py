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
