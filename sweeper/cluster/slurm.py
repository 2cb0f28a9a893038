"""What Slurm says: of its jobs (squeue; sacct where it keeps accounts), of its nodes (sinfo). A second witness.

Every question may go unanswered: a controller that restarts, no accounts, a tool that is missing. Then the answer is
None, and whoever asked goes on with what the runs wrote into the store.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ANSWER_S, QUEUE_S = 30.0, 10.0  # who follows jobs does nothing else while the queue is asked for
# States of a job that is not over; REQUEUED and the like pass within seconds.
LIVE = frozenset(
    [
        "PENDING",
        "RUNNING",
        "SUSPENDED",
        "COMPLETING",
        "CONFIGURING",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    ]
)


@dataclass(frozen=True)
class Job:
    """state: as Slurm spells it, RUNNING or PENDING. reason: why it is in that state, if Slurm says."""

    state: str
    reason: str = ""

    @property
    def live(self) -> bool:
        return self.state in LIVE


def queue() -> dict[str, Job] | None:
    """This user's jobs that the controller knows, by id (123 or 123_4); ended ones stay a while."""
    said = _ask("squeue", "--noheader", "--array", "--me", "--states=all", "--format=%i|%T|%r", seconds=QUEUE_S)
    if said is None:
        return None
    rows = (line.strip().split("|", 2) for line in said.splitlines())
    return {row[0]: Job(row[1], row[2]) for row in rows if len(row) == 3}


def accounted(job: str) -> list[str]:
    """How each start of a job ended, oldest first, as accounting tells it: "NODE_FAIL 1:0"; empty without an answer."""
    said = _ask("sacct", "--noheader", "--parsable2", "-X", "-D", "-j", job, "--format=JobID,State,ExitCode")
    rows = (line.split("|") for line in (said or "").splitlines())
    return [f"{row[1].split()[0]} {row[2]}" for row in rows if len(row) == 3 and row[0] == job and row[1]]


def shown(job: str) -> dict[str, str]:
    """What the controller shows of a job, {field: value}; empty without an answer."""
    said = _ask("scontrol", "--oneliner", "show", "job", job)
    return dict(re.findall(r"(\w+)=(\S*)", said or ""))


@functools.cache
def node_gpus(partition: str | None) -> int | str:
    """The most GPUs that any node of a partition has (None: of the default one); text says why Slurm does not tell."""
    words = ["sinfo", "--noheader", "--format=%P|%G", *(["--partition", partition] if partition else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 1]
    if done.returncode or not rows:
        return " ".join(done.stderr.split()) or "there is no such partition"
    usual = [gres for name, gres in rows if name.endswith("*")] or [gres for _, gres in rows]
    return max(_gpus(gres) for gres in (usual if partition is None else [gres for _, gres in rows]))


def _gpus(gres: str) -> int:
    """GPUs in Slurm's list of a node's resources, such as gpu:h200:8(S:0-1),tmpdisk:3."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))


def refusal(options: Sequence[str]) -> str:
    """Why sbatch would not take a job with these options, in its words; empty if it would."""
    words = ["sbatch", "--test-only", *options, "--wrap", "true"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(said) if done.returncode else ""


def cancel(jobs: Iterable[str], *, ask: bool) -> None:
    """End jobs: those that wait at once; those that run are asked to by SIGTERM, or with ask=False killed."""
    some = list(jobs)
    if not some:
        return
    _ask("scancel", "--state=PENDING", *some)
    _ask("scancel", *(["--signal=TERM"] if ask else []), *some)


def requeue(job: str) -> bool:
    """Put a job back into the queue, which ends it; False if Slurm refuses."""
    return _ask("scontrol", "requeue", job) is not None


def _ask(*words: str, seconds: float = ANSWER_S) -> str | None:
    # Names and states as they are, whatever the user's settings of these tools say.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
