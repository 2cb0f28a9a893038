"""Evidence of a failure -> its cause from a closed list, the line that shows it, what to do about it.

Rules are data (rules.toml), one a cause. `classify` reads text (a traceback, the end of a log); the harness's
verdict adds what no text tells: exit status, hangs, cache proofs. A text that fits no rule is no match, never
a guess. The cause list is `CAUSES`, documented by `python -m sweeper.signatures causes`.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from sweeper.signatures.prints import fingerprint, stack_fingerprint, without_source

__all__ = ["Match", "Rule", "classify", "fingerprint", "rule", "rules", "stack_fingerprint"]

LONGEST_TEXT = 400_000  # characters of a text that are searched, from its end
LONGEST_EVIDENCE = 300  # characters of an evidence line


@dataclass(frozen=True)
class Rule:
    """One cause. `patterns` show a failure; `warnings` show a state that only matters if something else
    failed or nothing else is known. `explains` lists the causes that are echoes of this one."""

    cause: str
    about: str
    evidence: str
    remedy: str
    source: str
    patterns: tuple[re.Pattern[str], ...] = ()
    warnings: tuple[re.Pattern[str], ...] = ()
    explains: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """A cause found in a text, with the line that shows it. `failed` is False when all that was found is a
    warning: a state of the run, which need not be why it failed."""

    cause: str
    evidence: str
    remedy: str
    failed: bool


def classify(text: str) -> Match | None:
    """Name the root cause a text shows, or None.

    The earliest failure in the text is the root of the later ones, unless another rule that matches explains
    it (an out-of-memory after a fall-back to dense attention is the fall-back). Source lines quoted in a
    traceback are not searched: they hold other errors' texts.
    """
    text = without_source(text[-LONGEST_TEXT:])
    failures: list[tuple[int, int, Rule]] = []
    warnings: list[tuple[int, int, Rule]] = []
    for order, candidate in enumerate(rules().values()):
        for patterns, into in ((candidate.patterns, failures), (candidate.warnings, warnings)):
            found = [m for p in patterns if (m := p.search(text))]
            if found:
                first = min(found, key=lambda m: m.start())
                into.append((first.start(), order, candidate))
    if not failures and not warnings:
        return None
    position, _, winner = min(failures or warnings, key=lambda f: f[:2])
    for at, _, other in sorted(failures + warnings, key=lambda f: f[:2]):
        if winner.cause in other.explains:
            position, winner = at, other
            break
    return Match(winner.cause, line_at(text, position), winner.remedy, bool(failures))


def line_at(text: str, position: int) -> str:
    """The line of `text` round `position`, trimmed and bounded."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : end if end >= 0 else len(text)].strip()[:LONGEST_EVIDENCE]


def rule(cause: str) -> Rule:
    """The rule of a cause; raises KeyError for a cause that is not in the list."""
    return rules()[cause]


@functools.cache
def rules() -> dict[str, Rule]:
    """All rules by cause, in the order in which they settle a tie."""
    data = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    found = {}
    for entry in data["rule"]:
        for key in ("patterns", "warnings"):
            entry[key] = tuple(re.compile(p, re.MULTILINE) for p in entry.get(key, ()))
        for key in ("explains", "examples"):
            entry[key] = tuple(entry.get(key, ()))
        found[entry["cause"]] = Rule(**entry)
    return found
