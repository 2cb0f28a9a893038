"""Measure a drafter's acceptance length by speculative decoding on prompts of your own.

    python -m dflash eval --drafter run/drafter --target SmolLM2-135M-Instruct --prompts humaneval.jsonl mtbench.jsonl
    python -m dflash eval --drafter run/drafter --target /models/Qwen3-4B --prompts chats.jsonl --temperature 1 \\
        --no-thinking --limit 80 --max-new 512 --json acceptance.json

Prompts are chat files as for training; assistant messages in them are replaced by the target's own responses, so
that later turns follow what it said itself. Every figure comes with its prompts, tokens, temperature, block, an
interval, and what an untrained drafter reaches (docs/ACCEPTANCE.md). Exit status: 0; 2 and one sentence when
something cannot work.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash import models, settings
from dflash.settings import SettingError

if TYPE_CHECKING:
    import torch


OPTIONS = {
    "eval.prompts": "--prompts",
    "eval.limit": "--limit",
    "eval.max_new": "--max-new",
    "eval.temperature": "--temperature",
    "eval.batch": "--batch",
    "target.model": "--target",
    "target.models_dir": "--models-dir",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", type=Path, required=True, help="folder of a drafter in z-lab's format")
    add("--target", required=True, help="a model folder, or the name of a packaged model")
    add("--prompts", nargs="+", required=True, metavar="FILE", help="chat files, each a set of its own")
    add("--temperature", type=float, default=0.0, help="0: greedy (%(default)s)")
    add("--max-new", type=int, default=256, help="most tokens of a response (%(default)s)")
    add("--batch", type=int, default=16, help="prompts decoded at a time (%(default)s)")
    add("--limit", type=int, default=0, help="prompts taken of each file, from its beginning; 0: all (%(default)s)")
    add("--json", type=Path, metavar="OUT.json", help="write every figure, response by response")
    add("--no-thinking", action="store_true", help="enable_thinking=False, for a template that knows it")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of target and drafter (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--seed", type=int, default=0, help="of sampling, of the interval and of the untrained drafter (%(default)s)")
    add("--models-dir", default="models", help="where packaged models are unpacked (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    wish = settings.Eval(
        prompts=arguments.prompts,
        limit=arguments.limit,
        max_new=arguments.max_new,
        temperature=arguments.temperature,
        batch=arguments.batch,
    )
    wish.check()
    target = settings.Target(model=arguments.target, models_dir=arguments.models_dir, dtype=arguments.dtype)
    target.check()
    models.check(target.model, target.models_dir)
    if arguments.json:
        _check_writable(arguments.json)
    # Here and not above: a wrong setting is told without waiting for torch.
    import torch

    from dflash.acceptance import table
    from dflash.evaluator import Evaluator
    from dflash.export import load_drafter

    device = _device(arguments.device)
    drafter, mask_token, taps = load_drafter(arguments.drafter, torch.device("cpu"), torch.float32, "--drafter")
    evaluator = Evaluator(target, wish, device, seed=arguments.seed, thinking=not arguments.no_thinking)

    def progress(done: int, total: int) -> None:
        print(f"\r{done}/{total} responses ", end="", file=sys.stderr, flush=True)

    found = evaluator(drafter, mask_token, taps, progress)
    print(file=sys.stderr)
    print(f"Drafter {arguments.drafter}, target {arguments.target}")
    print(table(found))
    if arguments.json:
        facts = {"drafter": str(arguments.drafter), "target": arguments.target, "sets": [a.to_dict() for a in found]}
        try:
            arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            raise SettingError("--json", arguments.json, f"could not be written ({error.strerror})") from None
    return 0


def _check_writable(path: Path) -> None:
    """Raise SettingError unless the file can be written; the figures are known only when all the work is done."""
    there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        why = f"must be a file that can be written, in an existing folder ({error.strerror})"
        raise SettingError("--json", path, why) from None
    if not there:
        path.unlink()


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("--device", name, "must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError("--device", name, f"this machine shows {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
