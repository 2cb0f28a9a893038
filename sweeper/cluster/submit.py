"""Runs -> jobs of Slurm, through submitit: in arrays where they are alike, and in the order that their caches need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash.settings import SettingError
from sweeper import caches, run, spec, store
from sweeper.caches import snapshots
from sweeper.cluster import slurm
from sweeper.cluster.job import Job
from sweeper.cluster.settings import Settings
from sweeper.here import Numbered
from sweeper.plan import Planned, starts_from
from sweeper.verdict import Verdict, named

MOST = 1000  # jobs of one array; Slurm's own limit is 1001 unless a site raised it
TRIES, PAUSE_S = 4, 10.0  # of a controller that cannot be reached
AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused")


@dataclass
class Watched:
    """A run that Slurm was given. folder: its newest attempt, as far as is known."""

    place: int
    item: Planned
    folder: Path
    job: str


def check(runs: Iterable[spec.Run], settings: Settings) -> None:
    """Raise SettingError when Slurm would refuse a job of a size that these runs need. Submits nothing."""
    for gpus, cpus in sorted({_size(one, settings) for one in runs}):
        asked = settings.parameters(gpus, cpus)
        names = {"cpus_per_task": "cpus-per-task", "gpus_per_node": "gpus-per-node"}
        wanted = ("partition", "account", "qos", "constraint", "mem", "time", *names)
        words = [f"--{names.get(name, name)}={asked[name]}" for name in wanted if name in asked]
        extra = asked["additional_parameters"].items()
        words += [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in extra]
        if said := slurm.refusal(words):
            raise SettingError("hydra/launcher", "slurm", f"Slurm refuses a job with {' '.join(words)}: {said}")


def submit(items: Sequence[Numbered], under_way: Sequence[Watched], session: run.Session) -> list[Watched]:
    """Submit a job for each of these runs, in arrays of equal size; those that Slurm refuses get that as verdict.

    A run that starts from caches which another run of the sweep leaves waits for that one's job, however it ends; what
    it then does not find it makes itself. Raises OSError when the store cannot be written.
    """
    settings = Settings(**(session.options.slurm or {}))
    makers = _makers([item for _, item in items], under_way, session.folder)
    jobs = {one.item.run.identity: one.job for one in under_way}
    submitted: list[Watched] = []

    def waits_for(item: Planned) -> str:
        maker = makers.get(starts_from(item.run), item.run.identity)
        return "" if maker == item.run.identity else maker

    first = [each for each in items if not waits_for(each[1])]
    later = [each for each in items if waits_for(each[1])]
    for wave in (first, later):
        for (gpus, cpus, maker), several in _grouped(
            wave, lambda item: (*_size(item.run, settings), waits_for(item))
        ).items():
            before = jobs.get(maker)
            parameters = settings.parameters(gpus, cpus, f"afterany:{before}" if before else "")
            for start in range(0, len(several), MOST):
                done = list(_submit(several[start : start + MOST], parameters, settings, session))
                submitted += done
                jobs |= {one.item.run.identity: one.job for one in done}
    return submitted


def _size(one: spec.Run, settings: Settings) -> tuple[int, int]:
    return settings.gpus_of(one.spec), settings.cpus_of(one.spec)


def _makers(items: Sequence[Planned], under_way: Sequence[Watched], folder: Path) -> dict[str, str]:
    """The identity of the run that leaves the caches of each key that nobody has left yet: a cold one if there is."""
    makers: dict[str, str] = {}
    runs = [one.item.run for one in under_way] + [item.run for item in items]
    cold = [one for one in runs if one.state == caches.COLD]
    for one in (*cold, *(one for one in runs if one.state != caches.COLD)):
        key = one.snapshot_key() if one.state == caches.COLD else starts_from(one)
        if key and not snapshots.exists(folder, key):
            makers.setdefault(key, one.identity)
    return makers


def _grouped(items: Iterable[Numbered], key: Callable[[Planned], Any]) -> dict[Any, list[Numbered]]:
    found: dict[Any, list[Numbered]] = {}
    for each in items:
        found.setdefault(key(each[1]), []).append(each)
    return found


def _submit(
    items: Sequence[Numbered], parameters: dict[str, Any], settings: Settings, session: run.Session
) -> Iterator[Watched]:
    """One job, or one array, for runs of one size."""
    import submitit

    place = session.folder / "sweeps" / session.sweep / "slurm"
    executor = submitit.SlurmExecutor(folder=place, python=settings.python)
    executor.update_parameters(job_name=f"sweeper-{session.sweep}", **parameters)
    # What a pickle holds lies open in the store, and an address of a tracking server may hold a password.
    options = replace(session.options, tracking={})
    folders = [_claim(item.run, session) for _, item in items]
    work = [
        Job(item.run, options, session.sweep, folder, f"{place}/%j_0_log.out")
        for (_, item), folder in zip(items, folders, strict=True)
    ]
    try:
        jobs = _patiently(executor, work, session)
    except submitit.core.utils.FailedJobError as error:
        said = " ".join(str(error).split()).partition("sbatch: error: ")[2] or " ".join(str(error).split())
        for (number, item), folder in zip(items, folders, strict=True):
            store.close(folder, Verdict("failed", named("scheduler.refused", said[:300]), f"not submitted: {said}"))
            session.tracking.finish(folder)
            session.display.run_started(number, item.run.label, item.estimate)
            session.display.run_ended(item.run.label, store.attempt(folder).verdict or {}, run=number)
        return
    for (number, item), folder, job in zip(items, folders, jobs, strict=True):
        record = {"id": job, "log": f"{place}/{job}_0_log.out", "submitted": time.time()}
        store.write(folder / store.JOB_FILE, record)
        yield Watched(number, item, folder, job)


def _patiently(executor: Any, work: Sequence[Job], session: run.Session) -> list[str]:
    """Submit, more than once if the controller is away. Raises submitit's FailedJobError."""
    import submitit

    for left in reversed(range(TRIES)):
        try:
            if len(work) == 1:
                return [str(executor.submit(work[0]).job_id)]
            with executor.batch():
                jobs = [executor.submit(one) for one in work]
            return [str(job.job_id) for job in jobs]
        except submitit.core.utils.FailedJobError as error:
            if not left or session.interrupted() or not any(words in str(error) for words in AWAY):
                raise
            session.display.note("Slurm's controller does not answer; trying again")
            time.sleep(PAUSE_S)
    raise AssertionError("not reached")


def _claim(one: spec.Run, session: run.Session) -> Path:
    """The directory of the attempt that a job will make, with what is known of it now."""
    folder, attempt = store.claim(session.folder, one)
    known = run.described(one, session.sweep, attempt) | {"argv": [], "env": {}, "beside": 0}
    store.write(folder / store.RUN_FILE, known | store.who_am_i())
    store.write(folder / store.SPEC_FILE, one.spec)
    return folder
