"""The optimiser: AdamW on one flat float32 vector, and its rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.settings import Optim


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """Rate of `step` (from 1) of `steps`: a linear warm-up over a share of them, then the schedule.

    `cosine` falls to min_lr * lr over all that is left; `wsd` stays at lr and falls to it linearly over the last
    `decay` share of the steps (warm-up, stable, decay: arXiv 2404.06395); `constant` stays at lr.
    """
    warmup = max(1, round(optim.warmup * steps))
    if step <= warmup:
        return optim.lr * step / warmup
    left = steps - warmup
    if optim.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * (step - warmup) / left))
    elif optim.schedule == "wsd":
        shape = min(1.0, (steps - step) / max(1, min(left, round(optim.decay * steps))))
    else:
        shape = 1.0
    return optim.lr * (optim.min_lr + (1 - optim.min_lr) * shape)


class Master:
    """The float32 truth of some parameters as one flat vector of n numbers, with AdamW on it.

    The parameters, in float32 or bfloat16, are working copies that each step writes anew. An update below bfloat16's
    resolution would be lost in a bfloat16 weight (Model-Optimizer #2483); here it adds up.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optim: Optim) -> None:
        self._parameters = list(parameters)
        self._clip = optim.clip
        self._sizes = [p.numel() for p in self._parameters]
        self._weights = torch.cat([p.detach().float().reshape(-1) for p in self._parameters])
        # Fused halves the passes over memory on a GPU. On a CPU its remainder of a vector is rounded otherwise than
        # the rest, so results would depend on how threads divide the work.
        self._adamw = torch.optim.AdamW(
            [self._weights],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            fused=self._weights.is_cuda,
        )
        zeros: dict[str, Any] = {name: torch.zeros_like(self._weights) for name in ("exp_avg", "exp_avg_sq")}
        zeros["step"] = torch.zeros((), device=self._weights.device if self._weights.is_cuda else "cpu")
        self._adamw.load_state_dict({"state": {0: zeros}, "param_groups": self._adamw.state_dict()["param_groups"]})

    def gradient(self, behind: Tensor | None = None) -> Tensor:
        """The parameters' gradients flattened in order, float32 [n], zeros where there is none; clears them.

        `behind` float32 [m] follows them in the same vector, [n + m], for what is summed over drafters together.
        """
        tail = 0 if behind is None else len(behind)
        flat = self._weights.new_empty(len(self._weights) + tail)
        parts = list(zip(self._split(flat[: len(self._weights)]), self._parameters, strict=True))
        if behind is not None:
            flat[len(self._weights) :] = behind
        held = [(part, p.grad) for part, p in parts if p.grad is not None]
        if held:
            torch._foreach_copy_([part for part, _ in held], [gradient for _, gradient in held])
        for part, parameter in parts:
            if parameter.grad is None:
                part.zero_()
            parameter.grad = None
        return flat

    def step(self, gradient: Tensor, lr: float, over: Tensor | None = None) -> Tensor:
        """One AdamW step with `gradient`, float32 [n], divided by `over` and clipped; gives its norm before clipping.

        Uses up `gradient`. `over` is 0-d, and so is the norm; nothing waits for the device, where the norm stays
        until the caller reads it.
        """
        norm = torch.linalg.vector_norm(gradient)
        if over is not None:
            norm = norm / over
        divisor = (norm / self._clip).clamp(min=1.0)
        if over is not None:
            divisor = divisor * over
        (group,) = self._adamw.param_groups
        group["lr"] = lr
        if gradient.is_cuda:
            self._adamw.grad_scale = divisor  # what a GradScaler sets: the fused kernel divides as it reads
        else:
            gradient /= divisor
        self._weights.grad = gradient
        self._adamw.step()
        self._weights.grad = None
        self._write()
        return norm

    def state(self) -> dict[str, Tensor]:
        """What `load` continues from, bit for bit: the vectors themselves, so save them before the next step."""
        return {"master": self._weights, **self._adamw.state[self._weights]}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from a state; raises ValueError when it was made for other parameters."""
        mine = self.state()
        if {name: value.shape for name, value in mine.items()} != {n: value.shape for n, value in state.items()}:
            raise ValueError(f"the optimiser's state is not of a drafter with {len(self._weights)} weights")
        for name, value in mine.items():
            value.copy_(state[name])
        self._write()

    def _write(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._split(self._weights))

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]
