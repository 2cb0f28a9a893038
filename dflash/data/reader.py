"""The rows of a data file, read in order and never all at once.

JSONL holds a row a line; a `.json` file may hold one list of rows instead; a `.txt` file is one text.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dflash.data import formats
from dflash.data.formats import BadRow, Record, Text
from dflash.settings import SettingError

_CHUNK = 1 << 20


def counted(reasons: Mapping[str, int]) -> str:
    """How many were left out for which reason, in words."""
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.items())


class Reader:
    """Iterating gives the records of a file in order.

    `format` says what a row means; "auto" becomes what the first usable row has. Bad rows raise SettingError
    (`bad_rows="error"`, or "refuse", which tells of no other way) or are counted by reason in `skipped`. `done` and
    `size` are bytes. Iterating raises SettingError too when the file cannot be read.
    """

    def __init__(
        self, path: Path | str, format: str = "auto", bad_rows: str = "error", need_assistant: bool = True
    ) -> None:
        self.path, self.format = Path(path), format
        self.skipped: Counter[str] = Counter()
        self.done = 0
        self._skip, self._need_assistant = bad_rows == "skip", need_assistant
        self._or_skip = "" if bad_rows == "refuse" else " or set data.bad_rows=skip"
        self._unit = "line"
        self._asked = str(path)
        try:
            self.size = self.path.stat().st_size
        except OSError as error:
            raise self._unreadable(error) from None

    def __iter__(self) -> Iterator[Record]:
        try:
            if self.path.suffix == ".txt" and self.format in ("auto", "text"):
                yield from self._one_text()
            else:
                yield from self._records()
        except OSError as error:
            raise self._unreadable(error) from None

    def bad(self, line: int, bad: BadRow) -> None:
        """Refuse a row, or count it if bad rows may be skipped."""
        if not self._skip:
            raise SettingError(
                "data.path",
                self._asked,
                f"{self._unit} {line}: {bad}; mend the row{self._or_skip}",
            )
        self.skipped[bad.reason] += 1

    def nothing(self) -> SettingError:
        """The error for a file without any usable row."""
        found = (
            f"all {self.skipped.total()} rows are bad: {counted(self.skipped)}" if self.skipped else "the file is empty"
        )
        return SettingError("data.path", self._asked, f"must hold at least one conversation or document; {found}")

    def _unreadable(self, error: OSError) -> SettingError:
        return SettingError("data.path", self._asked, f"must be a readable data file ({error.strerror})")

    def _one_text(self) -> Iterator[Text]:
        self.format = "text"
        content = self.path.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise SettingError("data.path", self._asked, f"must be UTF-8 text; byte {error.start} is not") from None
        if text.strip():
            yield Text(1, text)
        self.done = self.size

    def _records(self) -> Iterator[Record]:
        for line, row in self._rows():
            try:
                if isinstance(row, BadRow):
                    raise row
                if self.format == "auto":
                    # Settled only by a row that can be used.
                    found = formats.detect(row)
                    record = formats.parse(row, line, found, self._need_assistant)
                    self.format = found
                else:
                    record = formats.parse(row, line, self.format, self._need_assistant)
            except BadRow as bad:
                self.bad(line, bad)
                continue
            yield record

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Each row with its number from 1, or the BadRow that it is instead."""
        if self.path.suffix == ".json" and self._is_list():
            self._unit = "row"
            yield from self._listed()
            self.done = self.size
            return
        with open(self.path, "rb") as file:
            for line, content in enumerate(file, start=1):
                self.done += len(content)
                if content.strip():
                    yield line, _parse(content)

    def _is_list(self) -> bool:
        with open(self.path, "rb") as file:
            return file.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")

    def _listed(self) -> Iterator[tuple[int, Any]]:
        """The items of one JSON list, decoded one at a time.

        A fault in the JSON itself is always refused: nobody can tell where the next row begins.
        """
        decoder = json.JSONDecoder()
        number = 0
        with open(self.path, encoding="utf-8-sig") as file:
            text = self._piece(file, _CHUNK)
            at = text.index("[") + 1
            while True:
                try:
                    at = _skip_blanks(text, at)
                    if number == 0 and text[at] == "]":
                        return
                    row, end = decoder.raw_decode(text, at)
                    end = _skip_blanks(text, end)
                    separator = text[end]
                except (ValueError, IndexError, RecursionError) as error:
                    # Perhaps the row only goes on; reading as much again keeps the work linear in its length.
                    piece = self._piece(file, max(_CHUNK, len(text) - at))
                    if not piece:
                        raise self._broken(number, error) from None
                    text, at = text[at:] + piece, 0
                    continue
                number += 1
                yield number, row
                if separator == "]":
                    return
                if separator != ",":
                    raise self._broken(number, ValueError(f"{separator!r} instead of a comma"))
                at = end + 1

    def _piece(self, file: IO[str], characters: int) -> str:
        try:
            piece = file.read(characters)
        except UnicodeDecodeError as error:
            raise SettingError("data.path", self._asked, f"must be UTF-8 text ({error.reason})") from None
        self.done = min(self.size, self.done + len(piece))  # a character may be several bytes
        return piece

    def _broken(self, number: int, error: Exception) -> SettingError:
        why = "it ends too early" if isinstance(error, IndexError) else error
        return SettingError(
            "data.path", self._asked, f"must be one whole JSON list; it breaks after row {number}: {why}"
        )


def _skip_blanks(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", f"byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return BadRow("broken JSON", str(error))
