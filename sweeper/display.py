"""What a person watches: one live line a run on a terminal, plain lines anywhere else.

Everything goes to standard error, so that the table on standard output can be piped. Events are read with
suspicion: an odd one shows less, never raises. Several runs may be under way, told by threads of their own: each is
named by its index among the runs of the sweep, and its lines then say which it is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, TextIO

from dflash.events import STAGES
from sweeper.measure import Evaluation, Opening, Step, finite, parse_evaluation, parse_step

EVERY = 10.0  # seconds between two lines of steps when the output is no terminal
COUNTED = {"n": "prompts", "tokens": "tokens", "block": "slots a block"}
COLOURS = {"ok": "green", "skipped": "dim", "degraded": "yellow", "killed": "magenta"}


class Watch:
    """What is known of the run in progress: stage, step, speed so far in the measured window, time left.

    Of a run with fanout the first variant's steps are shown: all variants go through the same stream together.
    """

    def __init__(self, index: int, label: str, estimate: float | None) -> None:
        self.index, self.label, self.estimate = index, label, estimate
        self.began = time.monotonic()
        self.stage, self.work = "start", ""
        self.step = self.steps = 0
        self.speed: float | None = None
        self.told = 0.0  # when a line last told of it
        self._first: Step | None = None
        self._last: Step | None = None
        self._opened: Opening | None = None  # of the measured window, as far as is known yet
        self._tokens = 0

    def take(self, event: dict[str, Any]) -> str | None:
        """Read an event; returns "stage" or "step" if that moved."""
        kind = event.get("event")
        if kind == "stage" and isinstance(event.get("stage"), str):
            self.stage, self.work = event["stage"], ""
            return "stage"
        if kind == "progress":
            done, total = finite(event.get("done")), finite(event.get("total"))
            counted = f" {done:.0f}/{total:.0f}" if done is not None and total else ""
            self.work = f"{event.get('what') or ''}{counted}".strip()
        step = parse_step(event) if kind == "step" else None
        if step is None or (self._first and step.variant != self._first.variant):
            return None
        if self.stage == STAGES[0]:
            self.stage = "train"  # of a command that tells its steps alone
        self.step, self.steps = step.step, step.steps
        if step.steady and self._opened is not None:
            self._tokens += step.tokens
            seconds = self._opened.seconds(step, [])
            self.speed = self._tokens / seconds / 1000 if seconds > 0 else None
        elif self._opened is None or not self._tokens:
            self._opened = Opening(step.t, step)
        self._first, self._last = self._first or step, step
        return "step"

    def left(self) -> float | None:
        """Seconds left of this run: from its own pace once it steps, before that from earlier runs."""
        if self._first and self._last and self.steps and self._last.step > self._first.step:
            pace = (self._last.t - self._first.t) / (self._last.step - self._first.step)
            return max(0.0, pace * (self.steps - self._last.step))
        if self.estimate is not None:
            return max(0.0, self.estimate - (time.monotonic() - self.began))
        return None

    def doing(self) -> str:
        parts = [self.stage if not self.work else f"{self.stage} ({self.work})"]
        if self.step:
            parts.append(f"step {self.step}/{self.steps}" if self.steps else f"step {self.step}")
        if self.speed:
            parts.append(f"{self.speed:.3f} Ktok/s")
        return ", ".join(parts)


class Display:
    """Plain lines: one a stage, one about every ten seconds of steps, one a verdict.

    total: runs of the sweep. at_once: how many may be under way at a time, for the time left.
    """

    def __init__(self, total: int, verbose: bool, out: TextIO) -> None:
        self.total, self.verbose, self.out = total, verbose, out
        self.at_once = 1
        self.watches: dict[int, Watch] = {}  # by index
        self._took: list[float] = []
        self._lock = threading.RLock()

    @property
    def watch(self) -> Watch | None:
        """The run that was started last of those under way."""
        return next(reversed(self.watches.values()), None)

    def run_started(self, index: int, label: str, estimate_s: float | None = None) -> None:
        """`index` counts from 1 among `total`; estimate_s is the expected duration, None if unknown."""
        with self._lock:
            self.watches.pop(index, None)
            self.watches[index] = Watch(index, label, estimate_s)
            about = f" (about {duration(estimate_s)})" if estimate_s is not None else ""
            self._line(f"[{index}/{self.total}] {label}{about}")

    def event(self, event: dict[str, Any], run: int | None = None) -> None:
        """Show what a run reported; `run` is its index, None for the one started last."""
        with self._lock:
            watch = self._of(run)
            if watch is None or not isinstance(event, dict):
                return
            moved = watch.take(event)
            which = self._which(watch)
            if event.get("event") == "warning":
                self.note(f"{which}warning {event.get('code') or ''}: {event.get('message') or ''}")
            elif event.get("event") == "resume":
                self.note(f"{which}goes on after step {event.get('step')} from {event.get('folder')}")
            elif measured := parse_evaluation(event):
                self.note(f"{which}step {measured.step}: {in_words(measured)}")
            self._moved(watch, moved)

    def log_line(self, line: str, run: int | None = None) -> None:
        """A line the child printed; shown with verbose."""
        if self.verbose:
            with self._lock:
                watch = self._of(run)
                self._line(f"  {self._which(watch) if watch else ''}| {line.rstrip()}")

    def note(self, text: str) -> None:
        with self._lock:
            self._line(f"  {text}")

    def run_ended(self, label: str, verdict: dict[str, Any], run: int | None = None) -> None:
        """Show the verdict line; `verdict` is the content of verdict.json."""
        with self._lock:
            watch = self._of(run)
            which = ""
            if watch is not None:
                self._took.append(time.monotonic() - watch.began)
                which = f"[{watch.index}/{self.total}] {label}: " if len(self.watches) > 1 else ""
                del self.watches[watch.index]
            self._verdict(which, str(verdict.get("verdict")), told(verdict))

    def close(self) -> None:
        with self._lock:
            self.watches.clear()

    def left(self) -> float | None:
        """Seconds left of the sweep: the rest of the runs under way, and the mean of those done for each to come."""
        if not self.watches:
            return None
        rests = [watch.left() for watch in self.watches.values()]
        known = [rest for rest in rests if rest is not None]
        to_come = self.total - max(self.watches)
        estimate = next((w.estimate for w in self.watches.values() if w.estimate is not None), None)
        if len(known) < len(rests) or (to_come > 0 and not self._took and estimate is None):
            return None
        usual = sum(self._took) / len(self._took) if self._took else (estimate or 0.0)
        return max(max(known), (sum(known) + to_come * usual) / self.at_once)

    def _of(self, run: int | None) -> Watch | None:
        return self.watch if run is None else self.watches.get(run)

    def _which(self, watch: Watch) -> str:
        return f"[{watch.index}/{self.total}] " if len(self.watches) > 1 else ""

    def _moved(self, watch: Watch, what: str | None) -> None:
        now = time.monotonic()
        if what == "stage" or (what and (now - watch.told >= EVERY or watch.step == watch.steps)):
            watch.told = now
            left = remaining(watch.left(), self.left())
            self._line(f"  {self._which(watch)}{watch.doing()}{left}")

    def _verdict(self, which: str, verdict: str, text: str) -> None:
        self._line(f"  {which}{verdict}: {text}" if text else f"  {which}{verdict}")

    def _line(self, text: str) -> None:
        try:
            print(text, file=self.out, flush=True)
        except (OSError, ValueError):
            self.out = open(os.devnull, "w")  # noqa: SIM115  whoever watched is gone; the sweep goes on


class LiveDisplay(Display):
    """The same lines above one live line with a bar for each run under way."""

    def __init__(self, total: int, verbose: bool, out: TextIO) -> None:
        super().__init__(total, verbose, out)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(file=out, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[doing]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        self._tasks: dict[int, Any] = {}
        self._progress.start()

    def run_started(self, index: int, label: str, estimate_s: float | None = None) -> None:
        with self._lock:
            super().run_started(index, label, estimate_s)
            self._drop(index)
            self._tasks[index] = self._progress.add_task(f"[{index}/{self.total}]", total=None, doing="starting")

    def run_ended(self, label: str, verdict: dict[str, Any], run: int | None = None) -> None:
        with self._lock:
            if watch := self._of(run):
                self._drop(watch.index)
            super().run_ended(label, verdict, run)

    def close(self) -> None:
        with self._lock:
            for index in list(self._tasks):
                self._drop(index)
            self._progress.stop()
            super().close()

    def _moved(self, watch: Watch, what: str | None) -> None:
        if watch.index in self._tasks:
            doing = watch.doing() + remaining(watch.left(), self.left())
            self._progress.update(
                self._tasks[watch.index], completed=watch.step, total=watch.steps or None, doing=doing
            )

    def _verdict(self, which: str, verdict: str, text: str) -> None:
        from rich.text import Text

        line = Text(f"  {which}").append(verdict, style=COLOURS.get(verdict, "bold red"))
        self._console.print(line.append(f": {text}" if text else ""))

    def _line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True)

    def _drop(self, index: int) -> None:
        if index in self._tasks:
            self._progress.remove_task(self._tasks.pop(index))


def make(total: int, verbose: bool) -> Display:
    """The display that suits standard error: live on a terminal, plain otherwise."""
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return (LiveDisplay if live else Display)(total, verbose, sys.stderr)


def told(verdict: dict[str, Any]) -> str:
    """A verdict's figures, signature and reason on one line."""
    figures = verdict.get("figures") or {}
    parts = []
    for name, form in (("ktok_s", "{:.3f} Ktok/s"), ("time_to_first_step_s", "first step after {:.1f} s")):
        if (value := finite(figures.get(name))) is not None:
            parts.append(form.format(value))
    if (value := finite(verdict.get("wall_s"))) is not None:
        parts.append(f"{duration(value)} in all")
    cache, signature = verdict.get("cache"), verdict.get("signature")
    if isinstance(cache, dict) and cache.get("proved"):
        parts.append(f"cache {cache['proved']}")
    if isinstance(signature, dict):
        parts.append(f"{signature.get('cause')} ({signature.get('fingerprint')})")
    if verdict.get("reason"):
        parts.append(" ".join(str(verdict["reason"]).split())[:200])
    return ", ".join(parts)


def in_words(measured: Evaluation) -> str:
    """An evaluation with its conditions: a tau without them says nothing."""
    of = f" of {measured.variant}" if measured.variant else ""
    told = {name: finite(measured.told.get(name)) for name in ("tau_low", "tau_high", "tau_untrained", "temperature")}
    low, high = told["tau_low"], told["tau_high"]
    interval = f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""
    conditions = [f"{measured.told[name]} {what}" for name, what in COUNTED.items() if finite(measured.told.get(name))]
    if told["temperature"] is not None:
        conditions.append(f"T={told['temperature']:g}")
    if told["tau_untrained"] is not None:
        conditions.append(f"untrained {told['tau_untrained']:.2f}")
    said = f" ({', '.join(conditions)})" if conditions else ""
    return f"tau{of} {measured.tau:.2f}{interval} on {measured.set}{said}"


def remaining(run: float | None, sweep: float | None) -> str:
    """Time left, in words with a leading comma; empty if unknown."""
    if run is None:
        return ""
    rest = f", {duration(run)} left"
    return rest if sweep is None or sweep - run < 1 else f"{rest} of this run, {duration(sweep)} of the sweep"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3:05 min or 1:02 h."""
    whole = int(seconds + 0.5)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02d} h"
