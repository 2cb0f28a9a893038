"""What a job knows about its own compiling: who traces when, what compiled, what ran un-compiled, caches, memory.

Install it before anything compiles. It patches `torch.fx.Tracer.trace` and the list to which Dynamo adds a record
per compile; both run on the thread that traces or compiles, which is what torch's own counters do not tell.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import resource
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
import torch.fx._symbolic_trace as symbolic_trace

from dflash.events import EventWriter

WINDOWS_KEPT = 1024
HOLDER_SECONDS = 1.0

# Where a trace can come from; frames elsewhere (the caller's own, contextlib) say nothing about it.
TRACING_CODE = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._higher_order_ops", "torch.fx")

# Dynamo's counters by cache layer: layer -> {name here: (group, key) there}. Its async_compile_cache_* are none: they
# count every kernel that a graph asks for and whether this process had it at hand, so a start that found all it needed
# on disk "missed" each of them. What Triton itself finds on disk is counted by `_watch_triton`.
CACHE_COUNTERS: dict[str, dict[str, tuple[str, str]]] = {
    "aotautograd": {
        "hits": ("aot_autograd", "autograd_cache_hit"),
        "misses": ("aot_autograd", "autograd_cache_miss"),
        "bypasses": ("aot_autograd", "autograd_cache_bypass"),
        "guard_misses": ("aot_autograd", "autograd_cache_guard_miss"),
        "saved": ("aot_autograd", "autograd_cache_saved"),
    },
    "fxgraph": {
        "hits": ("inductor", "fxgraph_cache_hit"),
        "misses": ("inductor", "fxgraph_cache_miss"),
        "bypasses": ("inductor", "fxgraph_cache_bypass"),
        "write_errors": ("inductor", "fxgraph_cache_write_error"),
        "pickle_errors": ("inductor", "fxgraph_cache_pickle_error"),
    },
    "code": {
        "hits": ("inductor", "generated_module_cache_hit"),
        "misses": ("inductor", "generated_module_cache_miss"),
    },
    "triton": {
        "hits": ("inductor", "triton_bundler_read_and_emit_kernel"),
        "saved": ("inductor", "triton_bundler_save_kernel"),
    },
}


@dataclass
class Window:
    """One stretch of time in which a thread traced with FX; times in Unix seconds, end None while it lasts."""

    ident: int
    thread: str
    path: str
    start: float
    end: float | None = None


class Probe:
    """Watches a process from `install` to `close`; any thread may call its methods."""

    def __init__(self, events: EventWriter | None = None) -> None:
        self.steady = False  # whether the measured window is open; the training loop says so
        self.notes: list[str] = []
        self._events = events
        self._ended: deque[Window] = deque(maxlen=WINDOWS_KEPT)
        self._open: dict[int, Window] = {}
        # Counted per thread: each adds to its own entry alone, so no lock is needed and no count is lost.
        self._calls: Counter[int] = Counter()
        self._uncompiled: Counter[int] = Counter()
        self._graphs: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._recompiles: Counter[int] = Counter()
        self._unexpected = 0
        self._triton: Counter[str] = Counter()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Begin to watch; also makes a CUDA build of torch safe on a machine without a GPU."""
        self._watch_traces()
        self._watch_compiles()
        if torch.cuda.is_available():
            self._watch_triton()
        if torch.version.cuda and not torch.cuda.is_available():
            # It re-registers a device guard on every entry of fake-tensor mode, not safe from two threads at once:
            # a segfault without a GPU. Once is enough.
            torch._C._ensureCUDADeviceGuardSet()
            torch._C._ensureCUDADeviceGuardSet = lambda: None
            self.note("this CUDA build of torch runs without a GPU: its device guard is registered once, not per trace")

    def close(self) -> None:
        """Stop watching; what was seen stays readable."""
        while self._undo:
            self._undo.pop()()

    def note(self, text: str) -> None:
        """Keep and report something a reader of the run must know about how it was set up."""
        self.notes.append(text)
        if self._events:
            self._events.emit("warning", code="setup", message=text)

    def attention_call(self) -> None:
        self._calls[threading.get_ident()] += 1

    def uncompiled_call(self) -> None:
        """An attention that should have been compiled ran as plain Python."""
        self._uncompiled[threading.get_ident()] += 1

    def unexpected_compile(self, worker: str, shape_class: Hashable, reason: str) -> None:
        """A compile nobody had announced was caught and repeated with the other threads parked."""
        self._unexpected += 1
        if self._events:
            self._events.emit(
                "warning", code="compile.unexpected", message=f"{worker}, shape class {shape_class}: {reason}"
            )

    @contextlib.contextmanager
    def compiles(self, worker: str, shape_class: Hashable, any_thread: bool = False) -> Iterator[None]:
        """Report as a `compile` event what the calling thread, or with `any_thread` the process, compiles inside.

        On CUDA a backward compiles on autograd's thread, which only `any_thread` sees.
        """
        thread = None if any_thread else threading.current_thread().name
        graphs, seconds = self._compiled(thread)
        try:
            yield
        finally:
            graphs_after, seconds_after = self._compiled(thread)
            if self._events and graphs_after > graphs:
                self._events.emit(
                    "compile",
                    worker=worker,
                    seconds=round(seconds_after - seconds, 3),
                    graphs=graphs_after - graphs,
                    what=str(shape_class),
                    steady=self.steady,
                )

    def holders(self, at: float, ident: int | None = None) -> list[dict[str, Any]]:
        """Which other threads were tracing at the Unix time `at` or up to a second before, newest first.

        `ident` is the thread that suffered, by default the caller. This names who held the FX-tracing flag, or
        nn.Module's methods, when a drafter dies of the race. `seconds_before` is how long before `at` the trace
        ended, 0 for one that was open.
        """
        sufferer = threading.get_ident() if ident is None else ident
        found = []
        for window in [*self._ended, *list(self._open.values())]:
            is_open = window.start <= at and (window.end is None or window.end >= at)
            before = 0.0 if is_open else at - (window.end or at)
            if window.ident != sufferer and window.start <= at and 0 <= before <= HOLDER_SECONDS:
                found.append(
                    {"thread": window.thread, "path": window.path, "seconds_before": round(before, 4), "open": is_open}
                )
        return sorted(found, key=lambda holder: holder["seconds_before"])

    def counters(self) -> dict[str, Any]:
        """Totals so far, the fields of the event `counters` (dflash/events.py) but `at`."""
        there = dynamo_utils.counters
        graphs, seconds = self._compiled(None)
        caches = {
            layer: {name: int(there[group][key]) for name, (group, key) in names.items()}
            for layer, names in CACHE_COUNTERS.items()
        }
        for name in ("hits", "misses"):  # beside the kernels that came out of an FX graph's entry
            caches["triton"][name] = caches["triton"].get(name, 0) + self._triton[name]
        return {
            "caches": caches,
            "graphs": int(there["stats"]["unique_graphs"]),
            "compiles": graphs,
            "recompiles": sum(list(self._recompiles.values())),
            "unexpected_compiles": self._unexpected,
            "recompile_limit_hits": sum(n for k, n in there["unimplemented"].items() if "recompile limit" in k.lower()),
            "compile_seconds": round(seconds, 3),
            "compile_seconds_by_thread": {name: round(value, 3) for name, value in list(self._seconds.items())},
            "attention_calls": sum(list(self._calls.values())),
            "uncompiled_calls": sum(list(self._uncompiled.values())),
            "flag_stuck": self.flag_stuck(),
        }

    def flag_stuck(self) -> bool | str:
        """Whether the FX-tracing flag is up though nobody traces; "thread-local" where it is no longer shared."""
        if not hasattr(symbolic_trace, "_is_fx_tracing_flag") or hasattr(symbolic_trace, "_thread_tracing"):
            return "thread-local"
        nobody_before = not self._open
        return bool(symbolic_trace._is_fx_tracing_flag) and nobody_before and not self._open

    def memory(self) -> dict[str, Any]:
        """Peaks so far, the fields of the event `memory`: bytes resident, and allocated by torch on each GPU."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        return {
            "rss_bytes": peak if sys.platform == "darwin" else peak * 1024,
            "gpu_bytes": {f"cuda:{i}": torch.cuda.max_memory_allocated(i) for i in gpus},
        }

    def _compiled(self, thread: str | None) -> tuple[int, float]:
        if thread is None:
            return sum(list(self._graphs.values())), float(sum(list(self._seconds.values())))
        return self._graphs[thread], float(self._seconds[thread])

    def _watch_triton(self) -> None:
        """Count what Triton finds in its cache on disk, and what it compiles in this process.

        What Inductor's compile processes make is seen as new files alone.
        """
        try:
            from triton import knobs
        except ImportError:  # no Triton, or one without listeners
            return
        before = knobs.compilation.listener

        def listen(*, cache_hit: bool, **told: Any) -> None:
            self._triton["hits" if cache_hit else "misses"] += 1
            if before:
                before(cache_hit=cache_hit, **told)

        knobs.compilation.listener = listen
        self._undo.append(lambda: setattr(knobs.compilation, "listener", before))

    def _watch_traces(self) -> None:
        trace = symbolic_trace.Tracer.trace

        @functools.wraps(trace)
        def watched_trace(tracer: Any, *args: Any, **kwargs: Any) -> Any:
            ident = threading.get_ident()
            if ident in self._open:  # a trace within a trace: the outer one's window covers it
                return trace(tracer, *args, **kwargs)
            path = _path(sys._getframe(1), type(tracer).__name__)
            window = Window(ident, threading.current_thread().name, path, time.time())
            self._open[ident] = window
            try:
                return trace(tracer, *args, **kwargs)
            finally:
                window.end = time.time()
                self._ended.append(window)
                del self._open[ident]

        symbolic_trace.Tracer.trace = watched_trace
        self._undo.append(lambda: setattr(symbolic_trace.Tracer, "trace", trace))

    def _watch_compiles(self) -> None:
        probe, records = self, dynamo_utils._compilation_metrics

        class Records(deque[Any]):
            def append(self, record: Any) -> None:
                super().append(record)
                probe._record(record)

        dynamo_utils._compilation_metrics = Records(records, maxlen=records.maxlen)
        self._undo.append(lambda: setattr(dynamo_utils, "_compilation_metrics", records))

    def _record(self, record: Any) -> None:
        if record.is_runtime:  # autotuning at run time, no graph
            return
        name = threading.current_thread().name
        self._graphs[name] += 1
        self._seconds[name] += ((record.end_time_us or 0) - (record.start_time_us or 0)) / 1e6  # type: ignore
        self._recompiles[threading.get_ident()] += record.recompile_reason is not None


def environment(device_type: str) -> dict[str, Any]:
    """The fields of the event `start` (dflash/events.py)."""
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device_type == "cuda" else []
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "device": device_type,
        "gpus": gpus,
        "cpu_threads": torch.get_num_threads(),
    }


def _path(frame: FrameType | None, tracer: str) -> str:
    """The torch functions that led to a trace, outermost first: of each module on the way the last one.

    Of a long way the last five; a backward that compiles late is marked, for it runs where autograd runs it.
    """
    chain: list[str] = []
    module_before, in_backward = "", False
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        in_backward = in_backward or (module.endswith("runtime_wrappers") and function == "backward")
        if module.startswith(TRACING_CODE) and function not in ("_fn", "symbolic_trace"):
            if module != module_before and len(chain) < 5:
                chain.append(f"{module.rpartition('.')[2]}.{function}")
            module_before = module
        frame = frame.f_back
    chain += ["lazy backward"] * in_backward
    return " > ".join([*reversed(chain), f"{tracer}.trace"])
