"""Everything about speed in one go, within ten minutes on H200s: kernel, step, pipeline.

    python benchmarks/all.py --out results
    python benchmarks/all.py --out results --specforge DIR --speculators DIR     # the step beside its peers

Each is a process of its own with a JSON file in `--out`; what one of them prints goes on as it comes. One that fails or
overruns its minutes is said and the next begins; the exit status is then 1. Kernel and step take the first GPU; the
pipeline has its target there and its drafter on the second, if there is one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    name: str
    arguments: list[str]
    seconds: int  # most it may take
    gpus: int


def main() -> None:
    options = parse()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    failed = []
    for part in parts(options):
        if gpus < part.gpus and not options.tiny:
            print(f"{part.name}: left out, needs {part.gpus} GPUs and this machine shows {gpus}", flush=True)
            continue
        print(f"== {part.name}", flush=True)
        began = time.perf_counter()
        command = [
            sys.executable,
            str(HERE / f"{part.name}.py"),
            *part.arguments,
            "--json",
            str(out / f"{part.name}.json"),
        ]
        try:
            how: object = subprocess.run(command, timeout=part.seconds).returncode
        except subprocess.TimeoutExpired:
            how = f"ended after {part.seconds} s"
        print(f"== {part.name}: {time.perf_counter() - began:.0f} s", flush=True)
        if how:
            failed.append(part.name)
            print(f"{part.name} failed: {how}", flush=True)
    raise SystemExit(1 if failed else 0)


def parts(options: argparse.Namespace) -> list[Part]:
    if options.tiny:
        return [
            Part("step", ["--tiny", "--samples", "2"], 120, 0),
            Part("pipeline", ["--tiny", "--shapes", "packed", "--rounds", "1", "--steps", "10"], 120, 0),
        ]
    commit = ["--commit", options.commit] if options.commit else []
    peers = [["--specforge", options.specforge], ["--speculators", options.speculators]]
    # One step a sample: compiling six variants at three shapes takes most of the time as it is.
    step = ["--samples", "3", "--steps", "1"]
    step += [word for option, folder in peers if folder for word in (option, str(folder))]
    timeline = ["--timeline", str(options.out / "pipeline-timeline.png")]
    shapes = ["one document of 40,000", "20 documents of 2,000", "4 rows of 3,072"]
    return [
        Part("kernel", ["--rounds", "9", *commit, "--shapes", *shapes], 70, 1),
        Part("step", [*step, *commit], 410, 1),
        Part("pipeline", ["--shapes", "packed", "--rounds", "1", "--steps", "14", *timeline, *commit], 120, 1),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--specforge", type=Path, help="a checkout of sgl-project/SpecForge")
    parser.add_argument("--speculators", type=Path, help="a checkout of vllm-project/speculators")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--tiny", action="store_true", help="toys on CPU; figures say nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
