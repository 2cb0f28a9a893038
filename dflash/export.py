"""A trained drafter as a folder that z-lab's code, SGLang and vLLM load (docs/TRAINER.md, "Checkpoint")."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.attention import attend_dense, visible
from dflash.card import CARD_FILE, FACTS_FILE, card
from dflash.drafter import Drafter
from dflash.geometry import CONFIG_FILE, WEIGHTS_FILE, Geometry, Released, to_config
from dflash.settings import SettingError
from dflash.target import Target
from dflash.weights import copied


def export_drafter(
    drafter: Drafter, target: Target, mask_token: int, folder: Path, facts: Mapping[str, Any] | None = None
) -> None:
    """Write a drafter in z-lab's format with its card; `facts` is what `dflash.card` tells of. Raises OSError."""
    config = to_config(drafter.geometry, target, mask_token)
    write(folder, config, drafter.state_dict(), {"target_architectures": target.architectures, **(facts or {})})


def write(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    written: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json, model.safetensors (bfloat16; no embedding, no head: they are the target's), facts and card.

    `config` is z-lab's, which the card is made from; `written` is what config.json gets in another format. A file
    is replaced whole, and config.json comes last: a folder that was never finished has none. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in weights.items()}
    part = folder / f".{WEIGHTS_FILE}"
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    part.chmod(0o644)  # it comes readable by its owner alone, and servers run as others
    os.replace(part, folder / WEIGHTS_FILE)
    for name, text in {
        FACTS_FILE: json.dumps(facts, indent=2) + "\n",
        CARD_FILE: card(config, facts),
        CONFIG_FILE: json.dumps(written or config, indent=2) + "\n",
    }.items():
        part = folder / f".{name}"
        part.write_text(text)
        os.replace(part, folder / name)


def load_drafter(
    folder: Path, device: torch.device, dtype: torch.dtype, setting: str = "drafter"
) -> tuple[Drafter, int, list[int]]:
    """A drafter in z-lab's format, for decoding (dense attention); with its mask token and its taps.

    Raises SettingError, naming `setting`, when the folder is damaged or holds another kind of drafter.
    """
    released = Released.read(folder, setting)
    weights = copied(read_weights(folder, released.geometry, setting), device, dtype)
    drafter = Drafter(released.geometry, visible, attend_dense, weights)
    return drafter.eval().requires_grad_(False), released.mask_token, released.taps


def read_weights(folder: Path | str, geometry: Geometry, setting: str) -> dict[str, Tensor]:
    """The weights of a folder in z-lab's format, on the CPU as they were saved.

    Raises SettingError, naming `setting`, unless exactly the tensors of `geometry` are there: servers ignore a
    name that they do not know, and a drafter with random weights in its place only drafts badly.
    """
    path, wanted = Path(folder) / WEIGHTS_FILE, geometry.shapes()
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for wrong, what in (
                (sorted(wanted.keys() - found.keys()), "lacks"),
                (sorted(found.keys() - wanted.keys()), "has an unknown tensor"),
            ):
                if wrong:
                    raise SettingError(setting, folder, f"{WEIGHTS_FILE} {what} {wrong[0]} ({len(wrong)} in all)")
            for name, shape in wanted.items():
                if found[name] != shape:
                    raise SettingError(
                        setting, folder, f"{name} is {list(found[name])}, {CONFIG_FILE} calls for {list(shape)}"
                    )
            return {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise SettingError(setting, folder, f"must hold a readable {WEIGHTS_FILE} ({error})") from None
