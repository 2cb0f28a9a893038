"""Runs as jobs of a real Slurm: each gets its verdict, whatever Slurm, a person or a node does to its job."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.command import CHILD, alive, only, runs, started, sweeper, until
from slurm.cluster import Cluster, missing

TARGET = Path(__file__).parent / "target" / "qwen3-small"
JOBS = ["hydra/launcher=slurm", "slurm.cpus=1", "report=false"]
TRAINING = [
    *(f"target.model={TARGET}", "data.row_tokens=128", "drafter.layers=1", "drafter.anchors=8", "drafter.mask_token=0"),
    *("compile=eager", "device=cpu", "train.steps=400", "train.save_every=20", "train.keep=9"),
    *("slurm.memory=2G", "slurm.time=30"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    one = Cluster(tmp_path_factory.mktemp("slurm") / "c")
    one.start()
    before = dict(os.environ)
    os.environ.update(one.env)
    try:
        yield one
    finally:
        os.environ.clear()
        os.environ.update(before)
        one.stop()


@dataclass
class Fates:
    """A sweep whose jobs die in different ways, still being watched."""

    store: Path
    command: subprocess.Popen[str]
    ways: list[str]
    tree: list[int]  # of the job that was killed


@pytest.fixture(scope="module")
def fates(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fates]:
    """Jobs of one sweep: a person cancels one, another is killed without a word, one asks for more memory than it has,
    one for more time, and the controller goes away for a while."""
    here = tmp_path_factory.mktemp("fates")
    store, pids = here / "store", here / "pids"
    each = ["ok", "slow", "quiet", "orphan", *(["greedy"] if cluster.limits_memory else [])]
    words = [word.replace("'{out}'", f"'{{out}}','{pids}'") for word in ways(*each)]
    limits = ["slurm.memory=400M", "slurm.gpus=1", "slurm.time=1", "slurm.warning=10", "grace=1"]
    with started(store, *words, *limits) as command:
        until(lambda: steps(store, "slow") and "started" in record(store, "quiet") and steps(store, "orphan"), 60)
        job = psutil.Process(record(store, "orphan")["harness_pid"])
        assert any("submitit" in word for word in job.cmdline())
        job.kill()
        cluster.run("scancel", record(store, "quiet", "slurm.json")["id"])
        until(lambda: record(store, "quiet", "verdict.json"), 60)
        # A controller that misses a job's last word starts no job on the node until it asks again, a minute later.
        until(lambda: not cluster.run("squeue", "--noheader", "--states=COMPLETING").strip(), 60)
        cluster.stop_controller()
        time.sleep(6)
        assert command.poll() is None
        cluster.controller()
        until(
            lambda: cluster.answers("sbatch", "--test-only", "--gpus-per-node=1", "--wrap=true"), 60
        )  # it has its node
        yield Fates(store, command, each, [int(pid) for pid in pids.read_text().split()])


@pytest.fixture(scope="module")
def trained(fates: Fates, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of two training runs, made while the jobs of the other sweep come to their ends."""
    store = tmp_path_factory.mktemp("trained") / "store"
    done = sweeper(store, "-m", *JOBS, *TRAINING, "slurm.gpus=1", "seed=0,1", seconds=300)
    assert done.returncode == 0, done.stderr
    assert "2 jobs submitted to Slurm" in done.stderr
    return store


def ways(*several: str) -> list[str]:
    """A sweep of fake jobs that differ in the way they end."""
    words = f"workload.argv=['{{python}}','{CHILD}','{{args.way}}','{{out}}']"
    return ["-m", *JOBS, "workload=command", words, f"args.way={','.join(several)}"]


def folder(store: Path, part: str) -> Path:
    (found,) = (one for one in (store / "runs").iterdir() if part in one.name)
    return found


def record(store: Path, part: str, name: str = "run.json") -> dict[str, Any]:
    path = folder(store, part) / name
    return json.loads(path.read_text()) if path.exists() else {}


def steps(store: Path, part: str) -> bool:
    path = store / "runs"
    return path.exists() and any('"step"' in f.read_text() for f in path.glob(f"*{part}*/events.jsonl"))


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def test_each_cell_is_a_job_with_gpus_of_its_own(trained: Path) -> None:
    assert [verdict["verdict"] for verdict in runs(trained).values()] == ["ok"] * 2
    seen = [json.loads((one / "run.json").read_text()) for one in (trained / "runs").iterdir()]
    jobs = {json.loads((one / "slurm.json").read_text())["id"] for one in (trained / "runs").iterdir()}
    assert len({job.partition("_")[0] for job in jobs}) == 1, "one array"
    given = [run["env"]["CUDA_VISIBLE_DEVICES"].split(",") for run in seen]
    assert all(len(devices) == 1 for devices in given)
    assert max(run["beside"] for run in seen) >= 1, "they ran at the same time, and say so"


