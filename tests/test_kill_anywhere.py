"""Whatever is killed, whenever: the same command again goes on, and nothing is lost, doubled or left behind."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kill_anywhere
import pytest
from fakes.command import alive, runs, started, stepping, sweeper, until, workload

TREE = ["workload.sections=[train]", "+train={save_every:3}", "report=false"]


@pytest.mark.slow
def test_a_sweep_killed_anywhere_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(4)
    with kill_anywhere.opened("local", tmp_path / "local") as place:
        rounds = [kill_anywhere.play(place, number, rng) for number in (1, 2)]
    assert [one.faults for one in rounds] == [[], []]
    assert all(one.strikes for one in rounds)


def test_a_run_whose_harness_died_is_made_again_only_when_its_processes_are_gone(tmp_path: Path) -> None:
    store = tmp_path / "store"
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
        _, err = first.communicate(timeout=60)
    assert first.returncode in (0, 1), err
    assert "Traceback" not in err
    assert "No space left on device" in err
    refused = sweeper(store, *command)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
    assert "No space left on device" in refused.stderr
    full.unlink()
    assert sweeper(store, *command, "rerun=host.disk_full").returncode == 0
    through(store, 3)


@pytest.mark.parametrize("leave", [1, 6])
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


BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.fixture
def bound() -> list[str]:
    """What starts a command that may not write where root may not, or nothing for who is not root."""
    if os.geteuid() != 0:
        return []
    if shutil.which(BOUND[0]) is None or subprocess.run([*BOUND, "true"], capture_output=True).returncode:
        pytest.skip("root may write everywhere, and setpriv cannot take that away here")
    return BOUND


def test_a_run_directory_that_turns_read_only_costs_its_run_alone(bound: list[str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    line = command(bound, store, "tracking=none")
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        until(lambda: store.exists() and stepping(store))
        (folder,) = (store / "runs").iterdir()
        folder.chmod(0o555)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 1, err
    assert "Traceback" not in err
    assert f"{folder.name}: nor its verdict" in err
    assert "Permission denied" in err
    assert [one.get("verdict") for name, one in runs(store).items() if name != folder.name] == ["ok"]
    again = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "Traceback" not in again.stderr
    folder.chmod(0o755)
    assert sweeper(store, "-m", *workload("resumable"), *TREE, "seed=1,2").returncode == 0
    through(store, 2)


def test_a_store_that_turns_read_only_is_told_and_gone_on_with(bound: list[str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    line = command(bound, store, "tracking=none")
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        until(lambda: store.exists() and stepping(store))
        for folder in (store, store / "runs"):
            folder.chmod(0o555)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 1, err
    assert "Traceback" not in err
    assert "not run, the store cannot be written ([Errno 13] Permission denied" in err
    refused = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "must be a folder that can be written" in refused.stderr
    for folder in (store, store / "runs"):
        folder.chmod(0o755)
    assert sweeper(store, "-m", *workload("resumable"), *TREE, "seed=1,2").returncode == 0
    through(store, 2)


def test_a_kill_while_mlflow_makes_its_tables_leaves_nothing_that_cannot_be_used(tmp_path: Path) -> None:
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401  (imported before the fork, for speed)

    from sweeper.tracking import place
    from sweeper.tracking.view import View

    own = place.own(tmp_path)
    maker = os.fork()
    if maker == 0:
        try:
            View(own, tmp_path)
        finally:
            os._exit(0)
    until(lambda: any(path.stat().st_size for path in tmp_path.glob(".mlflow.db.*")))
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    assert not (tmp_path / "mlflow.db").exists()
    assert View(own, tmp_path).known() == set()
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "tracking.id"}


def command(bound: list[str], store: Path, *words: str) -> list[str]:
    told = [*workload("resumable"), *TREE, "seed=1,2", *words]
    return [*bound, sys.executable, "-m", "sweeper", f"store={store}", "-m", *told]


def through(store: Path, count: int) -> None:
    """Each of `count` runs has one verdict that counts, and it is ok."""
    counts: dict[str, list[str]] = {}
    for name, verdict in runs(store).items():
        assert verdict, name
        counts.setdefault(name.rpartition(".a")[0], []).append(verdict["verdict"])
    assert len(counts) == count
    assert all(several[-1] == "ok" for several in counts.values()), counts
