"""Everything about speed in one go, within ten minutes on H200s: kernel, step, pipeline.

    python benchmarks/all.py --out results
    python benchmarks/all.py --out results --specforge DIR --speculators DIR     # the step beside its peers

Each part is a process of its own that leaves a JSON file and what it printed in `--out`. Parts of one GPU run side by
side on the first two GPUs, if there are two, each alone on its own; then the pipeline has its target on the one and
its drafter on the other. A part that fails or overruns its minutes is said and the next begins; the exit status is
then 1.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    name: str
    script: str
    arguments: list[str]
    seconds: int  # most it may take
    gpus: int


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = seen.split(",")[:2] if seen else []
    wanted = parts(options)
    fitting = [part for part in wanted if options.tiny or part.gpus <= len(gpus)]
    for part in wanted:
        if part not in fitting:
            print(f"{part.name}: left out, needs {part.gpus} GPUs and this machine shows {len(gpus)}", flush=True)
    # Tiny parts see no GPU and run one by one.
    lanes: queue.Queue[str] = queue.Queue()
    for lane in gpus or [""]:
        lanes.put(lane)

    def alone(part: Part) -> bool:
        lane = lanes.get()
        try:
            return run(part, options.out, lane)
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(lanes.qsize()) as pool:
        done = list(pool.map(alone, [part for part in fitting if part.gpus <= 1]))
    done += [run(part, options.out, ",".join(gpus)) for part in fitting if part.gpus > 1]
    raise SystemExit(0 if all(done) else 1)


def run(part: Part, out: Path, gpus: str) -> bool:
    """Whether it ended well; what it printed is printed when it is over."""
    command = [sys.executable, str(HERE / part.script), *part.arguments, "--json", str(out / f"{part.name}.json")]
    printed = out / f"{part.name}.txt"
    began = time.perf_counter()
    how: object
    with printed.open("w") as file:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        try:
            how = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=part.seconds
            ).returncode
        except subprocess.TimeoutExpired:
            how = f"ended after {part.seconds} s"
    text = [f"== {part.name}: {time.perf_counter() - began:.0f} s", printed.read_text()]
    print("\n".join(text + ([f"{part.name} failed: {how}"] if how else [])), flush=True)
    return not how


def parts(options: argparse.Namespace) -> list[Part]:
    """The longest first, so that two GPUs end together."""
    if options.tiny:
        return [
            Part("step", "step.py", ["--tiny", "--samples", "2"], 120, 0),
            Part("pipeline", "pipeline.py", ["--tiny", "--shapes", "packed", "--rounds", "1", "--steps", "10"], 120, 0),
        ]
    commit = ["--commit", options.commit] if options.commit else []
    peers = [["--specforge", options.specforge], ["--speculators", options.speculators]]
    # One step a sample: compiling six variants takes most of the time as it is.
    step = ["--samples", "3", "--steps", "1", *commit]
    step += [word for option, folder in peers if folder for word in (option, str(folder))]
    timeline = ["--timeline", str(options.out / "pipeline-timeline.png")]
    shapes = ["one document of 40,000", "20 documents of 2,000", "4 rows of 3,072"]
    return [
        Part("step-long", "step.py", [*step, "--shapes", "long"], 240, 1),
        Part("step-batch", "step.py", [*step, "--shapes", "batch"], 200, 1),
        Part("step-packed", "step.py", [*step, "--shapes", "packed"], 130, 1),
        Part("kernel", "kernel.py", ["--rounds", "9", *commit, "--shapes", *shapes], 100, 1),
        Part(
            "pipeline",
            "pipeline.py",
            ["--shapes", "packed", "--rounds", "1", "--steps", "14", *timeline, *commit],
            120,
            2,
        ),
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
