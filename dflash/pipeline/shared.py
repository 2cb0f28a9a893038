"""What both ways of running workers need."""

from __future__ import annotations

from collections.abc import Iterable

from dflash import strategies
from dflash.pipeline.layout import Layout
from dflash.probe import Probe
from dflash.settings import JobSettings, SettingError

# How a job or a drafter worker can end without failing, the worst first.
STATUSES = ("interrupted", "requeue", "ok")


def overall(statuses: Iterable[str]) -> str:
    """The status of a job whose drafter workers ended with these."""
    return min(statuses, key=STATUSES.index)


def channel_limit(job: JobSettings) -> int:
    """Bytes one channel may hold: the bound is per drafter, shared by the targets that feed it."""
    return int(job.train.queue_mib * (1 << 20)) // Layout.of(job).targets


def require_strategy(job: JobSettings, device_type: str) -> None:
    """Raise SettingError when the job's strategy needs what this machine lacks."""
    try:
        strategies.require(job.compile, device_type)
    except strategies.Unavailable as reason:
        raise SettingError("compile", job.compile, str(reason)) from None


def make_strategy(job: JobSettings, device_type: str, probe: Probe) -> strategies.Strategy:
    """The strategy of a process, which is set up for it; require_strategy comes before."""
    strategy = strategies.make(job.compile, device_type, probe)
    strategy.setup_process()
    return strategy
