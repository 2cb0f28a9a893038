"""Records to token ids and loss masks; conversations go through the target tokenizer's own chat template.

Supervised are the tokens that the target would have generated: of every assistant turn its content and the
end-of-turn token, never the header before it nor the line break after it.

A text is tokenised once, whole, and tokens are marked by their character offsets, so what is trained on is
tokenised as the target sees it. A template with `{% generation %}` marks says itself which characters those
are. Without marks they lie between two renderings: the messages before the turn with a generation prompt,
and the messages up to and with the turn.

Some templates render a turn differently once later turns follow (Qwen3's drops earlier thoughts). Such a turn
becomes a document of its own, rendered as when it was said, so that each turn is supervised exactly once and
after the context in which it was said.

A thought is `reasoning_content` of a message or a leading `<think>...</think>` of its content. Templates that
know `enable_thinking` are told for each turn whether it has one: what such a template writes for a turn
without thoughts (Qwen3: an empty pair of tags) is then the prompt's, as it was when the target answered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.data.document import Document
from dflash.data.formats import BadRow, Conversation, Ids, Record, Text
from dflash.settings import SettingError

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_OPEN_THOUGHT = re.compile(r"\A\s*<think>(?!.*</think>)", re.DOTALL)
_PROBE = (
    "def f(x):\n\treturn x ** 2  # 12345 \u00e9\u4e2d\u6587 \U0001f600\nIt's the King's  speech, isn't it? "
    "HTTPServer foo_bar a1b2 \u0646\u0635 e\u0301 ...\r\n\n  end"
)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise SettingError unless the tokenizer has a chat template and reports character offsets."""
    if not tokenizer.chat_template:
        raise SettingError("target.model", tokenizer.name_or_path, "its tokenizer must have a chat template")
    if not tokenizer.is_fast:
        raise SettingError("target.model", tokenizer.name_or_path, "its tokenizer must be a fast one, with offsets")


def fingerprint(tokenizer: Any) -> str:
    """A checksum of what the tokenizer does: vocabulary, chat template, how it cuts a text of many kinds.

    Not of its files or its serialised form, which differ between versions of the libraries.
    """
    does = [
        sorted(tokenizer.get_vocab().items()),
        sorted((id_, str(token)) for id_, token in tokenizer.added_tokens_decoder.items()),
        tokenizer.chat_template,
        tokenizer(_PROBE)["input_ids"],
    ]
    return hashlib.sha256(json.dumps(does).encode()).hexdigest()


def encode(
    records: Sequence[Record], tokenizer: Any, reasoning: str, embedding_rows: int
) -> list[list[Document] | BadRow]:
    """The documents of each record, or why it has none; texts go to the tokenizer as one batch.

    Token ids made elsewhere must lie below `embedding_rows`.
    """
    found: list[list[Document] | BadRow] = []
    marked: list[Marked] = []
    owners: list[int] = []  # the record of each marked text
    for number, record in enumerate(records):
        try:
            if isinstance(record, Ids):
                found.append([_given(record, embedding_rows)])
            elif isinstance(record, Text):
                found.append([_plain(record.text, tokenizer)])
            else:
                template = Template.of(tokenizer)
                messages = template.prepare(record.messages, reasoning)
                if template.marked:
                    found.append([_marked_by_template(messages, template)])
                else:
                    made = _render(messages, template)
                    owners += [number] * len(made)
                    marked += made
                    found.append([])
        except BadRow as bad:
            found.append(bad)
    for number, document in zip(owners, _tokenise(marked, tokenizer), strict=True):
        documents = found[number]
        assert isinstance(documents, list)
        documents.append(document)
    return found


