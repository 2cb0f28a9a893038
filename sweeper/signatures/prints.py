"""Fingerprints: failures of one kind give the same 12 hex digits, wherever and whenever they happened.

What varies without meaning (paths, users, ranks, addresses, sizes, times, process ids, line numbers) is taken
out before hashing. Of a traceback only the frames outside installed packages count, by file name and
function, with the exception's first line; without such frames all of them count. The scheme has a version,
which is hashed too, so that a better scheme never mixes with an old one.
"""

from __future__ import annotations

import hashlib
import re

from sweeper.signatures.text import FRAME, TRACEBACK, lines

VERSION = "2"
LONGEST_MESSAGE = 30  # lines of an exception's message

_SPY_FRAME = re.compile(r"^\s+(?P<name>[\w.<>$:~]+) \((?P<path>[^()\s][^()]*?\.pyx?):\d+\)\s*$")
_THREAD = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]+\b")
_SLASH = re.compile(r"[/\\]")
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python3|^<(?:frozen|string)")
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")

# Of a host's name before a port only what no setting or device looks like: gpu-3:29500, a.b.c:80, [x]:1, n<42830>.
_HOST = re.compile(
    r"\b(?!\w+\.(?:py|c|cc|cpp|cu|cuh|h):)(?=\w*[\d.-])[A-Za-z][\w.-]*\w:\d+\b|\[[\w.:-]+\]:\d+\b|\b[\w.-]+<\d+>"
)

# Order matters: what holds other kinds inside it goes first.
_VARYING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE), "<url>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*"), "<address>"),
    (re.compile(r"""(['"`])(?:[A-Za-z]:|[~.]{0,2})[\\/][^'"`\n]*\1"""), "<path>"),
    (re.compile(r"(?:[A-Za-z]:)?[\w.@%+~-]*(?:[\\/][\w.@%+~-]+){2,}[\\/]?|(?<![\w/])~?/[\w.@%+~-]+/?"), "<path>"),
    (re.compile(r"\b[\w.-]+/[\w-]+\.[a-z]\w*\b"), "<path>"),
    (re.compile(r"\b(user(?:name)?|host(?:name)?|node)(\s?[=:]\s?)['\"]?[\w.-]+['\"]?", re.IGNORECASE), r"\1\2<name>"),
    (re.compile(r"\b(on (?:host|node)|hostname|host name) ['\"]?[\w.-]+['\"]?", re.IGNORECASE), r"\1 <name>"),
    (_HOST, "<host>"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b0x[0-9a-f]+", re.IGNORECASE), "<n>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b\d+(?:\.\d+)?\s?(?:[kKMGT]i?B|bytes|[kKMGT]\b)"), "<size>"),
    (re.compile(r"\b\d+(?:\.\d+)?\s?(?:ns|us|ms|s|sec|seconds|milliseconds|minutes|min|h|hours)\b"), "<span>"),
    (re.compile(r"-?\d+(?:[.,:]\d+)*(?:[eE][+-]?\d+)?"), "<n>"),
    (re.compile(r"\s+"), " "),
)


def fingerprint(text: str) -> str:
    """Twelve hex digits of a traceback, or of the last line of a text without one. Empty text has one too."""
    text = plain(text)
    start = text.find(TRACEBACK)
    if start < 0:
        told = [line for line in text.splitlines() if line.strip()]
        return _hash([normalise(told[-1])] if told else [])
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
    for line in stacks.splitlines():
        frame = FRAME.match(line) or _SPY_FRAME.match(line)
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


def plain(text: str) -> str:
    """A text without colours, prefixes of ranks and loggers, and the source lines that tracebacks quote."""
    return "\n".join(line.text for line in lines(text))


def last_traceback(text: str) -> str:
    """The last traceback of a log with the lines after it, or "" if there is none.

    Chained tracebacks are kept together: the first of a chain is the root.
    """
    start = text.rfind(TRACEBACK)
    if start < 0:
        return ""
    while True:
        earlier = text.rfind(TRACEBACK, 0, start)
        between = text[earlier:start] if earlier >= 0 else ""
        if "direct cause of the following exception" in between or "another exception occurred" in between:
            start = earlier
        else:
            return text[start:]


def ends_in_message(traceback: str) -> bool:
    """Whether the last line of a text is part of the message that its last traceback ends in."""
    told = traceback[traceback.rfind(TRACEBACK) :].splitlines()[1:]
    frames = [number for number, line in enumerate(told) if FRAME.match(line)]
    return bool(frames) and 0 < len(told) - 1 - frames[-1] <= LONGEST_MESSAGE


def _first_traceback(text: str) -> tuple[list[tuple[str, str]], str]:
    """Frames and exception line of the traceback that `text` starts with."""
    frames: list[tuple[str, str]] = []
    for line in text.splitlines()[1:]:
        frame = FRAME.match(line)
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
