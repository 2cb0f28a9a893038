"""A foreign command's progress, read from what it prints.

A line that fits the user's pattern becomes a `step` event (dflash/events.py), as if the command had reported it:
what reads events then shows, measures and tracks such a run like any other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

from dflash.settings import SettingError

# What a pattern may name, and what a step event calls it. tok_s becomes tokens, by the time since the line before.
GROUPS = ("step", "steps", "tokens", "tok_s", "seconds", "loss", "lr", "grad_norm")
LONGEST_LINE = 4096  # characters of a line that are looked at, from its end
UNMATCHED = "workload.pattern_unmatched"  # code of the warning, and cause of the verdict
_QUOTED = 200  # characters of the last line that are quoted
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = re.compile(r"([-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?) ?(k|K|M|G|us|ms|s|)")
_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def check(pattern: Any, tokens: Any, warmup_lines: Any) -> None:
    """Raise SettingError where `workload.pattern` and the settings beside it cannot work."""
    if pattern is not None and not isinstance(pattern, str):
        raise SettingError("workload.pattern", pattern, "must be a regular expression in quotes, or null")
    for name, value in (("tokens", tokens), ("warmup_lines", warmup_lines)):
        if type(value) is not int or value < 0:
            raise SettingError(f"workload.{name}", value, "must be a whole number from 0")
    if not pattern:
        if tokens:
            raise SettingError("workload.tokens", tokens, "says what a step of workload.pattern is; give a pattern")
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SettingError("workload.pattern", pattern, f"is no regular expression ({error})") from None
    groups = set(compiled.groupindex)
    if not groups or groups - set(GROUPS):
        told = f"unknown: {', '.join(sorted(groups - set(GROUPS)))}; " if groups else ""
        raise SettingError("workload.pattern", pattern, f"must have named groups, {told}known: {', '.join(GROUPS)}")
    if compiled.search(""):
        raise SettingError("workload.pattern", pattern, "must not fit an empty line")
    rates = [*(name for name in ("tokens", "tok_s") if name in groups), *(["workload.tokens"] if tokens else [])]
    if len(rates) > 1:
        raise SettingError("workload.pattern", pattern, f"tells tokens twice ({' and '.join(rates)}); give one")


class Printed:
    """Follows a command's output; `feed` takes it in pieces of any size and calls `emit(event, **fields)`.

    pattern: see `check`. tokens: of one step, if the output does not tell. The first `warmup_lines` lines that fit
    are outside of the measured window. Lines end with a line feed or a carriage return (a progress bar's);
    colours are taken out. A step number that comes again is the same step; a smaller one begins a new count,
    which goes on from the highest number so far.
    """

    def __init__(self, pattern: str, tokens: int, warmup_lines: int, emit: Callable[..., object]) -> None:
        self._pattern, self._tokens, self._warmup_lines, self._emit = re.compile(pattern), tokens, warmup_lines, emit
        self._rest = b""
        self._lines = 0
        self._last = ""  # the last line printed that is not empty
        self._told = self._number = 0  # the step as the command last called it, and as it is reported
        self._before: float | None = None

    def feed(self, data: bytes) -> None:
        """Take in output that has just come."""
        *lines, rest = re.split(rb"[\r\n]", self._rest + data)
        self._rest = rest[-LONGEST_LINE:]
        for line in lines:
            self._line(line[-LONGEST_LINE:])

    def close(self) -> None:
        """The output is over; its last line may lack an end. Warns if no line fitted."""
        self._line(self._rest)
        self._rest = b""
        if told := self.unmatched():
            self._emit("warning", code=UNMATCHED, message=told)

    def unmatched(self) -> str:
        """That no line has fitted so far, with the pattern and the last line; empty once one has."""
        if self._lines:
            return ""
        last = f"the last one printed is '{self._last}'" if self._last else "none was printed"
        return f"no line matched workload.pattern='{self._pattern.pattern}'; {last}"

    def _line(self, line: bytes) -> None:
        text = _ANSI.sub("", line.decode("utf-8", "replace"))
        if stripped := text.strip():
            self._last = stripped[-_QUOTED:]
        match = self._pattern.search(text)
        if not match:
            return
        found = {name: value for name, text in match.groupdict().items() if (value := number(text)) is not None}
        now, step = time.time(), found.pop("step", None)
        told = int(step) if step is not None and math.isfinite(step) else self._told + 1
        if self._lines and told == self._told:
            return
        passed = told - self._told if self._lines and told > self._told else 1
        self._number = self._number + passed if self._lines else max(told, 0)
        elapsed = None if self._before is None else now - self._before
        if "seconds" in found:
            elapsed = found.pop("seconds") * passed
        elif elapsed is not None and not elapsed > 0:
            elapsed = None
        rate = found.pop("tok_s", None)
        tokens = found.pop("tokens", self._tokens * passed if rate is None else rate * (elapsed or 0.0))
        fields: dict[str, Any] = {name: value for name, value in found.items() if name != "steps"}
        if math.isfinite(steps := found.get("steps", math.nan)):
            fields["steps"] = int(steps)
        if elapsed is not None and math.isfinite(elapsed):
            fields["seconds"] = round(elapsed, 6)
        if self._lines == 0:
            self._emit("stage", stage="train")
        self._lines, self._told, self._before = self._lines + 1, told, now
        fields["tokens"] = round(tokens) if math.isfinite(tokens) else 0
        self._emit("step", step=self._number, steady=self._lines > self._warmup_lines, **fields)


def number(text: str | None) -> float | None:
    """A number as programs print it: 1,234.5, 1e-3, 12.3K, 25.31ms (in seconds), nan, inf; None if it is none."""
    if text is None:
        return None
    match = _NUMBER.fullmatch(text.strip())
    if match:
        return float(match[1].replace(",", "").replace("_", "")) * _SCALE[match[2]]
    word = text.strip().lower()
    return float(word) if word in ("nan", "inf", "-inf", "+inf", "infinity", "-infinity") else None
