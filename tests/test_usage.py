"""What the harness sees of a run's memory, processors and GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from sweeper import usage

BUSY = "x = bytearray(200 << 20)\nprint(flush=True)\nwhile True: pass"


def test_memory_and_processors_of_a_tree_are_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.3)
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            child.stdout.readline()
            meter = usage.Meter(tmp_path, os.getpid(), {})
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                meter.look()
                time.sleep(0.02)
        finally:
            child.kill()
    seen = usage.read(tmp_path)
    assert 2 <= len(seen) <= 5, "a line each time it is time to, no more"
    assert seen[0].cpu is None
    assert all(one.rss_bytes > 200 << 20 for one in seen)
    assert max(one.cpu or 0 for one in seen) > 0.05
    assert all(before.t < after.t for before, after in itertools.pairwise(seen))


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("1", ["1"]), ("GPU-ab", ["GPU-ab"]), ("", []), ("-1", [])]
)
def test_the_gpus_that_a_run_may_use_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    fake = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=70),
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(used=5 << 30),
    }
    for name, function in fake.items():
        monkeypatch.setattr(pynvml, name, function)
    usage.Meter(tmp_path, os.getppid(), {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}).look()
    (seen,) = usage.read(tmp_path)
    assert seen.gpu_busy == dict.fromkeys(names, 0.7)
    assert seen.gpu_bytes == dict.fromkeys(names, 5 << 30)


def test_a_machine_without_driver_and_a_run_without_processes_are_no_error(tmp_path: Path) -> None:
    meter = usage.Meter(tmp_path, 2**22 + 1, {"CUDA_VISIBLE_DEVICES": "7"})
    meter.look()
    assert usage.read(tmp_path) == []


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    lines = ["[]", "{", '{"t": "now"}', '{"t": 5, "rss_bytes": 7, "cpu": null, "gpu_busy": {"0": "x", "1": 0.5}}']
    (tmp_path / usage.USAGE_FILE).write_text("\n".join(lines))
    assert usage.read(tmp_path) == [usage.Use(5.0, 7, None, {"1": 0.5})]
