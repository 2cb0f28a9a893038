"""Evidence of a failure -> its cause from a closed list, the line that shows it, what to do about it.

Rules are data (rules.toml), one a cause. `classify` reads text (a traceback, the end of a log); the harness's
verdict adds what no text tells: exit status, hangs, cache proofs. A text that fits no rule is no match, never
a guess. docs/SIGNATURES.md lists the causes; `python -m sweeper.signatures document` writes it.
"""

from __future__ import annotations

import functools
import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sweeper.signatures import prints
from sweeper.signatures.prints import fingerprint, last_traceback, stack_fingerprint
from sweeper.signatures.text import Line, lines, root_rank

__all__ = ["Match", "Rule", "classify", "fingerprint", "root_of", "rule", "rules", "stack_fingerprint", "version"]

LONGEST_TEXT = 500_000  # characters of a text that are searched: its first fifth and its end
LONGEST_EVIDENCE = 300  # characters of an evidence line


@dataclass(frozen=True)
class Rule:
    """One cause. `patterns` show a failure; `warnings` show a state that only matters if something else
    failed or nothing else is known. `explains` lists the causes that are echoes of this one. `injected` says how a
    test makes it happen; where none does, `not_injected` says what that would need, and `instead` what is tested."""

    cause: str
    about: str
    evidence: str
    remedy: str
    source: str
    patterns: tuple[re.Pattern[str], ...] = ()
    warnings: tuple[re.Pattern[str], ...] = ()
    explains: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    injected: str = ""
    not_injected: str = ""
    instead: str = ""


@dataclass(frozen=True)
class Match:
    """A cause found in a text, with the line that shows it and the fingerprint of the traceback that ends in that
    line, or of the line. `failed` is False when all that was found is a warning: a state of the run, which need not
    be why it failed."""

    cause: str
    evidence: str
    remedy: str
    failed: bool
    fingerprint: str


@dataclass(frozen=True)
class _Found:
    line: int
    order: int
    rule: Rule


def classify(text: str) -> Match | None:
    """Name the root cause a text shows, or None.

    The first failure is the root of the later ones: by the rank that torchrun names, else by the times of the lines
    where all of them tell one, else by their order. A cause that another rule in the text explains is its echo (an
    out-of-memory after a fall-back to dense attention is the fall-back).
    """
    found = lines(_bounded(text))
    failures = _search(found, lambda candidate: candidate.patterns)
    warnings = _search(found, lambda candidate: candidate.warnings)
    if not failures and not warnings:
        return None
    winner = _first(failures, found) if failures else min(warnings, key=lambda f: (f.line, f.order))
    seen: set[str] = set()
    while winner.rule.cause not in seen:
        seen.add(winner.rule.cause)
        winner = _explaining(winner.rule.cause, failures + warnings, seen) or winner
    return _match(winner, found, bool(failures))


def root_of(cause: str, text: str) -> Match | None:
    """What a text shows that explains a cause known from elsewhere (a signal, a worker's report), or None."""
    found = lines(_bounded(text))
    shown = _search(found, lambda candidate: candidate.patterns + candidate.warnings)
    root = _explaining(cause, shown, {cause})
    return _match(root, found, True) if root else None


def _bounded(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[: LONGEST_TEXT // 5]}\n{text[-LONGEST_TEXT * 4 // 5 :]}"


def _explaining(cause: str, shown: list[_Found], but: set[str]) -> _Found | None:
    """The first of what is shown whose echo `cause` is."""
    for other in sorted(shown, key=lambda f: (f.line, f.order)):
        if cause in other.rule.explains and other.rule.cause not in but:
            return other
    return None


def _match(shown: _Found, found: list[Line], failed: bool) -> Match:
    evidence = found[shown.line].text.strip()[:LONGEST_EVIDENCE]
    printed = _traceback(found, shown.line) or evidence
    return Match(shown.rule.cause, evidence, shown.rule.remedy, failed, fingerprint(printed))


def _search(found: list[Line], patterns: Callable[[Rule], tuple[re.Pattern[str], ...]]) -> list[_Found]:
    """The first line that shows each rule, for the rules that are shown."""
    text = "\n".join(line.text for line in found)
    starts = list(accumulate((len(line.text) + 1 for line in found), initial=0))
    shown = []
    for order, candidate in enumerate(rules().values()):
        places = [
            match.start("at" if "at" in pattern.groupindex else 0)
            for pattern in patterns(candidate)
            if (match := pattern.search(text))
        ]
        if places:
            shown.append(_Found(bisect_right(starts, min(places)) - 1, order, candidate))
    return shown


def _first(failures: list[_Found], found: list[Line]) -> _Found:
    root = root_rank(found)
    of_root = [f for f in failures if root and found[f.line].who == root]
    candidates = of_root or failures
    if all(found[f.line].at is not None for f in candidates):
        return min(candidates, key=lambda f: (found[f.line].at, f.line, f.order))
    return min(candidates, key=lambda f: (f.line, f.order))


def _traceback(found: list[Line], line: int) -> str:
    """The traceback whose message holds a line, with those it is chained to; "" if the line is in none."""
    who = found[line].who
    before = "\n".join(other.text for other in found[max(0, line - 2000) : line + 1] if other.who == who)
    last = last_traceback(before)
    return last if prints.ends_in_message(last) else ""


def rule(cause: str) -> Rule:
    """The rule of a cause; raises KeyError for a cause that is not in the list."""
    return rules()[cause]


@functools.cache
def rules() -> dict[str, Rule]:
    """All rules by cause, in the order in which they settle a tie."""
    found = {}
    for entry in _data()["rule"]:
        for key in ("patterns", "warnings"):
            entry[key] = tuple(_pattern(p) for p in entry.get(key, ()))
        for key in ("explains", "examples"):
            entry[key] = tuple(entry.get(key, ()))
        found[entry["cause"]] = Rule(**entry)
    return found


@functools.cache
def version() -> str:
    """What names and prints are comparable with: the version of the rules and that of fingerprints, as `2.1`."""
    return f"{_data()['version']}.{prints.VERSION}"


def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def _pattern(text: str) -> re.Pattern[str]:
    # Terminals and issue forms wrap long lines: a space in a rule fits a line's end as well.
    return re.compile(re.sub(r" (?![?*+{])", r"\\s+", text), re.MULTILINE)
