"""A data file to a prepared folder: read, tokenise, write, in one pass and with bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from dflash import settings
from dflash.data import store, tokens
from dflash.data.document import Document
from dflash.data.formats import BadRow, Conversation, Record
from dflash.data.reader import Reader, counted
from dflash.settings import SettingError

Progress = Callable[[int, int], object]
Encoded = list[list[Document] | BadRow]

_BATCH = 256  # records tokenised at a time
# A worker process has to load transformers before it is of use; a smaller file is done by then.
_BYTES_A_WORKER = 32 << 20
_MOST_WORKERS = 16


def prepare(
    data: settings.Data,
    tokenizer: Any,
    out: Path,
    *,
    embedding_rows: int,
    replace: bool,
    progress: Progress = lambda done, total: None,
) -> store.Meta:
    """Tokenise `data.path` into the folder `out`; `progress(done, total)` counts bytes of the file.

    A folder that was made from the same source and is whole is left as it is. Any other prepared folder is
    made anew if `replace` says so; what is no prepared folder is never touched. Documents in which no block can
    be anchored are left out and counted. Raises SettingError on a bad row (data.bad_rows=error), when nothing
    is left, and when `out` cannot be written.
    """
    reader = Reader(data.path, data.format, data.bad_rows)
    try:
        source = store.Source(
            name=Path(data.path).name,
            sha256=store.sha256(Path(data.path)),
            tokenizer=tokens.fingerprint(tokenizer),
            settings={"format": data.format, "reasoning": data.reasoning, "bad_rows": data.bad_rows},
        )
    except OSError as error:
        raise SettingError("data.path", data.path, f"must be a readable data file ({error.strerror})") from None
    if out.exists():
        meta, why = _reusable(out, source)
        if meta:
            return meta
        if not (replace and store.is_prepared(out)):
            raise SettingError("--out", out, f"{why}; name another folder")
    try:
        with store.making(out) as part:
            return _write(reader, tokenizer, data.reasoning, part, source, embedding_rows, progress)
    except OSError as error:
        raise SettingError("--out", out, f"cannot be written ({error.strerror})") from None


def _reusable(folder: Path, source: store.Source) -> tuple[store.Meta | None, str]:
    """What is known of a folder that holds all that the source would give; or else why it does not."""
    try:
        meta = store.read_meta(folder)
    except SettingError:
        return None, "exists and was not made by `dflash prepare`, or not finished"
    if difference := meta.source.difference(source):
        return None, f"was prepared {difference}"
    fault = store.fault(folder, meta)
    return (None, f"is damaged: {fault}") if fault else (meta, "")


def _write(
    reader: Reader,
    tokenizer: Any,
    reasoning: str,
    folder: Path,
    source: store.Source,
    embedding_rows: int,
    progress: Progress,
) -> store.Meta:
    writer = store.Writer(folder, embedding_rows)
    any_record = False
    try:
        for records, encoded in _encoded(reader, tokenizer, reasoning, embedding_rows):
            any_record = True
            for record, found in zip(records, encoded, strict=True):
                if isinstance(found, BadRow):
                    reader.bad(record.line, found)
                    continue
                for document in found:
                    if not writer.add(record.line, document):
                        reader.skipped["no place for an anchor"] += 1
            progress(reader.done, reader.size)
        if not any_record:
            raise reader.nothing()
        if not writer.documents:
            raise SettingError(
                "data.path", reader.path, f"holds nothing to train on; left out: {counted(reader.skipped)}"
            )
        progress(reader.size, reader.size)
        return writer.finish(source, reader.format, dict(reader.skipped))
    finally:
        writer.close()


def _encoded(
    reader: Reader, tokenizer: Any, reasoning: str, embedding_rows: int
) -> Iterator[tuple[list[Record], Encoded]]:
    """The records in batches, in order, with what became of each; large files by several processes."""
    batches = _batches(reader)
    first = next(batches, None)
    if first is None:
        return
    if isinstance(first[0], Conversation):
        tokens.check_tokenizer(tokenizer)
    yield first, tokens.encode(first, tokenizer, reasoning, embedding_rows)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, reader.size // _BYTES_A_WORKER, _MOST_WORKERS)
    if workers < 2:
        for batch in batches:
            yield batch, tokens.encode(batch, tokenizer, reasoning, embedding_rows)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer, reasoning, embedding_rows)) as pool:
        waiting: deque[tuple[list[Record], Future[Encoded]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch)))
            if len(waiting) > 3 * workers:
                records, future = waiting.popleft()
                yield records, future.result()
        for records, future in waiting:
            yield records, future.result()


def _batches(reader: Reader) -> Iterator[list[Record]]:
    records = iter(reader)
    while batch := list(islice(records, _BATCH)):
        yield batch


_worker: tuple[Any, str, int]  # what a worker process was started with


def _start_worker(*given: Any) -> None:
    global _worker
    _worker = given
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed could not close its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(batch: list[Record]) -> Encoded:
    return tokens.encode(batch, *_worker)
