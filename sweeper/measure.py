"""What a run did, in figures: the events of a job (dflash/events.py) in, numbers out.

Events come from a process that may die, lie or write rubbish, so every field is looked at before it is used;
a figure that cannot be known is None. Times are seconds, memory is bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dflash.events import ENDS

SERIES = ("loss", "accept", "accuracy", "coverage", "anchors", "lr", "grad_norm", "queue_bytes")
SLOTS = ("loss_at", "accuracy_at")  # lists by slot of a block, from slot 1
MEASURED = (
    "tau",
    "tau_low",
    "tau_high",
    "tau_untrained",
    "n",
    "temperature",
    "block",
    "max_new",
    "distinct4",
    "identical",
)
SIDES = ("target", "drafter")
CLEAR_WAIT = 0.25  # share of the window from which waiting is told


@dataclass(frozen=True)
class Step:
    """One training step of one variant ('' without fanout) that ended at `t` (Unix seconds).

    nonfinite: fields that were inf or NaN. slots: the fields SLOTS, None where a slot had no label. waits: seconds
    that each worker waited. tok_s: tokens a second of a side's one worker while it worked. lag: seconds from when its
    last batch was made.
    """

    step: int
    t: float
    variant: str = ""
    steps: int = 0
    tokens: int = 0
    seconds: float | None = None
    lag: float | None = None
    steady: bool = False
    nonfinite: tuple[str, ...] = ()
    series: dict[str, float] = field(default_factory=dict)
    slots: dict[str, list[float | None]] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    tok_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Acceptance length of one variant on one set of prompts after a step; `told` has every field of the event."""

    variant: str
    step: int
    t: float
    set: str
    tau: float
    told: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What one variant learnt; None where unknown.

    loss_*, accept_*: mean over the first and the last `ENDS` steps that have the value, or all if fewer.
    coverage_mean: share of the supervised tokens that were labels; anchors_mean: blocks a step. tau: acceptance
    length by decoding with its conditions, {prompt set: the numbers MEASURED, as told last}.
    """

    loss_first: float | None = None
    loss_last: float | None = None
    accept_first: float | None = None
    accept_last: float | None = None
    coverage_mean: float | None = None
    anchors_mean: float | None = None
    tau: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures(Learnt):
    """The figures of one run; None where unknown.

    Of a run with fanout, `variants` has what each variant learnt, and the fields of Learnt have no value.
    steps, tokens and the steady window are those of the slowest variant, for all train on the same stream: its
    context tokens count once, however many variants use them, and while a slow one's queue fills a fast one is ahead.
    ktok_s: thousands of context tokens a second over the steady window, all drafters of a variant together.
    steady_seconds: wall time of the window, less what evaluations in it took, and with what its
    drafters caught up of a backlog: the figure is that of the slower side.
    targets_waited, drafters_waited: share of the window that a worker of this kind stood waiting, on average,
    for room in a queue and for a batch.
    compile_s: seconds spent in compilers, summed over threads, so it may exceed the wall time.
    peak_rss_bytes: the job's own total if its `end` event tells it; otherwise the sum of each reporting
    process's peak, an upper bound. peak_gpu_bytes: the fullest device.
    """

    ktok_s: float | None = None
    steady_steps: int = 0
    steady_seconds: float | None = None
    steady_tokens: int = 0
    targets_waited: float | None = None
    drafters_waited: float | None = None
    steps: int = 0
    tokens: int = 0
    time_to_first_step_s: float | None = None
    compile_s: float | None = None
    peak_rss_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    variants: dict[str, Learnt] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def figures(events: list[dict[str, Any]], started: float | None = None) -> Figures:
    """Measure a run from its events, in any order. Never raises on odd events.

    started: when the command was started (Unix seconds), for one that does not tell.
    """
    found, measured = steps(events), evaluations(events)
    done = next(iter(found.values()), [])
    steady = [s for s in done if s.steady]
    # A variant that stands still soon holds up the others, whose target waits for room in its queue.
    still = merged(span for several in found.values() for span in pauses(several, measured))
    opened = opening(done)
    seconds = opened.seconds(steady[-1], still) if opened else None
    tokens = sum(s.tokens for s in steady)
    told = totals(events, "rss_bytes", "compile_seconds")
    names = sorted({*found, *(e.variant for e in measured)})
    learnt = {name: _learnt(found.get(name, []), [e for e in measured if e.variant == name]) for name in names}
    only = learnt.get("", Learnt()) if set(names) <= {""} else None
    return Figures(
        ktok_s=tokens / seconds / 1000 if tokens and seconds and seconds > 0 else None,
        steady_steps=len(steady),
        steady_seconds=seconds,
        steady_tokens=tokens,
        targets_waited=_waited("target", found, still),
        drafters_waited=_waited("drafter", found, still),
        steps=len(done),
        tokens=sum(s.tokens for s in done),
        time_to_first_step_s=_first_step(events, [s for several in found.values() for s in several], started),
        compile_s=told.get("compile_seconds"),
        peak_rss_bytes=_whole(told.get("rss_bytes")),
        peak_gpu_bytes=_whole(_fullest_gpu(events)),
        variants={} if only else learnt,
        **(vars(only) if only else {}),
    )


def steps(events: Iterable[dict[str, Any]]) -> dict[str, list[Step]]:
    """The training steps of each variant by number; of several events for one step the first to be written counts.

    The slowest variant is the first: the one furthest behind, and of equals the one that got there last.
    """
    found: dict[str, dict[int, Step]] = {}
    for event in events:
        step = parse_step(event)
        if step is not None:
            found.setdefault(step.variant, {}).setdefault(step.step, step)
    ordered = [[several[n] for n in sorted(several)] for several in found.values()]
    ordered.sort(key=lambda done: (done[-1].step, -done[-1].t, done[-1].variant))
    return {done[0].variant: done for done in ordered}


def evaluations(events: Iterable[dict[str, Any]]) -> list[Evaluation]:
    """The evaluations in the order of their end."""
    return sorted((e for event in events if (e := parse_evaluation(event))), key=lambda e: e.t)


def pauses(done: list[Step], measured: Iterable[Evaluation]) -> list[tuple[float, float]]:
    """When a variant stood still to be evaluated, as (from, to) in Unix seconds, apart from each other and in order.

    From the end of the step to the end of the evaluation: what it waits for and loads before is part of it.
    """
    ends = {step.step: step.t for step in done}
    own = [one for one in measured if done and one.variant == done[0].variant]
    return merged((began, one.t) for one in own if (began := ends.get(one.step, one.t)) < one.t)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans apart from each other and in order."""
    apart: list[tuple[float, float]] = []
    for since, to in sorted(spans):
        if apart and since <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(to, apart[-1][1]))
        else:
            apart.append((since, to))
    return apart


