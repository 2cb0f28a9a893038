"""A data file to packed rows, with an account of what went in and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash import settings
from dflash.data import chat, tokens
from dflash.data.rows import Rows, eligible_anchors, pack
from dflash.settings import SettingError

_PROGRESS_EVERY = 100


@dataclass
class Dataset:
    """`rows` to train on, and `summary`: documents, rows, tokens, supervised, anchors (eligible, all
    documents), fill (share of the rows' slots that hold a token), longest (tokens, before any was left out),
    cut (documents shortened to a row), skipped {reason: conversations or documents left out}."""

    rows: Rows
    summary: dict[str, Any]


def load(
    data: settings.Data,
    tokenizer: Any,
    *,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Dataset:
    """Read, tokenise and pack a chat JSONL file; `progress(done, total)` counts conversations.

    A document in which no block can be anchored is left out and counted. Raises SettingError on a bad row
    (data.bad_rows=error), a document longer than a row (data.too_long=error), and when nothing is left.
    """
    tokens.check_tokenizer(tokenizer)
    conversations, skipped = chat.read(data.path, data.bad_rows)
    kept: list[tokens.Document] = []
    anchors = longest = cut = 0
    for done, conversation in enumerate(conversations, start=1):
        for document in _documents(conversation, data, tokenizer, skipped):
            longest = max(longest, len(document.tokens))
            if len(document.tokens) > data.row_tokens:
                if data.too_long == "error":
                    raise SettingError(
                        "data.row_tokens",
                        data.row_tokens,
                        f"is too short for line {conversation.line} of {data.path}, "
                        f"which has {len(document.tokens)} tokens; raise it or set data.too_long=skip or cut",
                    )
                if data.too_long == "skip":
                    skipped["longer than a row"] += 1
                    continue
                document = tokens.Document(document.tokens[: data.row_tokens], document.loss_mask[: data.row_tokens])
                cut += 1
            here = int(eligible_anchors(document.loss_mask, np.zeros_like(document.tokens)).sum())
            if here == 0:
                skipped["no place for an anchor"] += 1
                continue
            anchors += here
            kept.append(document)
        if done % _PROGRESS_EVERY == 0 or done == len(conversations):
            progress(done, len(conversations))
    if not kept:
        raise SettingError("data.path", data.path, f"holds nothing to train on; left out: {dict(skipped)}")
    rows = Rows(kept, pack([len(d.tokens) for d in kept], data.row_tokens), data.row_tokens, seed)
    total = sum(len(d.tokens) for d in kept)
    summary = {
        "documents": len(kept),
        "rows": len(rows),
        "tokens": total,
        "supervised": sum(int(d.loss_mask.sum()) for d in kept),
        "anchors": anchors,
        "fill": total / (len(rows) * data.row_tokens),
        "longest": longest,
        "cut": cut,
        "skipped": dict(skipped),
    }
    return Dataset(rows, summary)


def _documents(
    conversation: chat.Conversation, data: settings.Data, tokenizer: Any, skipped: Counter[str]
) -> list[tokens.Document]:
    try:
        return tokens.documents(conversation.messages, tokenizer)
    except chat.BadRow as bad:
        if data.bad_rows == "error":
            raise SettingError(
                "data.path",
                data.path,
                f"line {conversation.line}: {bad}; mend the row or set data.bad_rows=skip",
            ) from None
        skipped[bad.reason] += 1
        return []
