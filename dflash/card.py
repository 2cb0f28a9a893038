"""The model card of an exported drafter: what it is for, what it learnt from, what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FACTS_FILE, CARD_FILE = "facts.json", "README.md"
# What training may tell, and how the card calls it; in the card's order.
TRAINING = {
    "data": "data",
    "documents": "documents",
    "tokens": "tokens of data",
    "supervised": "supervised tokens",
    "row_tokens": "tokens of a row",
    "init": "started from",
    "steps": "steps",
    "loss_kind": "loss",
    "loss": "loss (mean of the last 10 steps)",
    "accept": "teacher-forced acceptance length (the same steps, training data, bonus token included)",
    "lr": "learning rate",
    "seed": "seed",
}
MADE_UP = (
    "**Its target's weights were made up** (`target.made_up=true`), to measure the speed of training: this drafter is "
    "of no use with any model."
)


def card(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Markdown from a drafter's config.json and the facts that its training left; what is unknown is left out.

    `facts`: target (its name), target_made_up, the keys of TRAINING, and acceptance, a list of what
    `dflash.acceptance` measured (Acceptance.to_dict). A folder of this machine is named by its last part alone.
    """
    special = config["dflash_config"]
    target = _name(facts.get("target", "its target"))
    base = facts.get("target")
    sizes = {
        "layers": config["num_hidden_layers"],
        "block size": f"{special['block_size']} (the last token and {special['block_size'] - 1} drafted ones)",
        "taps": f"outputs of the target's decoder layers {_listed(special['target_layer_ids'])}, counted from 0",
        "mask token": f"id {special['mask_token_id']} of the target's embedding",
        "window": f"{config['sliding_window']} tokens, in layers {_listed(_sliding(config))}"
        if config["sliding_window"]
        else "none",
        "hidden size": config["hidden_size"],
    }
    told = {name: _told(facts[key]) for key, name in TRAINING.items() if facts.get(key) is not None}
    parts = [
        _front(base if base and not Path(base).is_absolute() else None),
        f"# DFlash drafter for {target}",
        f"Drafts blocks of tokens for speculative decoding with {target} (DFlash, arXiv 2602.06036). It reads hidden "
        "states of that target and is of no use with another.",
        *([MADE_UP] if facts.get("target_made_up") else []),
        _table(sizes),
    ]
    if told:
        parts += ["## Training", _table(told)]
    parts += ["## Acceptance length", _measured(facts.get("acceptance") or [])]
    parts += [
        "## Licence",
        f"This folder holds neither embedding nor head: both are those of {target}, whose licence applies to them. "
        "Whoever publishes this drafter states its own licence, with regard to the target's and the data's.",
    ]
    return "\n\n".join(parts) + "\n"


def read_facts(folder: Path) -> dict[str, Any]:
    """What the training of a drafter left beside it; empty for a drafter made elsewhere."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _front(base: str | None) -> str:
    lines = ["---", "tags:", "- dflash", "- speculative-decoding"]
    return "\n".join([*lines, *([f"base_model: {base}"] if base and "/" in base else []), "---"])


def _measured(figures: Iterable[Mapping[str, Any]]) -> str:
    columns = (
        "prompts | n | T | block | new tokens | dtype | tokens a round | 95 % | untrained | identical | distinct 4"
    )
    rows = [
        f"| {e['set']} | {e['n']} | {e['temperature']:g} | {e['block']} | {e['max_new']} | {e['dtype']} "
        f"| {e['tau']:.2f} | {_number(e['tau_low'])} to {_number(e['tau_high'])} | {_number(e['tau_untrained'])} "
        f"| {_number(e['identical'])} | {_number(e['distinct4'])} |"
        for e in figures
        if e["tau"] is not None
    ]
    if not rows:
        return "Not measured."
    head = f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}\n"
    return (
        "Measured by speculative decoding with the target. The target's own token of each round counts, so 1 is no "
        "gain. Untrained: the same drafter with random weights. Identical: share of responses equal to plain "
        "decoding's. Distinct 4: share of different 4-grams; a target that loops flatters a drafter.\n\n"
        + head
        + "\n".join(rows)
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(values: Mapping[str, object]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])


def _told(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else _name(str(value))


def _name(text: str) -> str:
    return Path(text).name if Path(text).is_absolute() else text


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _sliding(config: Mapping[str, Any]) -> list[int]:
    return [number for number, kind in enumerate(config["layer_types"]) if kind == "sliding_attention"]
