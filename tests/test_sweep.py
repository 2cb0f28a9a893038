"""A sweep ends with a verdict for every cell, resumes, and yields to the person who watches it."""

import json
import re
import signal
from pathlib import Path

import pytest
from fakes.command import only, runs, started, stepping, sweeper, until, workload

ENDINGS = {
    # the fake's way of ending: verdict, cause (None: any, "": none)
    "ok": ("ok", ""),
    "rubbish": ("ok", ""),
    "silent": ("ok", ""),
    "exit3": ("failed", None),
    "oom": ("failed", "memory.host_oom"),
    "segfault": ("failed", "process.segfault"),
    "sigkill": ("killed", "process.sigkill"),
    "deadlock": ("hung", None),
}


def test_each_way_of_ending_gets_its_verdict_while_the_sweep_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    # One sweep whose cells differ in the way that the job ends.
    ways = [workload(way)[1].partition("=")[2] for way in ENDINGS]
    cells = f"workload.argv={','.join(ways)}"
    done = sweeper(store, "-m", "workload=command", cells, "budget.train=1.5", "grace=1")
    assert done.returncode == 0, done.stderr
    found = {
        json.loads((store / "runs" / name / "run.json").read_text())["argv"][2]: verdict
        for name, verdict in runs(store).items()
    }
    assert set(found) == set(ENDINGS)
    for way, (verdict, cause) in ENDINGS.items():
        assert found[way]["verdict"] == verdict, (way, found[way])
        named = (found[way]["signature"] or {}).get("cause", "")
        assert cause is None or named == cause, (way, found[way])
        assert found[way]["overhead_s"] < 60
    assert "4 lines of events were unreadable" in found["rubbish"]["reason"]
    assert found["exit3"]["exit"] == {"code": 3, "signal": None}
    assert found["sigkill"]["exit"] == {"code": None, "signal": 9}
    assert found["deadlock"]["hung_stage"] == "train"
    table = next(store.glob("sweeps/*/table.txt")).read_text()
    for verdict in ("ok", "failed", "killed", "hung"):
        assert verdict in table
        assert verdict in done.stdout


def test_a_fanout_ends_with_a_row_for_each_variant(tmp_path: Path) -> None:
    done = sweeper(tmp_path / "store", *workload("fanout"))
    assert "step 6/6" in done.stderr
    assert "step 6: tau of b16 1.75 [1.65, 1.85] on gsm8k (32 prompts, 8 slots a block, T=0)" in done.stderr
    assert re.search(r"^b16 .* 1\.75$", done.stdout, re.MULTILINE)
    assert re.search(r"^b8 .* 1\.50$", done.stdout, re.MULTILINE)
    assert only(tmp_path / "store")["figures"]["steps"] == 6


@pytest.mark.parametrize("every", [0, 3])
def test_a_run_that_asks_to_be_started_again_goes_on_if_it_saves_checkpoints(tmp_path: Path, every: int) -> None:
    store = tmp_path / "store"
    words = [*workload("checkpointed"), "workload.sections=[train]", f"+train={{save_every:{every}}}"]
    assert sweeper(store, *words).returncode == 0
    first = only(store)
    assert (first["verdict"], first["signature"]["cause"]) == ("killed", "sweep.interrupted")
    assert re.fullmatch(r"the job was asked to end; checkpoint of step 3 in /.*/step-00000003", first["reason"])
    again = sweeper(store, *words)
    second = only(store, ".a2")
    if every:
        assert (second["verdict"], second["figures"]["steps"]) == ("ok", 6)
        assert "goes on from the checkpoints of" in again.stderr
        assert "goes on after step 3" in again.stderr
        assert sweeper(store, *words, "rerun=all").returncode == 0
        assert only(store, ".a3")["verdict"] == "killed", "a run done again begins from nothing"
    else:
        assert second["verdict"] == "killed", "repeated whole"


