"""The Triton attention kernels against compiled flex_attention with its block mask: forward, backward, set-up.

    python benchmarks/kernel.py --json benchmarks/results/kernel-h200.json

Each shape is one layer's attention of one drafter step, in bfloat16, on random normal q, k and v. The two ways are
timed in turn, their order drawn anew each round; a time is the median over the rounds, in milliseconds between events
on the device, with its quartiles. Set-up is what a step does once for all layers (`prepare`), flex's both as `locked`
runs it (eager) and as `whole` does (compiled). Useful work is visible pairs * 4 * head dimension * query heads forward,
2.5 times that backward. "together" is one layer's forward and backward with the set-up, flex's faster one.

"alike" is the first layer's attention (dflash.attention.alike): the same work where slots at one token have one query,
its forward with what only this layer sets up.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from dflash.attention import DFlashMask, attend_flex, block_mask
from dflash.attention.mask import first_visible


@dataclass(frozen=True)
class Shape:
    name: str
    rows: int
    documents: list[int]  # lengths, which add up to a row's context
    anchors: int
    block: int
    heads: int = 32
    key_heads: int = 8
    width: int = 128
    window: int | None = None


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("one document of 40,000", 1, [40_000], 1024, 32),
        Shape("20 documents of 2,000", 1, [2_000] * 20, 1024, 32),
        Shape("4 rows of 3,072", 4, [3_072], 512, 16),
        Shape("one document of 40,000, window 2,048", 1, [40_000], 1024, 32, window=2_048),
        Shape("small: 9/3 heads of 64, 4 x 2,048", 4, [2_048], 256, 8, heads=9, key_heads=3, width=64),
    )
}


def main() -> None:
    options = parse()
    torch._functorch.config.donated_buffer = False  # or flex's backward could run but once
    results: list[dict[str, Any]] = []
    for name in options.shapes or SHAPES:
        results.append(measure(SHAPES[name], options))
        if options.json:  # after each, so that a run cut short leaves what it has
            found = {"machine": machine(options.commit), "rounds": options.rounds, "results": results}
            Path(options.json).write_text(json.dumps(found))
    print(table(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), help="all of them if none is named")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0, help="of anchors, tensors and the order of the rounds")
    parser.add_argument("--without-flex", action="store_true", help="time our kernels alone")
    parser.add_argument("--json", help="write everything there")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    return parser.parse_args()


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    from dflash.attention.alike import attend_alike, lines
    from dflash.attention.triton import attend_triton, prepare_ranges

    made = random.Random(options.seed)
    mask = make_mask(shape, made)
    pairs = visible_pairs(mask)
    work = pairs * 4 * shape.width * shape.heads / 1e12  # TFLOP
    q, k, v, grad = tensors(shape, options.seed)
    jobs: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    ways: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {"triton": (prepare_ranges, attend_triton)}
    if not options.without_flex:
        ways["flex"] = (block_mask, torch.compile(attend_flex, fullgraph=True, dynamic=False))
    ways["alike"] = (prepare_ranges, attend_alike)
    alike = lines(prepare_ranges(mask), mask.document.shape[1])
    repeated = alike.source.gather(1, alike.place.long()).long()[:, None, :, None].expand_as(q)
    queries = {"alike": q.detach().gather(2, repeated).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()}
    for way, (prepare, attend) in ways.items():
        begun = time.perf_counter()
        seen, asked = prepare(mask), queries.get(way, q)
        out = attend(asked, k, v, seen)
        torch.autograd.grad(out, (asked, k, v), grad, retain_graph=True)
        torch.cuda.synchronize()
        first[way] = time.perf_counter() - begun
        jobs[f"{way} set-up"] = lambda prepare=prepare: prepare(mask)
        jobs[f"{way} forward"] = lambda attend=attend, asked=asked, seen=seen: attend(asked, k, v, seen)
        jobs[f"{way} backward"] = lambda out=out, asked=asked: torch.autograd.grad(
            out, (asked, k, v), grad, retain_graph=True
        )
    failed = ""
    if not options.without_flex:
        compiled = torch.compile(block_mask, fullgraph=True, dynamic=False)
        try:
            compiled(mask)
            jobs["flex set-up compiled"] = lambda: compiled(mask)
        except Exception as error:  # Inductor of torch 2.11 fails on it; eager set-up is what is left then
            failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    times = {name: summary(each) for name, each in rounds(jobs, options.rounds, made).items()}
    for name, each in times.items():
        factor = {"forward": 1.0, "backward": 2.5}.get(name.split()[-1])
        if factor:
            each["tflop_s"] = round(factor * work / each["median"] * 1e3, 1)
    together = {way: sum(times[f"{way} {part}"]["median"] for part in ("forward", "backward")) for way in ways}
    together["triton"] += times["triton set-up"]["median"]
    together["alike"] += times["alike set-up"]["median"]
    if "flex" in ways:
        together["flex"] += min(each["median"] for name, each in times.items() if name.startswith("flex set-up"))
    shared = int((alike.seen.anchor >= 0).sum())
    found = {
        "shape": asdict(shape),
        "visible_pairs": pairs,
        "slots": q.shape[0] * q.shape[2],
        "questions": shared,
        "tflop_forward": round(work, 3),
        "times_ms": times,
    }
    found |= {"together_ms": together, "first_call_s": {way: round(s, 1) for way, s in first.items()}}
    if failed:
        found["flex_set_up_compiled"] = failed
    print(shape.name, json.dumps(together), failed, flush=True)
    return found


def make_mask(shape: Shape, made: random.Random) -> DFlashMask:
    """Anchors drawn over the whole row, sorted, all blocks full."""
    length = sum(shape.documents)
    document = torch.repeat_interleave(torch.arange(len(shape.documents)), torch.tensor(shape.documents))
    anchors = [sorted(made.sample(range(length), shape.anchors)) for _ in range(shape.rows)]
    document = document.expand(shape.rows, -1).contiguous()
    return DFlashMask(document.cuda(), torch.tensor(anchors).cuda(), shape.block, shape.window)


def visible_pairs(mask: DFlashMask) -> int:
    """Pairs of a query and a key that it sees, of one head and all rows."""
    slot = torch.arange(mask.block, device=mask.anchors.device)
    high, low = mask.anchors[..., None], first_visible(mask)[..., None].expand(*mask.anchors.shape, mask.block)
    if mask.window is not None:
        low = torch.maximum(low, high + slot - mask.window + 1)
    return int((high - low).clamp(min=0).sum()) + mask.anchors.numel() * mask.block**2


def tensors(shape: Shape, seed: int) -> list[Tensor]:
    """q, k, v and the output's gradient, [R, H, L, d] views of [R, L, H, d] as projections leave them."""
    made = torch.Generator("cuda").manual_seed(seed)
    slots = shape.anchors * shape.block
    keys = sum(shape.documents) + slots
    sizes = [(slots, shape.heads), (keys, shape.key_heads), (keys, shape.key_heads), (slots, shape.heads)]
    made_up = [
        torch.randn(shape.rows, n, h, shape.width, generator=made, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n, h in sizes
    ]
    return [x.requires_grad_(at < 3) for at, x in enumerate(made_up)]


def rounds(jobs: dict[str, Callable[[], Any]], count: int, made: random.Random) -> dict[str, list[float]]:
    """Milliseconds of every job in each of `count` rounds, after two that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(count + 2):
        order = list(jobs)
        made.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            jobs[name]()
            end.record()
            torch.cuda.synchronize()
            if number >= 2:
                times[name].append(start.elapsed_time(end))
    return times


def summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": round(median, 3), "quartile_1": round(low, 3), "quartile_3": round(high, 3)}


def table(results: list[dict[str, Any]]) -> str:
    out = ["| shape | | ms | quartiles | TFLOP/s |", "|---|---|---|---|---|"]
    for result in results:
        name = result["shape"]["name"]
        for job, each in result["times_ms"].items():
            spread = f"{each['quartile_1']:.2f} to {each['quartile_3']:.2f}"
            out.append(f"| {name} | {job} | {each['median']:.2f} | {spread} | {each.get('tflop_s', '')} |")
        together = result["together_ms"]
        gain = f", {together['flex'] / together['triton']:.2f} times as fast" if "flex" in together else ""
        out.append(f"| {name} | together | {together['triton']:.2f}{gain} | | |")
        first = f"{result['questions']:,} questions of {result['slots']:,} slots"
        out.append(f"| {name} | first layer | {together['alike']:.2f}, {first} | | |")
    return "\n".join(out)


def machine(commit: str | None) -> dict[str, Any]:
    import triton

    if commit is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or None,
    }


if __name__ == "__main__":
    main()
