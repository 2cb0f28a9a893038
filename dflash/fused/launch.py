"""Where and how widely a kernel is started."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

# Triton compiles a kernel at its first launch, on the launching thread, and keeps it in plain dictionaries.
_launching = threading.Lock()


@contextmanager
def on(x: Tensor) -> Iterator[None]:
    """Launch on x's device, whatever the thread's current one is, one thread at a time."""
    with _launching, torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        yield


def programs(x: Tensor, each: int) -> int:
    """So many programs a multiprocessor of x's device: for kernels whose programs take many rows in turn."""
    return each * _multiprocessors(x.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # Under Triton's interpreter on CPU any number will do; few, so that programs there take several rows.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
