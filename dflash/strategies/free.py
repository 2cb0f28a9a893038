"""Drafters that compile and run as they like: the strategies without a discipline.

They reproduce what people run and what they try against the race; docs/STRATEGIES.md says what each shows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch._dynamo

from dflash.attention import attend_dense, attend_flex, block_mask, visible
from dflash.probe import Probe
from dflash.strategies import flag

T = TypeVar("T")

# Dynamo counts the graphs of a code object over all threads and devices and gives up at 8. Shape classes times
# devices may rightly be more; past this many something is wrong, and full graphs make Dynamo raise there.
RECOMPILE_LIMIT = 64

UNCOMPILED = ("eager", "triton")  # nothing of these goes through Dynamo

DYNAMO_CONFIG: dict[str, dict[str, bool]] = {
    "suppressed": {"error_on_nested_fx_trace": False},
    "forced": {"force_compile_during_fx_trace": True},
}


class Strategy:
    """How drafters' forwards become callable; one for all worker threads of a process.

    `prepare(mask)` makes what a step's layers share from a DFlashMask; `attend(q, k, v, prepared)` is one
    layer's attention, shapes as in dflash.attention; `attend_alike` that of a layer whose slots at one token have one
    query (dflash.attention.alike), where there is something to gain.
    """

    def __init__(self, name: str, device_type: str, probe: Probe, backend: str = "inductor") -> None:
        self.name, self.probe = name, probe
        # Static shapes: a geometry's shapes are constant, so a new one is a new graph, never a slower general one.
        self._compile = functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
        dense = device_type == "cpu" or name == "eager"
        self.prepare: Callable[..., Any] = visible if dense else block_mask
        self.attend: Callable[..., Any] = attend_dense if dense else attend_flex
        self.attend_alike: Callable[..., Any] | None = None
        if name == "triton":
            from dflash.attention.alike import attend_alike  # here: triton is not everywhere
            from dflash.attention.triton import attend_triton, prepare_ranges

            self.prepare, self.attend = prepare_ranges, attend_triton
            self.attend_alike = _counted(attend_alike, probe)
        if name not in UNCOMPILED:
            self.attend = _watched(self.attend, probe)
        if name not in (*UNCOMPILED, "whole"):
            self.attend = self._compile(self.attend)
        if name == "firstlock":
            self.attend = _first_call_locked(self.attend)
        if name != "whole":
            self.attend = _counted(self.attend, probe)

    def setup_process(self) -> None:
        """Patch what must be patched, before the first compile. Notes in the probe what was done."""
        if self.name == "patched":
            done = flag.make_thread_local()
            self.probe.note(
                "patched: the FX-tracing flag was made thread-local"
                if done
                else f"patched: nothing to do, torch {torch.__version__} has a thread-local FX-tracing flag"
            )

    def setup_thread(self) -> None:
        """Configure Dynamo for the calling thread: from torch 2.12 its configuration belongs to the thread."""
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        for key, value in DYNAMO_CONFIG.get(self.name, {}).items():
            setattr(torch._dynamo.config, key, value)

    def compile_forward(self, forward: Callable[..., T]) -> Callable[..., T]:
        """A drafter's forward as the strategy wants it called."""
        return forward

    def run(self, worker: str, shape_class: Hashable, body: Callable[[], T]) -> T:
        """Run one forward and backward of a drafter; `worker` and `shape_class` say what may need compiling."""
        with self.probe.compiles(worker, shape_class):
            return body()

    def quiet(self) -> AbstractContextManager[None]:
        """Hold this round other work on modules, parameters or optimisers. Raises Aborted."""
        return nullcontext()

    def abort(self) -> None:
        """End all waiting inside the strategy, for good."""

    def close(self) -> None:
        """Give back what `setup_process` took from the process; a patched flag stays."""


def _watched(attend: Callable[..., Any], probe: Probe) -> Callable[..., Any]:
    @functools.wraps(attend)
    def attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # false while tracing, so no compiled code has this line
            probe.uncompiled_call()
        return attend(q, k, v, seen)

    return attention


def _counted(attend: Callable[..., Any], probe: Probe) -> Callable[..., Any]:
    def counted_attention(*args: Any) -> Any:
        probe.attention_call()
        return attend(*args)

    return counted_attention


def _first_call_locked(attend: Callable[..., Any]) -> Callable[..., Any]:
    lock, mine = threading.Lock(), threading.local()

    def attention(*args: Any) -> Any:
        with nullcontext() if hasattr(mine, "called") else lock:
            out = attend(*args)
        mine.called = True
        return out

    return attention
