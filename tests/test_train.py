"""Whole jobs, as a harness starts them: `python -m dflash train` on a tiny random target, forked (tests/forked.py)."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash import made_up
from dflash.events import EventReader
from dflash.models import folder
from dflash.resume import refuse_other
from dflash.settings import SettingError

WORDS = [
    "a",
    "target",
    "feeds",
    "hidden",
    "states",
    "to",
    "its",
    "drafter",
    "and",
    "the",
    "drafter",
    "guesses",
    "a",
    "block",
    "of",
    "words",
]


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    """Six layers of width 32 with the real tokenizer and chat template of SmolLM2."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.5,  # wide enough that the head can be sure of a token
    )
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder("SmolLM2-135M-Instruct", models_dir)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = []
    for n in range(24):
        answer = " ".join(WORDS[(n + k) % len(WORDS)] for k in range(20))
        turns = [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


class Job:
    """One job's spec, process and events."""

    def __init__(self, out: Path, target: Path, data: Path, **changes: object) -> None:
        self.out = out
        self.spec = {
            "data": {"path": str(data), "row_tokens": 64},
            "target": {"model": str(target), "taps": [1, 3]},
            "drafter": {"layers": 1, "block": 4, "anchors": 6, "mask_token": 16},
            "optim": {"lr": 3e-3},
            "train": {"steps": 6, "steady_after": 2, "cpu_threads": 1, "queue_mib": 0.06},  # four batches
            "compile": "eager",
            "device": "cpu",
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                self.spec.setdefault(section, {})[name] = value  # type: ignore[union-attr]
            else:
                self.spec[section] = value
        out.mkdir(parents=True, exist_ok=True)
        (out / "spec.json").write_text(json.dumps(self.spec))

    def start(self) -> Forked:
        return Forked("dflash", "train", "--spec", str(self.out / "spec.json"), "--out", str(self.out))

    def run(self) -> tuple[int, str]:
        process = self.start()
        try:
            _, errors = process.communicate(timeout=180)
        finally:
            process.kill()
        return process.wait(), errors

    def events(self, kind: str) -> list[dict]:
        return [e for e in EventReader(self.out / "events.jsonl").poll() if e["event"] == kind]

    def losses(self, variant: str | None = None) -> dict[int, float]:
        """By step; of a fanout, one variant's."""
        return {e["step"]: e["loss"] for e in self.events("step") if variant is None or e["variant"] == variant}

    def wait_for(self, kind: str, count: int) -> None:
        until = time.monotonic() + 120
        while len(self.events(kind)) < count:
            assert time.monotonic() < until, f"no {kind} event"
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path: Path, tiny_target: Path, chats: Path):
    def make(name: str = "job", **changes: object) -> Job:
        return Job(tmp_path / name, tiny_target, chats, **changes)

    return make


def test_a_job_trains_reports_and_leaves_a_drafter(job):
    one = job(train__steps=60, train__steady_after=2)
    code, errors = one.run()
    assert code == 0, errors
    steps = one.events("step")
    assert [s["step"] for s in steps] == list(range(1, 61))
    opened = [s["steady"] for s in steps].index(True)
    assert 2 <= opened <= 2 + 4 + 2, "warm-up, then what waits in the channel and in the workers' hands"
    assert all(s["steady"] for s in steps[opened:])
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert all(1 <= s["accept"] <= 4 for s in steps)
    (data,) = one.events("data")
    assert data["documents"] == 24
    assert 0 < steps[0]["tokens"] <= 64  # unpadded
    assert [e["stage"] for e in one.events("stage")] == ["data", "load", "warmup", "train", "save"]
    assert one.events("end")[-1]["status"] == "ok"
    assert load_file(one.out / "drafter" / "model.safetensors")["fc.weight"].shape == (32, 64)


def _bytes(one: Job) -> bytes:
    return (one.out / "drafter" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["threads", "processes"])
def test_a_profiled_job_trains_to_the_same_bits_and_is_measured_after_the_profile(job, isolation):
    settings = {"train__steps": 40, "split": "1t2d", "isolation": isolation}
    plain, seen = job("plain", **settings), job("seen", train__profile=3, **settings)
    for one in (plain, seen):
        code, errors = one.run()
        assert code == 0, errors
    assert seen.losses() == plain.losses()
    assert _bytes(seen) == _bytes(plain)
    assert {path.name for path in seen.out.glob("*profile*")} == {"profile.json.gz", "profile.txt"}
    assert not list(plain.out.glob("*profile*"))
    (told,) = seen.events("profile")
    assert (told["first"], told["last"]) == (3, 5)
    assert [e["stage"] for e in seen.events("stage")] == ["data", "load", "warmup", "train", "save"]
    opened = seen.events("stage")[3]["t"]
    assert told["t"] <= opened, "written before the window opens"
    assert all(e["step"] > 6 and e["t"] > opened for e in seen.events("step") if e["steady"])
    assert any(e["steady"] for e in seen.events("step"))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["locked", "whole", "unlocked"])
