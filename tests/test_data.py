"""Chat JSONL to packed rows: what is read, what is supervised, what is left out, and that nothing is lost."""

import copy
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import models
from dflash.data import chat, dataset, regenerate, tokens
from dflash.data.rows import Rows, eligible_anchors, pack
from dflash.data.tokens import Document, resolve_mask_token
from dflash.settings import Data, SettingError

EXAMPLES = Path(dataset.__file__).parent / "examples" / "smollm2-chat.jsonl"
MODEL = "SmolLM2-135M-Instruct"
TURN = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.fixture(scope="module")
def tokenizer(models_dir):
    return AutoTokenizer.from_pretrained(models.folder(MODEL, models_dir), local_files_only=True)


@pytest.fixture(scope="module")
def model(models_dir):
    return AutoModelForCausalLM.from_pretrained(models.folder(MODEL, models_dir), dtype=torch.float32)


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def say(*turns):
    """Messages of user and assistant in turn; a system message first when the first text begins with `!`."""
    messages = [{"role": "system", "content": turns[0][1:]}] if turns[0].startswith("!") else []
    for number, text in enumerate(turns[len(messages) :]):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return messages


def supervised(tokenizer, document):
    """The supervised texts, one for each unbroken run of the loss mask."""
    edges = np.flatnonzero(np.diff(document.loss_mask.astype(int), prepend=0, append=0))
    return [tokenizer.decode(document.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# --- reading ------------------------------------------------------------------------------------


def test_reading_keeps_order_and_line_numbers_and_ignores_blank_lines(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(f"\n{TURN}\n   \n{TURN}")
    conversations, skipped = chat.read(path)
    assert [c.line for c in conversations] == [2, 4]
    assert conversations[0].messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert not skipped


BAD_ROWS = [
    (b'{"messages": [', "broken JSON"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid UTF-8"),
    (b"[" * 100_000, "broken JSON"),
    (b"[1, 2]", "not an object with a list of messages"),
    (b'{"text": "hello"}', "not an object with a list of messages"),
    (b'{"messages": []}', "no messages"),
    (b'{"messages": ["hello"]}', "a message is no object"),
    (b'{"messages": [{"role": "robot", "content": "a"}]}', "unknown role"),
    (b'{"messages": [{"role": ["user"], "content": "a"}]}', "unknown role"),
    (b'{"messages": [{"role": "assistant", "content": null}]}', "content is no text"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "no assistant turn"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, reason):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(TURN.encode() + b"\n\n" + row + b"\n")
    with pytest.raises(SettingError) as caught:
        chat.read(path)
    assert str(caught.value).startswith(f"data.path={path}: line 3: {reason}")
    assert "\n" not in str(caught.value)


def test_bad_rows_are_counted_by_reason_when_they_may_be_skipped(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"\n".join([TURN.encode(), *(row for row, _ in BAD_ROWS)]))
    conversations, skipped = chat.read(path, bad_rows="skip")
    assert [c.line for c in conversations] == [1]
    assert skipped == Counter(reason for _, reason in BAD_ROWS)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"", "the file is empty"), (b"\n \n", "the file is empty"), (b"{", "all 1 rows are bad")],
)
def test_a_file_without_conversations_is_refused(tmp_path, content, said):
    path = tmp_path / "chat.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=said) as caught:
        chat.read(path, bad_rows="skip")
    assert caught.value.setting == "data.path"


# --- loss masks ---------------------------------------------------------------------------------


def test_every_assistant_turn_is_supervised_with_its_end_and_without_its_header(tokenizer):
    messages = say("!Be brief.", "Hi", "Hello there.", "Add 12 and 7", "\u2603 19!")
    (document,) = tokens.documents(messages, tokenizer)
    assert supervised(tokenizer, document) == ["Hello there.<|im_end|>", "\u2603 19!<|im_end|>"]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert document.tokens.tolist() == whole


def test_the_end_of_a_turn_that_was_cut_is_not_supervised(tokenizer):
    messages = say("Hi", "Hello the", "Go on", "re.")
    messages[1]["cut"] = True
    (document,) = tokens.documents(messages, tokenizer)
    assert supervised(tokenizer, document) == ["Hello the", "re.<|im_end|>"]


text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"], include_characters="\t\n"), max_size=30)


@settings(deadline=None)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=4), st.booleans())
def test_masks_agree_with_characters_marked_by_hand(tokenizer, turns, system):
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    rendered, marked = "", []
    if not system:
        rendered = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        )
    else:
        rendered = "<|im_start|>system\nBe brief.<|im_end|>\n"
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rendered += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        start = len(rendered)
        rendered += f"{answer}<|im_end|>"
        marked.append(range(start, len(rendered)))
        rendered += "\n"
    (document,) = tokens.documents(messages, tokenizer)
    out = tokenizer(rendered, return_offsets_mapping=True)
    assert document.tokens.tolist() == out["input_ids"]
    assert document.loss_mask.tolist() == [any(a in part for part in marked) for a, _ in out["offset_mapping"]]
    ends = document.tokens[document.loss_mask] == tokenizer.eos_token_id
    assert ends.sum() == len(turns)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_generation_marks_of_a_template_are_taken_at_their_word(tokenizer):
    marked = with_template(tokenizer, MARKED)
    messages = say("Hi", "Hello", "More", "Fine")
    (document,) = tokens.documents(messages, marked)
    assert supervised(marked, document) == ["Hello<|im_end|>", "Fine<|im_end|>"]
    (plain,) = tokens.documents(say("!x", *(m["content"] for m in messages)), tokenizer)
    assert supervised(tokenizer, plain) == supervised(marked, document)
    messages[1]["cut"] = True
    (document,) = tokens.documents(messages, marked)
    assert supervised(marked, document) == ["Hello", "Fine<|im_end|>"]


