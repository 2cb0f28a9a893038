"""The text that the small target is trained on, from the running Python's library and its manual.

Every file belongs to one side, training or held out, and so does everything made from it. Rows are
`{"messages": [...]}`, conversations, or `{"text": ...}`, plain source and manual text.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tasks

Row = dict[str, Any]
SIDES = ("train", "heldout")
# Tests, code that is not Python's own, and tables of characters that teach nothing.
LEFT_OUT = {"test", "tests", "site-packages", "_bundled", "encodings", "idle_test", "__pycache__"}
LONGEST_CONVERSATION = 1500  # characters, about 430 tokens
PIECE = 1600  # characters of one piece of plain text
MADE_UP_EACH = {"train": 1500, "heldout": 20}
TASKS_A_FUNCTION = 4


def side(path: str) -> str:
    """`heldout` for one file in ten, by its name alone."""
    return SIDES[hashlib.sha256(path.encode()).digest()[0] % 10 == 0]


def make(manual: Path | None) -> tuple[dict[str, list[Row]], dict[str, int]]:
    """Rows of each side in random order, and how many of which kind there are."""
    choose = random.Random(0)
    rows: dict[str, list[Row]] = {name: [] for name in SIDES}
    counts: dict[str, int] = {}

    def add(where: str, kind: str, *new: Row) -> None:
        rows[where] += new
        counts[f"{where} {kind}"] = counts.get(f"{where} {kind}", 0) + len(new)

    seen: set[str] = set()
    library = Path(sysconfig.get_paths()["stdlib"])
    # Held-out files come first: a function that stands in two files is held out in both.
    files = [(side(name), name) for name in _names(library, "*.py")]
    for where, name in sorted(files):
        source = (library / name).read_text(encoding="utf-8", errors="replace")
        add(where, "pieces of source", *({"text": piece} for piece in _pieces(source)))
        for function in tasks.functions(source):
            if function.plain not in seen:
                seen.add(function.plain)
                add(where, "questions about code", *_conversations(function, choose))
    if manual:
        for name in _names(manual, "*.rst.txt"):
            text = plain_text((manual / name).read_text(encoding="utf-8", errors="replace"))
            where = side(name)
            add(where, "pieces of manual", *({"text": piece} for piece in _pieces(text)))
            add(where, "questions about Python", *(_conversation([pair]) for pair in _manual_questions(text)))
    for where in SIDES:
        for task in tasks.MADE_UP:
            new = (_conversation([task(choose)]) for _ in range(MADE_UP_EACH[where]))
            add(where, "made-up questions", *new)
        choose.shuffle(rows[where])
    return rows, counts


def write(rows: list[Row], path: Path) -> None:
    with lzma.open(path, "wt", preset=9, encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read(path: Path) -> list[Row]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def plain_text(rst: str) -> str:
    """The manual's mark-up, lightened: `:func:`open`` becomes `open` between single backticks."""
    text = re.sub(r":[a-z:]+:`[~!]?([^`<]+?)(?: ?<[^`>]*>)?`", r"`\1`", rst)
    text = re.sub(r"^\.\. (?:index|versionadded|versionchanged|_|seealso|deprecated).*\n", "", text, flags=re.M)
    return text.replace("``", "`")


def _names(folder: Path, pattern: str) -> list[str]:
    found = (path.relative_to(folder) for path in folder.rglob(pattern))
    return sorted(str(path) for path in found if not LEFT_OUT & set(path.parts))


def _pieces(text: str) -> Iterator[str]:
    """The text in whole lines, at most about PIECE characters together."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > PIECE:
            yield piece
            piece = ""
        piece += line[:PIECE]
    if len(piece) > 100:
        yield piece


def _conversation(turns: list[tasks.Pair]) -> Row:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    }


def _conversations(function: tasks.Function, choose: random.Random) -> Iterator[Row]:
    """A few tasks about one function, the first two of them also as turns of one conversation."""
    pairs = tasks.about(function, choose)
    picked = choose.sample(sorted(pairs), min(TASKS_A_FUNCTION, len(pairs)))
    for name in picked:
        question, answer = pairs[name]
        whole = question if name == "body" else f"{question}\n\n{tasks.fenced(function.plain)}"
        if len(answer) > 10 and len(whole) + len(answer) <= LONGEST_CONVERSATION:
            yield _conversation([(whole, answer)])
    first, second = (pairs[name] for name in choose.sample(["explain", "steps", "arguments", "calls"], 2))
    opening = (f"{first[0]}\n\n{tasks.fenced(function.plain)}", first[1])
    if sum(map(len, opening + second)) <= LONGEST_CONVERSATION * 0.9:
        yield _conversation([opening, second])


def _manual_questions(text: str) -> Iterator[tasks.Pair]:
    """What the manual says of a function, class or method right below its signature, and below a heading."""
    described = re.compile(r"^ *\.\. (?:function|class|method|exception|data|attribute):: (.+)\n+((?: +\S.*\n)+)", re.M)
    for signature, body in described.findall(text):
        answer = re.sub(r"\s+", " ", body).strip()
        if 30 < len(answer) < 600 and not answer.startswith((".. ", ":")):
            yield f"What is `{signature.strip()}`?", answer
    headed = re.compile(r"^(\S.{3,60})\n[-=~^\"]{4,}\n\n+((?:[A-Z`].*\n)(?:\S.*\n)*)\n", re.M)
    for heading, paragraph in headed.findall(text):
        answer = re.sub(r"\s+", " ", paragraph).strip()
        if 60 < len(answer) < 700:
            yield f"Tell me about this: {heading.strip()}", answer
