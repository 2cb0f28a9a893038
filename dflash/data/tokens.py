"""Conversations to token ids and loss masks, through the target tokenizer's own chat template.

Supervised are the tokens that the target would have generated: of every assistant turn its content and the
end-of-turn token, never the header before it nor the line break after it.

A text is tokenised once, whole, and tokens are marked by their character offsets, so what is trained on is
tokenised as the target sees it. A template with `{% generation %}` marks says itself which characters those
are. Without marks they lie between two renderings: the messages before the turn with a generation prompt,
and the messages up to and with the turn.

Some templates render a turn differently once later turns follow (Qwen3's drops earlier thoughts). Such a turn
becomes a document of its own, rendered as when it was said, so that each turn is supervised exactly once and
after the context in which it was said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.data.chat import BadRow
from dflash.settings import SettingError

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass
class Document:
    """`tokens` int64 [n]; `loss_mask` bool [n], True on what the target would generate."""

    tokens: np.ndarray
    loss_mask: np.ndarray


def check_tokenizer(tokenizer: Any) -> None:
    """Raise SettingError unless the tokenizer has a chat template and reports character offsets."""
    if not tokenizer.chat_template:
        raise SettingError("target.model", tokenizer.name_or_path, "its tokenizer must have a chat template")
    if not tokenizer.is_fast:
        raise SettingError("target.model", tokenizer.name_or_path, "its tokenizer must be a fast one, with offsets")


def documents(messages: list[dict[str, Any]], tokenizer: Any) -> list[Document]:
    """One document for a conversation; more when the template renders earlier turns differently later on.

    Raises BadRow when the template refuses the messages, or what it renders for an assistant turn does not
    continue its own generation prompt.
    """
    if _GENERATION_MARK.search(tokenizer.get_chat_template()):
        return [_marked_by_template(messages, tokenizer)]
    turns = [_Turn.render(messages, at, tokenizer) for at, m in enumerate(messages) if m["role"] == "assistant"]
    found = []
    text = _render(messages, tokenizer)
    while turns:
        stable = [turn for turn in turns if text.startswith(turn.through)]
        if stable:
            found.append(_marked_by_spans(text, stable, tokenizer))
        turns = [turn for turn in turns if turn not in stable]
        text = turns[-1].through if turns else ""
    return found[::-1]


@dataclass
class _Turn:
    """An assistant turn as it was said: `through` is the text up to its end, `start` its beginning."""

    through: str
    start: int
    cut: bool

    @classmethod
    def render(cls, messages: list[dict[str, Any]], at: int, tokenizer: Any) -> _Turn:
        if at == 0:
            raise BadRow("begins with an assistant turn", "there is no prompt that it answers")
        prompt = _render(messages[:at], tokenizer, add_generation_prompt=True)
        through = _render(messages[: at + 1], tokenizer)
        if not through.startswith(prompt):
            raise BadRow(
                "the chat template does not continue its own prompt",
                f"message {at + 1} is not rendered after the generation prompt, so its tokens cannot be told "
                "from the prompt's; use a template with {% generation %} marks",
            )
        return cls(through, len(prompt), bool(messages[at].get("cut")))


def _render(messages: list[dict[str, Any]], tokenizer: Any, **options: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template may raise whatever it likes; jinja2 is no dependency of ours
        raise BadRow("the chat template refuses it", str(error)) from None


def _marked_by_template(messages: list[dict[str, Any]], tokenizer: Any) -> Document:
    try:
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:
        raise BadRow("the chat template refuses it", str(error)) from None
    document = Document(np.asarray(out["input_ids"], np.int64), np.asarray(out["assistant_masks"], bool))
    turns = [message for message in messages if message["role"] == "assistant"]
    if any(turn.get("cut") for turn in turns):
        edges = np.flatnonzero(np.diff(document.loss_mask.astype(np.int8), prepend=0, append=0))
        if len(edges) != 2 * len(turns):
            raise BadRow("a cut turn cannot be found", "the template's marks do not give one span for each turn")
        for turn, last in zip(turns, edges[1::2] - 1, strict=True):
            if turn.get("cut") and int(document.tokens[last]) in tokenizer.added_tokens_decoder:
                document.loss_mask[last] = False
    return document


def _marked_by_spans(text: str, turns: list[_Turn], tokenizer: Any) -> Document:
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.asarray(out["input_ids"], dtype=np.int64)
    starts, ends = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    special = np.isin(tokens, list(tokenizer.added_tokens_decoder))
    loss_mask = np.zeros(len(tokens), dtype=bool)
    for turn in turns:
        # A token that begins in the header belongs to the prompt, though it may reach into the content.
        inside = np.flatnonzero((starts >= turn.start) & (starts < len(turn.through)))
        stops = inside[special[inside]]
        if len(stops) and not text[ends[stops[-1]] : len(turn.through)].strip():
            inside = inside[inside < stops[-1]] if turn.cut else inside[inside <= stops[-1]]
        loss_mask[inside] = True
    return Document(tokens, loss_mask)


def resolve_mask_token(explicit: int | None, tokenizer: Any, embedding_rows: int) -> int:
    """The id of the drafter's mask token, a row of the target's embedding [embedding_rows, H].

    In this order: the id that the user gave, the tokenizer's own mask token, the first embedding row that no
    token uses. Never padding or end of text by default: the drafter could not tell a mask from an end.
    Raises SettingError.
    """
    if explicit is not None:
        if not 0 <= explicit < embedding_rows:
            raise SettingError(
                "drafter.mask_token",
                explicit,
                f"must be a row of the target's embedding, from 0 to {embedding_rows - 1}",
            )
        return explicit
    own = tokenizer.mask_token_id
    if own is not None and own < embedding_rows:
        return int(own)
    if len(tokenizer) < embedding_rows:
        return len(tokenizer)
    raise SettingError(
        "drafter.mask_token",
        None,
        f"must be chosen: the target has no mask token, and its {embedding_rows} embedding rows are all in "
        "use; name the id of a token that never occurs in the data",
    )
