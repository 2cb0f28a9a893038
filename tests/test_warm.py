"""`python -m dflash warm` compiles, on the small target in tests/target, all that `locked` compiles."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeper import caches

HERE = Path(__file__).parent / "target"
SETTINGS = [
    f"target.model={HERE / 'qwen3-small'}",
    *("device=cpu", "data.row_tokens=64", "drafter.layers=1", "drafter.block=4", "drafter.anchors=4"),
    *("train.steps=2", "train.steady_after=1", "train.save=false"),
]


def dflash(command: str, folder: Path, *words: str) -> dict[str, dict[str, int]]:
    """Run a command whose caches lie in folder/cache; returns what it told of lookups, by layer."""
    env = os.environ | caches.environment(folder / "cache")
    line = [sys.executable, "-m", "dflash", command, "--out", str(folder / "out"), *SETTINGS, *words]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    written = (folder / "out" / "events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(each) for each in written]
    assert events[-1]["status"] == "ok"
    told = [event for event in events if event["event"] == "counters"][-1]["caches"]
    assert isinstance(told, dict)
    return told


@pytest.mark.slow
def test_attention_compiled_alone_is_all_that_locked_compiles(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer of some words"}]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(8)))
    alone, trained = tmp_path / "alone", tmp_path / "trained"
    caches.layout(alone / "cache")
    told = dflash("warm", alone, f"data.path={chats}", "compile=whole")
    assert told["fxgraph"]["misses"] > 0 == told["fxgraph"]["hits"]
    shutil.copytree(alone / "cache", trained / "cache")
    before = caches.count(trained / "cache")
    told = dflash("train", trained, f"data.path={chats}", "compile=locked")
    end = {"event": "end", "t": 0.0, "caches": told}
    proof = caches.proof("standalone", before, caches.count(trained / "cache"), [end])
    assert proof["proved"] == "warm", proof["why"]
    assert told["aotautograd"]["hits"] > 0


def test_a_wrong_setting_is_one_sentence(tmp_path: Path) -> None:
    given = ["--out", str(tmp_path / "out"), *SETTINGS, f"data.path={tmp_path}", "drafter.block=0"]
    line = [sys.executable, "-m", "dflash", "warm", *given]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("dflash: drafter.block=0: ")
    assert not (tmp_path / "out").exists()
