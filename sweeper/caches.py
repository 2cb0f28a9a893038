"""Compile caches of a run: directories of its own, snapshots to start warm from, the proof of what they held.

Layers (facts of PyTorch 2.11 to 2.14, read in its source): below TORCHINDUCTOR_CACHE_DIR lie `aotautograd/`
(AOTAutograd), `fxgraph/` (Inductor's graphs), `dynamo/` (profile-guided settings), `*.best_config`
(autotuning) and generated code; Triton, C++ extensions and CUDA's own compiler have directories of their
own. A cache copied to another path still hits, and a run that only hits adds no file (measured with 2.13).

A snapshot is a folder that is never changed in place: made beside and renamed, with the checksum of each
file, which is compared when a run takes its copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS = ("aotautograd", "fxgraph", "code", "triton", "autotune", "pgo", "extensions", "cuda")
# Lookups that say whether compilation was skipped; the layers below them are only asked when these miss.
LOOKUPS = ("hits", "misses", "bypasses", "guard_misses")
MANIFEST = "manifest.json"
FILES = "files"

_DIRECTORIES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "CUDA_CACHE_PATH": "cuda",
}
# A cache on another machine would make a cold run warm unseen.
_REMOTE = (
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO",
)


class SnapshotFault(Exception):
    """A snapshot that must not be used, and why."""


@dataclass(frozen=True)
class Count:
    files: int = 0
    bytes: int = 0


def environment(root: Path) -> dict[str, str]:
    """Variables that keep every compile cache of a child below `root`, which need not exist."""
    paths = {name: str(root / directory) for name, directory in _DIRECTORIES.items()}
    return paths | dict.fromkeys(_REMOTE, "0")


def layout(root: Path) -> None:
    """Make the empty cache directories; raises FileExistsError where there already are some."""
    root.mkdir(parents=True)
    for directory in _DIRECTORIES.values():
        (root / directory).mkdir()


def count(root: Path) -> dict[str, Count]:
    """Files and bytes of every layer below `root`."""
    files = dict.fromkeys(LAYERS, 0)
    size = dict.fromkeys(LAYERS, 0)
    for path in _files(root):
        layer = _layer(path.relative_to(root))
        files[layer] += 1
        size[layer] += path.stat().st_size
    return {layer: Count(files[layer], size[layer]) for layer in LAYERS}


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def _layer(path: Path) -> str:
    top = path.parts[0]
    if path.name.endswith(".best_config"):
        return "autotune"
    if top == "triton-home":
        return "triton"
    if top != "inductor":
        return top
    inside = path.parts[1]
    return {"dynamo": "pgo", "aotautograd": inside, "fxgraph": inside, "triton": inside}.get(inside, "code")


def proof(
    requested: str,
    before: dict[str, Count],
    after: dict[str, Count],
    events: list[dict[str, Any]],
    why_not_warm: str = "",
) -> dict[str, Any]:
    """What the caches held and did: {requested, proved, why, layers}.

    proved is `cold` (no file before), `warm` (files before, hits, and neither a miss, a bypass, a guard miss
    nor a new file) or `mixed`. Hits of a cold run are hits on what it wrote itself. `why_not_warm` is what is
    known of a snapshot that could not be had.
    """
    asked = _lookups(events)
    layers = {
        layer: {
            "files_before": before[layer].files,
            "bytes_before": before[layer].bytes,
            "files_after": after[layer].files,
            "bytes_after": after[layer].bytes,
            **asked.get(layer, {}),
        }
        for layer in LAYERS
    }
    for layer, numbers in asked.items():
        layers.setdefault(layer, dict(numbers))
    files = sum(c.files for c in before.values())
    new = sum(max(0, after[layer].files - before[layer].files) for layer in LAYERS)
    total = {name: sum(numbers.get(name, 0) for numbers in asked.values()) for name in LOOKUPS}
    told = ", ".join(f"{total[name]} {name.replace('_', ' ')}" for name in LOOKUPS if total[name])
    proved, why = "mixed", ""
    if requested == "cold":
        if files:
            why = f"{files} files were there before the start"
        else:
            proved, why = "cold", "no file before" + (f"; {told}" if told else "")
    elif why_not_warm:
        why = why_not_warm
    elif not files and not new and not any(total.values()):
        proved, why = "warm", "nothing is compiled here, so there is nothing to cache"
    elif not files:
        why = "no file before"
    elif not asked:
        why = "the run reported no cache lookups"
    elif total["misses"] or total["bypasses"] or total["guard_misses"]:
        why = told
    elif not total["hits"]:
        why = "no hit"
    elif new:
        why = f"{new} new files; {told}"
    else:
        proved, why = "warm", f"{files} files before, none new; {told}"
    return {"requested": requested, "proved": proved, "why": why, "layers": layers}


def _lookups(events: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The last totals that the run reported, per layer."""
    for event in reversed(events):
        caches = event.get("caches")
        if event.get("event") in ("counters", "end") and isinstance(caches, dict):
            return {
                str(layer): {str(k): v for k, v in numbers.items() if isinstance(v, int)}
                for layer, numbers in caches.items()
                if isinstance(numbers, dict)
            }
    return {}


def has_snapshot(store: Path, key: str) -> bool:
    return (_snapshot(store, key) / MANIFEST).is_file()


def donate(store: Path, key: str, caches: Path, made_from: dict[str, Any]) -> bool:
    """Turn the caches of a run that ended well into the snapshot of `key`; False when there already is one.

    The directory is moved, so it is gone from the run afterwards. Raises OSError.
    """
    target = _snapshot(store, key)
    if has_snapshot(store, key):
        return False
    part = target.with_name(f"{target.name}.tmp-{os.getpid()}-{time.time_ns()}")
    part.mkdir(parents=True)
    try:
        os.rename(caches, part / FILES)
        files = {
            str(path.relative_to(part / FILES)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in _files(part / FILES)
        }
        manifest = {"key": key, "made": time.time(), "from": made_from, "files": files}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        os.rename(part, target)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if has_snapshot(store, key):  # another harness was first
            return False
        raise
    return True


def take(store: Path, key: str, caches: Path) -> None:
    """Copy the snapshot of `key` to `caches`, which must be laid out, checking every file.

    Raises SnapshotFault when there is none, or when it is damaged: then it has been set aside and `caches` is
    empty again.
    """
    source = _snapshot(store, key)
    if not source.is_dir():
        raise SnapshotFault("there is no snapshot")
    try:
        _copy(source, caches)
    except (SnapshotFault, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        shutil.rmtree(caches, ignore_errors=True)
        layout(caches)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SnapshotFault(f"the snapshot could not be copied ({error.strerror})") from None
        aside = source.with_name(f"{source.name}.damaged-{time.time_ns()}")
        try:
            os.rename(source, aside)
        except OSError:
            aside = source  # another harness set it aside first
        raise SnapshotFault(f"the snapshot was damaged ({error}) and is set aside as {aside.name}") from None


def _copy(source: Path, caches: Path) -> None:
    listed = json.loads((source / MANIFEST).read_text())["files"]
    found = {str(path.relative_to(source / FILES)) for path in _files(source / FILES)}
    for name in sorted(found ^ set(listed)):
        raise SnapshotFault(f"{name} is {'missing' if name in listed else 'not listed'}")
    for name, facts in listed.items():
        target = caches / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / FILES / name, target)
        # Checked on the copy: that is what the run will read.
        if target.stat().st_size != facts["bytes"] or _sha256(target) != facts["sha256"]:
            raise SnapshotFault(f"{name} differs from its checksum")


def _snapshot(store: Path, key: str) -> Path:
    return store / "snapshots" / key[:24]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
