"""From prompts to an exported drafter, by the commands a user types, on the small target in tests/target."""

import json
from pathlib import Path
from typing import Any

import forked
import pytest
from transformers import AutoTokenizer

from dflash.events import EventReader

HERE = Path(__file__).parent / "target"
TARGET = HERE / "qwen3-small"
BLOCK = 8
# The first token of a response belongs to no round, so whole blocks remain.
LONGEST = 1 + 12 * BLOCK

pytestmark = pytest.mark.slow


def dflash(command: str, *words: object) -> str:
    done = forked.run("dflash", command, *map(str, words), timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(chats: Path, out: Path, *settings: str) -> None:
    common = ("device=cpu", "compile=eager", f"drafter.block={BLOCK}", "data.row_tokens=256", "optim.lr=1e-3")
    dflash("train", "--out", out, f"data.path={chats}", f"target.model={TARGET}", *common, *settings)


def evaluate(drafter: Path, prompts: Path, out: Path, *more: object) -> dict[str, Any]:
    """What `eval` found on one set of prompts."""
    words = ("--drafter", drafter, "--target", TARGET, "--prompts", prompts, "--max-new", LONGEST, "--json", out)
    dflash("eval", *words, "--device", "cpu", "--dtype", "float32", "--no-thinking", *more)
    (found,) = json.loads(out.read_text())["sets"]
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the target's own responses, a training run and the exported drafter."""
    folder = tmp_path_factory.mktemp("path")
    words = ("--target", TARGET, "--out", folder / "chats.jsonl", "--max-new", LONGEST, "--batch", 64, "--no-thinking")
    dflash("regenerate", "--prompts", HERE / "prompts-train.jsonl", *words)
    train(folder / "chats.jsonl", folder / "run", "drafter.layers=2", "drafter.anchors=64", "train.steps=200")
    dflash("export", "--run", folder / "run", "--to", folder / "exported")
    return folder


def test_the_target_answers_every_prompt_and_does_not_loop(work):
    rows = [json.loads(line) for line in (work / "chats.jsonl").read_text().splitlines()]
    assert len(rows) == 200
    answers = [row["messages"][-1] for row in rows]
    assert {answer["role"] for answer in answers} == {"assistant"}
    pieces = [{text[at : at + 16] for at in range(0, len(text) - 16)} for text in (a["content"] for a in answers)]
    assert sum(map(len, pieces)) > 0.7 * sum(max(0, len(a["content"]) - 16) for a in answers)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_drafter_raises_acceptance_on_files_it_never_saw(work, tmp_path, temperature):
    heldout = HERE / "prompts-heldout.jsonl"
    found = evaluate(work / "exported", heldout, tmp_path / "eval.json", "--temperature", temperature, "--batch", 40)
    assert found["n"] == 40
    assert found["block"] == BLOCK
    assert found["tau_untrained"] <= 1.05
    assert found["tau"] > 1.3
    assert found["tau_low"] > 1.2
    assert found["distinct4"] > 0.7  # a loop would flatter tau
    if temperature == 0:
        assert found["identical"] == 1.0


def test_the_loss_falls_and_acceptance_in_training_rises(work):
    steps = [event for event in EventReader(work / "run" / "events.jsonl").poll() if event["event"] == "step"]
    first, last = steps[:10], steps[-10:]
    assert sum(s["loss"] for s in last) < 0.5 * sum(s["loss"] for s in first)
    assert sum(s["accept"] for s in last) > 1.3 * sum(s["accept"] for s in first)


def test_one_conversation_can_be_learnt_by_heart(work, tmp_path):
    """Then nearly every block is accepted whole: the most that a block of 8 can give is 8 tokens a round."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    rows = (work / "chats.jsonl").read_text().splitlines()
    length, longest = max(
        (len(tokenizer(json.loads(row)["messages"][-1]["content"])["input_ids"]), row) for row in rows
    )
    one = tmp_path / "one.jsonl"
    one.write_text(longest + "\n")
    every = f"drafter.anchors={LONGEST}"
    train(one, tmp_path / "run", "drafter.layers=2", every, "train.steps=60", "optim.schedule=constant")
    whole_blocks = 1 + (length - 1) // BLOCK * BLOCK  # a last block that the end cuts short would count as rejected
    found = evaluate(tmp_path / "run" / "drafter", one, tmp_path / "eval.json", "--max-new", whole_blocks)
    assert found["identical"] == 1.0
    assert found["tau"] >= 0.95 * BLOCK
