"""Fingerprints: failures of one kind give the same 12 hex digits, wherever and whenever they happened.

What varies without meaning (paths, users, ranks, addresses, sizes, times, process ids, line numbers) is taken
out before hashing. Of a traceback only the frames outside installed packages count, by file name and
function, with the exception's first line; without such frames all of them count. The scheme has a version,
which is hashed too, so that a better scheme never mixes with an old one.
"""

from __future__ import annotations

import hashlib
import re

VERSION = "1"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FRAME = re.compile(r'^\s*File "(?P<path>[^"\n]+)", line \d+(?:,)? in (?P<name>.+?)\s*$')
_SPY_FRAME = re.compile(r"^\s+(?P<name>[\w.<>$:~]+) \((?P<path>[^()\s][^()]*?\.pyx?):\d+\)\s*$")
_THREAD = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]+\b")
_SLASH = re.compile(r"[/\\]")
_TRACEBACK = "Traceback (most recent call last)"
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python3|^<(?:frozen|string)")
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")

# Order matters: what holds other kinds inside it goes first.
_VARYING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE), "<url>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*"), "<address>"),
    (re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.@%+~-]+){2,}[\\/]?|(?<![\w/])~?/[\w.@%+~-]+/?"), "<path>"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b0x[0-9a-f]+", re.IGNORECASE), "<n>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b\d+(?:\.\d+)?\s?(?:[kKMGT]i?B|bytes)\b"), "<size>"),
    (re.compile(r"-?\d+(?:[.,:]\d+)*(?:[eE][+-]?\d+)?"), "<n>"),
    (re.compile(r"\s+"), " "),
)


def fingerprint(text: str) -> str:
    """Twelve hex digits of a traceback, or of the last line of a text without one. Empty text has one too."""
    text = _ANSI.sub("", text)
    start = text.find(_TRACEBACK)
    if start < 0:
        lines = [line for line in text.splitlines() if line.strip()]
        return _hash([normalise(lines[-1])] if lines else [])
    frames, message = _first_traceback(text[start:])
    own = [f for f in frames if not _INSTALLED.search(f[0])] or frames
    return _hash([_frame(path, name) for path, name in _unrepeated(own)] + [normalise(message)])


def stack_fingerprint(stacks: str) -> str:
    """Twelve hex digits of a dump of all threads' stacks (faulthandler's or py-spy's format).

    The three innermost Python frames of each thread, as a set: neither the order of threads nor how many
    workers stand in the same place matters, nor whether one dump was taken or both. (py-spy tells qualified
    names, faulthandler plain ones.)
    """
    places = {
        " < ".join(_frame(path, name.split(".")[-1]) for path, name in frames[:3]) for _, frames in threads(stacks)
    }
    return _hash(sorted(places))


def threads(stacks: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Split a dump into threads: (header line, [(path, function), ...] innermost first)."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for line in _ANSI.sub("", stacks).splitlines():
        frame = _FRAME.match(line) or _SPY_FRAME.match(line)
        if _THREAD.match(line.strip()):
            found.append((line.strip(), []))
        elif frame and found:
            found[-1][1].append((frame["path"], frame["name"]))
    return found


def normalise(message: str) -> str:
    """A message without what varies from run to run."""
    for pattern, stand_in in _VARYING:
        message = pattern.sub(stand_in, message)
    return message.strip()


def without_source(text: str) -> str:
    """A text without the source lines that tracebacks quote below a frame."""
    kept: list[str] = []
    quoting = False
    for line in _ANSI.sub("", text).split("\n"):
        if _FRAME.match(line):
            quoting = True
        elif quoting and line.startswith("    "):
            continue
        else:
            quoting = False
        kept.append(line)
    return "\n".join(kept)


def last_traceback(text: str) -> str:
    """The last traceback of a log with the lines after it, or "" if there is none.

    Chained tracebacks are kept together: the first of a chain is the root.
    """
    start = text.rfind(_TRACEBACK)
    if start < 0:
        return ""
    while True:
        earlier = text.rfind(_TRACEBACK, 0, start)
        between = text[earlier:start] if earlier >= 0 else ""
        if "direct cause of the following exception" in between or "another exception occurred" in between:
            start = earlier
        else:
            return text[start:]


def _first_traceback(text: str) -> tuple[list[tuple[str, str]], str]:
    """Frames and exception line of the traceback that `text` starts with."""
    frames: list[tuple[str, str]] = []
    for line in without_source(text).splitlines()[1:]:
        frame = _FRAME.match(line)
        if frame:
            frames.append((frame["path"], frame["name"]))
        elif _ERROR_LINE.match(line):
            return frames, line
    return frames, ""


def _frame(path: str, name: str) -> str:
    return normalise(_SLASH.split(path)[-1] + ":" + name)


def _unrepeated(frames: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Frames with runs of the same one (recursion) told once."""
    return [f for i, f in enumerate(frames) if i == 0 or f != frames[i - 1]]


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\n".join([VERSION, *parts]).encode("utf-8", "replace")).hexdigest()[:12]
