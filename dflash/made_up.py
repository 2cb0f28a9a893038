"""A target's weights made up on the spot, for runs that measure speed: no file is read, no host memory held.

A model is built without memory (torch's meta device), cut to what is needed, and each part gets memory on its device
and is filled there as transformers begins a model that is to be trained (`_init_weights`: matrices normal with the
configuration's `initializer_range`, norms neutral, tables of positions computed). Each module's draw begins from a seed
that follows from its name alone. So no weight depends on which others are drawn beside it: embedding and head are the
same in a drafter's process as in the target's, on devices of one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dflash.weights import seed_of

SAID = "the target's weights are made up (target.made_up=true): speed is what this run can tell, and nothing else"


def filler(model: Any) -> Callable[[nn.Module, torch.device], None]:
    """What gives a module of `model`, a PreTrainedModel on the meta device, its memory on a device, and its weights."""
    names = {id(module): name for name, module in model.named_modules()}

    def fill(part: nn.Module, device: torch.device) -> None:
        part.to_empty(device=device)
        for module in part.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if own:
                _initialise(model, module, names[id(module)], device)

    return fill


@torch.no_grad()
def _initialise(model: Any, module: nn.Module, name: str, device: torch.device) -> None:
    # transformers draws from the device's own generator.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        on_gpu = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if on_gpu else torch.default_generator
        generator.manual_seed(seed_of(0, name))
        model._init_weights(module)
