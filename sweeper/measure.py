"""What a run did, in figures: the events of a job (dflash/events.py) in, numbers out.

Events come from a process that may die, lie or write rubbish, so every field is looked at before it is used;
a figure that cannot be known is None. Times are seconds, memory is bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

ENDS = 5  # steps averaged into loss_first, loss_last, accept_first and accept_last


@dataclass(frozen=True)
class Step:
    """One training step that ended at `t` (Unix seconds). `nonfinite`: fields that were inf or NaN."""

    step: int
    t: float
    tokens: int = 0
    seconds: float | None = None
    steady: bool = False
    nonfinite: tuple[str, ...] = ()
    series: dict[str, float] = field(default_factory=dict)


SERIES = ("loss", "accept", "accuracy", "lr", "grad_norm", "queue_bytes")


@dataclass(frozen=True)
class Figures:
    """The figures of one run; None where unknown.

    ktok_s: thousands of context tokens a second over the steady window, all drafters together.
    loss_*, accept_*: mean over the first and the last `ENDS` steps that have the value, or all if fewer.
    compile_s: seconds spent in compilers, summed over threads, so it may exceed the wall time.
    peak_rss_bytes: the job's own total if its `end` event tells it; otherwise the sum of each reporting
    process's peak, an upper bound. peak_gpu_bytes: the fullest device.
    """

    ktok_s: float | None = None
    steady_steps: int = 0
    steady_seconds: float | None = None
    steady_tokens: int = 0
    steps: int = 0
    tokens: int = 0
    time_to_first_step_s: float | None = None
    compile_s: float | None = None
    peak_rss_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    accept_first: float | None = None
    accept_last: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def figures(events: list[dict[str, Any]]) -> Figures:
    """Measure a run from its events, in any order. Never raises on odd events."""
    done = steps(events)
    steady = [s for s in done if s.steady]
    seconds = _window(done, steady)
    tokens = sum(s.tokens for s in steady)
    loss, accept = (_values(done, name) for name in ("loss", "accept"))
    memory = totals(events, "rss_bytes", "gpu_bytes")
    return Figures(
        ktok_s=tokens / seconds / 1000 if seconds and tokens else None,
        steady_steps=len(steady),
        steady_seconds=seconds,
        steady_tokens=tokens,
        steps=len(done),
        tokens=sum(s.tokens for s in done),
        time_to_first_step_s=_first_step(events, done),
        compile_s=totals(events, "compile_seconds").get("compile_seconds"),
        peak_rss_bytes=_whole(memory.get("rss_bytes")),
        peak_gpu_bytes=_whole(_fullest(memory.get("gpu_bytes"))),
        loss_first=_mean(loss[:ENDS]),
        loss_last=_mean(loss[-ENDS:]),
        accept_first=_mean(accept[:ENDS]),
        accept_last=_mean(accept[-ENDS:]),
    )


def steps(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The training steps by number; of several events for one step the first to be written counts."""
    found: dict[int, Step] = {}
    for event in events:
        step = parse_step(event)
        if step is not None:
            found.setdefault(step.step, step)
    return [found[n] for n in sorted(found)]


def parse_step(event: dict[str, Any]) -> Step | None:
    """Read one event as a step; None when it is no step or lacks a usable number or time."""
    number, t = event.get("step"), finite(event.get("t"))
    if event.get("event") != "step" or not isinstance(number, int) or isinstance(number, bool) or t is None:
        return None
    tokens, seconds = finite(event.get("tokens")), finite(event.get("seconds"))
    named = event.get("nonfinite")
    return Step(
        step=number,
        t=t,
        tokens=int(tokens) if tokens and tokens > 0 else 0,
        seconds=seconds if seconds and seconds > 0 else None,
        steady=event.get("steady") is True,
        nonfinite=tuple(str(n) for n in named) if isinstance(named, list) else (),
        series={name: value for name in SERIES if (value := finite(event.get(name))) is not None},
    )


def totals(events: list[dict[str, Any]], *names: str) -> dict[str, Any]:
    """The running totals `names`, as last told in `counters`, `memory` and `end` events.

    Each process tells its own totals: they are added up, key by key for a dict of numbers. A total in the
    `end` event is the job's own word for all of its processes and wins. Absent names are left out.
    """
    last: dict[tuple[str, Any], Any] = {}
    final: dict[str, Any] = {}
    for event in sorted(events, key=lambda e: finite(e.get("t")) or 0.0):
        for name in names:
            value = _total(event.get(name))
            if value is None or event.get("event") not in ("counters", "memory", "end"):
                continue
            if event["event"] == "end":
                final[name] = value
            else:
                last[name, str(event.get("pid"))] = value
    summed: dict[str, Any] = {}
    for (name, _), value in last.items():
        if isinstance(value, dict):
            into = summed.setdefault(name, {})
            for key, number in value.items():
                into[key] = into.get(key, 0) + number
        else:
            summed[name] = summed.get(name, 0) + value
    return summed | final


def finite(value: Any) -> float | None:
    """The value as a float if it is a finite number and no bool, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _window(done: list[Step], steady: list[Step]) -> float | None:
    """Seconds from the end of the last step before the steady window to the end of its last step."""
    if not steady:
        return None
    first = steady[0]
    before = [s for s in done if s.step == first.step - 1]
    if before:
        opened = before[0].t
    elif first.seconds is not None:
        opened = first.t - first.seconds
    else:
        return None
    seconds = max(s.t for s in steady) - opened
    return seconds if seconds > 0 else None


def _first_step(events: list[dict[str, Any]], done: list[Step]) -> float | None:
    starts = [t for e in events if e.get("event") == "start" and (t := finite(e.get("t"))) is not None]
    if not starts or not done:
        return None
    return max(0.0, min(s.t for s in done) - min(starts))


def _values(done: list[Step], name: str) -> list[float]:
    return [s.series[name] for s in done if name in s.series]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _total(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): n for k, v in value.items() if (n := finite(v)) is not None}
    return finite(value)


def _fullest(devices: Any) -> float | None:
    return max(devices.values(), default=None) if isinstance(devices, dict) else finite(devices)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
