"""Pins -> an environment, by uv: resolved and locked with hashes, installed, asked what it is, then given its name.

Everything happens in a folder of a temporary name, under a lock of the pins; the rename at the end is what makes
an environment of it. uv links files from its cache, so a second environment with the same torch costs a second
and some megabytes, as long as cache and environments lie on one file system.

uv's answer is not trusted: an index that lacks a build may offer another one in its place without a word
(pytorch/benchmark PR #333), so the new interpreter is asked what it imports.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sweeper import supervisor
from sweeper.wheels import ENVIRONMENT, RECORD, Pins, Sources, Wheel, find, fingerprint_at, whole

LOCK = "lock.txt"
SILENCE_S = 3600.0  # uv says nothing while it fetches gigabytes
FAILURE_CHARACTERS = 4000
# Variables that would make uv, or the new interpreter, look into another environment.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT")

_PROBE = """
import json, os, platform, sys, sysconfig
import torch
version = getattr(torch, "version", None)
facts = {
    "python": platform.python_version(),
    "platform": sysconfig.get_platform(),
    "places": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
    "markers": {
        "python_version": "%d.%d" % sys.version_info[:2],
        "python_full_version": platform.python_version(),
        "implementation_version": platform.python_version(),
    },
    "torch": {
        "version": torch.__version__,
        "git_version": getattr(version, "git_version", None),
        "cuda": getattr(version, "cuda", None),
    },
}
with open(sys.argv[1], "w") as file:
    json.dump(facts, file)
