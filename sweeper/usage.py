"""What a run takes of its machine while it lasts, seen from outside: memory, processors, GPUs.

The harness looks every two seconds and appends a line to `usage.jsonl` in the run's directory, so any command has
these figures, also while it compiles or hangs, and no job waits for its GPU to answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sweeper.measure import finite

USAGE_FILE = "usage.jsonl"
EVERY_S = 2.0
AGAIN_S = 0.2  # where there was nothing to see: a run that begins


@dataclass(frozen=True)
class Use:
    """One look at a run at `t` (Unix seconds).

    rss_bytes: resident, summed over its processes, so memory that they share counts several times. cpu: processors
    busy with it since the look before, None at the first. gpu_busy: {device: share of the last moments in which a
    kernel ran, 0 to 1}. gpu_bytes: {device: memory in use on it, by whomever}. A device is named by its index or UUID.
    """

    t: float
    rss_bytes: int
    cpu: float | None = None
    gpu_busy: dict[str, float] = field(default_factory=dict)
    gpu_bytes: dict[str, int] = field(default_factory=dict)


def read(folder: Path) -> list[Use]:
    """What was seen of a run, in order; lines that cannot be read are left out."""
    found = []
    try:
        lines = (folder / USAGE_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            t = finite(told.get("t")) if isinstance(told, dict) else None
            if t is not None:
                busy, held = _numbers(told.get("gpu_busy")), _numbers(told.get("gpu_bytes"))
                held_bytes = {device: int(size) for device, size in held.items()}
                found.append(Use(t, int(finite(told.get("rss_bytes")) or 0), finite(told.get("cpu")), busy, held_bytes))
    return found


class Meter:
    """Looks at the processes below `pid` and at the GPUs that their environment names."""

    def __init__(self, folder: Path, pid: int, env: Mapping[str, str]) -> None:
        self._file, self._pid = folder / USAGE_FILE, pid
        self._gpus = _gpus(env.get("CUDA_VISIBLE_DEVICES"))
        self._next = 0.0  # time.monotonic()
        self._before: tuple[float, dict[int, float]] | None = None  # when, and processor seconds of each process

    def look(self) -> None:
        """Append a line if it is time to. A machine that does not answer, or a full disk, leaves it out."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        with contextlib.suppress(OSError, psutil.Error):
            if (told := self._use()) is None:
                self._next = time.monotonic() + AGAIN_S
            else:
                with open(self._file, "a", encoding="utf-8") as file:
                    file.write(json.dumps(told) + "\n")

    def _use(self) -> dict[str, Any] | None:
        """What there is to tell; nothing before the first process and after the last."""
        now, resident, seconds = time.monotonic(), 0, {}
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.Error), process.oneshot():
                spent = process.cpu_times()
                seconds[process.pid] = spent.user + spent.system
                resident += process.memory_info().rss
        if not resident:
            return None
        told: dict[str, Any] = {"t": round(time.time(), 3), "rss_bytes": resident}
        if self._before:
            at, earlier = self._before
            # A process that began since has spent all of its seconds since.
            spent_since = sum(max(0.0, total - earlier.get(pid, 0.0)) for pid, total in seconds.items())
            told["cpu"] = round(spent_since / (now - at), 3)
        self._before = now, seconds
        for name, device in self._gpus.items():
            with contextlib.suppress(Exception):  # the driver's own; a GPU that fell off the bus is the run's to tell
                import pynvml

                rates, memory = pynvml.nvmlDeviceGetUtilizationRates(device), pynvml.nvmlDeviceGetMemoryInfo(device)
                told.setdefault("gpu_busy", {})[name] = rates.gpu / 100
                told.setdefault("gpu_bytes", {})[name] = int(memory.used)
        return told


def _gpus(visible: str | None) -> dict[str, Any]:
    """NVML's handles of the GPUs that a run may use, by name; none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        names = [str(i) for i in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        return {name: _handle(name.strip()) for name in names if name.strip() not in ("", "-1")}
    except Exception:  # no driver, or a device that it does not know: then nothing is told of GPUs
        return {}


def _handle(name: str) -> Any:
    import pynvml

    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _numbers(value: Any) -> dict[str, float]:
    given = value.items() if isinstance(value, dict) else ()
    return {str(name): number for name, one in given if (number := finite(one)) is not None}
