"""Drafters that compile one at a time while all others are parked, and then run freely.

What can go wrong when one thread compiles while another runs is process-wide state of torch (the FX-tracing
flag up to 2.13, nn.Module's methods during a plain symbolic trace, autograd's one thread a device). So: the
first forward and backward of every (worker, shape class) runs alone. Everything else is work, which holds no
lock. Between compiles torch's stance `fail_on_recompile` and a callback on every compile's start make a compile
nobody announced raise instead of run; the body is then repeated alone, and the surprise is counted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._dynamo.callback import callback_handler

from dflash.probe import Probe
from dflash.strategies.free import Strategy
from dflash.strategies.gate import Gate

T = TypeVar("T")


class Unannounced(RuntimeError):
    """A compile began while other threads may be at work."""


class Parked(Strategy):
    """The strategies `locked` (eager forward, compiled attention) and `whole` (one graph a forward)."""

    def __init__(self, name: str, device_type: str, probe: Probe, backend: str = "inductor") -> None:
        super().__init__(name, device_type, probe, backend)
        self._backend, self._gate = backend, Gate()
        self._warm: set[tuple[str, Hashable]] = set()

    def setup_process(self) -> None:
        super().setup_process()
        callback_handler.register_start_callback(self._refuse)
        torch.compiler.set_stance("fail_on_recompile")

    def close(self) -> None:
        torch.compiler.set_stance("default")
        callback_handler.remove_start_callback(self._refuse)

    def compile_forward(self, forward: Callable[..., T]) -> Callable[..., T]:
        if self._backend == "inductor":
            # Some seconds, most of a warm start: now nobody is parked for it, and a target is at its first batch.
            importlib.import_module("torch._inductor.compile_fx")
        return self._compile(forward) if self.name == "whole" else forward

    def run(self, worker: str, shape_class: Hashable, body: Callable[[], T]) -> T:
        """Run one forward and backward, which must bear being begun again. Raises Aborted.

        Other threads are parked the first time for (worker, shape_class), and whenever the body needs a
        compile that this did not foresee.
        """
        if (worker, shape_class) in self._warm:
            try:
                with self._gate.shared():
                    return body()
            except RuntimeError as error:
                if not _is_unannounced(error):
                    raise
                self.probe.unexpected_compile(worker, shape_class, str(error))
        with self._gate.exclusive(), self.probe.compiles(worker, shape_class, any_thread=True):
            # The stance is one for the process: it changes only here, where everybody else is parked.
            torch.compiler.set_stance("default")
            try:
                result = body()
            finally:
                torch.compiler.set_stance("fail_on_recompile")
        self._warm.add((worker, shape_class))
        return result

    def quiet(self) -> AbstractContextManager[None]:
        return self._gate.shared()

    def abort(self) -> None:
        self._gate.abort()

    def _refuse(self, *_: Any) -> None:
        # The stance does not reach a backward that compiles late; this does, on autograd's threads too.
        if not self._gate.compiling:
            raise Unannounced("a compile began outside the time set aside for it")


def _is_unannounced(error: RuntimeError) -> bool:
    return isinstance(error, Unannounced) or "'fail_on_recompile'" in str(error)
