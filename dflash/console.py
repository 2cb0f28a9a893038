"""What a person at a terminal sees of a job: its events, as lines on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dflash.events import ENDS, EventReader

_STEP_EVERY_S = 5.0


class Console:
    """Follows an event file from its present end on; workers of all processes write there."""

    def __init__(self, path: Path) -> None:
        self._reader = EventReader(path)
        for _ in self._reader.poll():  # an earlier run's
            pass
        self._told: dict[str, float] = {}  # by variant, when its last step was told
        self._last: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=ENDS))  # by variant, its steps
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell what is left and end."""
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            last = self._done.wait(0.5)
            for event in self._reader.poll():
                text = self._step(event) if event["event"] == "step" else line(event)
                if event["event"] == "end":
                    text += "".join(map(_reached, self._last.values()))
                if text:
                    print(text, file=sys.stderr, flush=True)
            if last:
                return

    def _step(self, event: dict[str, Any]) -> str:
        now, variant = time.monotonic(), event["variant"]
        self._last[variant].append(event)
        if event["step"] != event["steps"] and now - self._told.get(variant, 0.0) < _STEP_EVERY_S:
            return ""
        self._told[variant] = now
        return line(event)


def line(event: dict[str, Any]) -> str:
    """An event in a line; empty for those that only a program wants."""
    kind, variant = event["event"], f"{event['variant']} " if event.get("variant") else ""
    if kind == "data":
        return f"data: {event['documents']} documents, {event['tokens']} tokens in {event['rows']} rows"
    if kind == "compile":
        return f"{event['worker']} compiled for {event['seconds']:.0f} s"
    if kind == "step":
        rates = ", ".join(f"{who} {rate / 1000:.1f}" for who, rate in event["stage_tok_s"].items())
        return (
            f"{variant}step {event['step']}/{event['steps']}: loss {_number(event['loss'])}, accepted "
            f"{_number(event['accept'])}, {event['seconds']:.2f} s, Ktok/s of each stage alone: {rates}"
        )
    if kind == "eval":
        return (
            f"{variant}step {event['step']}, {event['set']}: tau {_number(event['tau'])} ({_number(event['tau_low'])} "
            f"to {_number(event['tau_high'])}, n={event['n']}, T={event['temperature']:g}, block {event['block']}), "
            f"untrained {_number(event['tau_untrained'])}, identical {_number(event['identical'])}, "
            f"distinct-4 {_number(event['distinct4'])}"
        )
    if kind == "checkpoint":
        return f"{variant}step {event['step']}: saved {event['folder']}"
    if kind == "profile":
        return f"profile of steps {event['first']} to {event['last']}: {event['trace']}, {event['table']}"
    if kind == "resume":
        return f"{variant}goes on after step {event['step']} from {event['folder']}"
    if kind == "warning":
        return f"warning: {event['message']}"
    if kind == "failure":
        return f"{event['worker']} failed: {event['type']}: {event['message']}"
    if kind == "end":
        return f"ended: {event['status']}"
    return ""


def _reached(steps: Sequence[dict[str, Any]]) -> str:
    """What a variant reached by its last steps, to follow what is said before."""
    last, means = steps[-1], []
    for name in ("loss", "accept"):
        values = [one[name] for one in steps if one[name] is not None]
        means.append(_number(fmean(values) if values else None))
    over = f"mean of the last {len(steps)} steps" if len(steps) > 1 else "one step"
    variant = f" {last['variant']}" if last["variant"] else ""
    return f";{variant} after step {last['step']}/{last['steps']}: loss {means[0]}, accepted {means[1]} ({over})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
