"""Checkpoints to resume from, written so that a kill at any moment leaves a whole one.

    <folder>/step-00001234/checkpoint.json      step, facts, and the checksum of every file
    <folder>/step-00001234/<name>.safetensors   the tensors of that name
    <folder>/latest                             the name of the newest one

A checkpoint is written under a hidden name, brought to the disk, and then renamed; `latest` is replaced after that.
So what has a visible name is whole, unless the disk itself lost data, which the checksums show.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

POINTER = "latest"
MANIFEST = "checkpoint.json"
# A checkpoint that one of the same step is about to replace keeps its place under `.old` until the new one has it.
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its files are what was saved."""

    step: int
    facts: dict[str, Any]  # what the caller saved beside the tensors
    folder: Path
    names: tuple[str, ...]  # of its groups of tensors

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors saved as `name`, on the CPU. Raises KeyError when there is no such name."""
        if name not in self.names:
            raise KeyError(name)
        return load_file(self.folder / f"{name}.safetensors")


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], facts: dict[str, Any], keep: int
) -> Path:
    """Save a checkpoint of `step` and make it the latest; gives its folder.

    `tensors` are groups by name, a file each; `facts` is plain JSON. Of the earlier checkpoints the newest `keep` - 1
    stay. Later ones go too: training that saves an earlier step has passed them over, since they were damaged.
    Raises OSError when it cannot be written, as on a full disk, TypeError when `facts` are no JSON; earlier
    checkpoints are then as they were. One process saves to a folder at a time.
    """
    facts = json.loads(json.dumps(facts))  # as it will be read, and refused before any work
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):  # of a save that was killed
        _delete(leftover)
    place = folder / f"step-{step:08d}"
    new, pointer = folder / f".{place.name}", folder / f".{POINTER}"
    try:
        new.mkdir()
        files = {}
        for name, group in tensors.items():
            path = new / f"{name}.safetensors"
            try:
                save_file(dict(group), path)
            except SafetensorError as error:
                raise _os_error(error, path) from error
            files[name] = _digest(path, flush=True)
        manifest = {"step": step, "facts": facts, "files": files}
        _write(new / MANIFEST, json.dumps(manifest | {"sha256": _manifest_digest(manifest)}, indent=1))
        _write(pointer, place.name)
        _flush_folder(new)
        if place.exists():
            os.rename(place, _free(place.with_suffix(".old")))
        os.rename(new, place)
        _flush_folder(folder)
        os.replace(pointer, folder / POINTER)
        _flush_folder(folder)
    except BaseException:
        _delete(new)
        _delete(pointer)
        raise
    _prune(folder, step, keep)
    return place


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a sentence about each that was passed over because it is damaged.

    First the one that `latest` names, then the others from the newest to the oldest; every byte is read and checked.
    """
    skipped = []
    found = sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_age)
    try:
        named = (folder / POINTER).read_text(errors="replace").strip()
    except OSError as error:
        named = ""
        if found:
            skipped.append(f"{folder / POINTER} cannot be read: {error.strerror}")
    else:
        if not _NAME.fullmatch(named) or not (folder / named).exists():
            skipped.append(f"{folder / POINTER} names no checkpoint")
    for path in sorted(found, key=lambda path: path.name != named):
        try:
            return _verified(path), skipped
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(f"{path} is damaged: {_why(error)}")
    return None, skipped


def _verified(path: Path) -> Checkpoint:
    """The checkpoint in a folder; raises one of many errors when it is not what was saved."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    if manifest.pop("sha256") != _manifest_digest(manifest):
        raise ValueError(f"{MANIFEST} is not what was saved")
    for name, digest in manifest["files"].items():
        if _digest(path / f"{name}.safetensors") != digest:
            raise ValueError(f"{name}.safetensors is not what was saved")
    return Checkpoint(manifest["step"], manifest["facts"], path, tuple(manifest["files"]))


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename).name if error.filename else 'a file'} cannot be read: {error.strerror}"
    if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return str(error)
    return f"{MANIFEST} is not what was saved"


def _prune(folder: Path, step: int, keep: int) -> None:
    """Leave the checkpoint of `step` and the newest `keep` - 1 before it."""
    others = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.name != f"step-{step:08d}"]
    before = [path for path in sorted(others, key=_age) if _step(path) < step]
    for path in set(others) - set(before[: keep - 1]):
        gone = _free(folder / f".{path.name}")
        try:
            os.rename(path, gone)  # first out of sight, so that a kill leaves no half of it in its place
        except OSError:
            continue
        _delete(gone)


def _free(path: Path) -> Path:
    """The path, after whatever was there is gone."""
    _delete(path)
    return path


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _age(path: Path) -> tuple[int, bool]:
    """Sorts the newest first, and one that was to be replaced after the one that replaced it."""
    return -_step(path), path.suffix == ".old"


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _digest(path: Path, flush: bool = False) -> str:
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: without it a power cut may undo a rename."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """The operating system's error inside one of safetensors, which passes it on as text."""
    code = re.search(r"os error (\d+)", str(error))
    if code:
        return OSError(int(code[1]), os.strerror(int(code[1])), str(path))
    return OSError(str(error))
