"""What a job reports while it runs: one JSON object a line, each written whole.

The one module that both sides of the contract read: the job writes, the harness follows. Every line has
`t` (Unix seconds, float), `event` (a key of KINDS), `pid` and `thread`, and the fields listed there.
A number that is not finite is written as null (JSON has no NaN) and named in the field `nonfinite`.

Workers that are processes of their own append to the same file: a line is one `write` on a descriptor
opened with O_APPEND, which local file systems keep whole.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
STACKS_FILE = "stacks.txt"
ENDS = 10  # steps whose mean is what a drafter began with, and what it reached
CHECKPOINTS = "checkpoints"  # folder that a job goes on from, beside its events

# Stages in the order in which a job passes through them; the harness gives each a budget without progress.
STAGES = ("start", "data", "load", "warmup", "train", "save")

KINDS: dict[str, str] = {
    "start": "the process is up: python, torch, torch_git, cuda, triton, transformers, device, gpus, cpu_threads",
    "thread": "a worker thread or process began: name, role (target|drafter), ident (hex, as in stack dumps), device",
    "stage": "a stage began: stage (one of STAGES)",
    "progress": "work got done inside a stage: what, done, total",
    "data": "the data set was read: documents, rows, tokens, supervised, anchors, fill, longest, cut, split, "
    "lengths (histogram: {upper bound: documents}), skipped {reason: count}",
    "step": "a training step ended on all drafters of a variant: variant (its name, '' without fanout), step (from "
    "1), steps, tokens (unpadded context tokens of these drafters), loss, accept (teacher-forced acceptance length, "
    "bonus token included), accuracy, loss_at and accuracy_at (lists by slot, from slot 1; null where no label), "
    "anchors (blocks that were no padding), coverage (share of supervised tokens that were some slot's label), lr, "
    "grad_norm, seconds, steady (inside the measured window), queue_bytes, wait_s {worker: seconds waited this "
    "step}, stage_tok_s {target|drafter: tokens a second of one worker's own working time}",
    "eval": "acceptance was measured by decoding: variant, step, set, n, tokens, tau, tau_low, tau_high (95 %), "
    "tau_untrained, accept_at (share of rounds that accepted slot k, by slot), distinct4, identical (greedy outputs "
    "equal to the target's own), temperature, block, max_new, seconds",
    "checkpoint": "a checkpoint to resume from was written: variant, step, folder, seconds",
    "profile": "steps were recorded with torch.profiler: first, last, trace, table (files), seconds (to write them)",
    "resume": "training goes on from a checkpoint: variant, step (the last one done), folder",
    "compile": "a worker compiled: worker, seconds, graphs, what (shape class), steady",
    "counters": "totals so far: caches {layer: {hits, misses, bypasses, ...}}, graphs, compiles, recompiles, "
    "unexpected_compiles (not announced, caught and repeated alone), recompile_limit_hits, compile_seconds, "
    "compile_seconds_by_thread, attention_calls, uncompiled_calls, flag_stuck (true|false|thread-local); "
    "at (steady|end)",
    "memory": "peaks so far: rss_bytes, gpu_bytes {device: bytes}",
    "spans": "where workers spent their time, if that was to be told: spans [[worker, what (target|copy|step|"
    "optimiser on a device; hand over|wait of a thread), from, to (Unix seconds)]]",
    "warning": "the run goes on but its reader must know: code, message",
    "failure": "the root failure: type, message, traceback, worker, holders [{thread, path, seconds_before, open}] "
    "(who held the FX-tracing flag), stacks",
    "end": "the job's own last word: status (ok|requeue|interrupted|failed), plus the totals of counters and memory",
}


class EventWriter:
    """Appends events to a file; any thread may call `emit`.

    Raises OSError from the constructor when the file cannot be opened. `emit` never raises on a full disk:
    the job matters more than its report.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._torn = False  # whether a full disk took the beginning of the last line alone
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, event: str, **fields: Any) -> bool:
        """Write one event, whole; says whether that was possible. `event` must be a key of KINDS."""
        assert event in KINDS, event
        nonfinite: list[str] = []
        body = _finite(fields, "", nonfinite)
        if nonfinite:
            body["nonfinite"] = nonfinite
        head = {"t": round(time.time(), 4), "event": event, "pid": os.getpid()}
        head["thread"] = threading.current_thread().name
        line = (json.dumps(head | body, default=str) + "\n").encode()
        if self._torn:
            line = b"\n" + line  # or this one would be lost with the other
        try:
            written = os.write(self._fd, line)
        except OSError:
            return False
        self._torn = written < len(line)
        return not self._torn

    def close(self) -> None:
        os.close(self._fd)


def _finite(value: Any, name: str, nonfinite: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v, f"{name}.{k}" if name else str(k), nonfinite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, name, nonfinite) for v in value]
    return value


@dataclass
class EventReader:
    """Follows a growing events file; `poll` gives what came since the last call.

    Lines that are no event (rubbish, a half-written last line of a killed job) are counted in `bad` and
    skipped, and `last_bad` keeps the newest (its first 200 characters); a trailing line without its end
    waits for the rest.
    """

    path: Path
    bad: int = 0
    last_bad: str = ""
    _offset: int = 0
    _rest: bytes = b""

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the new events in file order. A file that does not exist yet has none."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.strip():
                continue
            event = _parse(line)
            if event is None:
                self.bad += 1
                self.last_bad = line[:200].decode("utf-8", "replace")
            else:
                yield event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("event") not in KINDS:
        return None
    return event if isinstance(event.get("t"), int | float) else None
