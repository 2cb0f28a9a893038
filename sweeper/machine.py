"""What this machine offers a run: GPUs, found without loading torch."""

from __future__ import annotations

import contextlib
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
    if told := _listed():
        return tuple(re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", told, re.MULTILINE))
    return tuple(_model(gpu / "information") for gpu in Path("/proc/driver/nvidia/gpus").glob("*"))


def _model(information: Path) -> str:
    try:
        found = re.search(r"^Model:\s*(.*)$", information.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "GPU"


@functools.cache
def devices() -> dict[str, str]:
    """The GPUs that a child may use, as CUDA_VISIBLE_DEVICES names them, each with a name that is its own on this
    machine: its UUID where the driver tells it, for in a container or a job every first GPU is called 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(len(gpu_names()))] if visible is None else visible.split(",")
    names = [name.strip() for name in names][: gpus()]
    known = gpu_uuids()
    return {name: known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in names}


@functools.cache
def gpu_uuids() -> tuple[str, ...]:
    """The UUIDs of the NVIDIA GPUs that the driver lists, in its order; none where it does not say."""
    return tuple(re.findall(r"^GPU \d+:.*\(UUID: (GPU-[\w-]+)\)", _listed(), re.MULTILINE))


@functools.cache
def _listed() -> str:
    """What the driver's tool lists of GPUs; empty without driver."""
    tool = shutil.which("nvidia-smi")
    if tool:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
            if done.returncode == 0:
                return done.stdout
    return ""


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory in this process's control group (Linux)."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return 0
    found = 0
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers not in ("", "memory"):
            continue
        name = "memory.oom_control" if controllers else "memory.events"  # the first and the second version
        for root in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            with contextlib.suppress(OSError):
                told = re.search(r"^oom_kill (\d+)$", Path(root, path.lstrip("/"), name).read_text(), re.MULTILINE)
                found = max(found, int(told[1]) if told else 0)
    return found
