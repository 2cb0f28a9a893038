"""A log as it really is -> the lines that can be evidence.

Logs come in UTF-16, with colours, with progress bars that overwrite themselves, with the lines of many ranks mixed
and a rank before each; tracebacks quote source that holds other errors' words; torchrun tells at the end who failed
first. All of that is dealt with here, so that the rules see plain lines.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEAD, TAIL = 100_000, 400_000  # bytes of a long file that are read, from its start and from its end
LONGEST_LINE = 2_000  # characters; of a longer line the middle is left out
TRACEBACK = "Traceback (most recent call last)"
FRAME = re.compile(r'^\s*File "(?P<path>[^"\n]+)", line \d+(?:,)? in (?P<name>.+?)\s*$')

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_WHO = r"(?P<who>{})"
# What a launcher or a logger puts before a line. A rank, a process or a worker is remembered; a time and a place go.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[(?:rank|default|Rank )?" + _WHO.format(r"\d{1,5}") + r"\]:\s?",  # torch, torchrun
        r"\[\d+," + _WHO.format(r"\d+") + r"\]<std(?:err|out)>:\s?",  # mpirun
        _WHO.format(r"\d{1,5}") + r": (?=\S|\s{2})",  # srun --label
        r"\(" + _WHO.format(r"[\w.:-]+(?: rank=\d+)? pid=\d+(?:, ip=[\d.]+)?") + r"\)\s?",  # Ray, vLLM
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?: [A-Z]+\d+)*\]?:?\s",
        r"(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[^\]\s]+\]\s?",  # vLLM
        r"[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?\S+:\d+\](?: \[[\d/]+\])?\s?",  # glog
        r"E {3}(?=\s*\S)",  # pytest
    )
)
_TIMES = (
    re.compile(r"\b\d{4}[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)"),
    re.compile(r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d\.\d+) "),
    re.compile(r"\b(?:ERROR|WARNING|INFO|CRITICAL) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) "),
)
_OTHER_FAILURES = re.compile(r"^\s*(?:Other )?Failures:\s*$")
_ROOT = re.compile(r"^\s*Root Cause(?: \(first observed failure\))?:\s*$")
_RULER = re.compile(r"^\s*[=*]{10,}\s*$")
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+)")


@dataclass(frozen=True)
class Line:
    """One line without colours and prefixes. who: the rank or process named before it, "" if none. at: a number that
    grows with the time the line itself tells, None if it tells none."""

    text: str
    who: str = ""
    at: float | None = None


def read(path: str | Path) -> str:
    """The text of a file; of a long one its first HEAD and last TAIL bytes. Raises OSError."""
    with open(path, "rb") as file:
        data = file.read(HEAD + TAIL)
        if file.read(1):
            file.seek(-TAIL, 2)
            data = data[:HEAD] + file.read(TAIL)
            return joined(data)
    return decode(data)


def joined(data: bytes) -> str:
    """The text of bytes; of many the first HEAD and the last TAIL."""
    if len(data) < HEAD + TAIL:
        return decode(data)
    return f"{decode(data[:HEAD])}\n{decode(data[-TAIL:], like=data[:HEAD])}"


def decode(data: bytes, like: bytes | None = None) -> str:
    """Bytes as text, whatever they are: UTF-8, UTF-16 (with its mark, or seen by its zeros), else rubbish replaced.

    `like`: the start of the file that `data` is a piece of.
    """
    start = data[:400] if like is None else like[:400]
    if start.startswith(codecs.BOM_UTF16_LE) or (not start[:40:2].count(0) and start[1:40:2].count(0) > 10):
        return data.decode("utf-16-le", "replace").lstrip("\ufeff")
    if start.startswith(codecs.BOM_UTF16_BE) or (not start[1:40:2].count(0) and start[:40:2].count(0) > 10):
        return data.decode("utf-16-be", "replace").lstrip("\ufeff")
    return data.decode("utf-8-sig", "replace")


def lines(text: str) -> list[Line]:
    """The lines that can be evidence, in order, torchrun's word on who failed first before all others.

    Source lines quoted in a traceback are left out, and so are the later failures in torchrun's list.
    """
    kept: list[Line] = []
    quoting: set[str] = set()  # ranks whose traceback has just told a frame
    for line in _plain(text):
        if FRAME.match(line.text):
            quoting.add(line.who)
        elif line.who in quoting and line.text.startswith("    "):
            continue
        else:
            quoting.discard(line.who)
        kept.append(line)
    return _root_first(kept)


def root_rank(found: list[Line]) -> str:
    """The rank that torchrun names as the first to fail, "" if it names none."""
    for number, line in enumerate(found):
        if _ROOT.match(line.text):
            for later in found[number + 1 : number + 8]:
                if rank := _RANK.match(later.text):
                    return rank[1]
    return ""


def _plain(text: str) -> Iterator[Line]:
    # What a carriage return, as a progress bar writes it, puts on top of each other are lines here.
    for raw in re.split(r"\r\n|\n|\r", _ANSI.sub("", text.replace("\0", ""))):
        if not raw.strip():
            continue
        if len(raw) > LONGEST_LINE:
            raw = f"{raw[: LONGEST_LINE // 2]} ... {raw[-LONGEST_LINE // 2 :]}"
        line, who, at = raw, "", None
        for pattern in _TIMES:
            if (time := pattern.search(raw[:120])) is not None:
                month, day, hour, minute, second = time.groups()
                days = (int(month) * 31 + int(day)) * 86_400
                at = days + int(hour) * 3600 + int(minute) * 60 + float(second.replace(",", "."))
                break
        stripped = True
        while stripped:
            stripped = False
            for prefix in _PREFIXES:
                if (found := prefix.match(line)) and found.end() < len(line):
                    who = found.groupdict().get("who") or who
                    line, stripped = line[found.end() :], True
        yield Line(line, who, at)


def _root_first(found: list[Line]) -> list[Line]:
    root: list[Line] = []
    rest: list[Line] = []
    place = rest
    for number, line in enumerate(found):
        if _OTHER_FAILURES.match(line.text) and any(_ROOT.match(later.text) for later in found[number : number + 400]):
            place = []
        elif _ROOT.match(line.text):
            place = root
        elif _RULER.match(line.text):
            place = rest
        place.append(line)
    return root + rest
