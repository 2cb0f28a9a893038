"""Telling what went wrong, while all who were there can still be asked."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback

from dflash.events import EventWriter
from dflash.probe import Probe


def report_failure(events: EventWriter, probe: Probe, worker: str, error: BaseException) -> None:
    """Write the `failure` event: the error, who held the FX-tracing flag just before, every thread's stack.

    The error goes to standard error where the event found no room: the log may have some, or lie elsewhere.
    """
    told = "".join(traceback.format_exception(error))
    written = events.emit(
        "failure",
        worker=worker,
        type=type(error).__name__,
        message=str(error),
        traceback=told,
        holders=probe.holders(time.time()),
        stacks=thread_stacks(),
    )
    if not written:
        with contextlib.suppress(OSError):
            print(told, end="", file=sys.stderr, flush=True)


def thread_stacks() -> str:
    """The Python stack of every thread of this process, by name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"Thread {names.get(ident, '?')} ({ident:#x}):\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
