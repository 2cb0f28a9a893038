"""Where the workers of a process spend their time, told only when asked; off, a span is nothing.

While a profile is taken (profile.py) a span bears its name there.

A span on a GPU lies between two events on its stream, so that measuring waits for nothing; all are read when the run
is over. One without a GPU is the thread's own wall time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

from dflash.events import EventWriter


class _Recorder:
    def __init__(self) -> None:
        self._walls: list[tuple[str, str, float, float]] = []
        self._works: list[tuple[str, str, torch.device, torch.cuda.Event, torch.cuda.Event]] = []
        self._zeros: dict[torch.device, tuple[torch.cuda.Event, float]] = {}

    @contextmanager
    def span(self, what: str, device: torch.device | None) -> Iterator[None]:
        who = threading.current_thread().name  # a worker's thread bears its name
        if device is None or device.type != "cuda":
            began = time.time()
            yield
            self._walls.append((who, what, began, time.time()))
            return
        stream = torch.cuda.current_stream(device)
        if device not in self._zeros:  # the one wait: a device's clock is tied to the wall's at its first span
            zero = torch.cuda.Event(enable_timing=True)
            zero.record(stream)
            zero.synchronize()
            self._zeros[device] = (zero, time.time())
        began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_at.record(stream)
        yield
        ended_at.record(stream)
        self._works.append((who, what, device, began_at, ended_at))

    def all(self) -> list[tuple[str, str, float, float]]:
        found = list(self._walls)
        for who, what, device, began, ended in self._works:
            zero, at = self._zeros[device]
            ended.synchronize()
            found.append((who, what, at + zero.elapsed_time(began) / 1e3, at + zero.elapsed_time(ended) / 1e3))
        return sorted(found, key=lambda one: one[2])


_recorder: _Recorder | None = None
_named = False  # a profile is being taken


def start() -> None:
    """Record the spans of this process from now on."""
    global _recorder
    _recorder = _Recorder()


def report(events: EventWriter) -> None:
    """Tell what was recorded, if anything was to be, and stop."""
    global _recorder
    if _recorder is not None:
        events.emit("spans", spans=_recorder.all())
        _recorder = None


def name_in_profiles(on: bool) -> None:
    """Whether spans are to be found in what torch.profiler records."""
    global _named
    _named = on


def span(what: str, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Round work that the calling worker's thread has `device` do on its current stream, or waits for itself."""
    if _recorder is not None:
        return _recorder.span(what, device)
    return record_function(what) if _named else nullcontext()
