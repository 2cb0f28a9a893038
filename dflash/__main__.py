"""`python -m dflash SPEC.json OUT`: run one training job and report it in OUT/events.jsonl.

Exit status: 0 the job ended well; 1 it failed (the last `failure` event says why); 2 a setting cannot work
(one sentence on standard error); 143 it was asked to end by SIGTERM and did so after a whole step.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

from dflash.events import EVENTS_FILE, EventWriter
from dflash.settings import JobSettings, SettingError

EXIT = {"ok": 0, "failed": 1, "interrupted": 143}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dflash", description="Train one DFlash drafter.")
    parser.add_argument("spec", type=Path, help="JSON file with the job's settings (see dflash/settings.py)")
    parser.add_argument("out", type=Path, help="folder for events.jsonl and the trained drafter")
    arguments = parser.parse_args()
    faulthandler.enable()
    try:
        job = JobSettings.from_file(arguments.spec)
        arguments.out.mkdir(parents=True, exist_ok=True)
        events = EventWriter(arguments.out / EVENTS_FILE)
        return _run(job, arguments.out, events)
    except SettingError as error:
        print(f"dflash: {error}", file=sys.stderr)
        return 2


def _run(job: JobSettings, out: Path, events: EventWriter) -> int:
    # Here and not above: a wrong setting is told without waiting for torch.
    import torch

    from dflash.devices import place
    from dflash.failure import report_failure
    from dflash.probe import Probe, environment
    from dflash.train import train

    placement = place(job)
    torch.set_num_threads(placement.cpu_threads)
    probe = Probe(events)
    probe.install()
    factors = {"compile": job.compile, "split": job.split, "isolation": job.isolation}
    events.emit("start", **factors, **environment(placement.kind))
    try:
        status = train(job, placement, out, events, probe)
    except SettingError:
        raise
    except BaseException as error:
        report_failure(events, probe, "main", error)
        status = "failed"
    events.emit("memory", **probe.memory())
    events.emit("end", status=status)
    return EXIT[status]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a worker thread that hangs after a failure must not keep the process.
    os._exit(code)
