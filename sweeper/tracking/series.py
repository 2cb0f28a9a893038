"""What a job reported, as MLflow's metrics: series over steps, evaluations, system metrics, and a run's last figures.

Names: headline figures by their plain names, `tau*/<set>`, `train/*` (series over steps), `train_end/*` (a run's last
word), `use/*` (times, and cache counts as `use/cache.<layer>.<count>`) and `system/*`, which the UI shows in a tab of
its own. A variant of a fanout is the last part of a name, `train/loss/b16`: the UI makes a section of what is equal
before the last slash, so variants stand side by side.

A point has the step and the time of the event that it comes from, so told twice it is the same point, which MLflow
keeps once.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash.events import EventReader
from sweeper import usage
from sweeper.measure import (
    SERIES,
    SIDES,
    Evaluation,
    Step,
    finite,
    opening,
    parse_evaluation,
    parse_step,
    pauses,
)

# Points a series has at most, about: a long run must not fill the store with rows, nor the UI with details.
POINTS, DETAIL_POINTS = 10_000, 200
EVALUATED = ("tau", "tau_low", "tau_high", "tau_untrained", "distinct4", "identical")
LOOKS = 5  # of the looks at a run's use of its machine one is shown: every ten seconds, as MLflow's own
WRITTEN = ("t", "event", "pid", "thread", "nonfinite")  # what the writer adds to an event of its own
HEADLINES = ("ktok_s", "time_to_first_step_s", "compile_s")


@dataclass
class Told:
    """How far MLflow knows a job: the last step of each variant, and how many evaluations and looks at its memory."""

    steps: dict[str, int] = field(default_factory=dict)
    evaluations: int = 0
    memory: int = 0


@dataclass
class Job:
    """What is known of a job so far: its steps by variant and number, of which the first event counts, evaluations,
    and what it took of its machine."""

    reader: EventReader
    steps: dict[str, dict[int, Step]] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def read(self) -> None:
        """Read what was reported since."""
        for event in self.reader.poll():
            if step := parse_step(event):
                self.steps.setdefault(step.variant, {}).setdefault(step.step, step)
            elif measured := parse_evaluation(event):
                self.evaluations.append(measured)
        looks = usage.read(self.reader.path.parent)[::LOOKS]
        self.memory = [(look.t, _used(look)) for look in looks]

    def metrics(self, told: Told) -> list[Any]:
        """The metrics of what was read and not told.

        ktok_s is that of the measured window so far, so that its last value is the run's. Of several variants each has
        its own; which is the slowest, whose speed is the run's, is known at the end.
        """
        found: list[Any] = []
        for variant, steps in self.steps.items():
            done = [steps[n] for n in sorted(steps)]
            new = [step for step in done if step.step > told.steps.get(variant, 0)]
            for step in new:
                found += _metrics(_of_step(step), step.t, step.step, variant)
            found += self._speeds(done, new)
        found += self.evaluated(told.evaluations)
        for number, (t, used) in enumerate(self.memory[told.memory :], told.memory):
            found += _metrics(used, t, number, "")
        return found

    def evaluated(self, after: int = 0) -> list[Any]:
        """The metrics of the evaluations that follow the first `after` ones."""
        found: list[Any] = []
        for one in self.evaluations[after:]:
            values = {name: value for name in EVALUATED if (value := finite(one.told.get(name))) is not None}
            named = {f"{name}/{_part(one.set)}": value for name, value in values.items()}
            found += _metrics(named, one.t, one.step, one.variant)
        return found

    def last_speed(self) -> float | None:
        """What `metrics` gave as ktok_s of the last step; None if it gave none."""
        done = [step for _, step in sorted(self.steps.get("", {}).items())]
        return next((point.value for point in self._speeds(done, done[-1:])), None)

    @property
    def told(self) -> Told:
        """How far MLflow knows this job once all of `metrics` is logged."""
        last = {variant: max(steps) for variant, steps in self.steps.items()}
        return Told(last, len(self.evaluations), len(self.memory))

    def _speeds(self, done: list[Step], new: list[Step]) -> Iterator[Any]:
        """Ktok/s of the measured window up to each new step, `done` being all steps so far."""
        opened, still = opening(done), pauses(done, self.evaluations)
        tokens = sum(step.tokens for step in done[: len(done) - len(new)] if step.steady)
        for step in new:
            tokens += step.tokens if step.steady else 0
            if tokens and opened and _shown(step, POINTS):
                seconds = opened.seconds(step, still)
                if seconds > 0:
                    yield from _metrics({"ktok_s": tokens / seconds / 1000}, step.t, step.step, step.variant)


def final(verdict: dict[str, Any]) -> dict[str, float]:
    """The metrics of a finished run: its figures, its times and the cache counts that are not all zero."""
    figures = dict(verdict.get("figures") or {})
    found: dict[str, Any] = {name: figures.pop(name, None) for name in HEADLINES}
    for kind in ("rss", "gpu"):
        size = finite(figures.pop(f"peak_{kind}_bytes", None))
        found[f"peak_{kind}_gb"] = None if size is None else size / 1e9
    for variant, learnt in (figures.pop("variants", None) or {}).items():
        found |= {f"train_end/{name}/{_part(variant)}": value for name, value in learnt.items()}
    found |= {f"train_end/{name}": value for name, value in figures.items()}
    found |= {f"use/{name}": verdict.get(name) for name in ("wall_s", "child_s", "overhead_s")}
    layers = (verdict.get("cache") or {}).get("layers") or {}
    for layer, counts in layers.items():
        if isinstance(counts, dict) and any(finite(n) for n in counts.values()):
            found |= {f"use/cache.{layer}.{name}": count for name, count in counts.items()}
    return {name: number for name, value in found.items() if (number := finite(value)) is not None}


def table(measured: list[Evaluation]) -> str:
    """The evaluations as CSV, a row each, which the UI shows as a table."""
    columns = list(dict.fromkeys(name for one in measured for name in one.told if name not in WRITTEN))
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(columns)
    for one in measured:
        values = [one.told.get(name) for name in columns]
        rows.writerow([" ".join(map(str, value)) if isinstance(value, list) else value for value in values])
    return out.getvalue()


def _of_step(step: Step) -> dict[str, float]:
    """The metrics of a step: its series, and now and then the details."""
    values: dict[str, float | None] = {}
    if _shown(step, POINTS):
        values |= {f"train/{name}": value for name, value in step.series.items()}
        values |= {f"train/{name}": math.nan for name in SERIES if name in step.nonfinite}
    if _shown(step, DETAIL_POINTS):
        for name, slots in step.slots.items():
            kind = name.removesuffix("_at")
            values |= {f"train/{kind}_slot/{slot:02}": value for slot, value in enumerate(slots, 1)}
        values |= {f"train/tok_s/{side}": rate for side, rate in step.tok_s.items()}
        for side in SIDES if step.seconds else ():
            waits = [waited for worker, waited in step.waits.items() if worker.startswith(side)]
            if waits:
                values[f"train/waited/{side}"] = min(1.0, sum(waits) / len(waits) / (step.seconds or 1.0))
    return {name: value for name, value in values.items() if value is not None}


def _used(look: usage.Use) -> dict[str, float]:
    """What a run took of its machine, by MLflow's names for such metrics where it has one."""
    found = {"system/process_memory_megabytes": look.rss_bytes / 1e6}
    if look.cpu is not None:
        found["system/process_processors"] = look.cpu
    for device, size in look.gpu_bytes.items():
        found[f"system/gpu_{_part(device)}_memory_usage_megabytes"] = size / 1e6
    for device, busy in look.gpu_busy.items():
        found[f"system/gpu_{_part(device)}_utilization_percentage"] = 100 * busy
    return found


def _shown(step: Step, points: int) -> bool:
    """Whether a step is one of the at most about `points` that a series shows: evenly spread, and the last."""
    every = max(1, math.ceil(step.steps / points))
    return step.step % every == 0 or step.step in (1, step.steps)


def _metrics(values: dict[str, float], t: float, step: int, variant: str) -> list[Any]:
    from mlflow.entities import Metric

    last = f"/{_part(variant)}" if variant else ""
    return [Metric(name + last, value, int(t * 1000), step) for name, value in values.items()]


def _part(text: str) -> str:
    """A name of the user's as one part of a metric's name."""
    return re.sub(r"[^\w.-]", "_", text).lstrip(".")[:60] or "_"
