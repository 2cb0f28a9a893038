"""Conversations whose assistant turns are to be made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflash.data.chat import BadRow, Conversation

Messages = list[dict[str, Any]]


@dataclass
class Answered:
    """A conversation with responses in place and the tokens they took.

    Or `left_out` says why there is none, in words that many rows may share, and `detail` says more.
    """

    line: int
    messages: Messages = field(default_factory=list)
    tokens: int = 0
    left_out: str = ""
    detail: str = ""


class Engine(Protocol):
    """Who answers: the target itself, run here, or a server."""

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Answered]:
        """The conversations with responses, in the order given."""


def turns(messages: Messages) -> list[Messages]:
    """What is said before each response: the given messages from one response to the next.

    A response is made wherever an assistant message stands (what it says is dropped), between two user messages
    that follow each other, and after the last message. Raises BadRow.
    """
    found: list[Messages] = [[]]
    for message in messages:
        role, asked = message["role"], _asks(found[-1])
        if role == "tool":
            raise BadRow("has results of tools, which the target did not call")
        if role == "assistant" and not asked and len(found) == 1:
            raise BadRow("begins with an assistant turn")
        if role in ("assistant", "user") and asked:
            found.append([])
        if role != "assistant":
            found[-1].append(message)
    if not _asks(found[-1]):
        found.pop()
    if not found:
        raise BadRow("no user turn")
    return found


def _asks(messages: Messages) -> bool:
    return any(message["role"] == "user" for message in messages)