"""


class BuildFailure(Exception):
    """An environment that cannot be had: what was tried, and the last lines that were said of it."""


def build(
    pins: Pins,
    sources: Sources,
    *,
    interrupted: Callable[[], int] = lambda: 0,
    say: Callable[[str], None] = lambda line: None,
) -> Wheel | None:
    """The environment of these pins, built unless it is there; None when an interrupt came first.

    Of several that ask at once, in any number of processes, one builds and the others wait. `say` is told what
    is going on, in lines. Raises BuildFailure.
    """
    if found := find(pins, sources):
        return found
    try:
        sources.folder.mkdir(parents=True, exist_ok=True)
        with _held(pins, sources, interrupted, say) as mine:
            if not mine:
                return None
            if found := find(pins, sources):
                return found
            for left in sources.folder.glob(f".{pins.key[:12]}-*"):  # by a builder that was killed
                shutil.rmtree(left, ignore_errors=True)
            say(f"wheel {pins.name}: building {pins}")
            part = sources.folder / f".{pins.key[:12]}-{os.getpid()}"
            part.mkdir()
            try:
                began = time.monotonic()
                if not _make(pins, sources, part, interrupted):
                    return None
                say(f"wheel {pins.name}: built in {time.monotonic() - began:.0f} s")
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise BuildFailure(f"wheel {pins.name} could not be built\nOSError: {error}") from None
    return find(pins, sources)


@contextmanager
def _held(pins: Pins, sources: Sources, interrupted: Callable[[], int], say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock of these pins; False when an interrupt came first."""
    lock = FileLock(sources.folder / f".{pins.key[:12]}.lock")
    said = False
    while not interrupted():
        try:
            lock.acquire(timeout=0.5 if said else 0)
            break
        except Timeout:
            if not said:
                say(f"wheel {pins.name}: waiting for another harness that builds it")
                said = True
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _make(pins: Pins, sources: Sources, part: Path, interrupted: Callable[[], int]) -> bool:
    """Build in `part` and rename it; False when interrupted. Raises BuildFailure and OSError."""
    from uv import find_uv_bin

    uv, python = find_uv_bin(), part / ENVIRONMENT / "bin" / "python"
    asked, lock, facts = part / "asked.txt", part / LOCK, part / "facts.json"
    asked.write_text("".join(f"{line}\n" for line in pins.requirements))
    where = ["--python", str(python), *_where(pins, sources)]
    venv = [uv, "venv", "--quiet", "--no-project", "--relocatable", "--no-python-downloads"]
    steps = {
        "making its environment": [*venv, "--python", pins.python or sys.executable, str(part / ENVIRONMENT)],
        "resolving its pins": [
            *(uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
            *(str(asked), "--output-file", str(lock), *where),
        ],
        "installing its packages": [
            *(uv, "pip", "install", "--quiet", "--no-deps", "--verify-hashes"),
            *("--requirements", str(lock), *where),
        ],
        "importing torch": [str(python), "-I", "-c", _PROBE, str(facts)],
    }
    for what, argv in steps.items():
        if not _step(f"wheel {pins.name} could not be built: {what} failed", argv, part, interrupted):
            return False
    told = json.loads(facts.read_text())
    for path in (asked, facts):  # the record will say it
        path.unlink()
    versions, fingerprint = fingerprint_at(told["places"], pins.requirements, told)
    _verify(pins, versions, told)
    record = {
        "keys": [pins.key],
        "name": pins.name,
        "requirements": pins.requirements,
        "index": pins.index,
        "fingerprint": fingerprint,
        "versions": versions,
        "torch": told["torch"],
        "platform": told["platform"],
        "built": time.time(),
    }
    _name_it(part, sources.folder / f"{pins.name}-{fingerprint[:12]}", record)
    return True


def _where(pins: Pins, sources: Sources) -> list[str]:
    """uv's options that say where packages come from."""
    words = [word for place in sources.places() for word in ("--find-links", place)]
    if sources.index == []:
        return [*words, "--no-index"]
    # As pip has it: the best version of all indexes. Of equal versions the one with a build's name (+cu128) is best.
    words += ["--index-strategy", "unsafe-best-match"]
    words += [word for address in filter(None, [pins.index]) for word in ("--index", address)]
    for number, address in enumerate(sources.index or ()):
        words += ["--index" if number else "--default-index", address]
    return words


def _step(title: str, argv: Sequence[str], part: Path, interrupted: Callable[[], int]) -> bool:
    """Run one command to its end; False when interrupted. Raises BuildFailure with what it said."""
    log = part / supervisor.LOG_FILE
    before = log.stat().st_size if log.exists() else 0
    # Proxies, certificates and the place of uv's cache are in the user's variables: it sees them all, as in a shell.
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    env |= {"PYTHONFAULTHANDLER": "1", "NO_COLOR": "1", "COLUMNS": "10000", supervisor.RUN_MARK: str(part)}
    silence = dict.fromkeys(supervisor.STAGES, SILENCE_S)
    outcome = supervisor.supervise(argv, part, env, budget=silence, grace=5.0, interrupted=interrupted)
    if outcome.ended_by == "interrupt":
        return False
    if outcome.exit_code == 0:
        return True
    said = log.read_bytes()[before:].decode("utf-8", "replace").strip()
    ended = outcome.reason or f"ended by signal {outcome.signal}"
    raise BuildFailure(f"{title}\n{said[-FAILURE_CHARACTERS:] or ended}")


def _verify(pins: Pins, versions: dict[str, str], told: dict[str, Any]) -> None:
    """Raise BuildFailure unless what is installed, and what is imported, is what was asked for."""
    title = f"wheel {pins.name} is not what was asked for"
    imported = told["torch"]["version"]
    for line in pins.requirements:
        asked = Requirement(line)
        name = canonicalize_name(asked.name)
        if asked.marker and not asked.marker.evaluate(told["markers"]):
            continue
        for got in {versions.get(name, "nothing"), imported if name == "torch" else versions.get(name, "nothing")}:
            if got == "nothing" or not asked.specifier.contains(got, prereleases=True):
                raise BuildFailure(f"{title}\nwheel asked for {line}, got {name} {got}")
    if Version(imported).public != Version(versions["torch"]).public:
        raise BuildFailure(f"{title}\nwheel asked for torch {versions['torch']}, got torch {imported} on import")


def _name_it(part: Path, target: Path, record: dict[str, Any]) -> None:
    """Give a finished environment its name; one of equal content that has it already is told of the new pins."""
    there = next((old for folder, old in whole(target.parent) if folder == target), None)
    if there:
        there["keys"] = sorted({*there["keys"], *record["keys"]})
        _write(part / RECORD, there)
        os.replace(part / RECORD, target / RECORD)
    else:
        shutil.rmtree(target, ignore_errors=True)  # of which somebody took parts away
        _write(part / RECORD, record)
        os.rename(part, target)


def _write(path: Path, record: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
