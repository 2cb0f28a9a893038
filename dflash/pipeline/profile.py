"""A look into a few steps: what a worker's operations and the GPUs did, left beside the events of a run.

torch.profiler sees the operations of the thread that asks it to, with their backward, and on GPUs the kernels of all
threads of the process. Its option to see the operations of all threads (`profile_all_threads`) crashes the process when
others are at work as it begins or ends: three of three tries within 25 s, torch 2.13.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dflash.pipeline import spans
from dflash.pipeline.tools import Tools

TRACE, TABLE = "profile.json.gz", "profile.txt"
ROWS = 30  # operations in the table


def profiled(steps: range, tools: Tools, device: torch.device) -> Iterator[int]:
    """The steps one after another, those after warm-up recorded, `train.profile` of them.

    When the last of these is over (when the next one is asked for) TRACE, a Chrome trace, and TABLE are written beside
    the events, whole or not at all. A run that ends before leaves neither; one that cannot be profiled goes on
    without, with a warning.
    """
    train = tools.job.train
    first = steps.start + train.steady_after
    wanted = range(first, first + train.profile)
    recorder = None
    try:
        for step in steps:
            if wanted and step == wanted[0]:
                recorder = _begun(tools, device)
            yield step
            if recorder and step == wanted[-1]:
                _finish(recorder, wanted, tools, device)
                recorder = None
    finally:
        if recorder:
            with contextlib.suppress(RuntimeError):  # what ends the run is told, not this
                _stop(recorder, device)


def _begun(tools: Tools, device: torch.device) -> Any:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    recorder = profile(activities=activities)
    try:
        recorder.start()
    except RuntimeError as error:  # another profiler holds the process or the GPU
        _warn(tools, error)
        return None
    spans.name_in_profiles(True)
    return recorder


def _stop(recorder: Any, device: torch.device) -> None:
    spans.name_in_profiles(False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    recorder.stop()


def _finish(recorder: Any, steps: range, tools: Tools, device: torch.device) -> None:
    began, folder = time.perf_counter(), tools.events.path.parent
    try:
        _stop(recorder, device)
        _write(recorder, steps, folder, device)
    except (OSError, RuntimeError) as error:
        _warn(tools, error)
        return
    seconds = time.perf_counter() - began
    told = {"first": steps[0], "last": steps[-1], "trace": str(folder / TRACE), "table": str(folder / TABLE)}
    tools.events.emit("profile", **told, seconds=seconds)


def _write(recorder: Any, steps: range, folder: Path, device: torch.device) -> None:
    which = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    head = f"Steps {steps[0]} to {steps[-1]} on {device}, torch {torch.__version__}: most time of their own first.\n"
    table = recorder.key_averages().table(sort_by=which, row_limit=ROWS, max_name_column_width=60)
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=folder) as scratch:
        raw, packed, text = Path(scratch, "trace.json"), Path(scratch, TRACE), Path(scratch, TABLE)
        _export(recorder, raw)
        with open(raw, "rb") as plain, gzip.open(packed, "wb", compresslevel=5) as file:
            shutil.copyfileobj(plain, file)
        text.write_text(head + "".join(f"{line.rstrip()}\n" for line in table.splitlines()))
        for made in (packed, text):
            os.replace(made, folder / made.name)


def _export(recorder: Any, raw: Path) -> None:
    """torch's own writing of a trace. Raises OSError when that was not possible, which torch only prints.

    What it began it then keeps open, and a disk has no room again for a file that is open: so that is emptied.
    """
    recorder.export_chrome_trace(str(raw))
    if raw.is_file():
        return
    free = shutil.disk_usage(raw.parent).free
    for begun in raw.parent.iterdir():
        os.truncate(begun, 0)
    raise OSError(f"torch could not write its trace to {raw.parent.parent}, where {free / 1e6:.1f} MB were left")


def _warn(tools: Tools, error: Exception) -> None:
    tools.events.emit("warning", code="profile.failed", message=f"no profile: {type(error).__name__}: {error}")
