"""Chat JSONL: one conversation a line, `{"messages": [{"role": ..., "content": ...}, ...]}`.

Roles are system, user, assistant and tool; content is text. Other keys of a row are ignored, other keys of a
message reach the chat template. An assistant message with `"cut": true` was stopped by a length limit: its
end-of-turn token is not something the target said and is not supervised.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.settings import SettingError

ROLES = ("system", "user", "assistant", "tool")


@dataclass
class Conversation:
    """`messages` as the file has them; `line` is their line there, from 1."""

    line: int
    messages: list[dict[str, Any]]


class BadRow(ValueError):
    """A row that is no usable conversation: `reason` is short and stable, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + (f" ({detail})" if detail else ""))
        self.reason = reason


def read(
    path: Path | str, bad_rows: str = "error", need_assistant: bool = True
) -> tuple[list[Conversation], Counter[str]]:
    """The conversations of a file in order, and how many rows were skipped for which reason.

    `bad_rows="error"` raises SettingError at the first bad row, `"skip"` counts it. Blank lines mean nothing.
    Raises SettingError when the file cannot be read or nothing usable is in it.
    """
    conversations: list[Conversation] = []
    skipped: Counter[str] = Counter()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    conversations.append(Conversation(number, _messages(line, need_assistant)))
                except BadRow as bad:
                    if bad_rows == "error":
                        raise SettingError(
                            "data.path", path, f"line {number}: {bad}; mend the row or set data.bad_rows=skip"
                        ) from None
                    skipped[bad.reason] += 1
    except OSError as error:
        raise SettingError("data.path", path, f"must be a readable chat JSONL file ({error.strerror})") from None
    if not conversations:
        found = f"all {skipped.total()} rows are bad: {dict(skipped)}" if skipped else "the file is empty"
        raise SettingError("data.path", path, f"must hold at least one conversation; {found}")
    return conversations, skipped


def _messages(line: bytes, need_assistant: bool) -> list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRow("invalid UTF-8", f"byte {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("broken JSON", str(error)) from None
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise BadRow("not an object with a list of messages")
    messages = row["messages"]
    if not messages:
        raise BadRow("no messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow("a message is no object", f"message {number}")
        if message.get("role") not in ROLES:
            raise BadRow(
                "unknown role",
                f"message {number} has role {message.get('role')!r}; known: {', '.join(ROLES)}",
            )
        if not isinstance(message.get("content"), str):
            raise BadRow("content is no text", f"message {number}")
    if need_assistant and not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no assistant turn")
    return messages
