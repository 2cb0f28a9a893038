"""A data file to a data set: the account adds up, and the shipped example is what it says it is."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import models
from dflash.data import chat, dataset, tokens
from dflash.data.document import eligible_anchors
from dflash.settings import Data, SettingError

EXAMPLES = Path(dataset.__file__).parent / "examples" / "smollm2-chat.jsonl"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def tokenizer(models_dir):
    return AutoTokenizer.from_pretrained(models.folder(MODEL, models_dir), local_files_only=True)


@pytest.fixture(scope="module")
def model(models_dir):
    return AutoModelForCausalLM.from_pretrained(models.folder(MODEL, models_dir), dtype=torch.float32)


@pytest.fixture
def load(tokenizer, tmp_path):
    def call(path=EXAMPLES, seed=0, progress=lambda done, total: None, **options):
        data = Data(path=str(path), **options)
        return dataset.load(
            data, tokenizer, embedding_rows=49_152, seed=seed, cache=tmp_path / "data", progress=progress
        )

    return call


def say(*texts):
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def write(path, *conversations):
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations))
    return str(path)


def test_the_summary_adds_up_with_the_rows(load):
    calls = []
    data = load(progress=lambda *done: calls.append(done))
    rows = [data.rows.build(at) for at in range(len(data.rows))]
    summary = data.summary
    assert summary["rows"] == len(rows)
    assert summary["tokens"] == sum(row.length for row in rows)
    assert summary["supervised"] == sum(int(row.loss_mask.sum()) for row in rows)
    assert summary["anchors"] == sum(int(eligible_anchors(r.loss_mask, r.document).sum()) for r in rows)
    assert summary["documents"] == sum(int(row.document.max()) + 1 for row in rows)
    assert summary["fill"] == pytest.approx(summary["tokens"] / (256 * len(rows)))
    assert all(eligible_anchors(row.loss_mask, row.document).any() for row in rows)
    assert sum(summary["lengths"].values()) == summary["documents"]
    assert calls[-1] == (EXAMPLES.stat().st_size,) * 2
    json.dumps(summary)


def test_the_shipped_data_is_used_whole_in_rows_of_256(load):
    summary = load().summary
    assert summary["skipped"] == {}
    assert summary["longest"] <= 256
    assert summary["documents"] == len(EXAMPLES.read_text().splitlines()) >= 200
    assert summary["fill"] > 0.7
    turns = Counter(len(c.messages) for c in chat.read(EXAMPLES)[0])
    assert turns[4] >= 30


def test_what_is_longer_than_a_row_is_skipped_cut_or_refused_as_told(load, tokenizer, tmp_path):
    path = write(tmp_path / "c.jsonl", say("Hi", "Hello"), say("Hi", "one two three " * 40))
    short = len(tokenizer.apply_chat_template(say("Hi", "Hello"), return_dict=False))
    skip = load(path, row_tokens=64).summary
    assert skip["skipped"] == {"longer than a row": 1}
    assert (skip["documents"], skip["cut"], skip["tokens"]) == (1, 0, short)
    assert skip["longest"] > 120
    cut = load(path, row_tokens=64, too_long="cut").summary
    assert (cut["documents"], cut["cut"], cut["tokens"], cut["skipped"]) == (2, 1, short + 64, {})
    split = load(path, row_tokens=64, too_long="split").summary
    assert (split["split"], split["cut"], split["skipped"]) == (1, 0, {})
    assert split["tokens"] == short + skip["longest"]
    with pytest.raises(SettingError, match=r"data\.row_tokens=64: is too short for line 2 of .*c\.jsonl"):
        load(path, row_tokens=64, too_long="error")


def test_a_document_without_place_for_an_anchor_is_counted_and_nothing_left_is_refused(load, tmp_path):
    lonely = say("Hi", "")  # the end of the turn is the only supervised token
    path = write(tmp_path / "c.jsonl", lonely, say("Hi", "Hello"))
    assert load(path).summary["skipped"] == {"no place for an anchor": 1}
    path = write(tmp_path / "d.jsonl", lonely, say("Hi " * 300, "Hello"))
    for too_long, counted in (
        ("skip", "left out: 1 (no place for an anchor), 1 (longer than a row)"),
        ("cut", "left out: 2 (no place for an anchor)"),
    ):
        with pytest.raises(SettingError, match="holds nothing to train on") as caught:
            load(path, too_long=too_long)
        assert counted in str(caught.value)


# --- the shipped example ------------------------------------------------------------------------


def test_the_shipped_responses_are_what_the_target_says(tokenizer, model):
    agreed = total = 0
    for conversation in chat.read(EXAMPLES)[0][:6]:
        (document,) = tokens.documents(conversation.messages, tokenizer)
        with torch.no_grad():
            best = model(torch.from_numpy(document.tokens)[None]).logits[0].argmax(-1).numpy()
        labels = document.loss_mask[1:]
        agreed += int((best[:-1] == document.tokens[1:])[labels].sum())
        total += int(labels.sum())
    assert total > 300
    assert agreed / total > 0.98
