"""When a device got somewhere, in the wall's time, for a thread that is further by then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """A device's clock, tied to the wall's; making one waits for the device, once.

    On a GPU a mark lies on the stream that is current when it is made. On a CPU work is done when it returns, and a
    mark is the time.
    """

    device: torch.device
    _mark: torch.cuda.Event | float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._mark = self.mark()
        if isinstance(self._mark, torch.cuda.Event):
            self._mark.synchronize()
        self._at = time.time()

    def mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def when(self, mark: torch.cuda.Event | float) -> float:
        """Unix seconds at which a mark was passed, in the order in which marks were made; waits until it is."""
        if isinstance(mark, float):
            return mark
        assert isinstance(self._mark, torch.cuda.Event)
        mark.synchronize()
        # From mark to mark: what lies between two is told in float32, which over hours loses the milliseconds.
        self._at += self._mark.elapsed_time(mark) / 1e3
        self._mark = mark
        return self._at
