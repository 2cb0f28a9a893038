"""NVIDIA's driver and a build of torch that could use it, as far as a harness asks: no GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path


def gpus(folder: Path, count: int) -> dict[str, str]:
    """The environment in which `nvidia-smi -L` lists `count` GPUs and torch could compute on them; made in `folder`."""
    tools, packages = folder / "bin", folder / "packages" / "torch-2.13.0.dist-info"
    tools.mkdir()
    packages.mkdir(parents=True)
    listed = "".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-0000000{n}-aa)\\n" for n in range(count))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    (tools / "nvidia-smi").chmod(0o755)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (packages / "RECORD").write_text("")
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(packages.parent)}
