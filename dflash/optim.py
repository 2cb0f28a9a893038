"""Learning rate over steps."""

from __future__ import annotations

import math

from dflash.settings import Optim


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """Rate of `step` (from 1) of `steps`: linear warm-up over a share of them, then a cosine to min_lr * lr."""
    warmup = max(1, round(optim.warmup * steps))
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.schedule == "constant":
        return optim.lr
    share = (step - warmup) / max(1, steps - warmup)
    return optim.lr * (optim.min_lr + (1 - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * share)))
