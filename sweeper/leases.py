"""Which GPUs a run has, and who else runs on this machine: locks that end with the process that holds them.

A lease is a locked file in a folder that all sweeps of a user on this machine share, so two sweeps never put two runs
on one GPU. The lock lies on an open file, which the harness hands on to the leash of its run: it is free once both have
ended, in whatever way, and not before, so that a killed harness frees a GPU only when the run's processes are gone.
`filelock`, used elsewhere, keeps its file to itself and cannot be handed on.

Every run, on a GPU or not, also holds a file of its own: how many there are says who was measured beside others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.settings import SettingError, Split
from sweeper import machine

FOLDER = "SWEEPER_LEASES"  # environment variable: the folder, where /tmp is not shared by all that share the GPUs
AUTO = "auto"
_RUN, _GPU = "run-", "gpu-"


@dataclass
class Lease:
    """What one run holds. devices: what the run sees of the GPUs, None for all that the harness sees.

    files: descriptors that keep it; to be inherited by the run's leash.
    """

    folder: Path
    name: str
    devices: tuple[str, ...] | None
    files: tuple[int, ...]

    def beside(self) -> int:
        """How many other runs are on this machine now."""
        return sum(path.name != self.name for path in _held(self.folder, _RUN))


def folder() -> Path:
    """The folder of this user's leases on this machine. Raises OSError when it cannot be had."""
    place = Path(os.environ.get(FOLDER) or f"/tmp/dflash-sweeper-{os.getuid()}")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user; set {FOLDER} to a folder of your own")
    return place


def wanted(spec: dict[str, Any], is_trainer: bool, alone: bool, there: Sequence[str]) -> tuple[int, bool]:
    """How many of the GPUs that are there a run takes, and whether it is shown all of them.

    A run that is measured alone takes all, so that nothing else is put beside it, and a trainer is shown those that its
    split asks for. Of several at once each takes what its split asks for, also a foreign command, which sees no more.
    """
    if spec.get("device") == "cpu" or not there:
        return 0, False
    asked = min(gpus(spec), len(there))
    return (len(there), not is_trainer) if alone else (asked, False)


def gpus(spec: dict[str, Any]) -> int:
    """How many GPUs the split of a run asks for: a target may take several."""
    if spec.get("device") == "cpu":
        return 0
    split = Split.parse(str(spec.get("split")))
    return split.targets * int((spec.get("target") or {}).get("gpus") or 1) + split.drafters


def at_once(jobs: str, specs: Sequence[dict[str, Any]], there: int) -> int:
    """How many of these runs may be under way at a time, for `jobs=`.

    auto: as many as the GPUs that are there can hold of the smallest split, or as the processors can hold of its
    workers. Raises SettingError.
    """
    if jobs != AUTO:
        return check(jobs)
    if not specs:
        return 1
    on_gpu = [spec for spec in specs if spec.get("device") != "cpu"]
    rooms = [there // max(1, min(map(gpus, on_gpu)))] if on_gpu else []
    if len(on_gpu) < len(specs):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        splits = [Split.parse(str(spec.get("split"))) for spec in specs if spec.get("device") == "cpu"]
        rooms.append(cores // min(split.targets + split.drafters for split in splits))
    return max(1, *rooms)


def check(jobs: str) -> int:
    """The number that `jobs=` gives, 0 for auto. Raises SettingError."""
    if jobs == AUTO:
        return 0
    if not re.fullmatch(r"\d{1,4}", jobs) or int(jobs) < 1:
        raise SettingError("jobs", jobs, "must be auto or a whole number of runs from 1 to 9999")
    return int(jobs)


@contextmanager
def held(
    count: int,
    show_all: bool,
    about: str,
    wait: Callable[[str], bool],
) -> Iterator[Lease | None]:
    """Hold `count` of this machine's GPUs, waiting until so many are free; None when the wait was given up.

    `wait` is called again and again with a sentence on who is waited for, sleeps, and says whether to go on waiting.
    `about` tells others what holds the GPUs. All or nothing: who waits holds none, so two never wait for each other.
    Raises OSError when the folder of leases cannot be used.
    """
    place = folder()
    devices = machine.devices()
    files: list[int] = []
    name = f"{_RUN}{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}-{uuid.uuid4().hex[:8]}"
    try:
        taken: list[str] | None = []
        while count:
            taken = _take(place, devices, count, files, about)
            if taken is not None or not wait(f"waiting for GPUs: {_holders(place, devices)}"):
                break
        if taken is None:
            yield None
            return
        files.append(_sign_in(place, name, about))
        chosen = tuple(taken) if count and not show_all else None
        yield Lease(place, name, chosen, tuple(files))
    finally:
        (place / name).unlink(missing_ok=True)
        for file in files:
            os.close(file)


def _take(place: Path, devices: dict[str, str], count: int, files: list[int], about: str) -> list[str] | None:
    """Lock `count` free devices and add their files, or leave all as they were."""
    # One chooser at a time, or two that want all of them could each get a half, and again.
    with _choosing(place):
        got: list[str] = []
        mine: list[int] = []
        for name, key in devices.items():
            if len(got) == count:
                break
            file = _lock(place / f"{_GPU}{key}", about)
            if file is not None:
                got.append(name)
                mine.append(file)
        if len(got) == count:
            files += mine
            return got
        for file in mine:
            os.close(file)
        return None


@contextmanager
def _choosing(place: Path) -> Iterator[None]:
    file = os.open(place / "choosing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _sign_in(place: Path, name: str, about: str) -> int:
    """The descriptor of this run's own file; files of runs that are gone are removed."""
    with _choosing(place):
        for path in set(place.glob(f"{_RUN}*")).difference(_held(place, _RUN)):
            path.unlink(missing_ok=True)
        file = _lock(place / name, about, wait=True)  # somebody may be looking whether it is held
    assert file is not None
    return file


def _lock(path: Path, about: str, wait: bool = False) -> int | None:
    """The descriptor of the locked file, which then says who holds it; None if somebody else does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    with contextlib.suppress(OSError):  # a full disk costs the words, not the lease
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"pid": os.getpid(), "run": about}).encode(), 0)
    return file


def _held(place: Path, prefix: str) -> list[Path]:
    """The files with this prefix that are locked by anybody."""
    found = []
    for path in place.glob(f"{prefix}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            found.append(path)
        finally:
            os.close(file)
    return found


def _holders(place: Path, devices: dict[str, str]) -> str:
    """Who holds which of these devices, in words."""
    names = {f"{_GPU}{key}": name for name, key in devices.items()}
    found: dict[str, list[str]] = {}
    for path in _held(place, _GPU):
        if path.name not in names:
            continue
        try:
            told = json.loads(path.read_text())
            who = f"{told['run']} (pid {told['pid']})"
        except (OSError, ValueError, KeyError, TypeError):
            who = "another run"
        found.setdefault(who, []).append(names[path.name])
    return "; ".join(f"{','.join(held)} held by {who}" for who, held in found.items()) or "none is free"
