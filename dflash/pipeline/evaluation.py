"""Acceptance length while training: a drafter decodes beside its whole target, and the figures are reported."""

from __future__ import annotations

import threading
from typing import Any

import torch

from dflash.drafter import Drafter
from dflash.evaluator import Evaluator
from dflash.pipeline.tools import Tools
from dflash.plan import Variant
from dflash.settings import JobSettings


class Evaluation:
    """The evaluator of a process; its drafters take turns."""

    def __init__(self, job: JobSettings, device: torch.device) -> None:
        """Load prompts and the whole target; raises SettingError."""
        thinking = job.data.reasoning == "keep"
        self._evaluator = Evaluator(job.target, job.eval, device, seed=job.seed, thinking=thinking)
        self._turn = threading.Lock()

    def __call__(self, tools: Tools, variant: Variant, drafter: Drafter, step: int) -> list[dict[str, Any]]:
        """Measure a drafter after a step on every prompt set and report it; gives what was reported."""

        def progress(done: int, total: int) -> None:
            tools.events.emit("progress", what="eval responses", done=done, total=total)

        taps = variant.taps
        with self._turn, tools.strategy.quiet():
            measured = self._evaluator(drafter, variant.mask_token, taps, progress)
        found = [acceptance.to_dict(per_response=False) for acceptance in measured]
        for one in found:
            tools.events.emit("eval", variant=variant.name, step=step, **one)
        return found
