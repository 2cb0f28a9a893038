"""Train drafters for a target and measure their acceptance length on prompts that they never saw.

    python benchmarks/acceptance/run.py --prompts PROMPTS --target SmolLM2-135M-Instruct --out OUT --steps 2000

PROMPTS is what make_prompts.py writes: train.jsonl and a folder eval/. Three stages, which --stages can take
apart: the target answers the training prompts (`dflash regenerate`, one process a GPU), drafters are trained
(`dflash train`, with acceptance measured on the way on a few prompts), and measured on all of eval/ (`dflash
eval`, one process a drafter). OUT/result.json holds every figure with its conditions. KEY=VALUE goes to the
training; a stage that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STAGES = ("regenerate", "train", "eval")
SETTINGS = {
    "data.row_tokens": 2048,
    "drafter.layers": 5,
    "drafter.block": 8,
    "drafter.anchors": 512,
    "drafter.mask_token": 16,  # SmolLM2: a marker that no chat holds
    "loss.chunk": 8192,
    "optim.lr": 1e-3,
    "train.rows": 8,
    "train.queue_mib": 256,
    "train.steady_after": 10,
    "eval.limit": 32,
    "eval.max_new": 96,
    "eval.batch": 32,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--models-dir", default="models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--gpus", type=int, default=1, help="regenerate and eval: processes, each on a GPU of its own")
    parser.add_argument("--limit", type=int, help="training prompts (all)")
    parser.add_argument("--max-new", type=int, default=256, help="tokens of a response, trained on and evaluated")
    parser.add_argument("--batch", type=int, default=1024, help="training prompts answered at a time")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--evaluations", type=int, default=2, help="on the way, the last of them at the end")
    parser.add_argument("--eval-batch", type=int, default=164)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for stage in arguments.stages:
        began = time.monotonic()
        {"regenerate": regenerate, "train": train, "eval": evaluate}[stage](arguments)
        print(f"{stage}: {time.monotonic() - began:.0f} s", flush=True)


def regenerate(arguments: argparse.Namespace) -> None:
    """The target's own answers to the training prompts, in OUT/chat.jsonl."""
    lines = (arguments.prompts / "train.jsonl").read_text().splitlines(keepends=True)[: arguments.limit]
    parts = [arguments.out / f"chat-{number}.jsonl" for number in range(arguments.gpus)]
    commands = []
    for number, part in enumerate(parts):
        asked = part.with_name(f"asked-{number}.jsonl")
        asked.write_text("".join(lines[number :: arguments.gpus]))
        command = ["regenerate", "--prompts", str(asked), *target(arguments), "--out", str(part)]
        commands.append([*command, "--max-new", str(arguments.max_new), "--batch", str(arguments.batch)])
    side_by_side(commands)
    (arguments.out / "chat.jsonl").write_text("".join(part.read_text() for part in parts))


def train(arguments: argparse.Namespace) -> None:
    settings = SETTINGS | {"data.path": arguments.out / "chat.jsonl", "target.model": arguments.target}
    settings |= {"target.models_dir": arguments.models_dir, "data.bad_rows": "skip", "train.steps": arguments.steps}
    settings |= {"eval.prompts": json.dumps([str(path) for path in sets(arguments)])}
    settings |= {"eval.every": arguments.steps // arguments.evaluations}
    settings |= dict(word.split("=", 1) for word in arguments.settings)
    words = [f"{key}={value}" for key, value in settings.items()]
    side_by_side([["train", "--out", str(arguments.out / "train"), *words]])


def evaluate(arguments: argparse.Namespace) -> None:
    """Every trained drafter on all prompts; writes OUT/result.json."""
    folder = arguments.out / "train" / "drafter"
    drafters = sorted(path.parent for path in folder.glob("**/config.json"))
    measured = {
        str(path.relative_to(folder)): arguments.out / f"acceptance-{n}.json" for n, path in enumerate(drafters)
    }
    commands = []
    for drafter, file in zip(drafters, measured.values(), strict=True):
        command = ["eval", "--drafter", str(drafter), *target(arguments), "--json", str(file)]
        command += ["--max-new", str(arguments.max_new), "--batch", str(arguments.eval_batch)]
        commands.append([*command, "--prompts", *map(str, sets(arguments))])
    for at in range(0, len(commands), arguments.gpus):
        side_by_side(commands[at : at + arguments.gpus])
    events = [json.loads(line) for line in (arguments.out / "train" / "events.jsonl").read_text().splitlines()]
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step"]
    result = {
        "command": sys.argv[1:],
        "job": json.loads((arguments.out / "train" / "job.json").read_text()),
        "versions": {key: start.get(key) for key in ("python", "torch", "cuda", "triton", "transformers", "gpus")},
        "machine": platform.machine(),
        "data": [e for e in events if e["event"] == "data"][-1],
        "acceptance": {name: figures(file) for name, file in measured.items()},
        "on_the_way": [e for e in events if e["event"] == "eval"],
        "curves": {name: curve([e for e in steps if e["variant"] == name]) for name in {e["variant"] for e in steps}},
    }
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def figures(file: Path) -> list[dict[str, Any]]:
    """Each set's figures, without those of every response."""
    found = json.loads(file.read_text())["sets"]
    return [{key: value for key, value in one.items() if key != "per_response"} for one in found]


def curve(steps: list[dict[str, Any]], points: int = 200) -> list[dict[str, Any]]:
    """Means of neighbouring steps, at most `points` of them."""
    size = -(-len(steps) // points)
    found = []
    for at in range(0, len(steps), size):
        part = steps[at : at + size]
        names = ("loss", "accept", "accuracy", "grad_norm", "coverage", "seconds")
        found.append({"step": part[-1]["step"]} | {n: statistics.fmean(e[n] for e in part) for n in names})
        found[-1]["accuracy_at"] = [
            statistics.fmean(column) for column in zip(*(e["accuracy_at"] for e in part), strict=True)
        ]
    return found


def side_by_side(commands: list[list[str]]) -> None:
    """Run commands of the trainer at once; several of them see a GPU each."""
    running = []
    for number, command in enumerate(commands):
        print("python -m dflash", *command, flush=True)
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(number)} if len(commands) > 1 else {})
        running.append(subprocess.Popen([sys.executable, "-m", "dflash", *command], env=environment))
    statuses = [process.wait() for process in running]
    if any(statuses):
        sys.exit("a command failed")


def target(arguments: argparse.Namespace) -> list[str]:
    return ["--target", arguments.target, "--models-dir", arguments.models_dir]


def sets(arguments: argparse.Namespace) -> list[Path]:
    return sorted((arguments.prompts / "eval").glob("*.jsonl"))


if __name__ == "__main__":
    main()
