"""Compile a job's attention alone, on one thread, and end: what a warm-up script before the job does.

The caches that the environment names, as it does for training (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR), keep
what was compiled. Whether the job then finds it is another matter: docs/CACHES.md. Settings are those of `train`.

    python -m dflash warm --out warmed --spec spec.json

Exit status: 0 it ended well; 1 it failed; 2 a setting cannot work (one sentence on standard error).
"""

from __future__ import annotations

import argparse
from typing import Any

from dflash.commands import job


def arguments(parser: argparse.ArgumentParser) -> None:
    job.arguments(parser, "folder for events")


def run(arguments: argparse.Namespace) -> int:
    settings = job.read(arguments)

    def work(*given: Any) -> str:
        from dflash.warm import warm

        return warm(*given)

    return 0 if job.carry_out(settings, arguments.out, work) == "ok" else 1
