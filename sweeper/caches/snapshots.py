"""Snapshots: the compile caches that one run left, for others to start from.

    snapshots/v<layout>-<key>/manifest.json     key, layout, when and of what it was made, and its files' checksums
    snapshots/v<layout>-<key>/files/...         a run's cache directory as it was
    snapshots/v<layout>-<key>+<n>/...           the same, grown n times: the newest is the one that counts

A snapshot is never changed in place: it is made beside, under a name that nobody reads, and renamed when whole.
One that grows gets the next name, and only then does the one before go, so that at every moment one is there.
A run takes a copy, each file of which is compared with its checksum. The layout's number is in the name, so
that harnesses of different versions share a store without reading each other's.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweeper import store as records
from sweeper.caches import files_below

LAYOUT = 2
FOLDER, MANIFEST, FILES = "snapshots", "manifest.json", "files"
# Nobody works longer than this on a snapshot that is being made: what is left then was left by a kill.
ABANDONED_S = 3600.0
# So often does a snapshot grow. What is compiled anew in every run would make it grow for ever.
GROWTHS = 8

FULL = (errno.ENOSPC, errno.EDQUOT)
# What renaming to a folder says that is there.
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
# What reading says of files that are gone or unreadable for good; anything else may pass.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)

_MARK = re.compile(r"\.(tmp|damaged|pruned)-")
_NAME = re.compile(r"v(\d+)-([0-9a-f]+)(?:\+(\d+))?$")


class Fault(Exception):
    """A snapshot that could not be used or made, and why; `cause` is the signature's."""

    def __init__(self, text: str, cause: str = "cache.warm_missed") -> None:
        super().__init__(text)
        self.cause = cause


class Gone(Fault):
    """A snapshot that was not there, or no longer."""


@dataclass(frozen=True)
class Snapshot:
    """One folder of snapshots/, as `survey` found it.

    state: `whole`, `outgrown` (by a larger one of the same key), `damaged` (set aside), `unfinished` (being made, or
    left by a kill) or `other layout`. bytes: on disk, of everything in it. used_by: the runs that started from it,
    oldest first. made, last_used: Unix seconds. busy: why it must not be removed now, if so.
    """

    name: str
    state: str
    made_from: dict[str, Any]
    made: float
    files: int
    bytes: int
    used_by: tuple[str, ...]
    last_used: float
    busy: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def place(store: Path, key: str) -> Path:
    """Where the snapshot of `key` (hex) is, or would be."""
    found = _numbered(store, key, 0)
    for number in range(1, GROWTHS + 1):  # upwards: one that went since its turn has left the next one behind
        if (grown := _numbered(store, key, number)).is_dir():
            found = grown
    return found


def _numbered(store: Path, key: str, number: int) -> Path:
    """The place of a snapshot that has grown so often."""
    return store / FOLDER / (f"v{LAYOUT}-{key[:24]}" + (f"+{number}" if number else ""))


def _number(folder: Path) -> int:
    match = _NAME.match(folder.name)
    return int((match and match[3]) or 0)


def exists(store: Path, key: str) -> bool:
    return place(store, key).is_dir()


def donate(store: Path, key: str, caches: Path, made_from: dict[str, Any]) -> bool:
    """Turn the caches of a run that ended well into the snapshot of `key`; False when there already is one.

    The directory is moved, so it is gone from the run afterwards. Raises Fault when the disk does not let it.
    """
    if exists(store, key):
        return False
    return _store(_numbered(store, key, 0), key, caches, made_from)


def grow(store: Path, key: str, caches: Path, made_from: dict[str, Any], of: str) -> bool:
    """Let the caches of a run that started from the snapshot of `key`, and compiled more, take that one's place.

    `of` is the run that made it, as `take` gave it; what the manifest says of the new one names that run, and those
    before it, as `grown_from`. False, and all is as it was, when there is another snapshot by now or none, when the
    caches hold no new file or have lost one, and when it has grown GROWTHS times. Otherwise as `donate`.
    """
    source = place(store, key)
    try:
        listed, told = _manifest(source, key)
    except (Fault, OSError):
        return False  # whoever takes it finds out
    number, names = _number(source), {str(path.relative_to(caches)) for path in files_below(caches)}
    if told.get("run") != of or not names > set(listed) or number == GROWTHS:
        return False
    before = told.get("grown_from")
    made_from = made_from | {"grown_from": [*(before if isinstance(before, list) else []), of]}
    if not _store(_numbered(store, key, number + 1), key, caches, made_from):
        return False
    newest = _number(place(store, key))  # others may have gone past this one
    for smaller in range(newest):  # also one that was being copied when the next came
        with suppress(OSError):
            _remove(_numbered(store, key, smaller), dry=False)
    return newest == number + 1


