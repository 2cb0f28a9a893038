"""The command line: help at once, completion, and one sentence for each thing that cannot work."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.command import runs, sweeper, workload

from dflash.settings import COMPILE_STRATEGIES
from sweeper import help, machine

DRY = ("dry=true",)


def test_help_names_every_factor_level_and_setting_in_words() -> None:
    text = help.text()
    for group in help.GROUPS:
        assert help.levels(group)
        for level in help.levels(group):
            assert len(help.about(group, level)) > 10
            assert help.about(group, level) in text
    for name, (_, comment) in help.top_level().items():
        assert name in text
        assert len(comment) > 10, name
    assert set(help.levels("compile")) == set(COMPILE_STRATEGIES)
    settings = [
        key for key in help.known_keys() if key.partition(".")[0] in ("data", "drafter", "eval", "train", "loss")
    ]
    assert len(settings) > 40
    for key in settings:
        assert "." not in key or f"  {key}=" in text


def test_help_loads_neither_hydra_nor_mlflow_nor_torch() -> None:
    code = (
        "import sys; from sweeper.__main__ import command; command(['--help']); "
        "print(sorted({'hydra', 'mlflow', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_plan_loads_neither_mlflow_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from sweeper.__main__ import command; "
        f"command(['dry=true', 'store={tmp_path}/store']); "
        "print(sorted({'mlflow', 'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
    assert not any(tmp_path.iterdir()), "a plan writes nothing"


BAD = [
    # arguments, what the sentence must name
    (["compile=lockd"], ["compile=lockd", "did you mean locked?", "whole"]),
    (["-m", "compile=locked,wholee", "cache=cold,warm"], ["compile=wholee", "did you mean whole?"]),
    (["cache=hot"], ["cache=hot", "cold, foreign, standalone, warm"]),
    (["tracking=x"], ["tracking=x", "none"]),
    (["drafter.layer=5"], ["drafter.layer=5", "did you mean drafter.layers"]),
    (["layers=5"], ["layers=5", "did you mean drafter.layers?"]),
    (["zzz=5"], ["zzz=5", "unknown setting"]),
    (["+foo=1"], ["foo=1", "unknown setting"]),
    (["+drafter.foo=1"], ["drafter.foo=1", "unknown setting", "layers"]),
    (["~seed"], ["seed", "required"]),
    (["~store"], ["store", "required"]),
    (["~store", "+store="], ["store=''", "a folder"]),
    (["train.steps=abc"], ["train.steps=abc", "must be a whole number"]),
    (["train.steps=0"], ["train.steps=0", "from 1"]),
    (["target.taps=[a]"], ["target.taps[0]=a", "must be a whole number"]),
    (["drafter.block=300", "data.row_tokens=16"], ["drafter.block=300", "64"]),
    (["repeat=abc"], ["repeat=abc", "whole number"]),
    (["repeat=0"], ["repeat=0", "from 1"]),
    (["-m", "repeat=1,2"], ["repeat=1,2", "same in every cell"]),
    (["order=x"], ["order=x", "random, given"]),
    (["dry=maybe"], ["dry=maybe", "true or false"]),
    (["rerun=foo"], ["rerun=foo", "failed"]),
    (["rerun=fx_trace"], ["rerun=fx_trace", "did you mean compile.fx_trace_race"]),
    (["grace=-1"], ["grace=-1", "0 or more"]),
    (["grace=abc"], ["grace=abc", "number"]),
    (["grace=nan"], ["grace=nan", "0 or more"]),
    (["grace=inf"], ["grace=inf", "0 or more seconds, and an end"]),
    (["data.path=/dev/null"], ["data.path=/dev/null", "readable file"]),
    (["optim.weight_decay=nan"], ["optim.weight_decay=nan", "0 or more"]),
    (["train.queue_mib=inf"], ["train.queue_mib=inf", "at most 1048576"]),
    (["budget.train=0"], ["budget.train=0", "more than 0"]),
    (["budget.trian=10"], ["budget.trian=10", "did you mean budget.train"]),
    (["seed=-1"], ["seed=-1", "whole number"]),
    (["split=3x"], ["split=3x", "5t3d"]),
    (["split=0t1d"], ["split=0t1d", "at least one of each"]),
    (["split=1t00d"], ["split=1t00d", "at least one of each"]),
    (["split=5t4d", "device=cpu"], ["split=5t4d", f"at most {machine.CPU_WORKERS}"]),
    (["device=gpu"], ["device=gpu", "auto, cpu, cuda"]),
    (["data.path=/no/such.jsonl"], ["data.path=/no/such.jsonl", "readable file"]),
    (["data.path=null"], ["data.path", "must be text"]),
    (["target.model=nobody/nothing"], ["target.model=nobody/nothing", "SmolLM2-135M-Instruct"]),
    (["data.path=/"], ["data.path=/", "dflash prepare"]),
    (["eval.prompts=[/no/such.jsonl]"], ["eval.prompts[0]=/no/such.jsonl", "readable file"]),
    (["eval.every=5"], ["eval.every=5", "needs eval.prompts"]),
    (["drafter.init=/no/such"], ["drafter.init=/no/such", "config.json"]),
    (["fanout.b16.drafter.bloc=16"], ["fanout.b16.drafter.bloc=16", "unknown setting"]),
    (["fanout.b16.data.row_tokens=16"], ["fanout.b16.data={'row_tokens': 16}", "only in drafter, loss, optim"]),
    (["fanout={b8:{},b16:{drafter:{block:16}}}"], ["split=1t1d", "2 fanout variants"]),
    (["fanout=5"], ["fanout=5", "a section with settings"]),
    (["fanout.a/b=3"], ["sweeper: fanout.a/b=3: no readable key=value"]),
    (["budget=30"], ["budget=30: has parts, each set by its name: budget.data, "]),
    (["budget=null"], ["budget=None: has parts"]),
    (["-m", "seed=interval(0,1)"], ["seed=interval(0,1): an interval has no list of levels", "range(FROM,TO,STEP)"]),
    (["args.x=3"], ["args.x=3: needs workload=command", "{args.x}"]),
    (["workload.tokens=5"], ["workload=smollm2 has no workload.tokens, workload=command has; it has data.NAME, "]),
    (
        ["workload=command", "workload.argv=[a]", "target.model=X"],
        ["target.model=X: workload=command has no target.model, workload=smollm2 has; it has args.NAME, workload.argv"],
    ),
    (["workload=command", "workload.argv=[a]", "workload.tokns=1"], ["did you mean workload.tokens"]),
    (["workload=command", "workload.argv=[a]", "data.pth=1"], ["data.pth=1: unknown setting; sweeper --help"]),
    (["workload=command"], ["workload.argv=???", "must be given"]),
    (["workload=command", "workload.argv=[]"], ["workload.argv=[]", "a command"]),
    (
        ["workload=command", "workload.argv=[a]", "workload.code=[/no.py]"],
        ["workload.code=/no.py", "existing"],
    ),
    (["compile=locked,whole"], ["compile=locked,whole", "-m"]),
    (["seed=range(3)"], ["seed=range(3)", "-m"]),
    (["a=[1"], ["a=[1", "key=value"]),
    (["foo"], ["foo", "key=value"]),
    (["--bogus"], ["--bogus"]),
    (["tracking.experiment=null"], ["tracking.experiment=null", "may not be null"]),
]


@pytest.mark.parametrize(("arguments", "named"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_gets_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: list[str]
) -> None:
    status, out, err = inside(tmp_path, capsys, arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    for words in named:
        assert words in err
    assert not any(tmp_path.iterdir()), "nothing was started or made"


def inside(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str, str]:
    """The command in this process, which composing alone needs no other for."""
    from hydra.core.global_hydra import GlobalHydra

    from sweeper.__main__ import command

    argv = sys.argv
    try:
        status = command([*arguments, f"store={tmp_path}/store"] if "~store" not in arguments else arguments)
    finally:
        sys.argv = argv
        GlobalHydra.instance().clear()
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize(
    "fanout",
    [
        ["fanout={b8:{drafter:{block:8}},b16:{drafter:{block:16}}}"],
        ["fanout.b8.drafter.block=8", "fanout.b16.drafter.block=16"],
        ["+fanout.b8.drafter.block=8", "+fanout.b16.drafter.block=16"],
    ],
    ids=" ".join,
)
def test_a_fanout_is_written_as_any_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fanout: list[str]
) -> None:
    status, out, err = inside(tmp_path, capsys, [*fanout, "split=1t2d", "device=cpu", *DRY])
    assert (status, err) == (0, "")
    assert "to do" in out


def test_the_incident_is_a_matrix_of_its_own_that_takes_wheels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "+experiment=incident", "wheel=cpu211,cpu213", "repeat=1", "device=cpu", *DRY]
    status, out, err = inside(tmp_path, capsys, words)
    assert (status, err) == (0, "")
    planned = [line for line in out.splitlines() if line.endswith("unknown") and "1t3d" in line]
    assert len(planned) == 2 * 5 * 2  # wheels, strategies, cold and warm
    for word in ("cpu211 unlocked cold", "cpu213 whole warm", "environment to build first: cpu211"):
        assert word in out


@pytest.mark.parametrize("store", ["/proc/sweeper", "/etc/passwd/sweeper", "/dev/null"])
def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path, store: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sweeper", f"store={store}", *workload("ok")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"sweeper: store={store}: must be a folder that can be written")
    assert done.stderr.count("\n") == 1


def test_a_split_larger_than_the_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sweeper import wheels

    monkeypatch.setattr(machine, "gpu_names", lambda: ("NVIDIA H200",) * 2)
    monkeypatch.setattr(wheels.Wheel, "computes_on_gpu", True)
    machine.gpus.cache_clear()
    try:
        status, _, err = inside(tmp_path, capsys, ["split=5t3d"])
        sentence = "needs 8 GPUs and this machine shows 2; device=shared puts several workers on one"
        assert (status, err) == (2, f"sweeper: split=5t3d: {sentence}\n")
        assert inside(tmp_path, capsys, ["split=5t3d", "device=shared", *DRY])[0] == 0
        status, _, err = inside(tmp_path, capsys, ["split=1t1d", "target.gpus=2"])
        assert (status, "needs 3 GPUs (a target takes target.gpus=2)" in err) == (2, True)
        status, out, _ = inside(tmp_path, capsys, ["split=1t1d", *DRY])
        assert status == 0
        assert "to do" in out
    finally:
        machine.gpus.cache_clear()


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("0,2", 2), ("-1", 0), ("0,-1,2", 1), ("0,1,2,3,4,5", 4)]
)
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ("NVIDIA H200",) * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine.gpus.cache_clear()
    try:
        assert machine.gpus() == count
    finally:
        machine.gpus.cache_clear()


def test_the_whole_matrix_is_checked_before_the_first_run(tmp_path: Path) -> None:
    done = sweeper(tmp_path / "store", "-m", "device=cpu", "split=1t1d,1t2d,9t9d")
    assert done.returncode == 2
    assert "split=9t9d" in done.stderr
    assert not any(tmp_path.iterdir())


def test_completion_offers_levels_and_settings(tmp_path: Path) -> None:
    for line, expected in (
        ("compile=", "compile=locked"),
        ("drafter.", "drafter.layers="),
        ("cac", "cache="),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "sweeper", "-sc", "query=bash"],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "COMP_LINE": f"sweeper {line}"},
        )
        assert expected in done.stdout.split()


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--info", "defaults"], ["--hydra-help"]])
def test_hydras_own_ways_to_look_work(tmp_path: Path, flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sweeper", *flags], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert len(done.stdout.splitlines()) > 10
    assert not any(tmp_path.iterdir())


def test_v_streams_the_log_of_the_child(tmp_path: Path) -> None:
    quiet = sweeper(tmp_path / "quiet", *workload("exit3"))
    loud = sweeper(tmp_path / "loud", "-v", *workload("exit3"))
    word = "this is the last word of the job"
    assert loud.stderr.count(word) > quiet.stderr.count(word)


def test_nothing_is_left_in_the_working_directory_but_the_store(tmp_path: Path) -> None:
    store = tmp_path / "deep" / "store"
    store.parent.mkdir()
    before = time.time()
    assert sweeper(store, *workload("ok")).returncode == 0
    assert [path.name for path in store.parent.iterdir()] == ["store"]
    (verdict,) = runs(store).values()
    assert verdict["verdict"] == "ok"
    assert before < verdict["started"] < verdict["ended"]


def test_a_sweep_keeps_its_command_as_it_was_typed_and_its_levels_in_order(tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = ["-m", *workload("ok", "{args.lr}"), "args.lr=0.05,0.1,0.01", "-v"]
    assert sweeper(store, *words).returncode == 0
    (path,) = store.glob("sweeps/*/plan.json")
    plan = json.loads(path.read_text())
    assert plan["command"] == [*words, f"store={store}", "tracking=none"]
    assert plan["title"] == "args.lr=0.01,0.05,0.1"
