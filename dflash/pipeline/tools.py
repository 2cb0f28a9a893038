"""What every worker of one process shares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dflash.events import EventWriter
from dflash.pipeline.channel import Channel
from dflash.pipeline.layout import Layout
from dflash.probe import Probe
from dflash.settings import JobSettings
from dflash.strategies import Strategy

Channels = Mapping[tuple[int, int], Channel]  # by (target, drafter worker)


@dataclass(frozen=True)
class Tools:
    """`done`: steps that each variant has behind it when this process starts."""

    job: JobSettings
    layout: Layout
    done: dict[str, int]
    channels: Channels
    events: EventWriter
    probe: Probe
    strategy: Strategy
    stopping: Callable[[], bool]  # asked to end after this step

    def announce(self, role: str, number: int, device: torch.device) -> str:
        """Name the calling thread and report it; gives the name."""
        name = f"{role}{number}"
        threading.current_thread().name = name
        self.events.emit("thread", name=name, role=role, ident=f"{threading.get_ident():#x}", device=str(device))
        return name
