"""Compile caches as PyTorch, Triton and CUDA lay them out, with made-up content."""

from __future__ import annotations

from pathlib import Path

WHERE = {
    "aotautograd": "inductor/aotautograd/akw/deb",
    "fxgraph": "inductor/fxgraph/3i/f3i/2ai",
    "code": "inductor/24/c24.cpp",
    "triton": "triton/0/kernel.cubin",
    "autotune": "inductor/5m/c5m.best_config",
    "pgo": "inductor/dynamo/code_state.pkl",
    "extensions": "extensions/ext/ext.so",
    "cuda": "cuda/index",
}


def fill(root: Path) -> dict[str, str]:
    """One file per layer, the n-th of n bytes; returns where each lies."""
    for number, name in enumerate(WHERE.values(), start=1):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * number)
    return WHERE
