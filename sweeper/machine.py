"""What this machine offers a run: GPUs, found without loading torch."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

# On CPU a device is a worker with its own replica of a model; more of them than this measure only paging.
CPU_WORKERS = 8


@functools.cache
def gpus() -> int:
    """How many NVIDIA GPUs a child may use: those the driver lists, less what CUDA_VISIBLE_DEVICES hides."""
    present = _listed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = 0
    for name in visible.split(","):
        # CUDA itself stops at the first entry that names no device.
        if not name.strip() or name.strip().startswith("-"):
            break
        chosen += 1
    return min(present, chosen)


def _listed() -> int:
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done and done.returncode == 0:
            return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0
