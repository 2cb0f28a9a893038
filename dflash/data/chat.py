"""The conversations of a data file, for those who want prompts or responses rather than tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dflash.data.formats import BadRow, Conversation
from dflash.data.reader import Reader
from dflash.settings import SettingError

__all__ = ["BadRow", "Conversation", "read"]


def read(
    path: Path | str, bad_rows: str = "error", need_assistant: bool = True, format: str = "auto"
) -> tuple[list[Conversation], Counter[str]]:
    """The conversations of a file in order, and how many rows were skipped for which reason.

    `bad_rows="error"` raises SettingError at the first bad row, `"refuse"` too and tells of no other way, `"skip"`
    counts it. Blank lines mean nothing.
    Raises SettingError when the file cannot be read, holds something else than chats, or nothing usable.
    """
    reader = Reader(path, format, bad_rows, need_assistant)
    conversations = []
    for record in reader:
        if not isinstance(record, Conversation):
            raise SettingError("data.path", path, f"must hold conversations; this is format {reader.format}")
        conversations.append(record)
    if not conversations:
        raise reader.nothing()
    return conversations, reader.skipped
