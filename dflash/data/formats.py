"""What a row of a data file means: one conversation, one text, or tokens made elsewhere.

| format | a row |
|---|---|
| messages | {"messages": [{"role": "user", "content": "..."}, ...]} |
| sharegpt | {"conversations": [{"from": "human", "value": "..."}, ...]}, or with role and content |
| completion | {"prompt", "completion" or "response"}, or {"instruction", "input", "output"} |
| text | {"text": "..."} |
| tokens | {"tokens" or "input_ids": [...]}, and if wanted {"loss_mask": [...]} |

Roles are system, user, assistant and tool; content is text. Other keys of a row are ignored, other keys of a
message reach the chat template. An assistant message with `"cut": true` was stopped by a length limit: its
end-of-turn token is not something the target said and is not supervised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
CHATS = ("messages", "sharegpt", "completion")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass
class Conversation:
    """`messages` as a chat template reads them; `line` is their place in the file, from 1."""

    line: int
    messages: list[dict[str, Any]]


@dataclass
class Text:
    """Plain text, all of it supervised."""

    line: int
    text: str


@dataclass
class Ids:
    """Token ids made elsewhere; `loss_mask` says which are supervised, None: all."""

    line: int
    tokens: list[int]
    loss_mask: list[bool] | None


Record = Conversation | Text | Ids


class BadRow(ValueError):
    """A row that cannot be used: `reason` is short and stable, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + (f" ({detail})" if detail else ""))
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[Any, ...]:  # it travels between processes
        return BadRow, (self.reason, self.detail)


def detect(row: Any) -> str:
    """The format whose keys a row has; raises BadRow."""
    if isinstance(row, dict):
        if isinstance(row.get("messages"), list):
            return "messages"
        if isinstance(row.get("conversations"), list):
            return "sharegpt"
        if "tokens" in row or "input_ids" in row:
            return "tokens"
        if "prompt" in row or "instruction" in row:
            return "completion"
        if "text" in row:
            return "text"
        found = f"its keys are {', '.join(map(str, row)) or 'none'}"
    else:
        found = "it is no object"
    raise BadRow(
        "no known format",
        f"{found}; known: messages, conversations, prompt with completion or response, instruction with output, "
        "text, tokens or input_ids",
    )


def parse(row: Any, line: int, format: str, need_assistant: bool = True) -> Record:
    """The record that a row of `format` holds; raises BadRow."""
    if format in CHATS:
        messages = {"messages": _messages, "sharegpt": _sharegpt, "completion": _completion}[format](row)
        if need_assistant and not any(message["role"] == "assistant" for message in messages):
            raise BadRow("no assistant turn")
        return Conversation(line, messages)
    if format == "text":
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise BadRow("not an object with a text")
        return Text(line, row["text"])
    return _ids(row, line)


def _messages(row: Any) -> list[dict[str, Any]]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise BadRow("not an object with a list of messages")
    return _checked(row["messages"])


def _checked(messages: list[Any]) -> list[dict[str, Any]]:
    if not messages:
        raise BadRow("no messages")
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow("a message is no object", f"message {number}")
        if message.get("tool_calls") and message.get("content", "") is None:
            message = message | {"content": ""}  # as OpenAI writes a turn that is nothing but calls
        if message.get("role") not in ROLES:
            raise BadRow(
                "unknown role",
                f"message {number} has role {message.get('role')!r}; known: {', '.join(ROLES)}",
            )
        if not isinstance(message.get("content"), str):
            raise BadRow("content is no text", f"message {number}")
        if not isinstance(message.get("reasoning_content", ""), str | None):
            raise BadRow("reasoning_content is no text", f"message {number}")
        checked.append(message)
    return checked


def _sharegpt(row: Any) -> list[dict[str, Any]]:
    if not isinstance(row, dict) or not isinstance(row.get("conversations"), list):
        raise BadRow("not an object with a list of conversations")
    messages: list[Any] = []
    for number, turn in enumerate(row["conversations"], start=1):
        if not isinstance(turn, dict):
            raise BadRow("a message is no object", f"message {number}")
        said_by = turn.get("from", turn.get("role"))
        role = _SHAREGPT_ROLES.get(said_by) if isinstance(said_by, str) else None
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise BadRow("unknown role", f"message {number} is from {said_by!r}; known: {known}")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
        messages.append({"role": role, "content": turn.get("value", turn.get("content"))} | rest)
    return _checked(_with_system(row, messages))


def _completion(row: Any) -> list[dict[str, Any]]:
    if not isinstance(row, dict) or not ("prompt" in row or "instruction" in row):
        raise BadRow("not an object with a prompt or an instruction")
    if "prompt" in row:
        prompt, answer = row["prompt"], row.get("completion", row.get("response"))
    else:
        prompt, answer = row["instruction"], row.get("output")
        if isinstance(prompt, str) and isinstance(row.get("input"), str) and row["input"]:
            prompt = f"{prompt}\n\n{row['input']}"
    return _checked(_with_system(row, _said("user", prompt) + ([] if answer is None else _said("assistant", answer))))


def _said(role: str, content: Any) -> list[Any]:
    """A text is one message of `role`; a list is messages already."""
    return list(content) if isinstance(content, list) else [{"role": role, "content": content}]


def _with_system(row: dict[str, Any], messages: list[Any]) -> list[Any]:
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _ids(row: Any, line: int) -> Ids:
    tokens = row.get("tokens", row.get("input_ids")) if isinstance(row, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise BadRow("not an object with a list of token ids")
    if not tokens:
        raise BadRow("no tokens")
    mask = row.get("loss_mask")
    if mask is not None:
        if not isinstance(mask, list) or not all(value in (0, 1) for value in mask):
            raise BadRow("loss_mask is no list of 0 and 1")
        if len(mask) != len(tokens):
            raise BadRow("loss_mask is not as long as the tokens", f"{len(mask)} and {len(tokens)}")
        mask = [bool(value) for value in mask]
    return Ids(line, tokens, mask)
