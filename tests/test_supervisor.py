"""However a child ends, the harness learns how, keeps the evidence and leaves no process behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from fakes.command import CHILD, alive, only, runs, started, stepping, sweeper, until, workload

from dflash.events import STAGES
from sweeper import supervisor

BUDGET = dict.fromkeys(STAGES, 20.0)


def supervise(tmp_path: Path, *argv: str, **options):
    environment = supervisor.environment(tmp_path, {})
    settings = {"budget": BUDGET, "grace": 0.5, "interrupted": lambda: 0} | options
    return supervisor.supervise(argv, tmp_path, environment, **settings)


def fake(tmp_path: Path, way: str, argument: Path | str = "", **options):
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[variable] = str(tmp_path / variable)
    return supervise(tmp_path, sys.executable, str(CHILD), way, str(tmp_path), str(argument), **options)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")


def test_a_job_that_ends_well_is_told_whole(tmp_path: Path) -> None:
    outcome = fake(tmp_path, "ok")
    assert (outcome.exit_code, outcome.signal, outcome.ended_by) == (0, None, "itself")
    assert [event["step"] for event in outcome.events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert outcome.events[-1]["event"] == "end"
    assert outcome.bad_events == 0
    assert 0 < outcome.ended - outcome.started < 20


@pytest.mark.parametrize(
    ("way", "code", "number"),
    [
        ("sigkill", None, signal.SIGKILL),
        ("segfault", None, signal.SIGSEGV),
        ("exit3", 3, None),
        ("oom", 1, None),
        ("silent", 0, None),
    ],
)
def test_exit_status_and_signal_are_told_apart(tmp_path: Path, way: str, code: int, number: int) -> None:
    outcome = fake(tmp_path, way)
    assert (outcome.exit_code, outcome.signal) == (code, number)


def test_output_is_kept_byte_for_byte(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = fake(tmp_path, "rubbish", on_log=lines.append)
    assert (tmp_path / "child.log").read_bytes() == b"\x00\xff\x1b[31m no text\n"
    assert lines == ["\x00\ufffd\x1b[31m no text"]
    assert outcome.bad_events == 4
    assert outcome.events[-1] == {**outcome.events[-1], "event": "end", "status": "ok"}


def test_a_command_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    outcome = supervise(tmp_path, "/no/such/program")
    assert outcome.exit_code == 127
    assert "/no/such/program" in outcome.reason


def test_a_deadlock_is_a_hang_with_the_stacks_of_both_threads(tmp_path: Path) -> None:
    outcome = fake(tmp_path, "deadlock", budget=BUDGET | {"train": 1.0})
    assert (outcome.ended_by, outcome.hung_stage) == ("hung", "train")
    assert outcome.stacks.count(" in hold") + outcome.stacks.count("hold (") >= 2
    assert (tmp_path / "stacks.txt").read_text() == outcome.stacks


def test_each_stage_has_a_budget_of_its_own(tmp_path: Path) -> None:
    outcome = supervise(tmp_path, sys.executable, "-c", "import time; time.sleep(60)", budget=BUDGET | {"start": 0.5})
    assert (outcome.ended_by, outcome.hung_stage) == ("hung", "start")


def test_output_is_progress_for_a_command_without_events(tmp_path: Path) -> None:
    talk = "import time\nfor i in range(20): print(i, flush=True); time.sleep(0.1)"
    outcome = supervise(tmp_path, sys.executable, "-c", talk, budget=BUDGET | {"start": 1.0})
    assert (outcome.ended_by, outcome.exit_code) == ("itself", 0)


def test_one_interrupt_lets_the_child_end_by_itself(tmp_path: Path) -> None:
    outcome = fake(tmp_path, "slow", grace=20.0, interrupted=lambda: int(stepping_here(tmp_path)))
    assert (outcome.ended_by, outcome.exit_code) == ("interrupt", 143)


def test_a_signal_to_the_whole_job_does_not_kill_a_leash_that_still_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = tmp_path / "leash.py"
    early.write_text(
        "import os, runpy, signal\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):\n"
        "    os.kill(os.getpid(), number)\n"
        f"runpy.run_path({str(supervisor.LEASH)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(supervisor, "LEASH", early)
    outcome = fake(tmp_path, "slow", grace=20.0, interrupted=lambda: int(stepping_here(tmp_path)))
    assert (outcome.ended_by, outcome.exit_code) == ("interrupt", 143), "its child hears"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 15)", "sys.exit(143)"])
def test_who_was_signalled_before_its_harness_was_asked_to_end(tmp_path: Path, end: str) -> None:
    gone = tmp_path / "gone"
    words = f"import os, sys; open({str(gone)!r}, 'w').close(); {end}"

    def told() -> int:
        return int(gone.exists() and time.time() - gone.stat().st_mtime > 0.8)

    outcome = supervise(tmp_path, sys.executable, "-c", words, interrupted=told)
    assert outcome.ended_by == "interrupt"


def test_a_child_that_ignores_the_wish_is_killed_after_the_grace(tmp_path: Path) -> None:
    outcome = fake(tmp_path, "stubborn", grace=0.5, interrupted=lambda: int(stepping_here(tmp_path)))
    assert (outcome.ended_by, outcome.signal) == ("interrupt", signal.SIGKILL)


def test_two_interrupts_do_not_wait_for_the_grace(tmp_path: Path) -> None:
    outcome = fake(tmp_path, "stubborn", grace=3600.0, interrupted=lambda: 2 * int(stepping_here(tmp_path)))
    assert (outcome.ended_by, outcome.signal) == ("interrupt", signal.SIGKILL)


def stepping_here(folder: Path) -> bool:
    events = folder / "events.jsonl"
    return events.exists() and '"step"' in events.read_text()


def test_a_grandchild_that_left_its_session_ends_with_its_run(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    outcome = fake(tmp_path, "leaves", pids)
    assert outcome.exit_code == 0
    assert [alive(int(pid)) for pid in pids.read_text().split()] == [False, False]


def test_the_tree_dies_with_a_killed_harness_and_the_run_is_reconciled(tmp_path: Path) -> None:
    store, pids = tmp_path / "store", tmp_path / "pids"
    with started(store, *workload("orphan", pids), "grace=0.5") as harness:
        until(lambda: store.exists() and stepping(store))
        tree = [int(pid) for pid in pids.read_text().split()]
        assert all(alive(pid) for pid in tree)
        os.kill(harness.pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in tree))
    assert only(store) == {}

    sweeper(store, *workload("ok"))
    died = min(runs(store).values(), key=lambda verdict: verdict["started"])
    assert (died["verdict"], died["signature"]["cause"]) == ("killed", "sweep.harness_died")
    assert died["figures"]["steps"] > 0
    assert "to do" in sweeper(store, *workload("orphan", pids), "dry=true").stdout


def test_the_tree_dies_with_a_killed_leash(tmp_path: Path) -> None:
    store, pids = tmp_path / "store", tmp_path / "pids"
    with started(store, *workload("orphan", pids)) as harness:
        until(lambda: store.exists() and stepping(store))
        tree = [int(pid) for pid in pids.read_text().split()]
        leash = int(Path(f"/proc/{tree[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert leash != harness.pid
        os.kill(leash, signal.SIGKILL)
        harness.communicate(timeout=60)
    assert not any(alive(pid) for pid in tree)
    assert only(store)["verdict"] == "killed"


def test_no_secret_reaches_child_or_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_API_KEY", "hush")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hush")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = supervisor.environment(tmp_path, {"EXTRA": "1"})
    assert "hush" not in environment.values()
    assert (environment["NCCL_DEBUG"], environment["EXTRA"]) == ("INFO", "1")
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    outcome = supervise(tmp_path, sys.executable, "-c", "print('x' * 1_000_000); print('the end')")
    assert len(outcome.log_tail) <= supervisor.LOG_TAIL
    assert outcome.log_tail.endswith("the end\n")
    assert (tmp_path / "child.log").stat().st_size > 1_000_000


def test_ticks_come_while_a_child_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK_S", 0.2)
    ticks: list[float] = []
    fake(tmp_path, "slow", interrupted=lambda: int(len(ticks) >= 3), on_tick=lambda: ticks.append(time.time()))
    assert len(ticks) >= 3
