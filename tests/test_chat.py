"""What of a conversation is supervised, through real and made-up chat templates."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import CHATML, small_tokenizer
from transformers import AutoTokenizer

from dflash import models
from dflash.data import chat, dataset, tokens
from dflash.data.formats import Ids, Text
from dflash.data.tokens import resolve_mask_token
from dflash.settings import Data, SettingError


@pytest.fixture(scope="module")
def tokenizer(models_dir):
    return AutoTokenizer.from_pretrained(models.folder("SmolLM2-135M-Instruct", models_dir), local_files_only=True)


@pytest.fixture(scope="module")
def qwen3():
    return small_tokenizer()


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


def load(path, tokenizer, cache, **options):
    data = Data(path=str(path), **options)
    return dataset.load(data, tokenizer, embedding_rows=len(tokenizer), seed=0, cache=cache)


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
        load(path, other, tmp_path / "data")
    with pytest.raises(SettingError, match=r"nothing to train on; left out: 1 \(\w"):
        load(path, other, tmp_path / "data", bad_rows="skip")


def test_a_tokenizer_without_template_serves_text_but_no_chats(tmp_path):
    bare = small_tokenizer(template=None)
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": say("Q", "A")}))
    with pytest.raises(SettingError, match="must have a chat template"):
        load(path, bare, tmp_path / "data")
    path.write_text(json.dumps({"text": "some text"}))
    assert load(path, bare, tmp_path / "data").summary["documents"] == 1


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


# --- thoughts -----------------------------------------------------------------------------------


def told(messages, tokenizer, reasoning="keep"):
    """Of each document its text and the supervised texts."""
    return [
        (tokenizer.decode(document.tokens), supervised(tokenizer, document))
        for document in tokens.documents(messages, tokenizer, reasoning)
    ]


def chatml(*turns):
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


Q1, Q2 = {"role": "user", "content": "Q1"}, {"role": "user", "content": "Q2"}
A1, A2 = {"role": "assistant", "content": "A1"}, {"role": "assistant", "content": "A2"}
T1 = [A1 | {"reasoning_content": "T1"}, A1 | {"content": "<think>\nT1\n</think>\n\nA1"}]


@pytest.mark.parametrize("thought", T1)
def test_with_qwen3_each_turn_is_supervised_with_its_own_thought_after_what_it_saw(qwen3, thought):
    first, second = told([Q1, thought, Q2, A2 | {"reasoning_content": "T2"}], qwen3)
    one = "<think>\nT1\n</think>\n\nA1"
    two = "<think>\nT2\n</think>\n\nA2"
    assert first == (chatml(("user", "Q1"), ("assistant", one)), [f"{one}<|im_end|>"])
    # The earlier thought is gone, as Qwen3 sees it, and the earlier answer is not supervised a second time.
    history = (("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", two))
    assert second == (chatml(*history), [f"{two}<|im_end|>"])


@pytest.mark.parametrize("thought", [*T1, A1])
def test_without_thoughts_the_template_is_told_so_and_its_empty_tags_are_the_prompts(qwen3, thought):
    empty = "<think>\n\n</think>\n\n"
    ((text, said),) = told([Q1, thought], qwen3, "drop")
    assert text == chatml(("user", "Q1"), ("assistant", f"{empty}A1"))
    assert said == ["A1<|im_end|>"]
    prompt = qwen3.apply_chat_template([Q1], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert text.startswith(prompt)


def test_a_turn_without_a_thought_was_said_by_a_target_told_not_to_think(qwen3):
    assert [said for _, said in told([Q1, A1, Q2, T1[0]], qwen3)] == [
        ["A1<|im_end|>"],
        ["<think>\nT1\n</think>\n\nA1<|im_end|>"],
    ]


def test_an_empty_thought_that_the_target_wrote_itself_is_supervised(qwen3):
    """Left unsupervised, its tokens cost a round each: a conversation known by heart decoded at 5.1 instead of 8."""
    own = "<think>\n\n</think>\n\nA1"
    ((text, said),) = told([Q1, A1 | {"content": own}], qwen3)
    assert said == [f"{own}<|im_end|>"]
    assert text == chatml(("user", "Q1"), ("assistant", own))
    ((_, said),) = told([Q1, A1 | {"content": own}], qwen3, "drop")
    assert said == ["A1<|im_end|>"]


def test_a_turn_cut_while_thinking_is_supervised_as_far_as_it_got(qwen3):
    cut = {"role": "assistant", "content": "<think>\nT1 and so", "cut": True}
    ((text, said),) = told([Q1, cut], qwen3)
    assert said == ["<think>\nT1 and so"]
    assert text == chatml(("user", "Q1")) + "<|im_start|>assistant\n<think>\nT1 and so"
    ((_, said),) = told([Q1, cut], qwen3, "drop")
    assert said == []
    ((_, said),) = told([Q1, T1[1] | {"cut": True}], qwen3)
    assert said == ["<think>\nT1\n</think>\n\nA1"]


def test_a_template_that_knows_no_reasoning_content_gets_it_in_the_content(qwen3):
    plain = with_template(qwen3, CHATML)
    ((_, said),) = told([Q1, T1[0], Q2, A2], plain)
    assert said == ["<think>\nT1\n</think>\n\nA1<|im_end|>", "A2<|im_end|>"]
    ((_, said),) = told([Q1, T1[1], Q2, A2], plain, "drop")
    assert said == ["A1<|im_end|>", "A2<|im_end|>"]


def test_only_a_leading_thought_of_the_assistant_is_a_thought(qwen3):
    plain = with_template(qwen3, CHATML)
    question = {"role": "user", "content": "<think>me</think>"}
    ((text, said),) = told([question, A1 | {"content": "see <think>T</think>"}], plain, "drop")
    assert said == ["see <think>T</think><|im_end|>"]
    assert "<think>me</think>" in text


def test_messages_after_the_last_answer_change_nothing(qwen3):
    assert told([Q1, T1[0], Q2], qwen3) == told([Q1, T1[0]], qwen3)


def test_tools_and_their_results_are_context(qwen3):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    *_, (text, said) = told([Q1, call, {"role": "tool", "content": "42"}, A1], qwen3)
    assert said == ["A1<|im_end|>"]
    assert "<tool_response>\n42\n</tool_response>" in text


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["", "T", "a\nb"]), st.text(max_size=12)), min_size=1, max_size=4),
    st.sampled_from(["keep", "drop"]),
)
def test_with_qwen3_every_answer_is_supervised_exactly_once(qwen3, turns, reasoning):
    turns = [(thought, "".join(answer.split()) + "x") for thought, answer in turns]
    messages, want = [], []
    for thought, answer in turns:
        messages += [Q1, {"role": "assistant", "content": answer, "reasoning_content": thought}]
        kept = thought and reasoning == "keep"
        want.append((f"<think>\n{thought}\n</think>\n\n" if kept else "") + answer + "<|im_end|>")
    if any("think>" in answer for _, answer in turns):
        return
    assert [run for _, said in told(messages, qwen3, reasoning) for run in said] == want


def test_half_a_surrogate_pair_is_a_bad_row_and_spoils_no_other(qwen3):
    odd = [Q1, {"role": "assistant", "content": "a\ud800b"}]
    records = [chat.Conversation(1, [Q1, A1]), chat.Conversation(2, odd), chat.Conversation(3, [Q2, A2])]
    good, bad, other = tokens.encode(records, qwen3, "keep", 512)
    assert bad.reason == "half of a surrogate pair"
    assert [len(good), len(other)] == [1, 1]


def test_a_batch_gives_what_each_conversation_gives_alone(qwen3):
    chats = [[Q1, T1[0], Q2, A2], [Q1, A1 | {"content": "\u2603 " * 9}], [Q2, A2]]
    together = tokens.encode([chat.Conversation(n, m) for n, m in enumerate(chats)], qwen3, "keep", 512)
    for messages, found in zip(chats, together, strict=True):
        for one, other in zip(tokens.documents(messages, qwen3), found, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()


# --- text and tokens ----------------------------------------------------------------------------


def test_every_token_of_a_text_is_supervised_but_what_the_tokenizer_adds():
    for bos in (False, True):
        tokenizer = small_tokenizer(bos=bos)
        (((document,)),) = tokens.encode([Text(1, "hello world")], tokenizer, "keep", 512)
        assert document.tokens.tolist() == tokenizer("hello world")["input_ids"]
        assert document.loss_mask.tolist() == [not bos] + [True] * (len(document.tokens) - 1)


def test_given_tokens_are_taken_as_they_are_within_the_embedding(qwen3):
    rows = [Ids(1, [0, 511], None), Ids(2, [5, 6, 7], [False, True, True]), Ids(3, [512], None), Ids(4, [-1], None)]
    rows.append(Ids(5, [1 << 70], None))
    whole, masked, *bad = tokens.encode(rows, qwen3, "keep", 512)
    assert whole[0].loss_mask.tolist() == [True, True]
    assert masked[0].tokens.tolist() == [5, 6, 7]
    assert masked[0].loss_mask.tolist() == [False, True, True]
    assert [str(b) for b in bad] == [
        f"a token outside the vocabulary (id {id_}; the target has 512)" for id_ in (512, -1, 1 << 70)
    ]


def test_the_fingerprint_tells_tokenizers_and_templates_apart_and_nothing_else(qwen3, tokenizer):
    again = small_tokenizer()
    again(["a", "long text"], padding=True)  # leaves the backend in another state
    assert tokens.fingerprint(again) == tokens.fingerprint(qwen3)
    others = [tokenizer, with_template(qwen3, CHATML), small_tokenizer(bos=True)]
    assert len({tokens.fingerprint(t) for t in (qwen3, *others)}) == 4
