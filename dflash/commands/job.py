"""What the commands that carry out a job share: its settings, and the first and last words in its events."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.events import EVENTS_FILE, EventWriter
from dflash.settings import JobSettings, SettingError, override

if TYPE_CHECKING:
    from dflash.devices import Placement
    from dflash.probe import Probe

# What is done for a job; gives its status. What failed is told in the events or raised.
Work = Callable[[JobSettings, "Placement", Path, EventWriter, "Probe"], str]


def arguments(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.add_argument("--spec", type=Path, help="JSON file with settings")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, such as drafter.block=16")


def read(arguments: argparse.Namespace) -> JobSettings:
    """The job that a command line means; raises SettingError."""
    values = _read(arguments.spec) if arguments.spec else {"data": {}, "target": {}}
    for word in arguments.settings:
        override(values, word)
    job = JobSettings.from_dict(values)
    job.check()
    return job


def carry_out(job: JobSettings, out: Path, work: Work, quiet: bool = True) -> str:
    """Do `work`, reported in OUT/events.jsonl; gives the status of its `end` event. Raises SettingError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        events = EventWriter(out / EVENTS_FILE)
    except OSError as error:
        raise SettingError("--out", out, f"must be a folder that can be written ({error.strerror})") from None
    # Here and not above: a wrong setting is told without waiting for torch.
    import torch

    from dflash.console import Console
    from dflash.devices import place
    from dflash.failure import report_failure
    from dflash.probe import Probe, environment

    placement = place(job)
    torch.set_num_threads(placement.cpu_threads)
    probe = Probe(events)
    probe.install()
    console = None if quiet else Console(events.path)
    factors = {"compile": job.compile, "split": job.split, "isolation": job.isolation}
    events.emit("start", **factors, **environment(placement.kind))
    try:
        status = work(job, placement, out, events, probe)
    except SettingError:
        raise
    except BaseException as error:
        report_failure(events, probe, "main", error)
        status = "failed"
    events.emit("memory", **probe.memory())
    events.emit("end", status=status)
    if console:
        console.close()
    return status


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingError("--spec", path, f"must be a readable JSON file ({error})") from None
    if not isinstance(values, dict):
        raise SettingError("--spec", path, "must hold one JSON object")
    return values