# Like Qwen3's: thoughts of all but the last assistant turn are left out.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def forgetful(tokenizer):
    return with_template(tokenizer, FORGETFUL)


def test_a_turn_that_is_rendered_differently_later_is_supervised_as_it_was_said(forgetful):
    messages = say("Q1", "<think>T1</think>A1", "Q2", "A2", "Q3", "<think>T3</think>A3")
    first, second = tokens.documents(messages, forgetful)
    assert supervised(forgetful, first) == ["<think>T1</think>A1<|im_end|>"]
    assert forgetful.decode(first.tokens).endswith("T1</think>A1<|im_end|>\n")
    assert supervised(forgetful, second) == ["A2<|im_end|>", "<think>T3</think>A3<|im_end|>"]
    assert "T1" not in forgetful.decode(second.tokens)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_with_a_forgetful_template_each_turn_is_supervised_exactly_once(forgetful, thinks):
    answers = [f"<think>T</think>A{n}" if think else f"A{n}" for n, think in enumerate(thinks)]
    messages = say(*(part for n, answer in enumerate(answers) for part in (f"Q{n}", answer)))
    found = [run for document in tokens.documents(messages, forgetful) for run in supervised(forgetful, document)]
    assert sorted(found) == sorted(f"{answer}<|im_end|>" for answer in answers)


UNPROMPTED = FORGETFUL.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
REFUSING = "{{ raise_exception('roles must alternate') }}"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (UNPROMPTED, say("Q", "A"), "does not continue its own prompt"),
        (REFUSING, say("Q", "A"), "the chat template refuses it (roles must alternate)"),
        (FORGETFUL, [{"role": "assistant", "content": "A"}], "begins with an assistant turn"),
    ],
)
def test_what_cannot_be_told_apart_is_a_bad_row(tokenizer, tmp_path, template, messages, reason):
    other = with_template(tokenizer, template)
    with pytest.raises(chat.BadRow) as caught:
        tokens.documents(messages, other)
    assert reason in str(caught.value)
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(SettingError, match="line 1: "):
        dataset.load(Data(path=str(path)), other, seed=0)
    with pytest.raises(SettingError, match=r"nothing to train on; left out: .* 1\}"):
        dataset.load(Data(path=str(path), bad_rows="skip"), other, seed=0)


def test_a_tokenizer_without_template_is_refused(tokenizer):
    with pytest.raises(SettingError, match="must have a chat template"):
        dataset.load(Data(path=str(EXAMPLES)), with_template(tokenizer, None), seed=0)


def test_the_mask_token_is_chosen_in_order_and_never_guessed(tokenizer):
    assert resolve_mask_token(16, tokenizer, 49_152) == 16
    assert resolve_mask_token(None, tokenizer, 49_160) == 49_152
    masked = copy.deepcopy(tokenizer)
    masked.mask_token = "<file_sep>"
    assert resolve_mask_token(None, masked, 49_160) == 5
    assert resolve_mask_token(7, masked, 49_160) == 7
    with pytest.raises(SettingError, match=r"drafter\.mask_token=None: must be chosen"):
        resolve_mask_token(None, tokenizer, 49_152)
    for wrong in (49_152, -1):
        with pytest.raises(SettingError, match=f"drafter.mask_token={wrong}: .*from 0 to 49151"):
            resolve_mask_token(wrong, tokenizer, 49_152)


