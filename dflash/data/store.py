"""The folder that `dflash prepare` makes: documents as they were tokenised, mapped into memory when read.

    tokens.bin      uint16 or uint32 by vocabulary, little endian, all documents one after the other
    loss_mask.bin   a byte a token, 1 where the target would generate it
    documents.bin   int64 [documents, 4]: line in the source, tokens, supervised tokens, eligible anchors
    meta.json       layout, checksums (files, source, tokenizer), settings, what was left out

The length of a row is no business of the folder: one serves runs with rows of any length. It is written under
another name and renamed when whole, so a folder with this name is never half of one.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash.data.document import Document, count_anchors
from dflash.settings import SettingError

META_FILE = "meta.json"
# Raised whenever the same source would give other files.
LAYOUT = "dflash-data-1"
_FILES = ("tokens.bin", "loss_mask.bin", "documents.bin")
_COLUMNS = 4


@dataclass(frozen=True)
class Source:
    """What a folder was made from; equal sources give equal folders."""

    name: str  # of the file, without its folder: not compared
    sha256: str
    tokenizer: str  # dflash.data.tokens.fingerprint
    settings: dict[str, str]  # data.format, data.reasoning, data.bad_rows as they were asked for

    def difference(self, wanted: Source) -> str:
        """In what this differs from what is wanted, as the end of a sentence; empty if it does not."""
        for name, value in wanted.settings.items():
            if (mine := self.settings.get(name)) != value:
                return f"with data.{name}={mine}, not {value}"
        if self.tokenizer != wanted.tokenizer:
            return "with another tokenizer or chat template than the target's"
        return "" if self.sha256 == wanted.sha256 else f"from {self.name} with other content than {wanted.name}"


@dataclass(frozen=True)
class Meta:
    """meta.json."""

    layout: str
    source: Source
    format: str  # as found, never "auto"
    dtype: str  # of tokens.bin
    documents: int
    tokens: int
    supervised: int
    largest: int  # token id
    skipped: dict[str, int]  # rows and documents left out, by reason
    files: dict[str, dict[str, Any]]  # name -> bytes, sha256


class Writer:
    """Appends documents to the files of a folder that is not yet whole."""

    def __init__(self, folder: Path, embedding_rows: int) -> None:
        self._folder = folder
        self._dtype = np.dtype("<u2" if embedding_rows <= 1 << 16 else "<u4")
        self._open = ExitStack()
        self._files: dict[str, IO[bytes]] = {
            name: self._open.enter_context(open(folder / name, "xb"))  # noqa: SIM115
            for name in _FILES
        }
        self._sums = {name: hashlib.sha256() for name in _FILES}
        self._sizes = dict.fromkeys(_FILES, 0)
        self.documents = self.tokens = self.supervised = 0
        self._largest = 0

    def add(self, line: int, document: Document) -> bool:
        """Write a document; False, and nothing written, if no block can be anchored in it."""
        size, supervised = len(document.tokens), int(document.loss_mask.sum())
        eligible = count_anchors(document.loss_mask)
        if not eligible:
            return False
        self._write("tokens.bin", document.tokens.astype(self._dtype).tobytes())
        self._write("loss_mask.bin", document.loss_mask.astype(np.uint8).tobytes())
        self._write("documents.bin", np.array([line, size, supervised, eligible], dtype="<i8").tobytes())
        self.documents += 1
        self.tokens += size
        self.supervised += supervised
        self._largest = max(self._largest, int(document.tokens.max()))
        return True

    def _write(self, name: str, content: bytes) -> None:
        self._files[name].write(content)
        self._sums[name].update(content)
        self._sizes[name] += len(content)

    def finish(self, source: Source, format: str, skipped: dict[str, int]) -> Meta:
        """Write meta.json and see that everything is on the disk."""
        facts = {name: {"bytes": self._sizes[name], "sha256": self._sums[name].hexdigest()} for name in _FILES}
        meta = Meta(
            layout=LAYOUT,
            source=source,
            format=format,
            dtype=self._dtype.str,
            documents=self.documents,
            tokens=self.tokens,
            supervised=self.supervised,
            largest=self._largest,
            skipped=skipped,
            files=facts,
        )
        with open(self._folder / META_FILE, "xb") as file:
            file.write(json.dumps(dataclasses.asdict(meta), indent=2).encode() + b"\n")
            for one in (*self._files.values(), file):
                one.flush()
                os.fsync(one.fileno())
        return meta

    def close(self) -> None:
        self._open.close()


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and goes when it does not.

    One process at a time; what a killed one left is removed. A folder that stands there already is replaced:
    whether it may be is the caller's to say.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part, old = (folder.with_name(f".{folder.name}.{what}") for what in ("part", "old"))
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in (part, old):
            if left.exists():
                shutil.rmtree(left)
        part.mkdir()
        try:
            yield part
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
        finally:
            for left in (part, old):
                shutil.rmtree(left, ignore_errors=True)
    finally:
        os.close(lock)


def is_prepared(folder: Path) -> bool:
    return (folder / META_FILE).is_file()


def read_meta(folder: Path) -> Meta:
    """The meta.json of a prepared folder; raises SettingError if it is none."""
    try:
        values = json.loads((folder / META_FILE).read_bytes())
        if values["layout"] != LAYOUT:
            raise SettingError(
                "data.path", folder, f"has layout {values['layout']}, this version reads {LAYOUT}; prepare it again"
            )
        return Meta(**values | {"source": Source(**values["source"])})
    except FileNotFoundError:
        raise SettingError("data.path", folder, "is a folder that `dflash prepare` did not make or finish") from None
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(
            "data.path", folder, f"its {META_FILE} cannot be used ({error!r}); prepare it again"
        ) from None


def fault(folder: Path, meta: Meta) -> str:
    """What is wrong with the files of a folder; empty when they are as they were written."""
    for name in _FILES:
        try:
            if (folder / name).stat().st_size != meta.files[name]["bytes"]:
                return f"{name} has another size than when it was written"
            if sha256(folder / name) != meta.files[name]["sha256"]:
                return f"{name} differs from its recorded checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except (KeyError, TypeError):
            return f"{META_FILE} has no checksum of {name}"
    return ""


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Documents:
    """The documents of a prepared folder. Pickles as its path; files are opened by whoever first reads."""

    folder: Path

    @cached_property
    def table(self) -> np.ndarray:
        """int64 [documents, 4]: line, tokens, supervised, eligible anchors."""
        return np.fromfile(self.folder / "documents.bin", dtype="<i8").reshape(-1, _COLUMNS)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [documents]: where each begins among all tokens."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def lines(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def lengths(self) -> np.ndarray:
        return self.table[:, 1]

    @property
    def supervised(self) -> np.ndarray:
        return self.table[:, 2]

    @property
    def eligible(self) -> np.ndarray:
        return self.table[:, 3]

    @cached_property
    def tokens(self) -> np.ndarray:
        return np.memmap(self.folder / "tokens.bin", dtype=read_meta(self.folder).dtype, mode="r")

    @cached_property
    def loss_mask(self) -> np.ndarray:
        return np.memmap(self.folder / "loss_mask.bin", dtype=bool, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
