"""Train one DFlash drafter (or several, with fanout) and report it in OUT/events.jsonl.

Settings come from a JSON file, from KEY=VALUE on the command line (which win), or both; dflash/settings.py
lists them. The same command on the same OUT goes on from the last checkpoint there.

    python -m dflash train --out run data.path=chats.jsonl target.model=SmolLM2-135M-Instruct train.steps=2000
    python -m dflash train --out run --spec spec.json split=1t2d loss.kind=dpace

Exit status: 0 it ended well; 1 it failed (the last `failure` event says why); 2 a setting cannot work (one
sentence on standard error); 75 it was asked to end (Ctrl-C, SIGTERM, SIGUSR2), saved a checkpoint after a whole step
and wants to be started again; 143 the same without a checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dflash.events import EVENTS_FILE, EventWriter
from dflash.settings import JobSettings, SettingError, override

EXIT = {"ok": 0, "failed": 1, "requeue": 75, "interrupted": 143}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for events, checkpoints and the drafter")
    parser.add_argument("--spec", type=Path, help="JSON file with settings")
    parser.add_argument("--quiet", action="store_true", help="tell of progress in the events alone")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, such as drafter.block=16")


def run(arguments: argparse.Namespace) -> int:
    values = _read(arguments.spec) if arguments.spec else {"data": {}, "target": {}}
    for word in arguments.settings:
        override(values, word)
    job = JobSettings.from_dict(values)
    job.check()
    arguments.out.mkdir(parents=True, exist_ok=True)
    events = EventWriter(arguments.out / EVENTS_FILE)
    # Here and not above: a wrong setting is told without waiting for torch.
    import torch

    from dflash.console import Console
    from dflash.devices import place
    from dflash.failure import report_failure
    from dflash.probe import Probe, environment
    from dflash.train import train

    placement = place(job)
    torch.set_num_threads(placement.cpu_threads)
    probe = Probe(events)
    probe.install()
    console = None if arguments.quiet else Console(events.path)
    factors = {"compile": job.compile, "split": job.split, "isolation": job.isolation}
    events.emit("start", **factors, **environment(placement.kind))
    try:
        status = train(job, placement, arguments.out, events, probe)
    except SettingError:
        raise
    except BaseException as error:
        report_failure(events, probe, "main", error)
        status = "failed"
    events.emit("memory", **probe.memory())
    events.emit("end", status=status)
    if console:
        console.close()
    return EXIT[status]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingError("spec", path, f"must be a readable JSON file ({error})") from None
    if not isinstance(values, dict):
        raise SettingError("spec", path, "must hold one JSON object")
    return values
