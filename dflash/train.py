"""One training job, read top to bottom: plan, lay out the workers, run them.

`isolation=threads`: all workers are threads of this process (the incident's shape). `isolation=processes`:
one process a worker, which share no interpreter state; this one only starts and watches them.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

from dflash import resume
from dflash.devices import Placement
from dflash.events import EventWriter
from dflash.pipeline.processes import run_in_processes
from dflash.pipeline.shared import require_strategy
from dflash.pipeline.threads import run_in_threads
from dflash.plan import make_plan, settle_taps, whole_target
from dflash.probe import Probe
from dflash.settings import JobSettings
from dflash.target import Target


def train(job: JobSettings, placement: Placement, out: Path, events: EventWriter, probe: Probe) -> str:
    """Run the job; gives `ok`, `failed`, or when it was asked to end `requeue` (a checkpoint was saved) or
    `interrupted`. What failed is in the events.

    Goes on from the last checkpoint in `out`. Raises SettingError before any training when the settings do not
    fit the machine, the data, the target or the checkpoint.
    """
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends at once

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # Slurm sends the last two before it kills
        signal.signal(number, ask)
    require_strategy(job, placement.kind)
    job = settle_taps(job)
    events.emit("stage", stage="data")
    outline = Target.outline(job.target, placement.targets[0][0], whole_target(job))
    plan = make_plan(job, outline, out, events)  # what cannot work is told here, before any worker exists
    resume.note(job, out)
    events.emit("stage", stage="load")
    run = run_in_threads if job.isolation == "threads" else run_in_processes
    return run(plan, placement, out, events, probe, stop)
