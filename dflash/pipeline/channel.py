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
from torch import Tensor

from dflash.pipeline.batch import Batch
from dflash.pipeline.transfer import carried, fetched, lock_pages, stored
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
    """Between two processes: features lie in a ring of slots in shared memory, as many as the bound allows.

    Slots are made once, for shapes are constant; only a batch's small tensors are pickled. GPUs copy into them and
    out of them beside their computing, for each end locks their pages at its first batch. (Memory of a GPU shared
    between processes would save the way over the host, which is hidden anyhow, at the price of rules about who may
    end when.) Waiters are not woken on abort: the parent ends the processes.
    """

    def __init__(self, limit_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, context: Any) -> None:
        self._size = dtype.itemsize * int(torch.Size(shape).numel())
        count = max(1, limit_bytes // self._size)
        self._slots = torch.empty((count, *shape), dtype=dtype).share_memory_()
        self._free, self._ready = context.Semaphore(count), context.SimpleQueue()
        self._waiting, self._left, self._handing = context.Value("q", 0), context.Value("b", 0), context.Lock()
        self._full = context.Value("b", 0)
        self._target_waited, self._drafter_waited = context.Value("d", 0.0), context.Value("d", 0.0)
        self._locked = False
        self._next = 0  # the slot that this end uses next: writer and reader go round in the same order

    def put(self, batch: Batch) -> None:
        since = time.perf_counter()
        if not self._free.acquire(block=False):
            self._full.value = 1
            self._free.acquire()
            self._full.value = 0
        self._target_waited.value += time.perf_counter() - since  # one writer
        assert batch.features is not None
        with self._handing:
            if self._left.value:
                self._free.release()
                return
            stored(batch.features, self._slot(batch.features.device))
            self._next = (self._next + 1) % len(self._slots)
            with self._waiting.get_lock():
                self._waiting.value += 1
            small = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in vars(batch).items() if k != "features"}
            self._ready.put(small)

    def get(self, device: torch.device) -> Batch:
        since = time.perf_counter()
        small = self._ready.get()
        self._drafter_waited.value += time.perf_counter() - since  # one reader
        features = fetched(self._slot(device), device)
        self._next = (self._next + 1) % len(self._slots)
        with self._waiting.get_lock():
            self._waiting.value -= 1
        self._free.release()
        tensors: dict[str, Any] = {
            k: v if isinstance(v, int | float) else torch.from_numpy(v) for k, v in small.items()
        }
        return Batch(**tensors, features=features)

    @property
    def left(self) -> bool:
        return bool(self._left.value)

    @property
    def full(self) -> bool:
        """As ThreadChannel's."""
        return bool(self._full.value)

    def leave(self) -> None:
        """As ThreadChannel's. What the target is at is read off: a pipe that nobody reads would hold it for ever."""
        self._left.value = 1
        self._free.release()
        while not self._handing.acquire(timeout=0.02):
            self._discard()
        self._handing.release()

    def _discard(self) -> None:
        while not self._ready.empty():
            self._ready.get()

    def _slot(self, device: torch.device) -> Tensor:
        if device.type == "cuda" and not self._locked:
            lock_pages(self._slots, device)
            self._locked = True
        return self._slots[self._next]

    def stats(self) -> ChannelStats:
        return ChannelStats(self._waiting.value * self._size, self._target_waited.value, self._drafter_waited.value)

    def abort(self) -> None:
        """Nothing to wake: see the class."""
