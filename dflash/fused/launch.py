"""Where and how widely a kernel is started."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on(x: Tensor) -> AbstractContextManager[object]:
    """Make x's device the current one, which is where Triton starts a kernel, whatever its arguments say."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def programs(x: Tensor, each: int) -> int:
    """So many programs a multiprocessor of x's device: for kernels whose programs take many rows in turn."""
    return each * _multiprocessors(x.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # Under Triton's interpreter on CPU any number will do; few, so that programs there take several rows.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
