"""Real text in documents of a wanted length, on any machine: the running Python's own library as JSONL.

    python benchmarks/long_documents.py --tokenizer tests/target/qwen3-small --tokens 2000 --out long.jsonl

Source files follow each other in an order drawn from the seed, and are cut every 4/5 to 6/5 of `--tokens` tokens,
evenly drawn. A cut text may come to a token more or less when it is tokenised again.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

LEFT_OUT = {"test", "tests", "site-packages", "idle_test", "__pycache__", "encodings"}  # the last are tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--tokens", type=int, default=2000, help="of a document, on average")
    parser.add_argument("--documents", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write(options.out, options.tokenizer, options.tokens, options.documents, options.seed)


def write(out: Path, tokenizer: Path, tokens: int, documents: int, seed: int = 0) -> None:
    """Write so many documents as rows {"text": ...}; the library is gone through again where it ends before them."""
    cutter, draw = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), random.Random(seed)
    with open(out, "w", encoding="utf-8") as file:
        left, ends = "", list[int]()  # text that is in no document yet, and where each of its tokens ends
        texts = _library(draw)
        for _ in range(documents):
            wanted = draw.randint(tokens * 4 // 5, tokens * 6 // 5)
            while len(ends) < wanted:
                left += next(texts) + "\n"
                ends = [end for _, end in cutter.encode(left).offsets]
            file.write(json.dumps({"text": left[: ends[wanted - 1]]}) + "\n")
            cut = ends[wanted - 1]
            left, ends = left[cut:], [end - cut for end in ends[wanted:]]


def _library(draw: random.Random) -> Iterator[str]:
    """Its sources, again and again, each time in another order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if not LEFT_OUT & set(path.relative_to(folder).parts))
    while True:
        for path in draw.sample(files, len(files)):
            yield path.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main()