# --- packing ------------------------------------------------------------------------------------

ROW = 16
lengths = st.lists(st.integers(1, ROW), min_size=1, max_size=40)


@settings(deadline=None)
@given(lengths)
def test_packing_keeps_each_document_whole_and_once(sizes):
    rows = pack(sizes, ROW)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    assert all(0 < sum(sizes[n] for n in row) <= ROW for row in rows)
    # Any-fit packings leave at most one row half empty.
    assert sum(sum(sizes[n] for n in row) <= ROW // 2 for row in rows) <= 1
    assert rows == pack(sizes, ROW)


def make_documents(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(0, 50, n), rng.random(n) < 0.6) for n in sizes]


@settings(deadline=None)
@given(lengths, st.integers(0, 3))
def test_rows_hold_documents_as_they_were_and_padding_otherwise(sizes, seed):
    documents = make_documents(sizes, seed)
    rows = Rows(documents, pack(sizes, ROW), ROW, seed)
    found = Counter()
    for at in range(len(rows)):
        row = rows.build(at)
        for array, kind in ((row.tokens, "i8"), (row.loss_mask, "?"), (row.document, "i8"), (row.position, "i8")):
            assert array.shape == (ROW,)
            assert array.dtype == kind
        assert (row.document[: row.length] >= 0).all()
        assert (row.document[row.length :] == -1).all()
        assert not row.loss_mask[row.length :].any()
        for number in range(row.document.max() + 1):
            here = row.document == number
            assert row.position[here].tolist() == list(range(here.sum()))
            found[(tuple(row.tokens[here]), tuple(row.loss_mask[here]))] += 1
    assert found == Counter((tuple(d.tokens), tuple(d.loss_mask)) for d in documents)


@settings(deadline=None)
@given(lengths, st.integers(0, 3), st.integers(0, 200))
def test_each_epoch_meets_every_row_once_and_an_index_is_enough_to_resume(sizes, seed, start):
    documents = make_documents(sizes)
    rows = Rows(documents, pack(sizes, ROW), ROW, seed)
    again = Rows(documents, pack(sizes, ROW), ROW, seed)
    n = len(rows)

    def key(row):
        return row.tokens.tobytes() + row.document.tobytes()

    want = Counter(key(rows.build(at)) for at in range(n))
    for epoch in range(2):
        assert Counter(key(rows.row(epoch * n + at)) for at in range(n)) == want
    assert key(again.row(start)) == key(rows.row(start))


def test_epochs_and_seeds_differ_in_order():
    documents = make_documents([ROW] * 30)
    packed = pack([ROW] * 30, ROW)

    def order(seed, epoch):
        rows = Rows(documents, packed, ROW, seed)
        return [rows.row(epoch * 30 + at).tokens.tobytes() for at in range(30)]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 2)), min_size=1, max_size=30))
def test_eligible_anchors_agree_with_a_plain_loop(slots):
    loss_mask, document = np.array([m for m, _ in slots]), np.array([d for _, d in slots])
    want = [
        a + 1 < len(slots)
        and bool(loss_mask[a] and loss_mask[a + 1])
        and bool(document[a] == document[a + 1] and document[a] != -1)
        for a in range(len(slots))
    ]
    assert eligible_anchors(loss_mask, document).tolist() == want
    assert eligible_anchors(loss_mask[None], document[None])[0].tolist() == want


# --- the whole ----------------------------------------------------------------------------------


def write(path, *conversations):
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations))
    return str(path)


def test_the_summary_adds_up_with_the_rows(tokenizer):
    calls = []
    data = dataset.load(Data(path=str(EXAMPLES)), tokenizer, seed=0, progress=lambda *done: calls.append(done))
    rows = [data.rows.build(at) for at in range(len(data.rows))]
    summary = data.summary
    assert summary["rows"] == len(rows)
    assert summary["tokens"] == sum(row.length for row in rows)
    assert summary["supervised"] == sum(int(row.loss_mask.sum()) for row in rows)
    assert summary["anchors"] == sum(int(eligible_anchors(r.loss_mask, r.document).sum()) for r in rows)
    assert summary["documents"] == sum(int(row.document.max()) + 1 for row in rows)
    assert summary["fill"] == pytest.approx(summary["tokens"] / (256 * len(rows)))
    assert all(eligible_anchors(row.loss_mask, row.document).any() for row in rows)
    assert calls[-1] == (summary["documents"], summary["documents"])
    json.dumps(summary)


