"""Whole jobs, as a harness starts them: `python -m dflash train` on a tiny random target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash.events import EventReader
from dflash.models import folder

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

    def start(self) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "dflash",
            "train",
            "--spec",
            str(self.out / "spec.json"),
            "--out",
            str(self.out),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self) -> tuple[int, str]:
        process = self.start()
        try:
            _, errors = process.communicate(timeout=180)
        finally:
            process.kill()
        return process.returncode, errors

    def events(self, kind: str) -> list[dict]:
        return [e for e in EventReader(self.out / "events.jsonl").poll() if e["event"] == kind]

    def losses(self) -> list[float]:
        return [e["loss"] for e in self.events("step")]

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
    assert [e["stage"] for e in one.events("stage")] == ["load", "data", "warmup", "train", "save"]
    assert one.events("end")[-1]["status"] == "ok"
    assert load_file(one.out / "drafter" / "model.safetensors")["fc.weight"].shape == (32, 64)


def test_drafters_that_average_equal_one_drafter_on_the_joint_batch(job):
    joint = job("joint", train__rows=2, split="1t1d")
    apart = job("apart", split="1t2d")
    many = job("many", split="2t2d")
    for one in (joint, apart, many):
        code, errors = one.run()
        assert code == 0, errors
    assert apart.losses() == pytest.approx(joint.losses(), rel=1e-5)
    assert many.losses() == apart.losses()  # who makes the features changes nothing, not a bit
    assert [e["tokens"] for e in apart.events("step")] == [e["tokens"] for e in joint.events("step")]


def test_processes_train_as_threads_do(job):
    threads = job("threads", split="1t2d")
    processes = job("processes", split="1t2d", isolation="processes")
    for one in (threads, processes):
        code, errors = one.run()
        assert code == 0, errors
    assert processes.losses() == pytest.approx(threads.losses(), rel=1e-5)
    names = {e["name"] for e in processes.events("thread")}
    assert names == {"target0", "drafter0", "drafter1"}
    assert len({e["pid"] for e in processes.events("thread")}) == 3


@pytest.mark.parametrize("isolation", ["threads", "processes"])
def test_sigterm_ends_after_a_whole_step_and_says_so(job, isolation):
    one = job(train__steps=100000, split="1t2d", isolation=isolation)
    process = one.start()
    try:
        one.wait_for("step", 3)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert one.events("end")[-1]["status"] == "interrupted"
    assert (one.out / "drafter" / "model.safetensors").exists()


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