def _store(target: Path, key: str, caches: Path, made_from: dict[str, Any]) -> bool:
    """Make a snapshot of caches, which are moved; False when another harness was first. Raises Fault."""
    part = target.with_name(f"{target.name}.tmp-{os.getpid()}-{time.time_ns()}")
    try:
        part.mkdir(parents=True)
        os.rename(caches, part / FILES)
        files = {
            str(path.relative_to(part / FILES)): {"bytes": path.stat().st_size, "sha256": _sha256(path.read_bytes())}
            for path in files_below(part / FILES)
        }
        manifest = {"layout": LAYOUT, "key": key, "made": time.time(), "from": made_from, "files": files}
        with open(part / MANIFEST, "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, target)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        if target.is_dir() or error.errno in TAKEN:  # or it was there, and has been outgrown since
            return False
        raise _unwritten("no snapshot could be made", error) from None
    return True


def take(store: Path, key: str, caches: Path) -> str:
    """Copy the snapshot of `key` to `caches`, which must be laid out, checking every file; gives who made it.

    Raises Fault when there is none or it cannot be copied; `caches` is then empty again. One that is damaged
    (cause cache.corrupt) is set aside.
    """
    source = place(store, key)
    try:
        return _take(source, key, caches)
    except Gone:
        if _number(place(store, key)) <= _number(source):
            raise
        return take(store, key, caches)  # it grew meanwhile


def _take(source: Path, key: str, caches: Path) -> str:
    try:
        with _opened(source) as inode:
            try:
                return _copy(source, key, caches)
            except Fault as fault:
                _empty(caches)
                if fault.cause != "cache.corrupt":
                    raise
                if _inode(source) != inode:  # set aside or pruned meanwhile; what is there now is another one
                    raise Gone("the snapshot was removed while it was copied") from None
                raise Fault(f"the snapshot was damaged ({fault}) and {_set_aside(source)}", fault.cause) from None
    except FileNotFoundError:
        raise Gone("there is no snapshot") from None
    except OSError as error:
        raise Fault(f"the snapshot could not be read ({error.strerror})") from None


def _copy(source: Path, key: str, caches: Path) -> str:
    listed, made_from = _manifest(source, key)
    with _reading():
        found = {str(path.relative_to(source / FILES)) for path in files_below(source / FILES)}
    for name in sorted(found ^ set(listed)):
        raise Fault(f"{name} is {'missing' if name in listed else 'not listed'}", "cache.corrupt")
    for name, facts in listed.items():
        with _reading():
            content = (source / FILES / name).read_bytes()
        if (len(content), _sha256(content)) != facts:
            raise Fault(f"{name} differs from its checksum", "cache.corrupt")
        target = caches / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_at_home(target, content))
            shutil.copystat(source / FILES / name, target)
        except OSError as error:
            raise _unwritten("the snapshot could not be copied", error) from None
    return str(made_from.get("run", ""))


def _at_home(file: Path, content: bytes) -> bytes:
    """What a cache's file has to say where `file` is its place.

    Of every kernel Triton notes the absolute paths of its files, which lie beside the note; where one of them is gone,
    it compiles anew. Anything else says nothing of where it lies.
    """
    if not (file.name.startswith("__grp__") and file.suffix == ".json"):
        return content
    try:
        note = json.loads(content)
        note["child_paths"] = {name: str(file.with_name(Path(path).name)) for name, path in note["child_paths"].items()}
        return json.dumps(note).encode()
    except (ValueError, KeyError, TypeError, AttributeError):  # not as Triton writes it
        return content