def test_the_shipped_data_is_used_whole_in_rows_of_256(tokenizer):
    summary = dataset.load(Data(path=str(EXAMPLES)), tokenizer, seed=0).summary
    assert summary["skipped"] == {}
    assert summary["longest"] <= 256
    assert summary["documents"] == len(EXAMPLES.read_text().splitlines()) >= 200
    assert summary["fill"] > 0.7
    turns = Counter(len(c.messages) for c in chat.read(EXAMPLES)[0])
    assert turns[4] >= 30


def test_what_is_longer_than_a_row_is_skipped_cut_or_refused_as_told(tokenizer, tmp_path):
    path = write(tmp_path / "c.jsonl", say("Hi", "Hello"), say("Hi", "one two three " * 40))
    short = len(tokenizer.apply_chat_template(say("Hi", "Hello"), return_dict=False))
    skip = dataset.load(Data(path=path, row_tokens=64), tokenizer, seed=0).summary
    assert skip["skipped"] == {"longer than a row": 1}
    assert (skip["documents"], skip["cut"], skip["tokens"]) == (1, 0, short)
    assert skip["longest"] > 120
    cut = dataset.load(Data(path=path, row_tokens=64, too_long="cut"), tokenizer, seed=0).summary
    assert (cut["documents"], cut["cut"], cut["tokens"], cut["skipped"]) == (2, 1, short + 64, {})
    with pytest.raises(SettingError, match=r"data\.row_tokens=64: is too short for line 2 of .*c\.jsonl"):
        dataset.load(Data(path=path, row_tokens=64, too_long="error"), tokenizer, seed=0)


def test_a_document_without_place_for_an_anchor_is_counted_and_nothing_left_is_refused(tokenizer, tmp_path):
    lonely = say("Hi", "")  # the end of the turn is the only supervised token
    path = write(tmp_path / "c.jsonl", lonely, say("Hi", "Hello"))
    assert dataset.load(Data(path=path), tokenizer, seed=0).summary["skipped"] == {"no place for an anchor": 1}
    path = write(tmp_path / "d.jsonl", lonely, say("Hi " * 300, "Hello"))
    for too_long, counted in (("skip", "'longer than a row': 1"), ("cut", "'no place for an anchor': 2")):
        with pytest.raises(SettingError, match="holds nothing to train on") as caught:
            dataset.load(Data(path=path, too_long=too_long), tokenizer, seed=0)
        assert counted in str(caught.value)


# --- regeneration -------------------------------------------------------------------------------


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


def test_responses_do_not_depend_on_the_company_of_a_prompt(tokenizer, model):
    prompts = [
        say("What is the capital of France?", ""),
        say("Hi", "old words", "Name three colours of the rainbow and say where one sees it.", ""),
        say("Thanks!"),
    ]
    together, _ = regenerate.respond(model, tokenizer, prompts, 12)
    alone = [regenerate.respond(model, tokenizer, [prompt], 12)[0][0] for prompt in prompts]
    assert together == alone
    assert together[0][1] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert [m["role"] for m in together[1]] == ["user", "assistant", "user", "assistant"]
    assert "old words" not in json.dumps(together)
    assert together[1][3]["cut"] is True
    assert together[2][1]["role"] == "assistant"


def test_regeneration_goes_on_where_it_was_stopped(models_dir, tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", say("Hi"), say("Hello", ""), say("word " * 70), say("Good day"))
    out = tmp_path / "out.jsonl"
    argv = ["--model", MODEL, "--models-dir", str(models_dir), "--prompts", prompts, "--out", str(out)]
    argv += ["--max-new", "5", "--batch", "2", "--fit", "80"]
    assert regenerate.main(argv) == 0
    assert "1 left out as longer than 80 tokens" in capsys.readouterr().out
    whole = out.read_bytes()
    assert [json.loads(row)["prompt"] for row in whole.splitlines()] == [1, 2, 4]
    first = whole.index(b"\n") + 1
    out.write_bytes(whole[: first + 20])  # killed in the middle of the second row
    assert regenerate.main(argv) == 0
    assert out.read_bytes() == whole
    assert len(chat.read(out)[0]) == 3


def test_regeneration_refuses_to_append_to_a_foreign_file(models_dir, tmp_path, capsys):
    prompts, mine = write(tmp_path / "p.jsonl", say("Hi")), tmp_path / "mine.jsonl"
    for content in (TURN, TURN + "\n", TURN + "\n{", '{"prompt": 1}\nnotes\n'):
        mine.write_text(content)
        argv = ["--model", MODEL, "--models-dir", str(models_dir), "--prompts", prompts, "--out", str(mine)]
        assert regenerate.main(argv) == 2
        assert "was not written by this command" in capsys.readouterr().err
        assert mine.read_text() == content
