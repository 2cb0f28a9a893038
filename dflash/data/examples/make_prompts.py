"""Collect the prompts of the shipped example data; see README.md beside this file for sources and licences.

    python make_prompts.py --bfcl BFCL_v4_simple_python.json BFCL_v4_multiple.json BFCL_v4_irrelevance.json \\
        --python /usr/lib/python3.11 > prompts.jsonl

Writes chat JSONL whose assistant turns are still empty; `python -m dflash regenerate` fills them. The
same files give the same prompts.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

FOLLOW_UPS = (
    "Now say the same in one sentence.",
    "Can you explain why?",
    "Give me one more example.",
    "Which step is the hardest, and why?",
    "How would you explain this to a child?",
    "What should I check to be sure this is right?",
    "List the three most important words of your answer.",
    "What is a common mistake here?",
    "Rewrite your answer as a short list.",
    "What would change if the numbers were twice as large?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bfcl", nargs="+", type=Path, required=True, help="BFCL question files (JSON lines)")
    parser.add_argument("--python", type=Path, required=True, help="folder of Python's standard library")
    parser.add_argument("--questions", type=int, default=130, help="one-turn questions (%(default)s)")
    parser.add_argument("--dialogues", type=int, default=50, help="two-turn conversations (%(default)s)")
    parser.add_argument("--functions", type=int, default=76, help="functions to explain (%(default)s)")
    args = parser.parse_args()
    choose = random.Random(0)
    questions = sorted({text for path in args.bfcl for text in bfcl_questions(path)})
    functions = sorted({text for path in sorted(args.python.glob("*.py")) for text in short_functions(path)})
    choose.shuffle(questions)
    short = [text for text in questions if len(text) <= 90]
    opening = short[: args.dialogues]
    single = [text for text in questions if text not in set(opening)][: args.questions]
    conversations = [[text] for text in single]
    conversations += [[text, choose.choice(FOLLOW_UPS)] for text in opening]
    conversations += [
        [f"Explain what this Python function does.\n\n```python\n{text}\n```"]
        for text in choose.sample(functions, args.functions)
    ]
    choose.shuffle(conversations)
    for turns in conversations:
        messages = [
            {"role": role, "content": text} for user in turns for role, text in (("user", user), ("assistant", ""))
        ]
        print(json.dumps({"messages": messages}, ensure_ascii=False))


def bfcl_questions(path: Path, longest: int = 300) -> Iterator[str]:
    """The user's first message of each entry, if it is short and the only one of its turn."""
    for line in path.read_text(encoding="utf-8").splitlines():
        first_turn = json.loads(line)["question"][0]
        if len(first_turn) == 1 and first_turn[0]["role"] == "user":
            text = first_turn[0]["content"].strip()
            if 20 <= len(text) <= longest:
                yield text


def short_functions(path: Path, longest: int = 320) -> Iterator[str]:
    """Source of the file's functions and methods of at least four lines and at most `longest` characters."""
    source = path.read_text(encoding="utf-8", errors="replace")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            text = textwrap.dedent("\n".join(lines)).strip()
            if len(lines) >= 4 and len(text) <= longest:
                yield text


if __name__ == "__main__":
    main()