def _manifest(source: Path, key: str) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
    """The files that a manifest lists, {name: (bytes, sha256)}, and what they were made from. Raises Fault, OSError."""
    with _reading():
        text = (source / MANIFEST).read_bytes()
    try:
        told = json.loads(text)
        if (told["layout"], told["key"]) != (LAYOUT, key):
            raise Fault("its manifest is of another snapshot", "cache.corrupt")
        listed = {str(name): (int(one["bytes"]), str(one["sha256"])) for name, one in told["files"].items()}
        return listed, dict(told["from"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Fault("its manifest is no manifest", "cache.corrupt") from None


def _empty(caches: Path) -> None:
    """Remove all but the directories that a layout has, which a full disk would not let us make again."""
    for path in caches.glob("*/*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _set_aside(source: Path) -> str:
    aside = source.with_name(f"{source.name}.damaged-{time.time_ns()}")
    try:
        os.rename(source, aside)
    except OSError as error:
        return f"could not be set aside ({error.strerror})"
    return f"is set aside as {aside.name}"


@contextmanager
def _opened(source: Path) -> Iterator[int]:
    """Hold a snapshot so that no prune removes it; gives the inode that is held. Raises OSError."""
    descriptor = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # of a file system without locks; there prune removes nothing
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DAMAGE:
            raise Fault(f"{Path(error.filename or 'a file').name}: {error.strerror}", "cache.corrupt") from None
        raise


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _unwritten(what: str, error: OSError) -> Fault:
    cause = "host.disk_full" if error.errno in FULL else "cache.warm_missed"
    return Fault(f"{what} ({error.strerror})", cause)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def survey(store: Path) -> list[Snapshot]:
    """Everything that lies in the store's snapshots/, last used first."""
    # By a key's digits in a snapshot's name: when and from whose snapshot which runs started, and who is at it.
    started: dict[str, list[tuple[float, str, str]]] = {}
    running: dict[str, str] = {}
    for folder in (store / "runs").glob("*/"):
        one = records.attempt(folder)
        if key := one.run.get("snapshot"):
            made_by = str(((one.verdict or {}).get("cache") or {}).get("made_by") or "")
            started.setdefault(key[:24], []).append((float(one.run.get("started") or 0.0), folder.name, made_by))
            if one.verdict is None and records.alive(folder):
                running[key[:24]] = folder.name
    found = []
    for folder in (store / FOLDER).glob("*/"):
        made_from, made = _told(folder)
        state, key = _state(folder)
        uses = [
            (when, run) for when, run, maker in sorted(started.get(key, [])) if maker in ("", made_from.get("run", ""))
        ]
        files = files_below(folder)
        busy = f"{running[key]} starts from it" if key in running else ""
        if state == "unfinished" and time.time() - _changed(folder) < ABANDONED_S:
            busy = "may be in the making"
        found.append(
            Snapshot(
                name=folder.name,
                state=state,
                made_from=made_from,
                made=made,
                files=len(files),
                bytes=sum(_size(path) for path in files),
                used_by=tuple(run for _, run in uses),
                last_used=max([made, *(when for when, _ in uses)]),
                busy=busy,
            )
        )
    return sorted(found, key=lambda one: -one.last_used)


def prune(
    store: Path,
    *,
    older_than: float | None = None,
    unused_for: float | None = None,
    down_to: int | None = None,
    dry: bool = False,
) -> tuple[list[Snapshot], list[tuple[Snapshot, str]]]:
    """Remove snapshots; gives those removed, and those that were to go but are in use, with the reason.

    Goes: what is not `whole`; what was made more than `older_than` seconds ago; what nobody started from for
    `unused_for` seconds; and while the rest takes more than `down_to` bytes, what was used longest ago. With
    `dry` nothing is removed. Raises OSError.
    """
    now, there = time.time(), survey(store)
    chosen = [
        one
        for one in there
        if one.state != "whole"
        or (older_than is not None and now - one.made > older_than)
        or (unused_for is not None and now - one.last_used > unused_for)
    ]
    left = [one for one in there if one not in chosen]
    while down_to is not None and left and sum(one.bytes for one in left) > down_to:
        idle = [one for one in left if not one.busy]
        if not idle:
            break
        chosen.append(idle[-1])
        left.remove(idle[-1])
    removed, kept = [], []
    for one in chosen:
        busy = one.busy or _remove(store / FOLDER / one.name, dry)
        if busy:
            kept.append((one, busy))
        else:
            removed.append(one)
    return removed, kept


def _remove(folder: Path, dry: bool) -> str:
    """Remove a snapshot unless a run is copying it, which is what is returned then. Raises OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dry:
            gone = folder.with_name(f"{folder.name}.pruned-{time.time_ns()}")
            os.rename(folder, gone)  # at once, so that no run finds half of it
            shutil.rmtree(gone)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP):
            return "a run copies it, or the file system has no locks"
        raise
    finally:
        os.close(descriptor)
    return ""


def _state(folder: Path) -> tuple[str, str]:
    """A snapshot's state and, of one that a run could start from, the digits of its key."""
    mark = _MARK.search(folder.name)
    if mark:
        return ("damaged" if mark[1] == "damaged" else "unfinished"), ""
    named = _NAME.match(folder.name)
    if not named or int(named[1]) != LAYOUT:
        return "other layout", ""
    newest = place(folder.parent.parent, named[2]).name
    return ("whole" if folder.name == newest else "outgrown"), named[2]


def _told(folder: Path) -> tuple[dict[str, Any], float]:
    """What a snapshot says it was made of, and when; of one that says nothing, when its folder last changed."""
    try:
        told = json.loads((folder / MANIFEST).read_bytes())
        return dict(told["from"]), float(told["made"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}, _changed(folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a run in the making of it, or another prune
        return 0


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
