"""Data files as people have them: what each row means, and what is said of one that means nothing."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import chat
from dflash.data.formats import Conversation, Ids, Text
from dflash.data.reader import Reader
from dflash.settings import SettingError

TURN = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
MESSAGES = json.loads(TURN)["messages"]


def read(path, content, **options):
    path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    reader = Reader(path, **options)
    return list(reader), reader


def test_reading_keeps_order_and_line_numbers_and_ignores_blank_lines(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(f"\n{TURN}\n   \n{TURN}")
    conversations, skipped = chat.read(path)
    assert [c.line for c in conversations] == [2, 4]
    assert conversations[0].messages == MESSAGES
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
    (
        b'{"messages": [{"role": "assistant", "content": "a", "reasoning_content": 5}]}',
        "reasoning_content is no text",
    ),
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


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
CHATS = [
    ("messages", {"messages": [USER, ANSWER], "prompt": 1}, [USER, ANSWER]),
    (
        "sharegpt",
        {"id": "x", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [USER, ANSWER],
    ),
    ("sharegpt", {"conversations": [USER, ANSWER]}, [USER, ANSWER]),
    (
        "sharegpt",
        {"system": "s", "conversations": [{"from": "user", "value": "a"}, {"from": "model", "value": "b"}]},
        [SYSTEM, USER, ANSWER],
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a"},
                {"from": "tool", "value": "t"},
                {"from": "gpt", "value": "b", "cut": True, "reasoning_content": "r"},
            ]
        },
        [SYSTEM, USER, {"role": "tool", "content": "t"}, ANSWER | {"cut": True, "reasoning_content": "r"}],
    ),
    ("completion", {"prompt": "a", "completion": "b"}, [USER, ANSWER]),
    ("completion", {"prompt": "a", "response": "b", "system": "s"}, [SYSTEM, USER, ANSWER]),
    ("completion", {"instruction": "a", "input": "", "output": "b"}, [USER, ANSWER]),
    (
        "completion",
        {"instruction": "a", "input": "x", "output": "b"},
        [{"role": "user", "content": "a\n\nx"}, ANSWER],
    ),
    ("completion", {"prompt": [SYSTEM, USER], "completion": "b"}, [SYSTEM, USER, ANSWER]),
    ("completion", {"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, ANSWER]},
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, ANSWER],
    ),
]


@pytest.mark.parametrize(("format", "row", "messages"), CHATS)
@pytest.mark.parametrize("asked", ["auto", "as it is"])
def test_chats_of_every_shape_become_the_same_messages(tmp_path, format, row, messages, asked):
    records, reader = read(tmp_path / "c.jsonl", [row], format="auto" if asked == "auto" else format)
    assert records == [Conversation(1, messages)]
    assert reader.format == format


def test_texts_and_tokens_are_read_and_never_taken_for_chats(tmp_path):
    path = tmp_path / "t.jsonl"
    assert read(path, [{"text": "hello"}, {"text": ""}])[0] == [Text(1, "hello"), Text(2, "")]
    with pytest.raises(SettingError, match="must hold conversations; this is format text"):
        chat.read(path)
    rows = [{"tokens": [1, 2]}, {"input_ids": [3], "loss_mask": [0]}]
    assert read(path, rows)[0] == [Ids(1, [1, 2], None), Ids(2, [3], [False])]
    text = tmp_path / "story.txt"
    assert read(text, "One day\n\n{}\n")[0] == [Text(1, "One day\n\n{}\n")]
    assert read(text, " \n")[0] == []
    text.write_bytes(b"ab\xff")
    with pytest.raises(SettingError, match="must be UTF-8 text; byte 2"):
        list(Reader(text))


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("tokens", {"tokens": []}, "no tokens"),
        ("tokens", {"tokens": [1, True]}, "not an object with a list of token ids"),
        ("tokens", {"tokens": [1, 2], "loss_mask": [1]}, r"loss_mask is not as long as the tokens \(1 and 2\)"),
        ("tokens", {"tokens": [1, 2], "loss_mask": [1, 2]}, "loss_mask is no list of 0 and 1"),
        ("text", {"text": None}, "not an object with a text"),
        ("text", {"messages": []}, "not an object with a text"),
        ("sharegpt", {"conversations": [{"from": "robot", "value": "a"}]}, "unknown role .message 1 is from 'robot'"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "content is no text"),
        ("completion", {"prompt": 5, "completion": "b"}, "content is no text"),
        ("completion", {"prompt": "a"}, "no assistant turn"),
    ],
)
def test_a_row_that_is_not_what_its_format_says_is_bad(tmp_path, format, row, reason):
    with pytest.raises(SettingError, match=f"line 1: {reason}"):
        read(tmp_path / "c.jsonl", [row], format=format)


def test_rows_of_no_known_format_are_told_what_they_look_like(tmp_path):
    with pytest.raises(SettingError) as caught:
        read(tmp_path / "c.jsonl", [{"question": "a", "reply": "b"}])
    said = str(caught.value)
    assert "its keys are question, reply" in said
    assert "prompt with completion or response" in said


def test_the_format_is_that_of_the_first_row_that_can_be_used(tmp_path):
    rows = [{"odd": 1}, {"conversations": []}, {"messages": MESSAGES}, {"text": "later"}]
    records, reader = read(tmp_path / "c.jsonl", rows, bad_rows="skip")
    assert records == [Conversation(3, MESSAGES)]
    assert reader.format == "messages"
    assert reader.skipped == {
        "no known format": 1,
        "no messages": 1,
        "not an object with a list of messages": 1,
    }


def test_prompts_alone_can_be_read_where_no_answer_is_needed(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}')
    conversations, _ = chat.read(path, need_assistant=False)
    assert [c.messages[0]["content"] for c in conversations] == ["a", "b"]


# --- one JSON list --------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(values, max_size=6), st.sampled_from([None, 2]), st.booleans(), st.integers(1, 9))
def test_a_json_list_gives_its_items_however_it_is_cut_into_pieces(tmp_path_factory, rows, indent, ascii_, piece):
    path = tmp_path_factory.mktemp("l") / "rows.json"
    path.write_text(" " + json.dumps(rows, indent=indent, ensure_ascii=ascii_) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.data.reader._CHUNK", piece + 1)  # so that blanks, names and characters are cut
        one = Reader(path)
        assert [row for _, row in one._rows()] == rows
        assert one.done == one.size


def test_a_json_list_names_rows_and_a_fault_in_it(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps([json.loads(TURN)] * 3))
    assert [c.line for c in chat.read(path)[0]] == [1, 2, 3]
    path.write_text(json.dumps([json.loads(TURN), {"messages": []}]))
    with pytest.raises(SettingError, match="row 2: no messages"):
        chat.read(path)
    whole = json.dumps([json.loads(TURN)] * 3, indent=1)
    for broken in (whole[:-1], whole[: len(whole) // 2], whole.replace("},\n {", "}\n {", 1), "[1 2]"):
        path.write_text(broken)
        with pytest.raises(SettingError, match=r"must be one whole JSON list; it breaks after row [012]: \S"):
            chat.read(path, bad_rows="skip")
    path.write_text(f"{TURN}\n{TURN}\n")  # JSONL under another name
    assert len(chat.read(path)[0]) == 2


def test_cutting_a_file_anywhere_never_raises_anything_but_a_sentence(tmp_path):
    rng = random.Random(0)
    whole = json.dumps([json.loads(TURN) | {"\u00e9": "\U0001f600"}] * 4, ensure_ascii=False).encode()
    for name in ("a.json", "a.jsonl", "a.txt"):
        for _ in range(30):
            path = tmp_path / name
            path.write_bytes(whole[: rng.randrange(len(whole))])
            said = ""
            try:
                list(Reader(path))
            except SettingError as error:
                said = str(error)
            assert "\n" not in said
