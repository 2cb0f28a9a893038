"""Which device each worker has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dflash.settings import JobSettings, SettingError, Split


@dataclass(frozen=True)
class Placement:
    """One device a worker; on CPU a device is a worker with threads of its own."""

    targets: list[torch.device]
    drafters: list[torch.device]
    cpu_threads: int  # intra-op threads of one worker

    @property
    def kind(self) -> str:
        return self.drafters[0].type


def place(job: JobSettings) -> Placement:
    """Targets on the first GPUs, drafters on those after them; raises SettingError when there are too few."""
    split = Split.parse(job.split)
    workers = split.targets + split.drafters
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu_threads = job.train.cpu_threads or max(1, cores // workers)
    gpus = torch.cuda.device_count()
    if job.device == "cpu" or (job.device == "auto" and gpus == 0):
        cpu = torch.device("cpu")
        return Placement([cpu] * split.targets, [cpu] * split.drafters, cpu_threads)
    if gpus == 0:
        raise SettingError("device", job.device, "needs a GPU, and this machine shows none; use device=cpu")
    if gpus < workers and job.device != "shared":
        raise SettingError(
            "split",
            job.split,
            f"needs {workers} GPUs, and this machine has {gpus}; device=shared puts several workers on one",
        )
    devices = [torch.device("cuda", n % gpus) for n in range(workers)]
    return Placement(devices[: split.targets], devices[split.targets :], cpu_threads)
