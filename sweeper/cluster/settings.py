"""What a user asks of Slurm (conf/hydra/launcher/slurm.yaml), checked, and as submitit wants it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash.settings import SettingError, Split
from sweeper import leases
from sweeper.cluster import slurm

AUTO = "auto"
CPUS_A_WORKER = 4
TEXTS = ("partition", "account", "qos", "constraint", "memory", "image", "mounts", "python")
# What this project decides itself: a run's resources come from its split, and its end is told by a signal.
OURS = ("array", "dependency", "gpus", "gpus-per-node", "nodes", "ntasks", "open-mode", "output", "error", "requeue")


@dataclass(frozen=True)
class Settings:
    """As in conf/hydra/launcher/slurm.yaml, which explains each. time: minutes; warning: seconds."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: int = 60
    memory: str | None = None
    cpus: int | str = AUTO
    gpus: int | str = AUTO
    at_once: int | None = None
    setup: list[str] = field(default_factory=list)
    image: str | None = None
    mounts: str | None = None
    python: str | None = None
    warning: int = 120
    extra: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise SettingError on values that cannot work, also such as Slurm refuses at once."""
        for name in TEXTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | int) or not str(value).strip()):
                raise SettingError(f"slurm.{name}", value, "must be text, or null for Slurm's own default")
        _whole("time", self.time, 1, "minutes")
        _whole("warning", self.warning, 10, "seconds")
        for name, least in (("cpus", 1), ("gpus", 0)):
            if getattr(self, name) != AUTO:
                _whole(name, getattr(self, name), least, f"or {AUTO}")
        if self.at_once is not None:
            _whole("at_once", self.at_once, 1, "jobs, or null")
        if self.memory is not None and not re.fullmatch(r"\d+(\.\d+)?[KMGT]?B?", str(self.memory)):
            raise SettingError("slurm.memory", self.memory, "must be a size such as 64G")
        if not isinstance(self.setup, list) or not all(isinstance(line, str) for line in self.setup):
            raise SettingError("slurm.setup", self.setup, "must be a list of lines of shell")
        if (self.mounts or self.python) and not self.image:
            name = "mounts" if self.mounts else "python"
            raise SettingError(f"slurm.{name}", getattr(self, name), "means something only with slurm.image")
        for name in self.extra:
            if str(name).replace("_", "-") in OURS:
                raise SettingError(f"slurm.extra.{name}", self.extra[name], "is set by the sweep itself")
        for tool in ("sbatch", "squeue", "scontrol", "sinfo", "scancel", "srun"):
            if shutil.which(tool) is None:
                raise SettingError("hydra/launcher", "slurm", f"needs Slurm's commands, and {tool} is not on the PATH")

    def node_gpus(self) -> int:
        """The most GPUs that a node of the partition has. Raises SettingError when Slurm does not say."""
        told = slurm.node_gpus(self.partition)
        if isinstance(told, str):
            raise SettingError("slurm.partition", self.partition or "null", f"Slurm says: {told}")
        return told

    def gpus_of(self, spec: Mapping[str, Any]) -> int:
        """GPUs of a job for a run with this spec. device=shared puts all its workers on one."""
        if self.gpus != AUTO:
            return int(self.gpus)
        return 1 if spec.get("device") == "shared" else leases.gpus(dict(spec))

    def cpus_of(self, spec: Mapping[str, Any]) -> int:
        """Processors of a job for a run with this spec."""
        if self.cpus != AUTO:
            return int(self.cpus)
        split = Split.parse(str(spec.get("split")))
        return CPUS_A_WORKER * (split.targets + split.drafters)

    def parameters(self, gpus: int, cpus: int, dependency: str = "") -> dict[str, Any]:
        """The parameters of submitit's SlurmExecutor for jobs of this size."""
        extra = {str(name): value for name, value in self.extra.items() if value not in (None, False)}
        chosen = {
            **{name: getattr(self, name) for name in ("partition", "account", "qos", "constraint")},
            "mem": self.memory,
            "gpus_per_node": gpus or None,
            "array_parallelism": self.at_once,
            "setup": self.setup or None,
            "dependency": dependency or None,
            "srun_args": [f"--container-{name}={value}" for name, value in self._container()] or None,
        }
        return {name: value for name, value in chosen.items() if value is not None} | {
            "time": self.time,
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": cpus,
            "signal_delay_s": self.warning,
            "stderr_to_stdout": True,
            "additional_parameters": {"requeue": True, **extra},
        }

    def _container(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in (("image", self.image), ("mounts", self.mounts)) if value]


def read(given: Mapping[str, Any]) -> Settings:
    """The settings of this section. Raises SettingError on one that is unknown."""
    known = [one.name for one in dataclasses.fields(Settings)]
    for name, value in given.items():
        if name not in known:
            raise SettingError(
                f"slurm.{name}", value, f"unknown setting; known: {', '.join(known)}; others: slurm.extra"
            )
    return Settings(**given)


def _whole(name: str, value: Any, least: int, unit: str) -> None:
    if type(value) is not int or value < least:
        raise SettingError(f"slurm.{name}", value, f"must be a whole number from {least} ({unit})")
