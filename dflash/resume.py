"""What the folder of a run says of it, and whether a job is that run. No torch here: it is told at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash.card import read_facts
from dflash.events import CHECKPOINTS
from dflash.geometry import starting_taps
from dflash.pipeline.layout import Layout
from dflash.settings import JobSettings, SettingError

JOB_FILE = "job.json"  # every setting of the job that the folder holds
DRAFTER_FOLDER = "drafter"
# What may have been moved: a checkpoint knows data and target by their content (dflash.plan).
PATHS = ("data.path", "target.model", "drafter.init")
SECTIONS = ("target", "data", "drafter", "loss", "optim")
# Settings of these sections that may change from one start to the next: they say where and how fast, not what.
_FREE = ("target.models_dir", "target.gpus", "target.trust_remote_code", "loss.chunk")


def lasting(job: JobSettings) -> dict[str, dict[str, Any]]:
    """By variant, each setting that a run keeps to its end, under its dotted name. Raises SettingError."""
    batches, found = Layout.of(job).batches_a_step, {}
    for name, variant in job.variants().items():
        told = variant.to_dict()
        kept = {f"{section}.{key}": value for section in SECTIONS for key, value in told[section].items()}
        found[name] = {key: value for key, value in kept.items() if key not in _FREE} | {
            "target.taps": starting_taps(job),
            "train.rows": job.train.rows,
            "train.precision": job.train.precision,
            "split and train.accumulate": f"{batches} batches a step",
            "seed": job.seed,
        }
    return found


def note(job: JobSettings, out: Path) -> None:
    """Leave the job's settings in its folder. Raises OSError."""
    part = out / f".{JOB_FILE}"
    part.write_text(json.dumps(job.to_dict(), indent=2) + "\n")
    os.replace(part, out / JOB_FILE)


def ended(job: JobSettings, out: Path) -> int:
    """Steps of the run in `out` if that is this very job and nothing is left of it to do, else 0.

    Raises SettingError when `out` holds a run of other settings, or one that ended and cannot go on.
    """
    try:
        before = JobSettings.from_dict(json.loads((out / JOB_FILE).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        why = f"must be a folder whose {JOB_FILE} can be read ({error}); name another to start anew"
        raise SettingError("--out", out, why) from None
    then, now = lasting(before), lasting(job)
    if then.keys() != now.keys():
        has = f"the run in {out} has {', '.join(filter(None, then)) or 'none'}; name another --out to start anew"
        raise SettingError("fanout", ", ".join(filter(None, now)) or "none", has)
    steps = min(int(read_facts(out / DRAFTER_FOLDER / name).get("steps") or 0) for name in now)
    over = steps >= before.train.steps
    saved = all(any((out / CHECKPOINTS / name).glob("step-*")) for name in now)
    for name, settings in now.items():
        refuse_other(settings, then[name], f"the run in {out}", name, PATHS if saved and not over else ())
    if over and job.train.steps > steps and not saved:
        why = f"the run in {out} ended after {steps} and left no checkpoint to go on from; name another --out"
        raise SettingError("train.steps", job.train.steps, why)
    return steps if over and job.train.steps <= steps else 0


def refuse_other(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str, variant: str, but: Iterable[str] = ()
) -> None:
    """Raise SettingError, naming the first that differs, unless the settings of a variant are those from before."""
    for key in dict.fromkeys([*now, *before]):
        if key not in but and now.get(key) != before.get(key):
            setting = f"fanout.{variant}.{key}" if variant else key
            has = f"{where} has {json.dumps(before.get(key))}; name another --out to start anew"
            raise SettingError(setting, json.dumps(now.get(key)), has)
