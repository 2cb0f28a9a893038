"""Tensors between CPU and device, without waiting for what the device is at."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Underway:
    """Numbers on their way from a device, to be read when they have come; meanwhile the device gets more to do."""

    def __init__(self, vector: Tensor) -> None:
        self._here = vector.detach().to("cpu", non_blocking=True)  # pinned, where the device is a GPU
        self._come = None
        if vector.is_cuda:
            self._come = torch.cuda.Event()
            self._come.record(torch.cuda.current_stream(vector.device))

    def read(self) -> list[float]:
        """The numbers; waits until they are here."""
        if self._come is not None:
            self._come.synchronize()
        values: list[float] = self._here.tolist()
        return values
