"""Which device each worker has, and the way there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dflash.settings import JobSettings, SettingError, Split


@dataclass(frozen=True)
class Placement:
    """The devices of each worker; on CPU a device is a worker with threads of its own."""

    targets: list[tuple[torch.device, ...]]  # several when one target is spread over them
    drafters: list[torch.device]
    cpu_threads: int  # intra-op threads of one worker

    @property
    def kind(self) -> str:
        return self.drafters[0].type


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """What a model computes in: `name` of target.dtype or train.precision; auto is float32 on CPU, else bfloat16."""
    # Most CPUs have no fast bfloat16; GPUs do.
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"auto": auto, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place(job: JobSettings) -> Placement:
    """Targets on the first GPUs, drafters on those after them; raises SettingError when there are too few."""
    split, each = Split.parse(job.split), job.target.gpus
    workers, wanted = split.targets + split.drafters, split.targets * each + split.drafters
    cpu_threads = job.train.cpu_threads or max(1, cores() // workers)
    gpus = torch.cuda.device_count()
    if job.device == "cpu" or (job.device == "auto" and gpus == 0):
        if each > 1:
            raise SettingError("target.gpus", each, "must be 1 on a CPU, and this machine shows no GPU")
        cpu = torch.device("cpu")
        return Placement([(cpu,)] * split.targets, [cpu] * split.drafters, cpu_threads)
    if gpus == 0:
        raise SettingError("device", job.device, "needs a GPU, and this machine shows none; use device=cpu")
    if each > gpus:
        raise SettingError("target.gpus", each, f"is more than this machine has ({gpus})")
    if gpus < wanted and job.device != "shared":
        spread = f" ({split.targets} targets of target.gpus={each})" if each > 1 else ""
        raise SettingError(
            "split",
            job.split,
            f"needs {wanted} GPUs{spread}, and this machine has {gpus}; device=shared puts several workers on one",
        )
    devices = [torch.device("cuda", n % gpus) for n in range(wanted)]
    first = split.targets * each
    return Placement([tuple(devices[n : n + each]) for n in range(0, first, each)], devices[first:], cpu_threads)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device, without waiting for what that is at."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
