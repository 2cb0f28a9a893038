"""Features between devices, without waiting for what these are at.

Features travel on streams of their own, so that they come while the device still computes on those before them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import torch
from torch import Tensor

from dflash.pipeline.clock import Clock
from dflash.pipeline.spans import span

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


def carried(features: Tensor, device: torch.device) -> Tensor:
    """Finished features on `device`, [R, S, width]; what the caller has the device do next waits for them, not the
    caller. From one GPU to another; whatever else is moved plainly.
    """
    if not features.is_cuda or device.type != "cuda" or features.device == device:
        return features.to(device)
    # torch copies between devices on the current streams of both, and makes each wait for the other: on the streams
    # that compute, the target's next batch would wait for the drafter's last step.
    there, here, computing = _copying(features.device), _copying(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(there), torch.cuda.stream(here), span("copy", device):
        arriving = features.to(device, non_blocking=True)
    computing.wait_stream(here)
    features.record_stream(there)  # neither memory is given away before both uses are over
    arriving.record_stream(computing)
    return arriving


def stored(features: Tensor, slot: Tensor) -> None:
    """Copy finished features into a slot of host memory, and return when they are there."""
    if not features.is_cuda:
        slot.copy_(features)
        return
    here = _copying(features.device)
    with torch.cuda.stream(here), span("copy", features.device):
        slot.copy_(features, non_blocking=True)
    here.synchronize()


def fetched(slot: Tensor, device: torch.device) -> Tensor:
    """A copy of a slot of host memory on `device`; the slot may be overwritten when this returns."""
    if device.type != "cuda":
        return slot.to(device, copy=True)
    here, computing = _copying(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(here), span("copy", device):
        arriving = slot.to(device, non_blocking=True)
    computing.wait_stream(here)
    arriving.record_stream(computing)
    here.synchronize()
    return arriving


def lock_pages(shared: Tensor, device: torch.device) -> None:
    """Let a GPU read and write shared host memory by itself, beside its computing; without this right it works too,
    but slowly.
    """
    with torch.cuda.device(device):
        fault = int(torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), shared.nbytes, PORTABLE))
        if fault:
            with contextlib.suppress(RuntimeError):  # the runtime remembers a fault, and the next launch raises it
                torch.ones(1, device=device)
            warnings.warn(f"features go through pageable memory: cudaHostRegister gave error {fault}", stacklevel=2)


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Underway:
    """Numbers on their way from a device, to be read when they have come; meanwhile the device gets more to do."""

    def __init__(self, vector: Tensor, clock: Clock) -> None:
        self._here = vector.detach().to("cpu", non_blocking=True)  # pinned, where the device is a GPU
        self._clock, self._come = clock, clock.mark()

    def read(self) -> tuple[float, list[float]]:
        """When they came (Unix seconds) and the numbers; waits until they are here."""
        return self._clock.when(self._come), self._here.tolist()
