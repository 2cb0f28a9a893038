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

ENDS = 10  # steps averaged into loss_first, loss_last, accept_first and accept_last


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
    opened = window_start(done)
    seconds = max(s.t for s in steady) - opened if steady and opened is not None else None
    tokens = sum(s.tokens for s in steady)
    loss, accept = (_values(done, name) for name in ("loss", "accept"))
    told = totals(events, "rss_bytes", "compile_seconds")
    return Figures(
        ktok_s=tokens / seconds / 1000 if tokens and seconds and seconds > 0 else None,
        steady_steps=len(steady),
        steady_seconds=seconds,
        steady_tokens=tokens,
        steps=len(done),
        tokens=sum(s.tokens for s in done),
        time_to_first_step_s=_first_step(events, done),
        compile_s=told.get("compile_seconds"),
        peak_rss_bytes=_whole(told.get("rss_bytes")),
        peak_gpu_bytes=_whole(_fullest_gpu(events)),
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


def window_start(done: list[Step]) -> float | None:
    """When the measured window opened (Unix seconds), None where unknown.

    That is the end of the last step before the first steady one or, if that step is not known, the first
    steady step's own start.
    """
    first = next((s for s in done if s.steady), None)
    if first is None:
        return None
    for step in done:
        if step.step == first.step - 1:
            return step.t
    return None if first.seconds is None else first.t - first.seconds


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


def totals(events: list[dict[str, Any]], *names: str) -> dict[str, float]:
    """The running totals `names`, as last told in `counters`, `memory` and `end` events.

    Each process tells its own totals: they are added up. A total in the `end` event is the job's own word for
    all of its processes and wins. Names that were never told are left out.
    """
    summed: dict[str, float] = {}
    final: dict[str, float] = {}
    for pid, event in _last_told(events):
        for name in names:
            value = finite(event.get(name))
            if value is not None and pid is None:
                final[name] = value
            elif value is not None:
                summed[name] = summed.get(name, 0.0) + value
    return summed | final


def _last_told(events: list[dict[str, Any]]) -> list[tuple[str | None, dict[str, Any]]]:
    """What each process last told of each total, as (pid, fields), and the job's `end` event as (None, fields)."""
    told: dict[str | None, dict[str, Any]] = {}
    for event in sorted(events, key=lambda e: finite(e.get("t")) or 0.0):
        if event.get("event") in ("counters", "memory", "end"):
            pid = None if event["event"] == "end" else str(event.get("pid"))
            told.setdefault(pid, {}).update(event)
    return list(told.items())


def finite(value: Any) -> float | None:
    """The value as a float if it is a finite number and no bool, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _first_step(events: list[dict[str, Any]], done: list[Step]) -> float | None:
    starts = [t for e in events if e.get("event") == "start" and (t := finite(e.get("t"))) is not None]
    if not starts or not done:
        return None
    return max(0.0, min(s.t for s in done) - min(starts))


def _values(done: list[Step], name: str) -> list[float]:
    return [s.series[name] for s in done if name in s.series]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _fullest_gpu(events: list[dict[str, Any]]) -> float | None:
    """The peak of the fullest device: on each, the processes' peaks added up, unless the job told them itself."""
    devices: dict[str, float] = {}
    final: dict[str, float] = {}
    for pid, event in _last_told(events):
        told = event.get("gpu_bytes")
        for device, peak in told.items() if isinstance(told, dict) else ():
            value = finite(peak)
            if value is not None and pid is None:
                final[device] = value
            elif value is not None:
                devices[device] = devices.get(device, 0.0) + value
    return max((devices | final).values(), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