def test_a_profile_makes_nothing_compile_again(job, compiled):
    one = job(train__steps=12, train__profile=2, compile=compiled)
    code, errors = one.run()
    assert code == 0, errors
    assert (one.out / "profile.json.gz").is_file()
    assert not [e for e in one.events("warning") if e["code"] != "setup"]
    (end,) = [e for e in one.events("counters") if e["at"] == "end"]
    assert (end["recompiles"], end["unexpected_compiles"], end["uncompiled_calls"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_job_that_is_ended_while_it_is_profiled_leaves_no_part_of_a_profile(job):
    one = job(train__steps=2000, train__profile=100)
    assert stopped(one, signal.SIGTERM, steps=5) == 75
    assert one.events("step")[-1]["step"] < 102
    assert not [*one.out.glob("*profile*")]


@pytest.fixture(scope="session")
def blank_target(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """The tiny target's folder without its weights."""
    path = tmp_path_factory.mktemp("blank")
    for file in tiny_target.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path)
    return path


@pytest.mark.slow
def test_a_made_up_target_is_the_same_for_threads_and_processes_and_the_drafter_says_so(job, blank_target):
    wish = {"target__model": str(blank_target), "target__made_up": True, "split": "2t2d"}
    threads, processes = job("threads", **wish), job("processes", isolation="processes", **wish)
    for one in (threads, processes):
        code, errors = one.run()
        assert code == 0, errors
        assert [e["message"] for e in one.events("warning") if e["code"] == "target.made_up"] == [made_up.SAID]
        assert "weights were made up" in (one.out / "drafter" / "README.md").read_text()
    assert threads.losses() == pytest.approx(processes.losses(), rel=1e-6)


def test_acceptance_with_a_made_up_target_is_refused(job, blank_target, chats):
    one = job(target__model=str(blank_target), target__made_up=True, eval__prompts=[str(chats)])
    code, errors = one.run()
    assert code == 2
    assert "must be empty with target.made_up=true" in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.slow
def test_drafters_that_average_equal_one_drafter_on_the_joint_batch(job):
    joint = job("joint", train__rows=2, split="1t1d")
    apart = job("apart", split="1t2d")
    many = job("many", split="2t2d")
    gathered = job("gathered", train__accumulate=2)
    for one in (joint, apart, many, gathered):
        code, errors = one.run()
        assert code == 0, errors
    assert apart.losses() == pytest.approx(joint.losses(), rel=1e-5)
    assert many.losses() == apart.losses()  # who makes the features changes nothing, not a bit
    assert gathered.losses() == pytest.approx(joint.losses(), rel=1e-5)
    for one in (apart, gathered):
        for mine, theirs in zip(one.events("step"), joint.events("step"), strict=True):
            for name in ("loss_at", "accuracy_at", "accept", "coverage", "grad_norm"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert [e["tokens"] for e in apart.events("step")] == [e["tokens"] for e in joint.events("step")]


def stopped(one: Job, number: signal.Signals, steps: int) -> int:
    """Send a running job a signal after some steps; gives its exit status."""
    process = one.start()
    try:
        one.wait_for("step", steps)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, chats: Path) -> Job:
    """What those that are asked to end must equal: 60 steps of two drafters, as threads."""
    one = Job(tmp_path_factory.mktemp("undisturbed"), tiny_target, chats, train__steps=60, split="1t2d")
    code, errors = one.run()
    assert code == 0, errors
    return one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isolation", "number"), [("threads", signal.SIGINT), ("threads", signal.SIGUSR2), ("processes", signal.SIGTERM)]
)
def test_a_job_that_is_asked_to_end_saves_and_goes_on_bit_for_bit(job, undisturbed, isolation, number):
    """And processes train as threads do, to the last bit."""
    one = job("one", train__steps=60, split="1t2d", isolation=isolation)
    assert stopped(one, number, steps=3) == 75
    assert one.events("end")[-1]["status"] == "requeue"
    (saved,) = one.events("checkpoint")
    assert saved["step"] == one.events("step")[-1]["step"] < 60
    workers = {e["name"]: e["pid"] for e in one.events("thread")}
    assert set(workers) == {"target0", "drafter0", "drafter1"}
    assert len(set(workers.values())) == (3 if isolation == "processes" else 1)
    code, errors = one.run()
    assert code == 0, errors
    assert one.events("resume")[0]["step"] == saved["step"]
    assert [e["step"] for e in one.events("step")] == list(range(1, 61))
    assert one.losses() == undisturbed.losses()
    trained = [load_file(each.out / "drafter" / "model.safetensors") for each in (undisturbed, one)]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_a_killed_job_goes_on_from_its_last_whole_checkpoint(job):
    whole = job("whole", train__steps=40)
    code, errors = whole.run()
    assert code == 0, errors
    one = job("one", train__steps=40, train__save_every=4)
    process = one.start()
    one.wait_for("checkpoint", 3)
    process.kill()
    process.communicate(timeout=60)
    newest = sorted((one.out / "checkpoints").glob("step-*"))[-1]
    (newest / "drafter.safetensors").write_bytes(b"half a file")
    code, errors = one.run()
    assert code == 0, errors
    (warning,) = [w for w in one.events("warning") if w["code"] == "checkpoint.damaged"]
    assert newest.name in warning["message"]
    assert one.events("resume")[0]["step"] == int(newest.name[5:]) - 4
    assert one.losses() == whole.losses()
    assert len(list((one.out / "checkpoints").glob("step-*"))) == 2


def _held(folder: Path) -> dict[str, bytes]:
    """Every file in a run's folder but the settings it is started with."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "spec.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_folder_of_a_run_takes_no_other_run(job, save_every):
    """And the same command on a run that has ended leaves everything as it is."""
    same = {"train__steps": 4, "train__save_every": save_every}
    code, errors = job("one", **same).run()
    assert code == 0, errors
    held = _held(job("one", **same).out)
    assert {"job.json", "events.jsonl", "drafter/model.safetensors"} <= held.keys()
    for changes, said in (
        ({"optim__lr": 1e-2}, "optim.lr=0.01: the run in {out} has 0.003; name another --out to start anew"),
        ({"drafter__block": 8, "compile": "locked"}, "drafter.block=8: the run in {out} has 4; name another --out"),
        ({"split": "1t2d"}, 'split and train.accumulate="2 batches a step": the run in {out} has "1 batches a step"'),
        ({"fanout": {"a": {}}}, "fanout=a: the run in {out} has none"),
    ):
        one = job("one", **same, **changes)
        code, errors = one.run()
        assert code == 2, errors
        assert errors.startswith("dflash: " + said.format(out=one.out))
        assert len(errors.splitlines()) == 1
        assert _held(one.out) == held
    for changes in ({}, {"train__steps": 3}, {"compile": "locked"}):
        one = job("one", **same | changes)
        code, errors = one.run()
        assert code == 0
        there = f"dflash: {one.out} holds this run, which ended after 4 steps"
        assert errors == f"{there}; name another --out to repeat it\n"
        assert _held(one.out) == held
    longer = job("one", **same | {"train__steps": 6})
    code, errors = longer.run()
    if save_every:
        assert code == 0, errors
        assert longer.events("resume")[0]["step"] == 4
        assert [e["step"] for e in longer.events("step")] == list(range(1, 7))
    else:
        assert code == 2
        assert f"train.steps=6: the run in {longer.out} ended after 4 and left no checkpoint to go on from" in errors
        assert _held(longer.out) == held


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(job):
    one = job(train__steps=2000)
    process = one.start()
    one.wait_for("step", 2)
    process.kill()
    process.communicate(timeout=60)
    code, errors = job(train__steps=4).run()
    assert code == 0, errors
    assert [e["step"] for e in one.events("step")][-4:] == [1, 2, 3, 4]


def test_a_checkpoint_of_another_job_is_refused_by_the_setting_that_differs(job, chats, tmp_path):
    before = job("one", train__steps=4, train__save_every=2)
    code, errors = before.run()
    assert code == 0, errors
    less = tmp_path / "less.jsonl"
    less.write_text("".join(chats.read_text().splitlines(keepends=True)[:-1]))
    moved = shutil.copy(chats, tmp_path / "moved.jsonl")
    for number, (changes, said) in enumerate(
        [
            ({"drafter__block": 8}, "drafter.block=8: the checkpoint in {saved} has 4; name another --out"),
            ({"drafter__heads": 2}, "drafter.heads=2: the checkpoint in {saved} has 4; name another --out"),
            ({"optim__lr": 1e-2}, "optim.lr=0.01: the checkpoint in {saved} has 0.003; name another --out"),
            ({"data__reasoning": "drop"}, 'data.reasoning="drop": the checkpoint in {saved} has "keep"; name another'),
            ({"data__path": str(less)}, 'data.path="content sha256:'),
            ({"data__path": str(moved), "train__steps": 6, "target__gpus": 1}, ""),
        ]
    ):
        after = job(f"other{number}", **{"train__steps": 4} | changes)
        shutil.copytree(before.out / "checkpoints", after.out / "checkpoints")
        code, errors = after.run()
        assert code == (2 if said else 0), errors
        told = [line for line in errors.splitlines() if line.startswith("dflash: ")]
        assert len(told) == bool(said)
        sentence = "dflash: " + said.format(saved=after.out / "checkpoints" / "step-00000004")
        assert all(line.startswith(sentence) for line in told), told
    assert [e["step"] for e in after.events("step")] == [5, 6]


def test_a_checkpoint_that_cannot_be_written_costs_the_checkpoint_not_the_run(job):
    one = job(train__steps=8, train__save_every=3)
    (one.out / "checkpoints").write_text("in the way")
    code, errors = one.run()
    assert code == 0, errors
    assert {w["code"] for w in one.events("warning")} >= {"checkpoint.failed"}
    assert len(one.losses()) == 8


@pytest.mark.slow
def test_variants_of_a_fanout_train_as_they_would_alone(job):
    """One stream of features, each variant with its own loss, block and depth, and its own curve."""
    variants = {
        "small": {"drafter": {"block": 2}},
        "deep": {"drafter": {"layers": 2, "anchors": 4}, "optim": {"lr": 1e-3}},
        "soft": {"loss": {"kind": "kl"}},
    }
    together = job("together", split="2t3d", fanout=variants)
    code, errors = together.run()
    assert code == 0, errors
    for name, changes in variants.items():
        alone = job(name, **{f"{s}__{k}": v for s, settings in changes.items() for k, v in settings.items()})
        code, errors = alone.run()
        assert code == 0, errors
        assert together.losses(name) == pytest.approx(alone.losses(), rel=1e-6)
        assert (together.out / "drafter" / name / "model.safetensors").exists()
    made = {e["step"]: e["tokens"] for e in together.events("step")}
    assert made == {e["step"]: e["tokens"] for e in alone.events("step")}


@pytest.mark.slow
def test_a_fanout_of_processes_that_was_stopped_goes_on(job):
    settings = {"split": "1t2d", "train__steps": 40, "fanout": {"a": {}, "b": {"loss": {"kind": "dpace"}}}}
    whole, one = job("whole", **settings), job("one", isolation="processes", **settings)
    code, errors = whole.run()
    assert code == 0, errors
    assert stopped(one, signal.SIGTERM, steps=6) == 75
    code, errors = one.run()
    assert code == 0, errors
    for name in ("a", "b"):
        assert one.losses(name) == whole.losses(name)
        assert len(one.losses(name)) == 40


def test_acceptance_is_measured_on_the_way_and_at_the_end(job, tmp_path):
    prompts = tmp_path / "asked.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    one = job(eval={"prompts": [str(prompts)], "every": 5, "max_new": 12}, train__steps=8)
    code, errors = one.run()
    assert code == 0, errors
    found = one.events("eval")
    assert [(e["step"], e["set"], e["n"], e["identical"]) for e in found] == [(5, "asked", 3, 1), (8, "asked", 3, 1)]
    assert all(1 <= e["tau"] <= 4 for e in found)
    assert "asked" in (one.out / "drafter" / "README.md").read_text()


def test_a_worker_process_that_is_killed_ends_the_job_with_its_name(job):
    one = job(train__steps=100000, split="1t2d", isolation="processes")
    process = one.start()
    try:
        one.wait_for("step", 2)
        (pid,) = {e["pid"] for e in one.events("thread") if e["name"] == "drafter1"}
        os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    (failure,) = one.events("failure")
    assert failure["worker"] == "drafter1"
    assert "SIGKILL" in failure["message"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drafter__mask_token": 49152}, "drafter.mask_token=49152"),
        ({"drafter__hidden": 48}, "drafter.hidden=48: must equal the target's hidden size 32"),
        ({"target__taps": [1, 6]}, "target.taps"),
        ({"data__path": "/nowhere/chats.jsonl"}, "data.path=/nowhere/chats.jsonl"),
        ({"data__row_tokens": 16}, "data.path"),  # every conversation is longer than a row
        ({"target__model": "/nowhere/model"}, "target.model=/nowhere/model"),
        ({"compile": "triton"}, "compile=triton: needs CUDA"),
        ({"device": "cuda"}, "device=cuda"),
        ({"drafter__layrs": 2}, "drafter.layrs=2: unknown setting"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_status_2(job, changes, sentence):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, errors = job(**changes).run()
    assert code == 2, errors
    said = [line for line in errors.splitlines() if line.startswith("dflash: ")]
    assert len(said) == 1
    assert sentence in said[0]
    assert "Traceback" not in errors


def test_an_empty_data_set_is_refused(job, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    code, errors = job(data__path=str(empty)).run()
    assert code == 2
    assert f"data.path={empty}" in errors


@pytest.mark.parametrize(("now", "before"), [({"a": 1}, {"a": 1, "b": 2}), ({"a": 1, "b": 2}, {"a": 1})])
def test_a_setting_that_only_one_of_two_runs_knows_makes_them_differ(
    now: dict[str, int], before: dict[str, int]
) -> None:
    with pytest.raises(SettingError, match=r"^b="):
        refuse_other(now, before, "the checkpoint", "")
    refuse_other(now, before, "the checkpoint", "", but=["b"])
