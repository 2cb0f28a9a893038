"""What a job trains on: packed rows, with an account of what went in and what was left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash import settings
from dflash.data import store, tokens
from dflash.data.prepare import Progress, prepare
from dflash.data.reader import counted
from dflash.data.rows import Rows
from dflash.settings import SettingError


@dataclass
class Dataset:
    """`rows` to train on, and `summary`: documents (or parts of split ones), rows, tokens, supervised, anchors
    (eligible, all documents), fill (share of the rows' slots that hold a token), longest (tokens, before any
    was left out), cut (documents shortened to a row), split (documents that became several), lengths
    {upper bound: documents before any was left out}, skipped {reason: rows, documents or parts left out}."""

    rows: Rows
    summary: dict[str, Any]


def load(
    data: settings.Data,
    tokenizer: Any,
    *,
    embedding_rows: int,
    seed: int,
    cache: Path,
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """Rows of a data file, prepared into the folder `cache` first, or of a folder that was prepared before.

    `cache` is used as it is when it was made from the same data, tokenizer and settings, and made anew
    otherwise. `progress(done, total)` counts bytes of the data file. Raises SettingError on a bad row
    (data.bad_rows=error), a document longer than a row (data.too_long=error), a prepared folder that is
    damaged or made for something else, and when nothing is left.
    """
    if Path(data.path).is_dir():
        folder = Path(data.path)
        meta = open_folder(folder, data, tokenizer)
    else:
        folder = cache
        meta = prepare(data, tokenizer, cache, embedding_rows=embedding_rows, replace=True, progress=progress)
    if meta.largest >= embedding_rows:
        raise SettingError(
            "data.path", data.path, f"holds token {meta.largest}, the target's embedding has {embedding_rows} rows"
        )
    return from_folder(folder, meta, data, seed)


def open_folder(folder: Path, data: settings.Data, tokenizer: Any) -> store.Meta:
    """Raise SettingError unless a prepared folder is whole and fits the tokenizer and what `data` asks for."""
    meta = store.read_meta(folder)
    fault = store.fault(folder, meta)
    if fault:
        raise SettingError("data.path", folder, f"is damaged: {fault}; prepare it again")
    if meta.source.tokenizer != tokens.fingerprint(tokenizer):
        raise SettingError(
            "data.path", folder, "was prepared with another tokenizer or chat template than the target's"
        )
    if data.format not in ("auto", meta.format):
        raise SettingError("data.format", data.format, f"contradicts {folder}, which was read as {meta.format}")
    reasoning = meta.source.settings["reasoning"]
    if data.reasoning != reasoning:
        raise SettingError("data.reasoning", data.reasoning, f"contradicts {folder}, prepared with {reasoning}")
    return meta


def from_folder(folder: Path, meta: store.Meta, data: settings.Data, seed: int) -> Dataset:
    """Rows and summary of a prepared folder; raises SettingError."""
    rows = Rows(folder, data.row_tokens, data.too_long, seed)
    documents = rows.documents
    longest = int(documents.lengths.max())
    if data.too_long == "error" and longest > data.row_tokens:
        at = int(np.flatnonzero(documents.lengths > data.row_tokens)[0])
        raise SettingError(
            "data.row_tokens",
            data.row_tokens,
            f"is too short for line {documents.lines[at]} of {meta.source.name}, which has {documents.lengths[at]} "
            "tokens; raise it or set data.too_long=skip, cut or split",
        )
    pieces = rows.pieces
    skipped = Counter(meta.skipped) + pieces.skipped
    if not len(pieces.starts):
        raise SettingError("data.path", data.path, f"holds nothing to train on; left out: {counted(skipped)}")
    total = int(pieces.lengths.sum())
    summary = {
        "documents": len(pieces.starts),
        "rows": len(rows),
        "tokens": total,
        "supervised": int(pieces.supervised.sum()),
        "anchors": int(pieces.eligible.sum()),
        "fill": total / (len(rows) * data.row_tokens),
        "longest": longest,
        "cut": pieces.cut,
        "split": pieces.split,
        "lengths": histogram(documents.lengths),
        "skipped": dict(skipped),
    }
    return Dataset(rows, summary)


def histogram(lengths: np.ndarray) -> dict[str, int]:
    """Documents by length, up to 16 tokens, up to 32, up to 64, ..."""
    powers = np.maximum(4, np.ceil(np.log2(lengths))).astype(int)
    return {
        str(1 << int(power)): int(count) for power, count in zip(*np.unique(powers, return_counts=True), strict=True)
    }
