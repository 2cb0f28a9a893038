"""Rewrite the responses of chats with what the target itself says; a drafter's acceptance depends on it most.

Any chat file serves as prompts. A response is made wherever an assistant message stands (what it says is dropped),
between two user messages that follow each other, and after a last message that is the user's; each turn sees the
responses made before it. The same command goes on where it was stopped.

    python -m dflash regenerate --prompts chats.jsonl --target SmolLM2-135M-Instruct --out own.jsonl
    python -m dflash regenerate --prompts chats.jsonl --target /models/my-model --out own.jsonl \\
        --max-new 2048 --temperature 0.7
    python -m dflash regenerate --prompts chats.jsonl --server http://localhost:8000 --server-model my-model \\
        --out own.jsonl --parallel 128

A server is one that speaks OpenAI's /v1/chat/completions (vLLM, SGLang, llama.cpp and others). It must serve the very
target that the drafter will be trained for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.settings import SettingError

if TYPE_CHECKING:
    from dflash.regenerate.turns import Engine


OPTIONS = {
    "data.path": "--prompts",
    "data.bad_rows": "--bad-rows",
    "target.model": "--target",
    "target.models_dir": "--models-dir",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, help="chats; see docs/DATA.md for what they look like")
    parser.add_argument("--out", type=Path, required=True, help="chat JSONL to write, or to go on with")
    parser.add_argument("--limit", type=int, default=0, help="take only so many conversations, from the beginning")
    parser.add_argument("--bad-rows", choices=("error", "skip"), default="error", help="(%(default)s)")
    parser.add_argument("--max-new", type=int, default=512, help="most tokens of a response (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from this share of the likeliest (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at a temperature above 0 (%(default)s)")
    parser.add_argument("--no-thinking", action="store_true", help="pass enable_thinking=false to the chat template")
    here = parser.add_argument_group("the target run here")
    here.add_argument("--target", help="a model folder, or the name of a packaged model")
    here.add_argument("--models-dir", default="models", help="where packaged models are unpacked (%(default)s)")
    here.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    here.add_argument("--batch", type=int, help="conversations at a time (as many as memory holds; 16 on CPU)")
    here.add_argument("--fit", type=int, help="leave out conversations longer than this, in tokens")
    there = parser.add_argument_group("the target served elsewhere")
    there.add_argument("--server", metavar="URL", help="such as http://localhost:8000")
    there.add_argument("--server-model", metavar="NAME", help="the target's name there (the first that it serves)")
    there.add_argument("--parallel", type=int, default=32, help="requests at a time (%(default)s)")
    there.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    there.add_argument("--patience", type=float, default=120.0, help="seconds a failing server gets (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    from dflash.regenerate import regenerate

    _check(arguments)
    settings = {
        name: getattr(arguments, name) for name in ("max_new", "temperature", "top_p", "seed", "no_thinking", "fit")
    }
    try:
        start, identity = _served(arguments) if arguments.server else _local(arguments)
        regenerate(
            arguments.prompts,
            arguments.out,
            start,
            settings | {"target": identity},
            limit=arguments.limit,
            bad_rows=arguments.bad_rows,
        )
    except KeyboardInterrupt:
        print("dflash: stopped; the same command goes on with what is left", file=sys.stderr)
        return 130
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if bool(arguments.target) == bool(arguments.server):
        raise SettingError("--target", arguments.target or "none", "give either --target or --server")
    for name in ("max_new", "batch", "fit", "parallel"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise SettingError(f"--{name.replace('_', '-')}", value, "must be 1 or more")
    if arguments.limit < 0:
        raise SettingError("--limit", arguments.limit, "must be 0 (all) or more")
    if not 0 <= arguments.temperature <= 10:
        raise SettingError("--temperature", arguments.temperature, "must be from 0 (greedy) to 10")
    if not 0 < arguments.top_p <= 1:
        raise SettingError("--top-p", arguments.top_p, "must be above 0 and at most 1")
    if not 0 <= arguments.seed < 1 << 32:
        raise SettingError("--seed", arguments.seed, "must be from 0 to 4294967295")
    if not arguments.patience > 0:
        raise SettingError("--patience", arguments.patience, "must be greater than 0")
    if arguments.server and arguments.fit:
        raise SettingError("--fit", arguments.fit, "needs --target, whose tokenizer counts; use data.too_long later")
    if not arguments.out.parent.is_dir():
        raise SettingError("--out", arguments.out, "must be a file in an existing folder")
    if not arguments.prompts.is_file():
        raise SettingError("--prompts", arguments.prompts, "must be an existing file")


def _local(arguments: argparse.Namespace) -> tuple[Callable[[], Engine], str]:
    """How to start the target here, and what identifies it."""
    from dflash import models

    def start() -> Engine:
        # Here and not above: a wrong setting is told without waiting for torch.
        import torch

        from dflash.regenerate.generate import Model, Sampling
        from dflash.regenerate.local import LocalEngine

        gpus = torch.cuda.device_count()
        if arguments.device == "cuda" and not gpus:
            raise SettingError("--device", "cuda", "needs a GPU, and this machine shows none; use --device cpu")
        device = torch.device("cuda" if gpus and arguments.device != "cpu" else "cpu")
        return LocalEngine(
            Model.load(arguments.target, arguments.models_dir, device),
            Sampling(arguments.max_new, arguments.temperature, arguments.top_p),
            batch=arguments.batch,
            fit=arguments.fit,
            seed=arguments.seed,
            thinking=not arguments.no_thinking,
        )

    return start, models.identity(arguments.target, arguments.models_dir)


def _served(arguments: argparse.Namespace) -> tuple[Callable[[], Engine], str]:
    """How to ask the server, and what it calls the target."""
    from dflash.regenerate.server import Server, ServerEngine

    server = Server.open(
        arguments.server, arguments.server_model, api_key_env=arguments.api_key_env, patience=arguments.patience
    )

    def start() -> Engine:
        return ServerEngine(
            server,
            max_new=arguments.max_new,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            thinking=not arguments.no_thinking,
            parallel=arguments.parallel,
        )

    return start, f"served as {server.model}"
