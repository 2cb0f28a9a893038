"""Train one DFlash drafter (or several, with fanout) and report it in OUT/events.jsonl.

Settings come from a JSON file, from KEY=VALUE on the command line (which win), or both; dflash/settings.py
lists them. The same command on the same OUT goes on from the last checkpoint there; other settings are refused.

    python -m dflash train --out run data.path=chats.jsonl target.model=SmolLM2-135M-Instruct train.steps=2000
    python -m dflash train --out run --spec spec.json split=1t2d loss.kind=dpace

Exit status: 0 it ended well; 1 it failed (the last `failure` event says why); 2 a setting cannot work (one
sentence on standard error); 75 it was asked to end (Ctrl-C, SIGTERM, SIGUSR2), saved a checkpoint after a whole step
and wants to be started again; 143 the same without a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dflash import resume
from dflash.commands import job

EXIT = {"ok": 0, "failed": 1, "requeue": 75, "interrupted": 143}


def arguments(parser: argparse.ArgumentParser) -> None:
    job.arguments(parser, "folder for events, checkpoints and the drafter")
    parser.add_argument("--quiet", action="store_true", help="tell of progress in the events alone")


def run(arguments: argparse.Namespace) -> int:
    settings = job.read(arguments)
    if steps := resume.ended(settings, arguments.out):
        there = f"{arguments.out} holds this run, which ended after {steps} steps"
        print(f"dflash: {there}; name another --out to repeat it", file=sys.stderr)
        return EXIT["ok"]

    def work(*given: Any) -> str:
        from dflash.train import train

        return train(*given)

    return EXIT[job.carry_out(settings, arguments.out, work, arguments.quiet)]
