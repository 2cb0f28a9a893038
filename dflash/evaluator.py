"""One target with its prompts, to measure one drafter after another: what `dflash eval` and training call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from dflash import models, settings
from dflash.acceptance import Acceptance, Conditions, Progress, Reference, answer, check, measure, untrained_tau
from dflash.data import chat
from dflash.data.tokens import check_tokenizer
from dflash.drafter import Drafter
from dflash.regenerate.turns import Messages
from dflash.settings import SettingError
from dflash.speculate import check_target
from dflash.target import load_tokenizer, pretrained

_FLOAT32_BELOW = 1e9  # parameters


class Evaluator:
    """The whole target with its prompts and its own answers to them, ready to measure one drafter after another.

    `target.dtype=auto` is float32 for targets below 1e9 parameters and on CPU, bfloat16 for larger ones: only in
    float32 do blocks and single tokens come to the same choices at near ties (docs/ACCEPTANCE.md). One thread at
    a time may call it.
    """

    def __init__(
        self,
        target: settings.Target,
        wish: settings.Eval,
        device: torch.device,
        *,
        seed: int = 0,
        thinking: bool = True,
    ) -> None:
        """Read prompts and load the target; raises SettingError."""
        self.sets = prompt_sets(wish.prompts, wish.limit)
        folder = models.folder(target.model, target.models_dir)
        self.tokenizer = load_tokenizer(target)
        check_tokenizer(self.tokenizer)
        dtype = _dtype(target.dtype, folder, device)
        self.model = pretrained(dataclasses.replace(target, dtype=dtype), device).eval().requires_grad_(False)
        check_target(self.model)
        self.model.to(device)
        self.conditions = Conditions(wish.max_new, wish.temperature, wish.batch, seed, thinking)
        self._references: dict[str, Reference] = {}
        self._untrained: dict[Any, tuple[float | None, int]] = {}

    def __call__(
        self, drafter: Drafter, mask_token: int, taps: Sequence[int], progress: Progress | None = None
    ) -> list[Acceptance]:
        """The figures of one drafter on every set; raises SettingError when it does not fit the target."""
        check(drafter, self.model, mask_token, taps)
        found = []
        for name, prompts in self.sets.items():
            if name not in self._references:
                self._references[name] = answer(self.model, self.tokenizer, prompts, self.conditions, name, progress)
            reference = self._references[name]
            key = (name, drafter.geometry, mask_token, tuple(taps))
            if key not in self._untrained:
                self._untrained[key] = untrained_tau(
                    self.model, self.tokenizer, drafter, mask_token, taps, reference, self.conditions
                )
            found.append(
                measure(
                    self.model,
                    self.tokenizer,
                    drafter,
                    mask_token,
                    taps,
                    prompts,
                    **dataclasses.asdict(self.conditions),
                    progress=progress,
                    name=name,
                    reference=reference,
                    untrained=self._untrained[key],
                )
            )
        return found


def prompt_sets(files: Sequence[str | Path], limit: int = 0) -> dict[str, list[Messages]]:
    """The prompts of each file (the first `limit`, if not 0), by the file's name; raises SettingError."""
    stems = [Path(file).stem for file in files]
    sets = {}
    for file, stem in zip(files, stems, strict=True):
        try:
            # There is no leaving out of rows here: figures are of all the prompts or of none.
            conversations, _ = chat.read(file, bad_rows="refuse", need_assistant=False)
        except SettingError as error:
            raise SettingError("eval.prompts", error.value, error.allowed) from None
        messages = [conversation.messages for conversation in conversations]
        sets[stem if stems.count(stem) == 1 else str(file)] = messages[: limit or None]
    return sets


def _dtype(name: str, folder: Path, device: torch.device) -> str:
    if name != "auto":
        return name
    parameters = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118
                    parameters += int(np.prod(weights.get_slice(key).get_shape()))
        except Exception as error:
            raise SettingError("target.model", folder, f"{file.name} cannot be read ({error})") from None
    return "float32" if device.type == "cpu" or parameters < _FLOAT32_BELOW else "bfloat16"
