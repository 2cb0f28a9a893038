"""The benchmark for eight GPUs: in which order it asks, what it leaves out, what its file tells of made-up runs."""

import json
import re
import sys

import pytest
from benchmark_module import FOLDER, benchmark_module
from made_up import events, proof, write_run

from sweeper import machine

SPLITS = ("5t3d", "6t2d", "7t1d", "4t4d")
DRAFTERS = ("drafter0", "drafter1", "drafter2")
CELL = {"wheel": "current", "cache": "cold", "compile": "triton", "split": "5t3d", "isolation": "threads"}


@pytest.fixture
def benchmark():
    with benchmark_module("eight") as module:
        yield module


def measured(store, repeat=1, **levels):
    """A good run of a cell, 24 steps of a second each; its events name the worker of one GPU."""
    told = events(steps=24)
    told.append({"t": told[0]["t"] + 1, "event": "thread", "name": "drafter0", "role": "drafter", "device": "cuda:1"})
    return write_run(store, CELL | levels, repeat=repeat, told=told, cache=proof(levels.get("cache", "cold")))


def test_what_matters_most_comes_first_and_every_cell_comes(benchmark):
    parts = list(benchmark.parts(SPLITS, tiny=False))
    first = [(part.store, part.factor, part.others["isolation"]) for part in parts[:4]]
    assert first == [
        ("speed", "compile", "threads"),
        ("speed", "split", "threads"),
        ("speed", "compile", "processes"),
        ("failures", "compile", "threads"),
    ]
    speed = [cell for part in parts if part.store == "speed" and part.repeats == 1 for cell in part.cells()]
    cold = {(c["split"], c["compile"], c["isolation"]) for c in speed if c["cache"] == "cold"}
    assert len(cold) == len(SPLITS) * 3 * 2 == len([c for c in speed if c["cache"] == "cold"])
    assert {c["compile"] for c in speed if c["cache"] == "warm"} == {"triton", "locked", "whole"}


def test_one_split_asks_no_question_about_splits(benchmark):
    assert all(part.factor == "compile" for part in benchmark.parts(("1t1d",), tiny=False))


def test_runs_that_are_there_are_not_asked_for_and_those_without_time_are_named(benchmark, tmp_path):
    measured(tmp_path / "speed")  # took 60 s
    part = next(iter(benchmark.parts(SPLITS, tiny=False)))
    left_out = {}
    (fits,) = benchmark.trimmed(part, tmp_path, 100.0, left_out)
    assert fits.levels == ("locked",)
    assert benchmark.told(left_out) == ["compile=whole split=5t3d isolation=threads cache=cold: repeat 1"]
    assert benchmark.trimmed(part, tmp_path, 0.0, {}) == []


def test_the_file_tells_speed_waits_and_failures(benchmark, tmp_path, monkeypatch):
    looked = {"rss_bytes": 1, "gpu_busy": {"0": 0.2, "1": 0.9}}
    for repeat in (1, 2, 3):
        folder = measured(tmp_path / "speed", repeat)
        looks = [{"t": events()[0]["t"] + at} | looked for at in (1, 30, 35)]
        (folder / "usage.jsonl").write_text("\n".join(map(json.dumps, looks)))
    measured(tmp_path / "speed", cache="warm")
    raced = {"event": "failure", "t": events()[0]["t"] + 9, "worker": "drafter1", "type": "RuntimeError"}
    raced |= {"message": "Detected that you are using FX to symbolically trace", "traceback": ""}
    stacks = [f"Thread {name} (0x{ident}):\n  File {name}.py\n" for ident, name in enumerate(("MainThread", *DRAFTERS))]
    raced |= {"holders": [{"thread": "drafter2", "path": "x"}], "stacks": "\n".join(stacks)}
    told = [{"t": raced["t"], "event": "thread", "name": name, "role": "drafter", "ident": "0xff"} for name in DRAFTERS]
    broken = CELL | {"compile": "unlocked"}
    write_run(tmp_path / "failures", broken, told=[events()[0], *told, raced], exit_code=1)
    write_run(tmp_path / "failures", broken, repeat=2)
    monkeypatch.setattr(sys, "argv", ["eight.py", "--work", str(tmp_path), "--tiny"])
    found = json.loads(json.dumps(benchmark.report(tmp_path, benchmark.parse(), {}, 0.0)))
    cold = next(cell for cell in found["speed"] if cell["cache"] == "cold")
    assert cold["ktok_s"]["median"] == pytest.approx(0.5)
    assert cold["ktok_s"]["n"] == 3
    assert cold["times_the_incident"] == pytest.approx(0.5 / 12.8)
    run = cold["runs"][0]
    assert run["within_ktok_s"]["low"] <= 0.5 <= run["within_ktok_s"]["high"]
    assert run["busy"] == pytest.approx({"cuda:0": 0.2, "drafter0": 0.9})
    assert len(found["first_step_s"]["5t3d triton threads cold"]) == 3
    assert len(found["first_step_s"]["5t3d triton threads warm"]) == 1
    rate = found["failures"]["unlocked"]
    assert (rate["k"], rate["n"]) == (1, 2)
    assert rate["low"] < 0.5 < rate["high"]
    (way,) = rate["ways"].values()
    assert way["worker"] == "drafter1"
    assert re.findall(r"Thread (\w+)", way["stacks"]) == ["drafter2", "drafter0", "drafter1"], "who held the flag first"
    assert found["failures"]["suppressed"] is None


def test_documents_have_the_length_that_was_asked_for(benchmark, tmp_path):
    from tokenizers import Tokenizer

    folder = FOLDER.parent / "tests" / "target" / "qwen3-small"
    benchmark.long_documents.write(tmp_path / "long.jsonl", folder, tokens=100, documents=30)
    texts = [json.loads(line)["text"] for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    lengths = [len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids) for text in texts]
    assert len(texts) == len(set(texts)) == 30
    assert 78 <= min(lengths) <= max(lengths) <= 122
    assert 90 < sum(lengths) / 30 < 110


def test_a_machine_with_fewer_gpus_is_told(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["eight.py", "--work", "w"])
    with pytest.raises(SystemExit):
        benchmark.parse()
    assert "--splits needs 8 GPUs and this machine shows 2; --tiny runs toys on CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_toy_run_goes_on_where_it_ended(benchmark, tmp_path, monkeypatch, capfd):
    out = tmp_path / "out.json"
    words = ["eight.py", "--work", str(tmp_path / "work"), "--json", str(out), "--tiny", "--splits", "1t1d"]
    for level in ("eager", "locked"):  # one question each time
        only = benchmark.Part("speed", "compile", (level,), {n: CELL[n] for n in ("cache", "isolation", "split")})
        only.others["split"] = "1t1d"
        monkeypatch.setattr(benchmark, "parts", lambda *_, only=only: iter([only]))
        monkeypatch.setattr(sys, "argv", words)
        benchmark.main()
    found = json.loads(out.read_text())
    assert {cell["compile"]: cell["verdicts"] for cell in found["speed"]} == {"eager": {"ok": 1}, "locked": {"ok": 1}}
    assert "compile=locked is" in found["said"]["speed"] or "compile=eager is" in found["said"]["speed"]
    assert out.with_name("out-speed.html").stat().st_size > 10_000
    assert len(list((tmp_path / "work" / "speed" / "runs").iterdir())) == 2
    assert "weights are made up" in capfd.readouterr().err
