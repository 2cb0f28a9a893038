"""Summing one flat vector over all drafters, each step.

Sums, not means: a drafter's vector carries the gradient of its weighted loss *sum*, its sum of weights and
its counts, so that dividing afterwards gives what one drafter would have computed on the joint batch.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.strategies import Aborted


class PeerLost(RuntimeError):
    """The group broke while this drafter waited for the others: the echo of a death, seldom its cause."""


class Averager(Protocol):
    def total(self, rank: int, vector: Tensor) -> Tensor: ...
    def abort(self) -> None: ...


class ThreadAverager:
    """Drafters as threads: each sums a slice of everyone's vector, in rank order, so all get the same bits."""

    def __init__(self, drafters: int) -> None:
        self._vectors: list[Tensor] = [torch.empty(0)] * drafters
        self._slices: list[Tensor] = [torch.empty(0)] * drafters
        self._reached: list[Any] = [None] * drafters  # CUDA events
        self._barrier = threading.Barrier(drafters)

    def total(self, rank: int, vector: Tensor) -> Tensor:
        """The sum over drafters of `vector` float32 [n], on the device it came from; raises Aborted.

        Threads wait for each other here, and devices for what the others' threads gave them to do; no thread waits
        for a device.
        """
        if len(self._vectors) == 1:
            return vector
        self._vectors[rank] = vector
        self._meet(rank, vector)
        own = self._vectors[0].tensor_split(len(self._vectors))[rank].to(vector.device, copy=True)
        for other in self._vectors[1:]:
            own += other.tensor_split(len(self._vectors))[rank].to(vector.device)
        self._slices[rank] = own
        self._meet(rank, vector)
        total = torch.cat([part.to(vector.device) for part in self._slices])
        self._meet(rank, vector)  # nobody replaces its slice while another still reads it
        return total

    def _meet(self, rank: int, vector: Tensor) -> None:
        """Go on when all are here, on the devices too: a peer reads this one's memory on a stream of its own."""
        stream = torch.cuda.current_stream(vector.device) if vector.is_cuda else None
        if stream is not None:
            self._reached[rank] = stream.record_event()
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None
        if stream is not None:
            for reached in self._reached:  # one that has moved on since waited for no more than it had already
                stream.wait_event(reached)

    def abort(self) -> None:
        self._barrier.abort()


class ProcessAverager:
    """Drafters as processes: an all-reduce, over gloo on CPU and NCCL on GPUs, met through a file."""

    def __init__(self, drafters: int, meeting: Path) -> None:
        self.drafters, self.meeting = drafters, meeting
        self._joined = False

    def total(self, rank: int, vector: Tensor) -> Tensor:
        """As ThreadAverager.total; the first call joins the group. Raises PeerLost."""
        if self.drafters == 1:
            return vector
        try:
            self._join(rank, vector)
            torch.distributed.all_reduce(vector)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        return vector

    def _join(self, rank: int, vector: Tensor) -> None:
        if not self._joined:
            # Gloo looks the host's name up otherwise, which fails on machines without a resolver.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group(
                backend="nccl" if vector.is_cuda else "gloo",
                init_method=f"file://{self.meeting.resolve()}",
                rank=rank,
                world_size=self.drafters,
            )
            self._joined = True

    def close(self) -> None:
        """Leave the group, when all have ended well."""
        if self._joined:
            torch.distributed.destroy_process_group()

    def abort(self) -> None:
        """The parent ends the processes."""
