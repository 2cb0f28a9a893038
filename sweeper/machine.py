"""What this machine offers a run: GPUs, found without loading torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

# On CPU a device is a worker with its own replica of a model; more of them than this measure only paging.
CPU_WORKERS = 8


@functools.cache
def gpus() -> int:
    """How many NVIDIA GPUs a child may use: those the driver lists, less what CUDA_VISIBLE_DEVICES hides."""
    present = len(gpu_names())
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


@functools.cache
def kind() -> str:
    """What compiled code depends on (hex): the CPU's model and instructions, and the models of the GPUs."""
    try:
        told = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        told = [platform.machine()]
    wanted = ("model name", "CPU part", "flags", "Features")
    cpu = [line for line in told if line.startswith(wanted)] or told
    return hashlib.sha256("\n".join([*cpu, *sorted(set(gpu_names()))]).encode()).hexdigest()


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """The models of all NVIDIA GPUs that the driver lists, such as "NVIDIA H200"."""
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done and done.returncode == 0:
            return tuple(re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", done.stdout, re.MULTILINE))
    return tuple(_model(gpu / "information") for gpu in Path("/proc/driver/nvidia/gpus").glob("*"))


def _model(information: Path) -> str:
    try:
        found = re.search(r"^Model:\s*(.*)$", information.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "GPU"
