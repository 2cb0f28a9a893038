"""A first-in first-out way from one target to one drafter, bounded in bytes.

Bounded in bytes and not in batches, because features are large (40,000 tokens of an 8B target: 1.6 GB) and
their size depends on settings that a sweep varies. One batch always fits, however large.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dflash.pipeline.batch import Batch
from dflash.pipeline.slots import Slots
from dflash.pipeline.transfer import carried
from dflash.strategies import Aborted


@dataclass(frozen=True)
class ChannelStats:
    bytes: int  # waiting in the channel now
    target_waited: float  # seconds its target has waited for room, in all
    drafter_waited: float  # seconds its drafter has waited for a batch, in all


class Channel(Protocol):
    @property
    def left(self) -> bool: ...
    @property
    def full(self) -> bool: ...
    def put(self, batch: Batch) -> None: ...
    def get(self, device: torch.device) -> Batch: ...
    def leave(self) -> None: ...
    def stats(self) -> ChannelStats: ...
    def abort(self) -> None: ...


class ThreadChannel:
    """Between two threads; batches pass by reference, and on the way to another GPU are copied when taken out: while
    it computes on the batch before, for a drafter's thread is a step ahead of its device.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._left = self._aborted = self._full = False
        self._target_waited = self._drafter_waited = 0.0

    def put(self, batch: Batch) -> None:
        """Wait for room, then append; raises Aborted. Nothing more is kept once the drafter has left."""
        with self._changed:
            since, self._full = time.perf_counter(), True
            self._changed.wait_for(
                lambda: self._aborted or self._left or not self._batches or self._bytes + batch.bytes <= self._limit
            )
            self._full = False
            self._target_waited += time.perf_counter() - since
            if self._aborted:
                raise Aborted
            if self._left:
                return
            self._batches.append(batch)
            self._bytes += batch.bytes
            self._changed.notify_all()

    def get(self, device: torch.device) -> Batch:
        """Wait for the next batch, its features on `device`; raises Aborted."""
        with self._changed:
            since = time.perf_counter()
            self._changed.wait_for(lambda: self._aborted or bool(self._batches))
            self._drafter_waited += time.perf_counter() - since
            if self._aborted:
                raise Aborted
            batch = self._batches.popleft()
            self._bytes -= batch.bytes
            self._changed.notify_all()
        assert batch.features is not None
        return replace(batch, features=carried(batch.features, device))

    @property
    def left(self) -> bool:
        return self._left

    @property
    def full(self) -> bool:
        """Whether the target waits for room."""
        with self._changed:
            return self._full

    def leave(self) -> None:
        """The drafter takes no more: its target, which feeds others too, need not wait for it."""
        with self._changed:
            self._left, self._bytes = True, 0
            self._batches.clear()
            self._changed.notify_all()

    def stats(self) -> ChannelStats:
        return ChannelStats(self._bytes, self._target_waited, self._drafter_waited)

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class ProcessChannel:
    """Between two processes: batches lie in a ring of slots in shared memory, as many as the bound allows.

    Nothing but numbers is counted between the two, so neither can be held by a pipe that the other does not read.
    Waiters are not woken on abort: the parent ends the processes.
    """

    def __init__(self, limit_bytes: int, like: Batch, context: Any) -> None:
        """For batches of the shapes of `like` (batch_outline); `context` is of multiprocessing."""
        self._size = like.bytes
        self._slots = Slots(max(1, limit_bytes // self._size), like)
        self._free, self._ready = context.Semaphore(len(self._slots)), context.Semaphore(0)
        self._waiting, self._left, self._full = context.Value("q", 0), context.Value("b", 0), context.Value("b", 0)
        self._target_waited, self._drafter_waited = context.Value("d", 0.0), context.Value("d", 0.0)
        self._next = 0  # the slot that this end uses next: writer and reader go round in the same order

    def put(self, batch: Batch) -> None:
        """As ThreadChannel's."""
        since = time.perf_counter()
        if not self._free.acquire(block=False):
            self._full.value = 1
            self._free.acquire()
            self._full.value = 0
        self._target_waited.value += time.perf_counter() - since  # one writer
        if self._left.value:
            self._free.release()  # the next does not wait either
            return
        self._slots.write(self._next, batch)
        self._next = (self._next + 1) % len(self._slots)
        with self._waiting.get_lock():
            self._waiting.value += 1
        self._ready.release()

    def get(self, device: torch.device) -> Batch:
        """As ThreadChannel's."""
        since = time.perf_counter()
        self._ready.acquire()
        self._drafter_waited.value += time.perf_counter() - since  # one reader
        batch = self._slots.read(self._next, device)
        self._next = (self._next + 1) % len(self._slots)
        with self._waiting.get_lock():
            self._waiting.value -= 1
        self._free.release()
        return batch

    @property
    def left(self) -> bool:
        return bool(self._left.value)

    @property
    def full(self) -> bool:
        """As ThreadChannel's."""
        return bool(self._full.value)

    def leave(self) -> None:
        """As ThreadChannel's."""
        self._left.value = 1
        self._free.release()

    def stats(self) -> ChannelStats:
        return ChannelStats(self._waiting.value * self._size, self._target_waited.value, self._drafter_waited.value)

    def abort(self) -> None:
        """Nothing to wake: see the class."""
