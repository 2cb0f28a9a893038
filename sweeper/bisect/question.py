"""What a bisect is asked, and what a run that is over says to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash.settings import SettingError
from sweeper.bisect import search, speed
from sweeper.bisect.search import Answer
from sweeper.measure import finite
from sweeper.signatures import rules
from sweeper.store import Attempt

BAD = ("failed", "hung", "killed")
GOOD = ("ok", "degraded")
FINGERPRINT = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Result:
    """What one run says. symptom: it shows it, does not, or tells nothing (None). ktok_s: its speed, if it is one."""

    symptom: bool | None
    ktok_s: float | None
    why: str  # the verdict in words


@dataclass(frozen=True)
class Question:
    """levels: as the command line has them. signature: a cause, a fingerprint, or "" for any failure.
    slower, error: shares (0.05: 5 %). most: runs that may be used."""

    factor: str
    levels: str
    signature: str = ""
    slower: float | None = None
    error: float = 0.01
    most: int = 100

    @property
    def symptom(self) -> str:
        return f"slower by {100 * self.slower:g} %" if self.slower is not None else self.signature or "any failure"

    def read(self, attempt: Attempt) -> Result:
        """What a finished attempt says. A run whose command never started tells nothing, whatever its verdict."""
        told = attempt.verdict or {}
        signature = told.get("signature") or {}
        verdict, cause = str(told.get("verdict")), str(signature.get("cause", ""))
        why = " ".join(filter(None, (verdict, cause)))
        measured = finite((told.get("figures") or {}).get("ktok_s"))
        ktok_s = measured if verdict == "ok" and measured and measured > 0 else None
        symptom: bool | None
        if self.slower is not None:
            symptom = None
        elif self.signature and self.signature in (cause, signature.get("fingerprint")):
            symptom = True
        elif verdict in GOOD:
            symptom = False
        elif verdict in BAD and not self.signature and told.get("child_s"):
            symptom = True
        else:
            symptom = None
        return Result(symptom, ktok_s, why)

    def judge(self, results: Sequence[Sequence[Result]]) -> list[list[bool | None]] | int | Answer:
        """The symptoms of all runs; in search of a slow-down, before the line is drawn, what to do about it."""
        if self.slower is None:
            return [[one.symptom for one in several] for several in results]
        return speed.symptoms(
            [[one.ktok_s for one in several] for several in results], self.slower, self.error, self.most
        )

    def decide(self, results: Sequence[Sequence[Result]]) -> int | Answer:
        """The level to run next, or the answer."""
        seen = self.judge(results)
        return search.decide(seen, self.error, self.most) if isinstance(seen, list) else seen


def parse(words: Sequence[str]) -> tuple[Question, list[str]]:
    """The question of a command line, and the settings that are left. Raises SettingError."""
    own: dict[str, str] = {}
    rest = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in Question.__dataclass_fields__:
            own[name] = value
        elif word not in ("-m", "--multirun"):
            rest.append(word)
    for name, such in (("factor", "factor=wheel"), ("levels", "levels=t211,t212,t213")):
        if not own.get(name):
            raise SettingError(name, own.get(name, "???"), f"must be given, such as {such}")
    question = Question(own["factor"], own["levels"])
    for word in rest:
        if word.lstrip("+~").partition("=")[0] == question.factor:
            raise SettingError(*word.partition("=")[::2], f"levels= says what {question.factor} is")
    if signature := own.get("signature", ""):
        if signature not in rules() and not FINGERPRINT.fullmatch(signature):
            raise SettingError("signature", signature, "must be a cause or a fingerprint (12 hex digits)")
        question = replace(question, signature=signature)
    if "slower" in own:
        if signature:
            raise SettingError("slower", own["slower"], "is another symptom than signature; give one of them")
        question = replace(question, slower=_share("slower", own["slower"], 0.9))
    if "error" in own:
        question = replace(question, error=_share("error", own["error"], 0.3))
    if "most" in own:
        if not own["most"].isdecimal() or not 1 <= int(own["most"]) <= 10_000:
            raise SettingError("most", own["most"], "must be a whole number of runs from 1 to 10000")
        question = replace(question, most=int(own["most"]))
    return question, rest


def _share(name: str, text: str, highest: float) -> float:
    """A share in percent (`5%`) or as a number (`0.05`)."""
    percent = text.endswith("%")
    try:
        share = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= highest:
        raise SettingError(name, text, f"must be a share from above 0 to {highest:.0%}, such as 5%")
    return share
