"""How long a frozen target takes for a row of packed documents, on the device and in Python, by how these attend.

    python benchmarks/documents.py --json out.json        # a target of Qwen3-8B's sizes on one GPU
    python benchmarks/documents.py --tiny                 # a toy on any machine, to see that it runs

Rows of 40,000 tokens, of documents as long as each line says, drawn anew for every batch. Ways: all documents in one
call of varlen_attn; one by one in lengths rounded up (dflash/documents.py); one by one as they are. `wall` is from the
call to the end of the device's work, the median of some batches with their range after two that are not counted;
`host` is the processor's time of the calling thread, which in a full launch queue includes waiting for room; `first` is
the first batch of its kind, with whatever is planned or compiled for it. Ways take turns, two rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import blank_target
import torch
from torch import Tensor

from dflash import documents, settings
from dflash.target import Target

# Name: shortest and longest document of a row.
MIXES = {
    "2,000": (2000, 2000),
    "1,000 to 3,000": (1000, 3000),
    "200 to 1,000": (200, 1000),
    "2,000 to 8,000": (2000, 8000),
}
WAYS = {"one call": (1 << 30, 256), "rounded": (0, 256), "as they are": (0, 1)}  # documents.SHORT, .ROUNDED_TO


def main() -> None:
    options = parse()
    device = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda")
    length = 400 if options.tiny else 40_000
    with tempfile.TemporaryDirectory() as folder:
        blank_target.write(Path(folder), blank_target.TINY if options.tiny else blank_target.QWEN3_8B)
        target = Target.load(settings.Target(model=folder, made_up=True), [device])
    results = []
    for name, lengths in MIXES.items():
        low, high = (n // 100 for n in lengths) if options.tiny else lengths
        made = random.Random(options.seed)
        for way in [*WAYS, *WAYS]:
            results.append({"documents": name, "way": way, **timed(target, made, (length, low, high), way, options)})
            print(line(results[-1]), flush=True)
            if options.json:  # after each, so that a run cut short leaves what it has
                Path(options.json).write_text(json.dumps({**machine(device), "results": results}, indent=1) + "\n")


def timed(
    target: Target, made: random.Random, sizes: tuple[int, int, int], way: str, options: argparse.Namespace
) -> dict[str, Any]:
    documents.SHORT, documents.ROUNDED_TO = WAYS[way]
    wall, host = [], []
    for _ in range(options.batches + 2):
        batch = row(made, *sizes)
        wait(target.device)
        began, busy = time.perf_counter(), time.thread_time()
        with torch.no_grad():
            target.features(*batch)
        host.append(time.thread_time() - busy)
        wait(target.device)
        wall.append(time.perf_counter() - began)
    counted = wall[2:]
    return {
        "first_s": wall[0],
        "wall_ms": statistics.median(counted) * 1e3,
        "range_ms": [min(counted) * 1e3, max(counted) * 1e3],
        "host_ms": statistics.median(host[2:]) * 1e3,
    }


def row(made: random.Random, length: int, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, documents and positions [1, length] of one row, full to its end."""
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, made.randint(low, high)))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    return torch.randint(1000, (1, length)), document, position


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def line(result: dict[str, Any]) -> str:
    low, high = result["range_ms"]
    return (
        f"{result['documents']:16} {result['way']:12} first {result['first_s']:.3f} s, then wall "
        f"{result['wall_ms']:.1f} ms ({low:.1f} to {high:.1f}), host {result['host_ms']:.1f} ms"
    )


def machine(device: torch.device) -> dict[str, Any]:
    import transformers

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "benchmark": "documents",
        "card": card,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6, help="batches that are counted, of each way and round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--tiny", action="store_true", help="a toy on CPU; figures say nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
