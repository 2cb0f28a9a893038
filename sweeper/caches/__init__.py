"""Compile caches of a run: directories of its own, and the proof of what they held and did.

Layers (facts of PyTorch 2.11 to 2.14, read in its source): below TORCHINDUCTOR_CACHE_DIR lie `aotautograd/`
(AOTAutograd), `fxgraph/` (Inductor's graphs), `dynamo/` (profile-guided settings), `*.best_config`
(autotuning) and generated code; Triton, C++ extensions and CUDA's own compiler have directories of their
own. A cache copied to another path still hits, once Triton's notes of where its kernels lie are put right
(snapshots.py), and a run that only hits adds no file (measured with 2.13 on a CPU, 2.11 on a GPU).

What a run starts from and where that comes from is in snapshots.py; docs/CACHES.md tells the whole.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Cache states (`cache=`), as docs/CACHES.md describes them.
COLD, WARM, FOREIGN, STANDALONE = "cold", "warm", "foreign", "standalone"
LAYERS = ("aotautograd", "fxgraph", "code", "triton", "autotune", "pgo", "extensions", "cuda")
# Lookups that say whether compilation was skipped; the layers below them are only asked when these miss.
LOOKUPS = ("hits", "misses", "bypasses", "guard_misses")

_DIRECTORIES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "CUDA_CACHE_PATH": "cuda",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",  # of torch's own run-time compiler, jiterator
}
# A cache on another machine would make a cold run warm unseen.
_REMOTE = (
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO",
)


@dataclass(frozen=True)
class Count:
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Start:
    """What a run's caches were filled with.

    made_by: the run that made the snapshot; empty where the run starts with none. missed: why a snapshot that
    was asked for could not be had, so that the run started cold; cause: the signature's cause of that.
    note: what became of a first snapshot, where another one was had or asked for after it.
    """

    made_by: str = ""
    missed: str = ""
    cause: str = ""
    note: str = ""


def environment(root: Path) -> dict[str, str]:
    """Variables that keep every compile cache of a child below `root`, which need not exist."""
    paths = {name: str(root / directory) for name, directory in _DIRECTORIES.items()}
    return paths | dict.fromkeys(_REMOTE, "0")


def compiler_settings() -> dict[str, str]:
    """The variables of this process that its children's compilers read, less those that `environment` sets."""
    ours = environment(Path("/"))
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name not in ours and (name in ("CC", "CXX") or name.startswith(("TORCH", "PYTORCH_", "TRITON_")))
    }


def layout(root: Path) -> None:
    """Make the empty cache directories; raises FileExistsError where there already are some."""
    root.mkdir(parents=True)
    for directory in _DIRECTORIES.values():
        (root / directory).mkdir()


def count(root: Path) -> dict[str, Count]:
    """Files and bytes of every layer below `root`."""
    files = dict.fromkeys(LAYERS, 0)
    size = dict.fromkeys(LAYERS, 0)
    for path in files_below(root):
        layer = _layer(path.relative_to(root))
        files[layer] += 1
        size[layer] += path.stat().st_size
    return {layer: Count(files[layer], size[layer]) for layer in LAYERS}


def files_below(root: Path) -> list[Path]:
    """Every file below `root`, sorted; no links."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def _layer(path: Path) -> str:
    top = path.parts[0]
    if path.name.endswith(".best_config"):
        return "autotune"
    if top != "inductor":
        return {"triton-home": "triton", "kernels": "cuda"}.get(top, top)
    inside = path.parts[1]
    return {"dynamo": "pgo", "aotautograd": inside, "fxgraph": inside, "triton": inside}.get(inside, "code")


def proof(
    requested: str,
    before: dict[str, Count],
    after: dict[str, Count],
    events: list[dict[str, Any]],
    start: Start | None = None,
    reports: bool = True,
) -> dict[str, Any]:
    """What the caches held and did: {requested, proved, why, layers, made_by, cause, note}.

    proved is `cold` (no file before), `warm` (files before, hits, and neither a miss, a bypass, a guard miss
    nor a new file) or `mixed`; only a run that asked for cold can be proved cold, and one that asked for
    anything else only warm. Hits of a cold run are hits on what it wrote itself. The rest is that of `start`.

    reports: False of a command that need not report lookups; if it does not, files alone are its proof. A miss
    leaves a new file, so only a compile that bypasses the caches would go unseen.
    """
    start = start or Start()
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
    if requested == COLD:
        if files:
            why = f"{files} files were there before the start"
        else:
            proved, why = "cold", "no file before" + (f"; {told}" if told else "")
    elif start.missed:
        why = start.missed
    elif not files and not new and not any(total.values()):
        proved, why = "warm", "nothing is compiled here, so there is nothing to cache"
    elif not files:
        why = "no file before"
    elif not asked and (new or reports):
        why = f"{new} new files" if new else "the run reported no cache lookups"
    elif not asked:
        proved, why = "warm", f"{files} files before, none new; no lookups reported"
    elif total["misses"] or total["bypasses"] or total["guard_misses"]:
        why = told
    elif not total["hits"]:
        why = "no hit"
    elif new:
        why = f"{new} new files; {told}"
    else:
        proved, why = "warm", f"{files} files before, none new; {told}"
    told_of_start = {"made_by": start.made_by, "cause": start.cause, "note": start.note}
    return {"requested": requested, "proved": proved, "why": why, "layers": layers, **told_of_start}


def _lookups(events: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """The totals of all processes of a run, per layer: of each what it told last, unless the job's end tells all."""
    told: dict[Any, dict[str, dict[str, int]]] = {}
    for event in events:
        caches = event.get("caches")
        if event.get("event") in ("counters", "end") and isinstance(caches, dict):
            if event["event"] == "end":
                told.clear()
            told[event.get("pid")] = {
                str(layer): {str(name): n for name, n in numbers.items() if isinstance(n, int)}
                for layer, numbers in caches.items()
                if isinstance(numbers, dict)
            }
    total: dict[str, Counter[str]] = {}
    for layers in told.values():
        for layer, numbers in layers.items():
            total.setdefault(layer, Counter()).update(numbers)
    return {layer: dict(numbers) for layer, numbers in total.items()}
