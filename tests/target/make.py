"""Make the small target of the tests: a Qwen3 model of six million parameters that answers simple questions.

Stages, in order; each works apart, from what the one before it wrote:

    python tests/target/make.py text --out TEXT --manual /usr/share/doc/python3.11/html/_sources
    python tests/target/make.py tokenizer --text TEXT --qwen3 TOKENIZER --out tests/target/qwen3-small
    python tests/target/make.py prompts --text TEXT --out tests/target
    python tests/target/make.py train --text TEXT --tokenizer tests/target/qwen3-small --out tests/target/qwen3-small

README.md beside this file says what went in and what came out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import tasks

VOCABULARY = 4096
# Qwen3 marks the first three as special and the thoughts' brackets as ordinary added tokens.
SPECIAL, ADDED, MASK = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", "</think>"), "<|MASK|>"
ROW = 512
SEED = 0
PROMPTS = {"train": 200, "heldout": 40}
FIXED_FORM = (
    *("Sort these", "Say these", "Write a loop", "Write as JSON", "Make a table", "Write a dataclass"),
    *tasks.ARGUMENTS,
)
LONGEST_PROMPT, LONGEST_ANSWER = 500, 450  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True)

    stage = stages.add_parser("text", help="training text from the running Python's library and manual")
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--manual", type=Path, help="the manual's sources, .rst.txt (Debian: python3.11-doc)")
    stage.set_defaults(run=make_text)

    stage = stages.add_parser("tokenizer", help="a byte-level BPE trained on the text, with Qwen3's chat template")
    stage.add_argument("--text", type=Path, required=True)
    stage.add_argument("--qwen3", type=Path, required=True, help="folder of a Qwen3 tokenizer")
    stage.add_argument("--out", type=Path, required=True)
    stage.set_defaults(run=make_tokenizer)

    stage = stages.add_parser("prompts", help="prompts of the tests, from training and from held-out files")
    stage.add_argument("--text", type=Path, required=True)
    stage.add_argument("--out", type=Path, required=True)
    stage.set_defaults(run=make_prompts)

    stage = stages.add_parser("train", help="the model")
    stage.add_argument("--text", type=Path, required=True)
    stage.add_argument("--tokenizer", type=Path, required=True)
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--minutes", type=float, default=3.0, help="time for training steps (%(default)s)")
    stage.add_argument("--device", default="cuda")
    stage.add_argument("--rows", type=int, default=64, help=f"rows of {ROW} tokens a step (%(default)s)")
    stage.add_argument("--lr", type=float, default=2e-3)
    stage.add_argument("--limit", type=int, help="training rows of text used, to try it out")
    stage.set_defaults(run=train)

    arguments = parser.parse_args()
    arguments.run(arguments)


# --- text, prompts, tokenizer ----------------------------------------------------------------------------


def make_text(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows, counts = corpus.make(arguments.manual)
    for side in corpus.SIDES:
        corpus.write(rows[side], arguments.out / f"{side}.jsonl.xz")
    print(json.dumps(counts, indent=2))


def make_prompts(arguments: argparse.Namespace) -> None:
    """The first conversations of each side that are short, without their answers."""
    for side, count in PROMPTS.items():
        rows = filter(_short, corpus.read(arguments.text / f"{side}.jsonl.xz"))
        prompts = [{"messages": row["messages"][:1]} for row in itertools.islice(rows, count)]
        lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
        (arguments.out / f"prompts-{side}.jsonl").write_text("".join(lines), encoding="utf-8")


def _short(row: corpus.Row) -> bool:
    """One question whose answer has a fixed form: some hundred of them teach a drafter something in a minute."""
    texts = [message["content"] for message in row.get("messages", [])]
    if len(texts) != 2 or not texts[0].startswith(FIXED_FORM):
        return False
    return len(texts[0]) <= LONGEST_PROMPT and 60 <= len(texts[1]) <= LONGEST_ANSWER


def make_tokenizer(arguments: argparse.Namespace) -> None:
    """Qwen3's own pre-tokeniser and chat template round a vocabulary of our own."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    theirs = Tokenizer.from_file(str(arguments.qwen3 / "tokenizer.json"))
    ours = Tokenizer(BPE())
    ours.normalizer, ours.pre_tokenizer, ours.decoder = theirs.normalizer, theirs.pre_tokenizer, theirs.decoder
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *ADDED, MASK],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    ours.train_from_iterator(map(_words, corpus.read(arguments.text / "train.jsonl.xz")), trainer)
    ours.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    config = json.loads((arguments.qwen3 / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=ours,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token=MASK,
        chat_template=config["chat_template"],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(arguments.out)
    print(f"{len(tokenizer)} tokens, mask token {tokenizer.mask_token_id}")


def _words(row: corpus.Row) -> str:
    return row.get("text") or "\n".join(message["content"] for message in row["messages"])


# --- training --------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer, local_files_only=True)
    documents = {
        side: tokenised(corpus.read(arguments.text / f"{side}.jsonl.xz")[: arguments.limit], tokenizer)
        for side in corpus.SIDES
    }
    for side, found in documents.items():
        print(f"{side}: {len(found)} documents, {sum(len(tokens) for tokens, _ in found)} tokens", flush=True)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
    )
    device = torch.device(arguments.device)
    model = Qwen3ForCausalLM(config).to(device)
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    plain = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=device.type == "cuda")

    def loss_of(batch: Any) -> Any:
        tokens, labels, position = (part.to(device, torch.int64) for part in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Positions that begin again tell transformers where documents begin: none sees another.
            logits = model(input_ids=tokens, position_ids=position, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    started, told, tokens_seen = time.monotonic(), 0.0, 0
    steps, losses = 0, []
    for epoch in range(1 << 30):
        rows = [torch.from_numpy(part) for part in packed(documents["train"], np.random.default_rng(epoch))]
        for first in range(0, len(rows[0]) - arguments.rows + 1, arguments.rows):
            share = (time.monotonic() - started) / (60 * arguments.minutes)
            if share >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * min(1.0, share / 0.03) * 0.5 * (1 + math.cos(math.pi * share))
            loss = loss_of([part[first : first + arguments.rows] for part in rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            steps, tokens_seen = steps + 1, tokens_seen + arguments.rows * ROW
            if share >= told + 0.05:
                told = share
                recent = torch.stack(losses).mean().item()
                losses = []
                rate = tokens_seen / (time.monotonic() - started)
                print(f"{share:4.0%} epoch {epoch} step {steps} loss {recent:.3f}, {rate:.0f} tokens/s", flush=True)
        else:
            continue
        break

    write_model(model.to(torch.bfloat16).eval(), tokenizer, arguments)
    if device.type == "cpu":
        model.float()  # the same values; bfloat16 is far slower there
    with torch.no_grad():
        heldout = documents["heldout"]
        parts = [torch.from_numpy(part) for part in packed(heldout, np.random.default_rng(0))]
        batches = [[part[at : at + 64] for part in parts] for at in range(0, min(len(parts[0]), 1024), 64)]
        loss = torch.stack([loss_of(batch) for batch in batches]).mean().item()
    characters = sum(len(tokenizer.decode(tokens)) for tokens, _ in heldout[:500])
    each = characters / sum(len(tokens) for tokens, _ in heldout[:500])
    print(f"held out: {loss:.3f} nats a token, {loss / math.log(2) / each:.3f} bits a character")
    answer(model, tokenizer, [row["messages"][:1] for row in questions(arguments.text)])


def tokenised(rows: list[corpus.Row], tokenizer: Any) -> list[tuple[np.ndarray, int]]:
    """Token ids of each document that fits a row, and how many of its first tokens teach nothing.

    Those are a conversation's earlier turns: the template shows them without thoughts, and a model that
    learnt them so would forget to open its answers as the template does.
    """
    texts, quiet = [], []
    for row in rows:
        earlier = 0
        if "messages" in row:
            messages = row["messages"]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            if len(messages) > 2:
                before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
                earlier = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        else:
            text = row["text"] + "<|endoftext|>"
        texts.append(text)
        quiet.append(earlier)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        (np.asarray(tokens, np.int16), earlier)
        for tokens, earlier, row in zip(ids, quiet, rows, strict=True)
        if len(tokens) <= ROW or "text" in row
    ]


def packed(documents: list[tuple[np.ndarray, int]], order: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Tokens, labels (-100: none) and positions, each int16 [rows, ROW].

    Every row begins with a document; the last one of a row is cut where the row ends, a long one at ROW.
    """
    rows = len(documents)
    tokens, position = np.zeros((2, rows, ROW), np.int16)
    labels = np.full((rows, ROW), -100, np.int16)
    row = at = 0
    for number in order.permutation(len(documents)):
        document, quiet = documents[number]
        document = document[: ROW - at]
        end = at + len(document)
        tokens[row, at:end], position[row, at:end] = document, np.arange(len(document))
        labels[row, at + max(1, quiet) : end] = document[max(1, quiet) :]
        at = end
        if at > ROW - 16:
            row, at = row + 1, 0
    return tokens[:row], labels[:row], position[:row]


def write_model(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(arguments.out)
    if arguments.tokenizer.resolve() != arguments.out.resolve():
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(arguments.tokenizer / name, arguments.out / name)


def questions(text: Path) -> Iterator[corpus.Row]:
    """Held-out conversations, some of every kind."""
    rows = [row for row in corpus.read(text / "heldout.jsonl.xz") if len(row.get("messages", [])) == 2]
    return iter(rows[:64])


def answer(model: Any, tokenizer: Any, prompts: list[Any], max_new: int = 128) -> None:
    """Print three greedy answers and the share of distinct runs of four tokens in all."""
    import torch

    texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]
    inputs = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        output = model.generate(**inputs.to(model.device), max_new_tokens=max_new, do_sample=False)
    answers = [
        [token for token in row if token != tokenizer.pad_token_id]
        for row in output[:, inputs["input_ids"].shape[1] :].tolist()
    ]
    for text, tokens in list(zip(texts, answers, strict=True))[:3]:
        print(f"{text}{tokenizer.decode(tokens)}\n{'-' * 40}")
    ended = sum(tokens[-1] == tokenizer.eos_token_id for tokens in answers)
    share = [len(set(runs)) / len(runs) for runs in map(_fours, answers) if runs]
    print(f"{len(answers)} greedy answers: distinct-4 {sum(share) / len(share):.3f}, {ended} ended", flush=True)


def _fours(tokens: list[int]) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[at:] for at in range(4)), strict=False))


if __name__ == "__main__":
    main()
