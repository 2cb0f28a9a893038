"""`python -m dflash warm`: what compiling the attention alone is good for, on the small target in tests/target."""

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


def dflash(command: str, out: Path, cache: Path, *words: str) -> dict[str, dict[str, int]]:
    """Run a command with a cache directory; returns what it told of lookups, by layer."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    line = [sys.executable, "-m", "dflash", command, "--out", str(out), *SETTINGS, *words]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = [json.loads(each) for each in (out / "events.jsonl").read_text().splitlines()]
    assert events[-1]["status"] == "ok"
    return [event for event in events if event["event"] == "counters"][-1]["caches"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    chat = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer of some words"}]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(8)))
    return path


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Path:
    """Caches in which the attention was compiled alone."""
    folder = tmp_path_factory.mktemp("warmed")
    told = dflash("warm", folder / "out", folder / "cache", f"data.path={chats}", "compile=whole")
    assert told["fxgraph"]["misses"] > 0 == told["fxgraph"]["hits"]
    return folder / "cache"


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("warm")]


@pytest.mark.parametrize(("strategy", "finds"), [("locked", True), ("whole", False)])
def test_attention_alone_warms_the_strategy_that_compiles_attention_alone(
    tmp_path: Path, chats: Path, warmed: Path, strategy: str, finds: bool
) -> None:
    """A whole forward is another graph: for `whole` such a warm-up does nothing."""
    shutil.copytree(warmed, tmp_path / "cache")
    before = caches.count(tmp_path / "cache")
    told = dflash("train", tmp_path / "out", tmp_path / "cache", f"data.path={chats}", f"compile={strategy}")
    after = caches.count(tmp_path / "cache")
    events = [{"event": "end", "t": 0.0, "caches": told}]
    proof = caches.proof("standalone", before, after, events, caches.Start(made_by="warm"))
    assert proof["proved"] == ("warm" if finds else "mixed"), proof["why"]
    assert bool(told["aotautograd"]["hits"]) == finds


def test_a_wrong_setting_is_one_sentence(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dflash", "warm", "--out", str(tmp_path / "out"), *SETTINGS, "drafter.block=0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("dflash: drafter.block=0: ")
    assert not (tmp_path / "out").exists()
