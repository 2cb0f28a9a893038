"""Chat data whose responses are the target's own: a drafter learns what its target says.

An engine answers: the target itself, run here (local.py), or a server (server.py). This module reads prompts, writes
rows, and goes on where an earlier call was stopped: rows go out in order, each with the line of its prompt, and
OUT.meta.json says with which settings the file was begun.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dflash.data import chat
from dflash.data.reader import counted
from dflash.regenerate.turns import Answered, Engine
from dflash.settings import SettingError

PROMPTS = "prompts_sha256"  # of the file of prompts, among the settings
_ROW_START = b'{"prompt": '
_TELL_EVERY = 10.0  # seconds between two lines of progress


def regenerate(
    prompts: Path,
    out: Path,
    start: Callable[[], Engine],
    settings: dict[str, Any],
    *,
    limit: int = 0,
    bad_rows: str = "error",
) -> None:
    """Write to `out` the conversations of `prompts` (the first `limit` of them; 0: all) as an engine answers them.

    `start` gives the engine; it is called only if a conversation is left to answer.

    `settings` are what the responses depend on; a file that was begun with others is refused. Raises SettingError.
    """
    conversations, skipped = chat.read(prompts, bad_rows, need_assistant=False)
    conversations = conversations[: limit or None]
    with _opened(out, settings | {PROMPTS: hashlib.sha256(prompts.read_bytes()).hexdigest()}) as file:
        last = _last_line_done(file, out)
        rest = [conversation for conversation in conversations if conversation.line > last]
        if last:
            _tell(f"{out} is done up to line {last} of {prompts}; {len(rest)} conversations are left")
        if skipped:
            _tell(f"{prompts}: bad rows skipped: {counted(skipped)}")
        report = _Report(len(rest))
        for answered in start().answer(rest) if rest else ():
            if not answered.left_out:
                row = {"prompt": answered.line, "messages": answered.messages}
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode(errors="replace"))
                file.flush()
            report.add(answered)
        report.tell()
    if not last and report.left_out.total() == len(rest):
        why = f"must hold a usable conversation; left out: {counted(report.left_out)}"
        raise SettingError("--prompts", prompts, why)


def _opened(out: Path, settings: dict[str, Any]) -> IO[bytes]:
    """`out` open for appending, locked against a second writer, its settings beside it; raises SettingError."""
    try:
        file = open(out, "ab+")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise SettingError("--out", out, f"must be a file that can be written ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _settle(out, file, settings)
    except BlockingIOError:
        file.close()
        raise SettingError("--out", out, "is being written by another process") from None
    except OSError as error:
        file.close()
        raise SettingError("--out", out, f"must stand in a folder that can be written ({error.strerror})") from None
    except BaseException:
        file.close()
        raise
    return file


def _settle(out: Path, file: IO[bytes], settings: dict[str, Any]) -> None:
    """Note the settings of a file without rows; compare those of a file with rows."""
    meta = out.with_name(out.name + ".meta.json")
    if not os.fstat(file.fileno()).st_size:
        part = meta.with_name(meta.name + ".part")
        part.write_text(json.dumps(settings, indent=2) + "\n")
        part.rename(meta)
        return
    try:
        begun = json.loads(meta.read_text())
        differing = [name for name in settings | begun if begun.get(name) != settings.get(name)]
    except (OSError, ValueError, TypeError, AttributeError):
        raise SettingError(
            "--out", out, f"exists and was not written by this command (no {meta.name}); name another file"
        ) from None
    for name in differing:
        then, now = begun.get(name), settings.get(name)
        how = "other prompts" if name == PROMPTS else f"--{name.replace('_', '-')}={then}, not {now}"
        raise SettingError("--out", out, f"was begun with {how}; name another file")


def _last_line_done(file: IO[bytes], out: Path) -> int:
    """The prompt line of the last whole row; what a killed run left of a row is cut off."""
    file.seek(0)
    data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        last = int(json.loads(whole.splitlines()[-1])["prompt"]) if whole else 0
    except (ValueError, KeyError, TypeError):
        last = -1
    if last < 0 or not data.startswith(_ROW_START[: len(data)]):
        raise SettingError("--out", out, "exists and was not written by this command; name another file")
    file.truncate(len(whole))
    return last


class _Report:
    """Progress for a person: a line every few seconds at most, and one at the end."""

    def __init__(self, conversations: int) -> None:
        self.conversations = conversations
        self.done = self.tokens = 0
        self.left_out: Counter[str] = Counter()
        self.started = self.told = time.monotonic()

    def add(self, answered: Answered) -> None:
        self.done += 1
        self.tokens += answered.tokens
        if answered.left_out:
            self.left_out[answered.left_out] += 1
        if time.monotonic() - self.told > _TELL_EVERY:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        rate = self.tokens / max(self.told - self.started, 1e-3)
        left_out = f"; left out: {counted(self.left_out)}" if self.left_out else ""
        _tell(f"{self.done}/{self.conversations} conversations, {self.tokens} tokens, {rate:.0f} tokens/s{left_out}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