def overlap(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds from `start` to `end` that lie in spans."""
    return sum(max(0.0, min(to, end) - max(since, start)) for since, to in spans)


@dataclass(frozen=True)
class Opening:
    """Where a measured window begins: when (Unix seconds), and the step before it, None where that is not told."""

    t: float
    before: Step | None

    def seconds(self, last: Step, still: list[tuple[float, float]]) -> float:
        """From here to the end of the step `last`, without the evaluations `still` and with what was caught up of a
        backlog, by how much lags shrank (dflash.pipeline.window).
        """
        then, now = _lag(self.before, still), _lag(last, still)
        caught_up = 0.0 if then is None or now is None else max(0.0, then - now)
        return last.t - self.t - overlap(still, self.t, last.t) + caught_up


def _lag(step: Step | None, still: list[tuple[float, float]]) -> float | None:
    """A step's lag without the evaluations in it; None where it is not told."""
    if step is None or step.lag is None:
        return None
    return step.lag - overlap(still, step.t - step.lag, step.t)


def opening(done: list[Step]) -> Opening | None:
    """Of the measured window; None where unknown.

    That is the end of the step before the first steady one; if that step is not known, the first steady step's own
    start; if that is not known either (a command that tells every tenth step), the end of the last step told before.
    """
    first = next((s for s in done if s.steady), None)
    if first is None:
        return None
    before = next((step for step in done if step.step == first.step - 1), None)
    if before is not None:
        return Opening(before.t, before)
    if first.seconds is not None:
        return Opening(first.t - first.seconds, None)
    last = max((step.t for step in done if step.step < first.step), default=None)
    return None if last is None else Opening(last, None)


def parse_step(event: dict[str, Any]) -> Step | None:
    """Read one event as a step; None when it is no step or lacks a usable number or time."""
    number, t = event.get("step"), finite(event.get("t"))
    if event.get("event") != "step" or not isinstance(number, int) or isinstance(number, bool) or t is None:
        return None
    tokens, seconds = finite(event.get("tokens")), finite(event.get("seconds"))
    named, variant = event.get("nonfinite"), event.get("variant")
    # Python's own json writes NaN as it is; a command that is not ours may.
    odd = tuple(name for name in SERIES if isinstance(v := event.get(name), float) and not math.isfinite(v))
    return Step(
        step=number,
        t=t,
        variant=variant if isinstance(variant, str) else "",
        steps=int(finite(event.get("steps")) or 0),
        tokens=int(tokens) if tokens and tokens > 0 else 0,
        seconds=seconds if seconds and seconds > 0 else None,
        lag=finite(event.get("lag")),
        steady=event.get("steady") is True,
        nonfinite=(*(str(n) for n in named), *odd) if isinstance(named, list) else odd,
        series={name: value for name in SERIES if (value := finite(event.get(name))) is not None},
        slots={name: [finite(v) for v in value] for name in SLOTS if isinstance(value := event.get(name), list)},
        waits=_numbers(event.get("wait_s")),
        tok_s={side: rate for side, rate in _numbers(event.get("stage_tok_s")).items() if side in SIDES},
    )


def parse_evaluation(event: dict[str, Any]) -> Evaluation | None:
    """Read one event as an evaluation; None when it is none or lacks a usable time, step, set or tau."""
    t, step, tau = (finite(event.get(name)) for name in ("t", "step", "tau"))
    variant, prompts = event.get("variant"), event.get("set")
    if event.get("event") != "eval" or t is None or step is None or tau is None or not isinstance(prompts, str):
        return None
    return Evaluation(variant if isinstance(variant, str) else "", int(step), t, prompts, tau, event)


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


def _first_step(events: list[dict[str, Any]], done: list[Step], started: float | None) -> float | None:
    starts = [t for e in events if e.get("event") == "start" and (t := finite(e.get("t"))) is not None]
    begun = min(starts, default=started)
    return None if begun is None or not done else max(0.0, min(s.t for s in done) - begun)


def _learnt(done: list[Step], measured: list[Evaluation]) -> Learnt:
    loss, accept, coverage, anchors = (_values(done, name) for name in ("loss", "accept", "coverage", "anchors"))
    return Learnt(
        loss_first=_mean(loss[:ENDS]),
        loss_last=_mean(loss[-ENDS:]),
        accept_first=_mean(accept[:ENDS]),
        accept_last=_mean(accept[-ENDS:]),
        coverage_mean=_mean(coverage),
        anchors_mean=_mean(anchors),
        tau={e.set: {name: n for name, n in _numbers(e.told).items() if name in MEASURED} for e in measured},
    )


def slower_side(targets_waited: float, drafters_waited: float) -> str:
    """`targets` or `drafters`, whom the other side stood waiting for (shares of the window); empty where that is not
    clear: neither waited long, or both did."""
    longer, shorter = max(targets_waited, drafters_waited), min(targets_waited, drafters_waited)
    if longer < CLEAR_WAIT or shorter > longer / 2:
        return ""
    return "drafters" if targets_waited > drafters_waited else "targets"


def _waited(side: str, found: dict[str, list[Step]], still: list[tuple[float, float]]) -> float | None:
    """Share of the measured steps' time that workers of a side waited; None where no step tells of them.

    A step before which training stood still for an evaluation does not count. Steps of several variants may tell
    of the same worker: those of the first variant that does count.
    """
    shares: dict[str, float] = {}
    for done in found.values():
        span, waits = 0.0, dict[str, float]()
        for before, step in itertools.pairwise(done):
            if step.steady and not overlap(still, before.t, step.t):
                span += step.t - before.t
                for worker, waited in step.waits.items():
                    if worker.startswith(side):
                        waits[worker] = waits.get(worker, 0.0) + max(0.0, waited)
        if span > 0:
            shares = {worker: min(1.0, waited / span) for worker, waited in waits.items()} | shares
    return _mean(list(shares.values()))


def _numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a mapping."""
    given = value.items() if isinstance(value, dict) else ()
    return {str(name): number for name, one in given if (number := finite(one)) is not None}


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
