"""How a drafter's forward becomes callable when several drafters share a process (`compile=`).

docs/STRATEGIES.md says what each does and what to expect of it. A trainer uses one strategy per process:

    strategy = make(name, "cuda", probe)
    strategy.setup_process()                     # once, before anything compiles
    strategy.setup_thread()                      # first thing in every worker thread
    forward = strategy.compile_forward(drafter)  # calls strategy.prepare once, strategy.attend in each layer
    strategy.run("drafter0", shape_class, body)  # body: one forward and backward, may be begun again
    with strategy.quiet(): ...                   # all other work on modules, parameters, optimisers
    strategy.abort(); strategy.close()           # when the job ends

Never wait for another worker (a queue, a barrier) inside `run` or `quiet`.
"""

from __future__ import annotations

import importlib.util

from dflash.attention import KERNEL_WIDTHS
from dflash.geometry import Geometry
from dflash.probe import Probe
from dflash.settings import COMPILE_STRATEGIES, SettingError
from dflash.strategies.free import Strategy
from dflash.strategies.gate import Aborted, Gate
from dflash.strategies.parked import Parked

__all__ = ["Aborted", "Gate", "Strategy", "Unavailable", "check", "make", "require"]


class Unavailable(RuntimeError):
    """The strategy cannot run on this machine; the text says what it needs."""


def make(name: str, device_type: str, probe: Probe, backend: str = "inductor") -> Strategy:
    """Build the strategy `name` for workers on "cpu" or "cuda"; `backend` is torch.compile's.

    Raises SettingError on an unknown name and Unavailable when the machine lacks what it needs.
    """
    if name not in COMPILE_STRATEGIES:
        raise SettingError("compile", name, f"must be one of {', '.join(COMPILE_STRATEGIES)}")
    require(name, device_type)
    kind = Parked if name in ("locked", "whole") else Strategy
    return kind(name, device_type, probe, backend)


def require(name: str, device_type: str) -> None:
    """Raise Unavailable when this machine lacks what the strategy `name` needs."""
    if name == "triton" and device_type != "cuda":
        raise Unavailable("needs CUDA")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise Unavailable("needs the package triton, which comes with CUDA builds of torch")


def check(name: str, geometry: Geometry) -> None:
    """Raise SettingError when the strategy `name` cannot compute a drafter of this geometry."""
    if name == "triton" and geometry.head_dim not in KERNEL_WIDTHS:
        allowed = ", ".join(map(str, KERNEL_WIDTHS))
        raise SettingError("drafter.head_dim", geometry.head_dim, f"compile=triton takes one of {allowed}")
