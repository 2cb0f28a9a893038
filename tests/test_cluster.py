"""What Slurm is asked for and how it is understood, without a Slurm."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from made_up import write_run
from test_cache_states import job, session, wheel

from dflash.settings import SettingError
from sweeper import spec, store
from sweeper.cluster import slurm, submit, watch
from sweeper.cluster.job import STOP_FILE, Told, may_follow, why
from sweeper.cluster.settings import Settings, read
from sweeper.plan import Planned

ON_GPU = {"device": "cuda", "split": "5t3d"}


def test_a_job_is_as_large_as_its_split() -> None:
    usual = Settings()
    assert (usual.gpus_of(ON_GPU), usual.cpus_of(ON_GPU)) == (8, 32)
    assert usual.gpus_of({"device": "cuda", "split": "1t2d", "target": {"gpus": 3}}) == 5
    assert usual.gpus_of({"device": "cpu", "split": "1t1d"}) == 0
    assert usual.gpus_of({"device": "shared", "split": "1t1d"}) == 1
    assert (Settings(gpus=2).gpus_of(ON_GPU), Settings(cpus=6).cpus_of(ON_GPU)) == (2, 6)


def test_settings_become_what_submitit_understands(tmp_path: Path) -> None:
    chosen = Settings(
        **{"partition": "gpu", "account": "me", "qos": "high", "constraint": "h200", "time": 90, "memory": "64G"},
        **{"at_once": 3, "setup": ["module load cuda"], "image": "me/torch:2", "mounts": "/data:/data"},
        extra={"nice": 100, "exclusive": True, "nodelist": None},
    )
    from submitit.slurm.slurm import _make_sbatch_string

    text = _make_sbatch_string(command="run", folder=tmp_path, map_count=5, **chosen.parameters(8, 32, "afterany:7"))
    for line in (
        *("partition=gpu", "account=me", "qos=high", "constraint=h200", "time=90", "mem=64G", "gpus-per-node=8"),
        *("cpus-per-task=32", "array=0-4%3", "dependency=afterany:7", "nice=100", "exclusive", "requeue"),
        "signal=USR2@120",
    ):
        assert f"#SBATCH --{line}\n" in text
    assert "\nmodule load cuda\n" in text
    assert "--container-image=me/torch:2 --container-mounts=/data:/data" in text
    assert "nodelist" not in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hours": 3}, "slurm.hours=3: unknown setting; known: partition, "),
        ({"time": 0}, "slurm.time=0: must be a whole number from 1 (minutes)"),
        ({"gpus": "many"}, "slurm.gpus=many: must be a whole number from 0 (or auto)"),
        ({"memory": "much"}, "slurm.memory=much: must be a size such as 64G"),
        ({"setup": "module load"}, "slurm.setup=module load: must be a list of lines of shell"),
        ({"python": "/opt/python"}, "slurm.python=/opt/python: means something only with slurm.image"),
        ({"extra": {"array": "1-5"}}, "slurm.extra.array=1-5: is set by the sweep itself"),
        ({}, "hydra/launcher=slurm: needs Slurm's commands, and sbatch is not on the PATH"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingError) as error:
        read(given).check()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:8", 8), ("gpu:h200:8(S:0-1)", 8), ("gpu:a:2,gpu:b:4,tmp:9", 6), ("(null)", 0), ("shard:3", 0)],
)
def test_gpus_of_a_node_are_counted(gres: str, count: int) -> None:
    assert slurm._gpus(gres) == count


def test_who_needs_caches_waits_for_the_run_that_leaves_them(tmp_path: Path) -> None:
    ours = wheel(tmp_path, "cu130")
    warm, cold, again = job(ours, "warm"), job(ours, "cold"), job(ours, "cold").repeated(2)
    folder = session(tmp_path / "store").folder
    items = [Planned(one, None, None) for one in (warm, cold, again)]
    assert submit._makers(items, [], folder) == {cold.snapshot_key(): cold.identity}
    # Nobody leaves them: the first that needs them makes them itself, and the next waits for it.
    items = [Planned(one, None, None) for one in (warm, warm.repeated(2))]
    assert submit._makers(items, [], folder) == {cold.snapshot_key(): warm.identity}


def test_runs_that_sbatch_refuses_have_that_as_their_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, does in (("srun", "exit 0"), ("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    during = session(tmp_path / "store")
    during.options.slurm = {"gpus": 1, "cpus": 1}
    runs = [job(wheel(tmp_path, "cu130"), "cold").repeated(n) for n in (1, 2)]
    items = [(n, Planned(one, None, None)) for n, one in enumerate(runs, start=1)]
    assert submit.submit(items, [], during) == []
    for one in runs:
        (attempt,) = store.attempts(during.folder, one)
        assert attempt.cause == "scheduler.refused"
        assert attempt.verdict is not None
        assert attempt.verdict["reason"] == "not submitted: QOSMaxSubmitJobPerUserLimit"
        assert not attempt.done, "the same command tries again"


def told(*numbers: int) -> Told:
    return Told([(number, time.time()) for number in numbers])


@pytest.mark.parametrize(
    ("numbers", "shown", "log", "cause"),
    [
        ([signal.SIGUSR2], {"PreemptTime": "2026-01-01T10:00:00"}, "", "scheduler.preempted"),
        ([signal.SIGUSR2], {"EndTime": "{soon}"}, "", "scheduler.time_limit"),
        ([signal.SIGUSR2], {"EndTime": "{later}"}, "", "scheduler.preempted"),
        ([signal.SIGUSR2], {}, "", "scheduler.time_limit"),
        ([signal.SIGTERM], {"JobState": "RUNNING"}, "", "scheduler.cancelled"),
        ([signal.SIGTERM], {"JobState": "TIMEOUT"}, "", "scheduler.time_limit"),
        ([signal.SIGTERM], {}, "*** JOB 3 ON n CANCELLED AT T DUE TO NODE FAILURE, SEE", "scheduler.node_failed"),
        ([signal.SIGTERM], {}, "*** JOB 3 ON n CANCELLED AT T DUE TO PREEMPTION ***", "scheduler.preempted"),
    ],
)
def test_who_asked_a_job_to_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: list[int],
    shown: dict[str, str],
    log: str,
    cause: str,
) -> None:
    def at(seconds: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))

    filled = {name: value.format(soon=at(30), later=at(3000)) for name, value in shown.items()}
    monkeypatch.setattr(slurm, "shown", lambda job: filled)
    monkeypatch.setattr("sweeper.cluster.job.WORDS_TRIES", 1)
    (tmp_path / "log").write_text(log)
    options = spec.Options(slurm={"time": 60})
    job = {"id": "7", "log": str(tmp_path / "log")}
    assert why(told(*numbers), job, time.time(), options, tmp_path)[0] == cause
    (tmp_path / STOP_FILE).touch()
    assert why(told(*numbers), job, time.time(), options, tmp_path)[0] == "sweep.interrupted"


@pytest.mark.parametrize(
    ("ends", "log", "cause", "reason"),
    [
        (["CANCELLED 0:0"], "", "scheduler.cancelled", "Slurm says CANCELLED 0:0"),
        (["OUT_OF_MEMORY 0:125"], "", "memory.host_oom", "Slurm says OUT_OF_MEMORY"),
        (["PREEMPTED 0:0", "NODE_FAIL 1:0"], "", "scheduler.node_failed", "Slurm says NODE_FAIL"),
        (["FAILED 1:0"], "bash: /opt/python: No such file", "scheduler.job_lost", "it never began: bash: /opt/python"),
        ([], "", "scheduler.job_lost", "job 7_1 ended without a word of its own"),
    ],
)
def test_a_job_that_left_no_verdict_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str], log: str, cause: str, reason: str
) -> None:
    monkeypatch.setattr(slurm, "accounted", lambda job: ends)
    monkeypatch.setattr(slurm, "shown", lambda job: {})
    folder = write_run(tmp_path, {"compile": "locked"}, finished=False)
    run = store.read_json(folder / store.RUN_FILE) or {}
    store.write(folder / store.RUN_FILE, {name: value for name, value in run.items() if name != "started"})
    (tmp_path / "log").write_text(log)
    store.write(folder / store.JOB_FILE, {"id": "7_1", "log": str(tmp_path / "log")})
    assert watch.close(folder)
    assert not watch.close(folder), "one verdict a run"
    attempt = store.attempt(folder)
    assert attempt.cause == cause
    assert attempt.verdict is not None
    assert (attempt.verdict["verdict"], reason in attempt.verdict["reason"]) == ("killed", True), attempt.verdict
    assert may_follow(attempt) == (cause in ("scheduler.cancelled", "scheduler.node_failed"))


def test_where_slurm_does_not_answer_a_long_silence_is_a_death(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"compile": "locked"}, finished=False)
    store.write(folder / store.JOB_FILE, {"id": "7"})
    assert watch._gone([folder], None) == []
    assert watch._gone([folder], {"7": slurm.Job("COMPLETING")}) == []
    assert watch._gone([folder], {}) == [folder]
    long_ago = time.time() - watch.SILENT_S - 1
    os.utime(folder / store.JOB_FILE, (long_ago, long_ago))
    assert watch._gone([folder], None) == [folder]
    assert store.reconcile(tmp_path, lambda folder: True) == [], "who runs it is no process of this machine"