def documents(messages: list[dict[str, Any]], tokenizer: Any, reasoning: str = "keep") -> list[Document]:
    """The documents of one conversation: one, or more when its template renders earlier turns differently later.

    Raises BadRow when the template refuses the messages, or what it renders for an assistant turn does not
    continue its own generation prompt.
    """
    (found,) = encode([Conversation(1, messages)], tokenizer, reasoning, 0)
    if isinstance(found, BadRow):
        raise found
    return found


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template and what it knows of."""

    tokenizer: Any
    marked: bool  # it has {% generation %} marks
    knows_reasoning_content: bool
    knows_enable_thinking: bool

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        text = tokenizer.get_chat_template()
        marked = bool(_GENERATION_MARK.search(text))
        return cls(tokenizer, marked, "reasoning_content" in text, "enable_thinking" in text)

    def prepare(self, messages: list[dict[str, Any]], reasoning: str) -> list[dict[str, Any]]:
        """The messages with their thoughts where the template looks for them, or ("drop") without any."""
        return [self._thought(m, reasoning) if m["role"] == "assistant" else m for m in messages]

    def _thought(self, message: dict[str, Any], reasoning: str) -> dict[str, Any]:
        message, content = dict(message), message["content"]
        thought = message.pop("reasoning_content", None)
        if reasoning == "drop":
            # What was cut while thinking has nothing but a thought.
            return message | {"content": "" if _OPEN_THOUGHT.match(content) else _THOUGHT.sub("", content)}
        if not thought:
            return message
        if self.knows_reasoning_content:
            return message | {"reasoning_content": thought}
        return message | {"content": f"<think>\n{thought}\n</think>\n\n{content}"}

    def arguments(self, turn: dict[str, Any]) -> dict[str, Any]:
        """What the target was told when it said `turn`, an assistant message of `prepare`."""
        return {"enable_thinking": _thinks(turn)} if self.knows_enable_thinking else {}

    def render(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """The text of `messages`; raises BadRow."""
        return _unicode(self._apply(messages, tokenize=False, **arguments))

    def tokens_and_mask(self, messages: list[dict[str, Any]], **arguments: Any) -> tuple[list[int], list[int]]:
        """What a template with marks gives: token ids, and 1 for each token between them; raises BadRow."""
        out = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True, **arguments)
        return out["input_ids"], out["assistant_masks"]

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template may raise whatever it likes; jinja2 is no dependency of ours
            raise BadRow("the chat template refuses it", str(error)) from None


def _thinks(turn: dict[str, Any]) -> bool:
    # An empty thought that stands in the content was said by the target; one that the template adds was not.
    content = turn["content"]
    return bool(turn.get("reasoning_content") or _THOUGHT.match(content) or _OPEN_THOUGHT.match(content))


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("half of a surrogate pair", f"character {error.start}") from None
    return text


@dataclass
class Marked:
    """A rendered text and its supervised spans: first character, behind the last, stopped by a length limit."""

    text: str
    spans: list[tuple[int, int, bool]]


def _render(messages: list[dict[str, Any]], template: Template) -> list[Marked]:
    turns = [_Turn.render(messages, at, template) for at, m in enumerate(messages) if m["role"] == "assistant"]
    found = []
    while turns:
        text = turns[-1].through
        stable = [turn for turn in turns if text.startswith(turn.through)]
        found.append(Marked(text, [(turn.start, len(turn.through), turn.cut) for turn in stable]))
        turns = [turn for turn in turns if turn not in stable]
    return found[::-1]


@dataclass
class _Turn:
    """An assistant turn as it was said: `through` is the text up to its end, `start` its beginning."""

    through: str
    start: int
    cut: bool

    @classmethod
    def render(cls, messages: list[dict[str, Any]], at: int, template: Template) -> _Turn:
        if at == 0:
            raise BadRow("begins with an assistant turn", "there is no prompt that it answers")
        turn = messages[at]
        cut, told = bool(turn.get("cut")), template.arguments(turn)
        prompt = template.render(messages[:at], add_generation_prompt=True, **told)
        if cut and _OPEN_THOUGHT.match(turn["content"]):
            # Stopped while thinking: a template would close the thought, which the target never did.
            return cls(_unicode(prompt + turn["content"]), len(prompt), cut)
        through = template.render(messages[: at + 1], **told)
        if not through.startswith(prompt):
            raise BadRow(
                "the chat template does not continue its own prompt",
                f"message {at + 1} is not rendered after the generation prompt, so its tokens cannot be told "
                "from the prompt's; use a template with {% generation %} marks",
            )
        return cls(through, len(prompt), cut)


def _marked_by_template(messages: list[dict[str, Any]], template: Template) -> Document:
    turns = [message for message in messages if message["role"] == "assistant"]
    tokens, mask = template.tokens_and_mask(messages, **template.arguments(turns[-1]))
    document = Document(np.asarray(tokens, np.int64), np.asarray(mask, bool))
    if any(turn.get("cut") for turn in turns):
        edges = np.flatnonzero(np.diff(document.loss_mask.astype(np.int8), prepend=0, append=0))
        if len(edges) != 2 * len(turns):
            raise BadRow("a cut turn cannot be found", "the template's marks do not give one span for each turn")
        for turn, last in zip(turns, edges[1::2] - 1, strict=True):
            if turn.get("cut") and int(document.tokens[last]) in template.tokenizer.added_tokens_decoder:
                document.loss_mask[last] = False
    return document


def _tokenise(marked: list[Marked], tokenizer: Any) -> Iterator[Document]:
    if not marked:
        return
    # The batch goes to the backend itself: what the tokenizer makes of its answer costs as much again.
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    added = np.array(list(tokenizer.added_tokens_decoder), dtype=np.int64)
    encodings = backend.encode_batch([m.text for m in marked], add_special_tokens=False)
    for one, encoding in zip(marked, encodings, strict=True):
        yield _marked_by_spans(one, encoding, added)


def _marked_by_spans(marked: Marked, encoding: Any, added: np.ndarray) -> Document:
    tokens = np.asarray(encoding.ids, dtype=np.int64)
    starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    special = np.isin(tokens, added)
    loss_mask = np.zeros(len(tokens), dtype=bool)
    for first, behind, cut in marked.spans:
        # A token that begins in the header belongs to the prompt, though it may reach into the content.
        inside = np.flatnonzero((starts >= first) & (starts < behind))
        stops = inside[special[inside]]
        if len(stops) and not marked.text[ends[stops[-1]] : behind].strip():
            inside = inside[inside < stops[-1]] if cut else inside[inside <= stops[-1]]
        loss_mask[inside] = True
    return Document(tokens, loss_mask)


def _plain(text: str, tokenizer: Any) -> Document:
    """Every token is supervised but those that the tokenizer adds (a beginning-of-text token)."""
    out = tokenizer(_unicode(text), return_special_tokens_mask=True, verbose=False)
    mask = np.asarray(out["special_tokens_mask"], dtype=bool)
    return Document(np.asarray(out["input_ids"], dtype=np.int64), ~mask)


def _given(ids: Ids, embedding_rows: int) -> Document:
    low, high = min(ids.tokens), max(ids.tokens)
    if low < 0 or high >= embedding_rows:
        wrong = low if low < 0 else high
        raise BadRow("a token outside the vocabulary", f"id {wrong}; the target has {embedding_rows}")
    tokens = np.asarray(ids.tokens, dtype=np.int64)
    mask = np.ones(len(tokens), bool) if ids.loss_mask is None else np.asarray(ids.loss_mask, bool)
    return Document(tokens, mask)


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