def test_records_tell_what_ran_where(tmp_path: Path) -> None:
    store = tmp_path / "store"
    sweeper(store, *workload("ok"), "seed=4")
    (folder,) = (store / "runs").iterdir()
    run, given = (json.loads((folder / name).read_text()) for name in ("run.json", "spec.json"))
    assert given["seed"] == 4
    assert run["cell"]["compile"] == "locked"
    assert run["role"] == "cell"
    assert run["argv"][0] == run["wheel"]["python"]
    assert run["identity"][:12] in folder.name
    assert Path(run["env"]["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder)
    assert run["wheel"]["versions"]["torch"]


def test_a_cell_that_cannot_run_here_is_skipped_with_its_reason(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sweeper(store, "compile=triton", "device=cpu", "cache=warm")
    assert done.returncode == 0
    verdict = only(store)
    assert (verdict["verdict"], verdict["reason"], verdict["cache"]) == ("skipped", "needs CUDA", None)
    assert "skipped" in done.stdout
    assert sweeper(store, "compile=triton", "device=cpu", "cache=warm", "rerun=failed").returncode == 0
    assert len(runs(store)) == 1


def test_code_that_is_changed_while_a_sweep_runs_is_not_run_under_its_old_name(tmp_path: Path) -> None:
    script, store = tmp_path / "train.py", tmp_path / "store"
    script.write_text("from pathlib import Path\nPath(__file__).write_text('print(2)')\n")
    words = ["-m", "workload=command", f"workload.argv=['{{python}}','{script}','{{seed}}']", "seed=1,2", "order=given"]
    done = sweeper(store, *words)
    assert done.returncode == 0
    first, second = (runs(store)[name] for name in sorted(runs(store)))
    assert first["verdict"] == "ok"
    assert (second["verdict"], second["signature"]["cause"]) == ("skipped", "sweep.code_changed")
    assert second["reason"].startswith(f"{script} changed since the sweep began")
    assert "Nothing failed in 1 run" in done.stdout
    assert "1 of 2 runs are done already" not in sweeper(store, *words).stderr, "other code is other runs"
    found = [one["verdict"] for one in runs(store).values()]
    assert sorted(found) == ["ok", "ok", "ok", "skipped"]


def test_strict_turns_a_bad_cell_into_status_3(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert sweeper(store, *workload("exit3")).returncode == 0
    assert sweeper(store, *workload("exit3"), "strict=true").returncode == 3
    assert sweeper(store, *workload("ok"), "strict=true").returncode == 0


def test_a_sweep_started_again_runs_only_what_is_missing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = sweeper(store, "-m", *workload("ok"), "compile=locked,whole")
    assert first.returncode == 0
    again = sweeper(store, "-m", *workload("ok"), "compile=locked,whole")
    assert len(runs(store)) == 2
    assert "2 of 2 runs are done already" in again.stderr
    assert again.stdout == first.stdout, "the table shows what is done, whoever did it"
    sweeper(store, "-m", *workload("ok"), "compile=locked,whole", "repeat=2")
    assert len(runs(store)) == 4
    assert len(list((store / "sweeps").iterdir())) == 1, "more repeats belong to the same sweep"
    sweeper(store, "-m", *workload("ok"), "compile=locked,whole,eager")
    assert len(runs(store)) == 5
    assert len(list((store / "sweeps").iterdir())) == 2
    shared = [verdict for name, verdict in runs(store).items() if name.startswith("locked") and "-r1." in name]
    assert len(shared[0]["sweeps"]) == 2


def test_rerun_says_what_to_do_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    good, bad = workload("ok"), workload("segfault")
    sweeper(store, *good)
    sweeper(store, *bad)
    print_ = next(v["signature"]["fingerprint"] for v in runs(store).values() if v["verdict"] == "failed")

    def attempts(command: list[str], rerun: str) -> int:
        before = len(runs(store))
        assert sweeper(store, *command, f"rerun={rerun}").returncode == 0
        return len(runs(store)) - before

    assert attempts(good, "failed") == 0
    assert attempts(bad, "failed") == 1
    assert attempts(bad, "process.segfault") == 1
    assert attempts(bad, print_) == 1
    assert attempts(bad, "memory.gpu_oom") == 0
    assert attempts(good, "process.segfault") == 0
    assert attempts(good, "all") == 1
    assert sorted(name[-3:] for name in runs(store)) == [".a1", ".a1", ".a2", ".a2", ".a3", ".a4"]


def test_the_plan_shows_order_state_and_time_and_runs_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cells = ["-m", *workload("ok"), "compile=locked,triton,whole", "cache=cold,warm"]
    plan = sweeper(store, *cells, "dry=true")
    assert plan.returncode == 0
    assert not store.exists()
    assert len(re.findall(r"^\d+ .*to do +unknown$", plan.stdout, re.M)) == 6
    assert "6 runs, 0 done, 6 to do; time for those: unknown" in plan.stdout
    sweeper(store, *workload("ok"))
    again = sweeper(store, *cells, "dry=true", "repeat=2")
    assert len(re.findall(r"locked cold .*done: ok", again.stdout)) == 1
    assert len(re.findall(r"locked cold .*#2 .*to do +\d+ s$", again.stdout, re.M)) == 1
    assert len(runs(store)) == 1
    needed = re.search(r"priming runs needed: (\d+)", again.stdout)
    assert needed
    assert int(needed[1]) <= 2


def test_the_plan_is_the_same_each_time_and_each_block_is_whole(tmp_path: Path) -> None:
    cells = ["-m", *workload("ok"), "compile=locked,whole,eager,forced", "repeat=3", "dry=true"]
    first, second = (sweeper(tmp_path / "store", *cells).stdout for _ in range(2))
    assert first == second
    order = re.findall(r"^\d+ +(\w+) ", first, re.M)
    blocks = [order[i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(block) == ["eager", "forced", "locked", "whole"] for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1, "blocks are shuffled"
    given = sweeper(tmp_path / "store", *cells, "order=given").stdout
    assert re.findall(r"^\d+ +(\w+) ", given, re.M) == ["locked", "whole", "eager", "forced"] * 3


def test_cells_that_mean_the_same_run_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert sweeper(store, "-m", *workload("ok"), "compile=locked,locked", "device=auto,cpu").returncode == 0
    assert len(runs(store)) == 1


def test_one_interrupt_ends_the_run_and_leaves_the_sweep_resumable(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["-m", *workload("slow"), "compile=locked,whole", "grace=20"]
    with started(store, *command) as harness:
        until(lambda: store.exists() and stepping(store))
        harness.send_signal(signal.SIGINT)
        out, err = harness.communicate(timeout=60)
    assert harness.returncode == 130, err
    verdict = only(store)
    assert (verdict["verdict"], verdict["signature"]["cause"]) == ("killed", "sweep.interrupted")
    assert verdict["exit"] == {"code": 143, "signal": None}, "the child could end by itself"
    assert "killed" in out
    assert err.rstrip().endswith("stopped with 0 of 2 runs over; the same command goes on from there")
    plan = sweeper(store, *command, "dry=true").stdout
    assert len(re.findall("to do", plan)) == 3, "two runs and the sum"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_two_interrupts_end_at_once(tmp_path: Path, number: int) -> None:
    store = tmp_path / "store"
    with started(store, *workload("stubborn"), "grace=3600") as harness:
        until(lambda: store.exists() and stepping(store))
        harness.send_signal(number)
        assert any("once more to end at once" in line for line in harness.stderr)
        harness.send_signal(number)
        harness.communicate(timeout=60)
    assert harness.returncode == 130
    assert only(store)["verdict"] == "killed"


def test_a_command_that_handles_no_signal_hears_the_first_interrupt(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with started(store, "workload=command", "workload.argv=[sleep,'600']", "grace=600") as process:
        until(lambda: list(store.glob("runs/*/run.json")))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert only(store)["verdict"] == "killed"
    assert only(store)["signature"]["cause"] == "sweep.interrupted"


def test_two_harnesses_started_at_once_share_the_work(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["-m", *workload("ok"), "compile=locked,whole,eager", "order=given"]
    with started(store, *command) as one, started(store, *command) as two:
        told = [process.communicate(timeout=120) for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), told
    assert len(runs(store)) == 3, "each run was done once"
    assert all(verdict["verdict"] == "ok" for verdict in runs(store).values())
    assert told[0][0] == told[1][0]


def test_a_harness_waits_for_the_run_that_another_is_at(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with started(store, *workload("slow"), "grace=20") as first:
        until(lambda: store.exists() and stepping(store))
        with started(store, *workload("slow")) as second:
            line = next(line for line in second.stderr if "waiting" in line)
            assert f"waiting for pid {first.pid}" in line
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=60)
            assert second.returncode == 130
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
    assert len(runs(store)) == 1


def test_two_different_sweeps_in_one_second_never_share_a_directory(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with started(store, *workload("ok"), "seed=1") as one, started(store, *workload("ok"), "seed=2") as two:
        for process in (one, two):
            process.communicate(timeout=120)
    assert len(runs(store)) == 2
    assert len(list((store / "sweeps").iterdir())) == 2
    assert {verdict["attempt"] for verdict in runs(store).values()} == {1}


def test_a_full_disk_is_a_verdict_and_the_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from sweeper import caches, run, spec

    class Screen:
        notes: list[str]

        def __init__(self) -> None:
            self.notes = []

        def note(self, text: str) -> None:
            self.notes.append(text)

        def __getattr__(self, name: str):
            return lambda *args, **named: None

    from test_spec import read

    one = read(tmp_path, *workload("ok"))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(caches, "layout", lambda root: (_ for _ in ()).throw(full))
    options = spec.Options(store=str(tmp_path / "store"))
    screen = Screen()
    session = run.Session(options, "sweep", screen, Screen(), lambda: 0)
    folder = run.execute(one, session, 1)
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["signature"]["cause"]) == ("failed", "host.disk_full")
    assert any("No space left" in note for note in screen.notes)