def test_the_command_may_leave_and_come_back(cluster: Cluster, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [*ways("ok", "slow"), "slurm.memory=400M", "slurm.gpus=1", "slurm.time=30"]
    left = sweeper(store, *command, "detach=true")
    assert left.returncode == 0, left.stderr
    assert "2 of 2 runs are with Slurm" in left.stdout
    until(lambda: steps(store, "slow") and record(store, "way-ok", "verdict.json"), 60)
    again = sweeper(store, *command, "detach=true")
    assert "1 of 2 runs are with Slurm" in again.stdout
    assert "submitted" not in again.stderr, "nothing is submitted twice"
    (sweep,) = (one.name for one in (store / "sweeps").iterdir())
    told = state(store, sweep)
    assert "ok        args.way=ok r1" in told
    assert "running   args.way=slow r1: job " in told
    with started(store, *command) as back:
        next(line for line in back.stderr if "1 jobs of this sweep are with Slurm already" in line)
        until(lambda: "running" in state(store, sweep))
        time.sleep(1)
        back.send_signal(signal.SIGINT)
        out, _ = back.communicate(timeout=60)
    assert back.returncode == 130
    assert only(store, "way-slow")["signature"]["cause"] == "sweep.interrupted"
    assert only(store, "way-slow")["exit"] == {"code": 143, "signal": None}, "the child could end by itself"
    assert "sweep.interrupted" in out
    assert len(runs(store)) == 2


def test_every_way_that_a_job_dies_is_a_verdict_and_touches_no_other(fates: Fates, trained: Path) -> None:
    out, err = fates.command.communicate(timeout=180)
    assert fates.command.returncode == 0, err
    told = {way: only(fates.store, f"way-{way}") for way in fates.ways}
    causes = {way: (verdict["signature"] or {}).get("cause") for way, verdict in told.items()}
    expected = {"ok": None, "slow": "scheduler.time_limit", "quiet": "scheduler.cancelled"}
    expected |= {"orphan": "process.sigkill", "greedy": "memory.host_oom"}
    assert causes == {way: expected[way] for way in fates.ways}
    assert {verdict["verdict"] for way, verdict in told.items() if way != "ok"} == {"killed"}
    assert len(runs(fates.store)) == len(told), "one verdict each, none was made twice"
    assert not any(alive(pid) for pid in fates.tree)
    assert "scheduler.time_limit" in out


def test_a_preempted_training_run_goes_on_to_the_same_losses(cluster: Cluster, trained: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with started(store, *JOBS, *TRAINING, "slurm.gpus=8", "seed=1") as command:
        until(lambda: list(store.glob("runs/*/checkpoints/step-*")), 120)
        cluster.run("sbatch", "--partition=high", "--gpus=8", "--mem=100", "--output=/dev/null", "--wrap=sleep 1")
        out, err = command.communicate(timeout=180)
    assert command.returncode == 0, err
    first, second = only(store, ".a1"), only(store, ".a2")
    assert (first["verdict"], first["signature"]["cause"]) == ("killed", "scheduler.preempted")
    assert "; checkpoint of step" in first["reason"], "the trainer had the time to save"
    assert second["verdict"] == "ok", second
    assert "goes on after step" in err
    whole = losses(next(one for one in (trained / "runs").iterdir() if "seed-1" in one.name))
    before, after = losses(folder(store, ".a1")), losses(folder(store, ".a2"))
    assert max(before) + 1 == min(after) > 4, "no step was lost or made twice"
    assert before | after == whole
    assert out.count(" ok ") == 1


def state(store: Path, *words: str) -> str:
    line = [sys.executable, "-m", "sweeper.status", *words, "--store", str(store)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["slurm.partition=nope"], "slurm.partition=nope: Slurm says: there is no such partition"),
        (["slurm.partition=low", "slurm.gpus=9"], "hydra/launcher=slurm: Slurm refuses a job with "),
    ],
)
def test_what_slurm_would_refuse_is_one_sentence_before_any_work(
    cluster: Cluster, tmp_path: Path, words: list[str], sentence: str
) -> None:
    done = sweeper(tmp_path / "store", *ways("ok"), "device=auto", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"sweeper: {sentence}")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()
