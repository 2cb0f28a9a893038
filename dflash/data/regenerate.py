"""Rewrite the assistant turns of chat JSONL with the target's own greedy responses.

    python -m dflash.data.regenerate --model SmolLM2-135M-Instruct --prompts prompts.jsonl --out chat.jsonl

A drafter learns what its target says, so responses must be the target's. A response is made wherever an
assistant message stands, and after a last message that is the user's; each turn sees the responses made
before it. Rows go out in order, each with the line number of its prompt; started again, the command goes on
after the last whole row of `--out`. Conversations longer than `--fit` tokens are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import models
from dflash.data import chat
from dflash.settings import SettingError

if TYPE_CHECKING:
    import torch

Messages = list[dict[str, Any]]
_ROW_START = b'{"prompt": '


def main(argv: list[str] | None = None) -> int:
    """The command; 2 and one sentence on bad input."""
    args = _parser().parse_args(argv)
    try:
        regenerate(args)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflash.data.regenerate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a model folder, or the name of a packaged model")
    parser.add_argument("--models-dir", default="models", help="where packaged models are unpacked (%(default)s)")
    parser.add_argument("--prompts", required=True, type=Path, help="chat JSONL; assistant content is replaced")
    parser.add_argument("--out", required=True, type=Path, help="chat JSONL to write, or to go on with")
    parser.add_argument("--max-new", default=96, type=int, help="most tokens of a response (%(default)s)")
    parser.add_argument("--batch", default=24, type=int, help="conversations at a time (%(default)s)")
    parser.add_argument("--fit", default=256, type=int, help="longest conversation kept, in tokens (%(default)s)")
    return parser


def regenerate(args: argparse.Namespace) -> None:
    """Do what the parsed arguments ask; raises SettingError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    conversations, _ = chat.read(args.prompts, need_assistant=False)
    last = _last_line_done(args.out)
    rest = [conversation for conversation in conversations if conversation.line > last]
    if last:
        print(
            f"{args.out} is done up to line {last} of {args.prompts}; {len(rest)} conversations are left",
            flush=True,
        )
    folder = models.folder(args.model, args.models_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    started, tokens, too_long = time.monotonic(), 0, 0
    with open(args.out, "a", encoding="utf-8") as out:
        for first in range(0, len(rest), args.batch):
            batch = rest[first : first + args.batch]
            done, made = respond(model, tokenizer, [c.messages for c in batch], args.max_new)
            tokens += made
            for conversation, messages in zip(batch, done, strict=True):
                if len(tokenizer.apply_chat_template(messages, return_dict=False)) > args.fit:
                    too_long += 1
                else:
                    row = {"prompt": conversation.line, "messages": messages}
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()
            rate = tokens / (time.monotonic() - started)
            print(
                f"{first + len(batch)}/{len(rest)} conversations, {tokens} tokens, {rate:.0f} tokens/s, "
                f"{too_long} left out as longer than {args.fit} tokens",
                flush=True,
            )


def respond(model: Any, tokenizer: Any, prompts: list[Messages], max_new: int) -> tuple[list[Messages], int]:
    """The conversations with greedy responses in place, and the number of tokens generated.

    Turns are generated in step: the first responses of all conversations as one batch, then the second ones.
    """
    histories: list[Messages] = [[] for _ in prompts]
    queues = [_with_last_turn(prompt) for prompt in prompts]
    made = 0
    while any(queues):
        waiting = []
        for number, queue in enumerate(queues):
            while queue and queue[0]["role"] != "assistant":
                histories[number].append(queue.pop(0))
            if queue:
                queue.pop(0)
                waiting.append(number)
        if waiting:
            texts = [
                tokenizer.apply_chat_template(histories[n], tokenize=False, add_generation_prompt=True) for n in waiting
            ]
            for number, ids in zip(waiting, _greedy(model, tokenizer, texts, max_new), strict=True):
                cut = ids[-1] not in _stops(model)
                text = tokenizer.decode(ids if cut else ids[:-1], skip_special_tokens=True)
                histories[number].append({"role": "assistant", "content": text} | ({"cut": True} if cut else {}))
                made += len(ids)
    return histories, made


def _with_last_turn(messages: Messages) -> Messages:
    return [*messages, {"role": "assistant"}] if messages[-1]["role"] != "assistant" else list(messages)


def _greedy(model: Any, tokenizer: Any, texts: list[str], max_new: int) -> list[list[int]]:
    """Token ids of each response, its end-of-turn token included when it got that far.

    Padding is on the left, hidden by the attention mask, from which `generate` also counts positions; a
    response ends at its first stop token and is never searched for padding, which has the same id in some
    models.
    """
    inputs = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt").to(
        model.device
    )
    output: torch.Tensor = model.generate(
        **inputs, max_new_tokens=max_new, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    stops = _stops(model)
    responses = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((at for at, id_ in enumerate(row) if id_ in stops), len(row) - 1)
        responses.append(row[: end + 1])
    return responses


def _stops(model: Any) -> set[int]:
    stop = model.generation_config.eos_token_id
    return set(stop) if isinstance(stop, list) else {stop}


def _last_line_done(out: Path) -> int:
    """The prompt line of the last whole row; what a killed run left of a row is cut off."""
    if not out.exists():
        return 0
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        last = int(json.loads(whole.splitlines()[-1])["prompt"]) if whole else 0
    except (ValueError, KeyError, TypeError):
        last = -1
    if last < 0 or not data.startswith(_ROW_START[: len(data)]):
        raise SettingError("--out", out, "exists and was not written by this command; name another file")
    if len(whole) < len(data):
        out.write_bytes(whole)
    return last


if __name__ == "__main__":
    sys.exit(main())
