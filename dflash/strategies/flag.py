"""The FX-tracing flag made thread-local on torch builds where it is one for the whole process.

torch.compile refuses a call while "FX is tracing". Up to torch 2.13 that state is a module global of
torch.fx._symbolic_trace, so a trace on one thread makes calls on all others raise; from 2.14 it belongs to the
thread (pytorch pull request 168999). This gives the older builds the same. It does not cure the other race:
a plain symbolic trace patches nn.Module for the whole process (pytorch pull request 187589).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._higher_order_ops.utils as hop_utils
import torch.fx._symbolic_trace as symbolic_trace


class _ThreadTracing(threading.local):
    on = False


_thread_tracing = _ThreadTracing()


@contextlib.contextmanager
def _tracing(on: bool) -> Iterator[None]:
    before = _thread_tracing.on
    _thread_tracing.on = on
    try:
        yield
    finally:
        _thread_tracing.on = before


def is_process_wide() -> bool:
    """Whether this torch build, as patched so far, shares the flag between threads."""
    return hasattr(symbolic_trace, "_is_fx_tracing_flag") and not hasattr(symbolic_trace, "_thread_tracing")


def make_thread_local() -> bool:
    """Patch this process for good. False when there was nothing to do."""
    if not is_process_wide():
        return False
    trace = symbolic_trace.Tracer.trace
    environment = hop_utils._set_compilation_env

    @functools.wraps(trace)
    def marked_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _tracing(True):
            return trace(self, *args, **kwargs)

    @contextlib.contextmanager
    def marked_environment() -> Iterator[None]:
        # Torch lowers its flag here so that a higher-order operator may compile within a trace.
        with _tracing(False), environment():
            yield

    symbolic_trace.Tracer.trace = marked_trace
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.")]:
        if getattr(module, "_set_compilation_env", None) is environment:
            module._set_compilation_env = marked_environment  # type: ignore[attr-defined]
    # Compiled functions keep the question they were made with, so the question itself gets new code, which
    # looks its names up in torch.fx._symbolic_trace.
    symbolic_trace._thread_tracing = _thread_tracing
    symbolic_trace.is_fx_tracing.__code__ = (lambda: _thread_tracing.on).__code__
    symbolic_trace.is_fx_symbolic_tracing.__code__ = (
        lambda: _thread_tracing.on and not torch.compiler.is_compiling()
    ).__code__
    return True
