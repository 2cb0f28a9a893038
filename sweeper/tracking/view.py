"""Runs in MLflow: one MLflow run a run directory.

Everything here is idempotent: `bring` looks at what a directory holds and at what MLflow was told of it
(tracking.json beside the other records), and tells the difference. So starting, following, finishing,
retrying and rebuilding are one operation, and a view that was lost can be made again from the directories.

MLflow's compare view sorts parameters and shows some ten rows, so what a reader compares comes first: the levels
`cell.*`, then `result.*` once the run is over, then the child's settings `spec.*`. Sweeps, cells and runs are told
apart by the tag `kind` and lie side by side: the UI shows children of a run only once somebody unfolds it.
Callers hold the store's tracking lock; only one thread uses a view.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from dflash.events import EVENTS_FILE, STACKS_FILE, EventReader
from sweeper import store as records
from sweeper.measure import finite
from sweeper.report.table import label
from sweeper.store import read_json
from sweeper.tracking import models, series
from sweeper.tracking.place import DATABASE_FILE, Place, reach

STATE_FILE = "tracking.json"
LOCK_FILE = "tracking.lock"
ID_FILE = "tracking.id"
METRICS, PARAMS = 500, 100  # a call; the tracking server takes 1000 and 100
LONGEST_PARAM, LONGEST_TAG = 6000, 5000  # characters; MLflow cuts longer ones in silence
LOG_BYTES, EVENTS_BYTES = 256 << 10, 4 << 20  # of the logs' ends that are kept as artifacts
STATUS = {"ok": "FINISHED", "degraded": "FINISHED", "skipped": "FINISHED", "killed": "KILLED"}
EVAL_FILE, PROOF_FILE, ENVIRONMENT_FILE = "eval.csv", "cache.json", "environment.txt"
TAGS = ("wheel", "cache", "compile", "split", "isolation")


class Unkept(LookupError):
    """A run's directory cannot be written, so that it will be told again: that holds up no other run."""


class View:
    """An open tracking store. The constructor makes a fresh store's tables, which takes some seconds, and
    raises what MLflow raises when the store cannot be reached."""

    def __init__(self, place: Place, store: Path) -> None:
        self.place, self.store = place, store.resolve()
        reach(place)
        if place.own:
            _make_whole(self.store / DATABASE_FILE)
        self.client = _client(place.uri)
        found = self.client.get_experiment_by_name(place.experiment)
        if found is None:
            where = (self.store / "mlartifacts").as_uri() if place.own else None
            self.experiment = self._make_experiment(where)
        elif found.lifecycle_stage != "active":
            raise ValueError(f"the experiment {place.experiment} is deleted there; restore it, or name another one")
        else:
            self.experiment = str(found.experiment_id)
        self.store_id = _store_id(self.store)
        self._following: dict[Path, series.Job] = {}
        self._cells: dict[str, list[dict[str, Any]]] = {}  # by sweep, as its plan has them

    def _make_experiment(self, where: str | None) -> str:
        try:
            return str(self.client.create_experiment(self.place.experiment, artifact_location=where))
        except Exception:
            found = self.client.get_experiment_by_name(self.place.experiment)  # another harness was quicker
            if found is None:
                raise
            return str(found.experiment_id)

    def bring(self, folder: Path, anew: bool = False) -> bool:
        """Tell MLflow what it does not yet know of a run directory, `anew` all of it; False if there was nothing
        to tell.

        Priming runs are not shown: they are no cell of a sweep.
        """
        run, verdict = read_json(folder / records.RUN_FILE), read_json(folder / records.VERDICT_FILE)
        if run is None or run.get("role") == "prime":
            return False
        state = {} if anew else told_of(self.place, folder)
        word = _last_word(verdict)
        if word is not None and state.get("done") == word:
            return False
        try:
            self._tell(folder, run, verdict, state)
        except Exception as error:
            if not state or getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._tell(folder, run, verdict, {})  # whoever keeps the store has lost the run
        return True

    def reconcile(self) -> list[Path]:
        """Close what dead harnesses left running; returns the run directories that still need `bring`."""
        behind = []
        for run in self.search("attributes.status = 'RUNNING'"):
            folder = self.store / "runs" / run.data.tags.get("sweeper.run", "")
            if "sweeper.run" not in run.data.tags:
                told = run.data.tags
                if not alive(told.get("sweeper.harness_pid"), told.get("sweeper.host"), run.info.start_time / 1000):
                    self.client.set_terminated(run.info.run_id, "KILLED")
            elif (folder / records.VERDICT_FILE).exists():
                behind.append(folder)
            else:
                told = read_json(folder / records.RUN_FILE) or {}
                if not alive(told.get("harness_pid"), told.get("host"), told.get("started")):
                    self.client.set_terminated(run.info.run_id, "KILLED")
        return behind

    def known(self) -> set[str]:
        """Ids of all MLflow runs of this store, the deleted ones too: who deleted them wants them back as little."""
        from mlflow.entities import ViewType

        return {str(run.info.run_id) for run in self.search("", ViewType.ALL)}

    def search(self, condition: str, of: int | None = None) -> Iterator[Any]:
        """The MLflow runs of this store that a condition holds for; `of`: a ViewType."""
        token, conditions = None, [condition, f"tags.`sweeper.store` = '{self.store_id}'"]
        while True:
            more = {} if of is None else {"run_view_type": of}
            page = self.client.search_runs(
                [self.experiment], " and ".join(filter(None, conditions)), max_results=1000, page_token=token, **more
            )
            yield from page
            if not (token := page.token):
                return

    def create(self, name: str, tags: Mapping[str, Any], started: Any = None) -> str:
        """A new MLflow run of this store; returns its id. `started` in Unix seconds."""
        told = {"sweeper.store": self.store_id, "sweeper.folder": str(self.store)} | dict(tags)
        made = self.client.create_run(
            self.experiment,
            start_time=milliseconds(started),
            tags={k: _short(v, LONGEST_TAG) for k, v in told.items() if v is not None},
            run_name=name[:250],
        )
        return str(made.info.run_id)

    def log(
        self,
        run_id: str,
        metrics: Any = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        """Log all of it, in as few calls as the server takes."""
        from mlflow.entities import Param, RunTag

        kept = [Param(k, _short(v, LONGEST_PARAM)) for k, v in (params or {}).items()]
        said = [RunTag(k, _short(v, LONGEST_TAG)) for k, v in (tags or {}).items() if v is not None]
        parts = [list(_chunks(metrics, METRICS)), list(_chunks(kept, PARAMS)), list(_chunks(said, PARAMS))]
        for number in range(max(map(len, parts))):
            some, few, labels = (part[number] if number < len(part) else [] for part in parts)
            self.client.log_batch(run_id, metrics=some, params=few, tags=labels)

    def _tell(self, folder: Path, run: dict[str, Any], verdict: dict[str, Any] | None, state: dict[str, Any]) -> None:
        run_id = state.get("run_id") or self._open(folder, run)
        state |= {"run_id": run_id, "place": self.place.key, "ui": self.place.ui, "experiment": self.experiment}
        job = self._following.setdefault(folder, series.Job(EventReader(folder / EVENTS_FILE)))
        job.read()
        self.log(run_id, metrics=job.metrics(series.Told(**state.get("told", {}))))
        state["told"] = asdict(job.told)
        if verdict is not None:
            if job.evaluations:
                self.client.log_text(run_id, series.table(job.evaluations), EVAL_FILE)
            state["models"] = self._close(folder, run_id, verdict, job, state.get("models") or {})
            state["done"] = _last_word(verdict)
            del self._following[folder]
        try:
            records.write(folder / STATE_FILE, state)
        except OSError as error:
            raise Unkept(f"what it was told could not be kept in {folder} ({error.strerror})") from None

    def _open(self, folder: Path, run: dict[str, Any]) -> str:
        """Create the MLflow run of a directory, or find the one that a harness made just before it died."""
        cell, sweep = run.get("cell") or {}, str(run.get("sweep") or "")
        found = next(self.search(f"tags.`sweeper.run` = '{folder.name}'"), None)
        if found:
            run_id = str(found.info.run_id)
        else:
            tags = {k: run.get(k) for k in ("repeat", "attempt", "identity")} | {k: cell.get(k) for k in TAGS}
            tags["cache.requested"] = tags.pop("cache")
            tags |= {"kind": "run", "sweep_id": sweep, "sweep_ids": sweep, "sweeper.run": folder.name}
            run_id = self.create(_name(self._varied(sweep, cell), run), tags, run.get("started"))
        spec = read_json(folder / records.SPEC_FILE) or {}
        settings = {f"cell.{k}": v for k, v in cell.items()} | dict(_flat(spec, "spec."))
        self.log(run_id, params=settings | {"cell.repeat": run.get("repeat")})
        return run_id

    def _varied(self, sweep: str, cell: dict[str, Any]) -> dict[str, Any]:
        """The levels of a cell that its sweep varies, all of them where it varies none."""
        if sweep not in self._cells:
            plan = read_json(self.store / "sweeps" / sweep / "plan.json") or {}
            self._cells[sweep] = [one["cell"] for one in plan.get("runs") or ()]
        return {k: v for k, v in cell.items() if any(one.get(k) != v for one in self._cells[sweep])} or cell

    def _close(
        self, folder: Path, run_id: str, verdict: dict[str, Any], job: series.Job, known: dict[str, str]
    ) -> dict[str, str]:
        """Log what is known only at the end: figures, proof, signature, artifacts, models, status; returns the ids of
        the run's models, of which `known` are logged already."""
        from mlflow.entities import Metric

        at, step = (
            milliseconds(verdict.get("ended")) or int(time.time() * 1000),
            max(job.told.steps.values(), default=0),
        )
        cache, signature = verdict.get("cache") or {}, verdict.get("signature") or {}
        results = {
            "verdict": verdict.get("verdict"),
            "signature": signature.get("cause") or "none",
            "cache": cache.get("proved") or "none",
        }
        metrics = [Metric(name, value, at, step) for name, value in sorted(series.final(verdict).items())]
        # The speed of the whole window stands there already where it is the last point of its series.
        speed = job.last_speed()
        new = [one for one in metrics if not (one.key == "ktok_s" and speed and math.isclose(one.value, speed))]
        self.log(
            run_id,
            metrics=new,
            params={f"result.{k}": v for k, v in results.items()},
            tags={
                "verdict": results["verdict"],
                "signature": results["signature"],
                "fingerprint": signature.get("fingerprint"),
                "cache.proved": results["cache"],
                "cache.why": cache.get("why"),
                "reason": verdict.get("reason"),
                "sweep_ids": ",".join(map(str, verdict.get("sweeps") or [])) or None,
            },
        )
        self._artifacts(folder, run_id, cache)
        if self.place.models and verdict.get("verdict") in ("ok", "degraded"):
            figures = [*metrics, *job.evaluated()]
            known = models.log(self.client, self.experiment, run_id, folder, figures, known)
        self.client.set_terminated(run_id, STATUS.get(str(verdict.get("verdict")), "FAILED"), at)
        return known

    def _artifacts(self, folder: Path, run_id: str, cache: dict[str, Any]) -> None:
        for name in (records.SPEC_FILE, records.RUN_FILE, records.VERDICT_FILE, STACKS_FILE):
            if (folder / name).exists():
                self.client.log_artifact(run_id, str(folder / name))
        for path in records.profiles(folder):
            self.client.log_artifact(run_id, str(path))
        if cache:
            self.client.log_text(run_id, json.dumps(cache, indent=1), PROOF_FILE)
        if environment := _environment(read_json(folder / records.RUN_FILE) or {}):
            self.client.log_text(run_id, environment, ENVIRONMENT_FILE)
        for name, limit in (("child.log", LOG_BYTES), (EVENTS_FILE, EVENTS_BYTES)):
            if (folder / name).exists():
                self.client.log_text(run_id, _end(folder / name, limit), name)


def told_of(place: Place, folder: Path) -> dict[str, Any]:
    """What MLflow was told of a directory; nothing, if that was in another place."""
    state = read_json(folder / STATE_FILE) or {}
    return state if state.get("place") == place.key else {}


def up_to_date(place: Place, folder: Path) -> bool:
    """Whether `View.bring` has nothing to tell of a run directory, as far as this side knows."""
    verdict = read_json(folder / records.VERDICT_FILE)
    if verdict is None or told_of(place, folder).get("done") == _last_word(verdict):
        return verdict is not None
    return (read_json(folder / records.RUN_FILE) or {}).get("role") == "prime"


def lock(store: Path) -> FileLock:
    """Held by whoever writes to the tracking store on behalf of this store: one writer at a time."""
    return FileLock(store / LOCK_FILE, timeout=120)


def alive(pid: Any, host: Any, since: Any) -> bool:
    """Whether the harness `pid`, up at `since` (Unix seconds), may still live; on another host it may."""
    if host != socket.gethostname():
        return host is not None
    try:
        born = psutil.Process(int(pid)).create_time()
    except (psutil.Error, TypeError, ValueError):
        return False
    return born <= (finite(since) or math.inf) + 1


def owner() -> dict[str, str]:
    """Tags that tell who is at work on something that MLflow shows as running."""
    return {"sweeper.harness_pid": str(os.getpid()), "sweeper.host": socket.gethostname()}


def milliseconds(seconds: Any) -> int | None:
    number = finite(seconds)
    return None if number is None else int(number * 1000)


def _client(uri: str) -> Any:
    """An MLflow client that talks to nobody but `uri`, gives up soon and prints nothing of its own.

    It does not try again: the tracker does, and until then nobody waits.
    """
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _make_whole(path: Path) -> None:
    """Make the embedded store's database, unless there is one, so that a kill never leaves half of its tables: MLflow
    cannot go on from there. The caller holds the tracking lock. Raises OSError and what MLflow raises."""
    if path.exists():
        return
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink()
    part = path.with_name(f".{path.name}.{os.getpid()}-{time.time_ns()}")
    part.touch()  # where it cannot be written MLflow would try for minutes
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    made = SqlAlchemyStore(f"sqlite:///{part}", (path.parent / "mlartifacts").as_uri())
    made.engine.dispose()
    os.rename(part, path)


def _store_id(store: Path) -> str:
    """What tells this store from others on the same server, wherever its folder lies; made at first use."""
    path = store / ID_FILE
    if not path.exists():
        records.write(path, uuid.uuid4().hex[:16])
    return path.read_text().strip()


def _environment(run: dict[str, Any]) -> str:
    """The lock of the environment that a run was done in: its own, or the packages that were seen to matter."""
    wheel = run.get("wheel") or {}
    lock_file = Path(str(wheel.get("python") or "")).parent.parent.parent / "lock.txt"
    if wheel.get("pins") and lock_file.is_file():
        return lock_file.read_text(encoding="utf-8", errors="replace")
    return "".join(f"{name}=={version}\n" for name, version in sorted((wheel.get("versions") or {}).items()))


def _name(cell: dict[str, Any], run: dict[str, Any]) -> str:
    """A run in a few words, for heads and legends, which cut them: levels, repeat, attempt after the first."""
    attempt = f" attempt {run['attempt']}" if (run.get("attempt") or 1) != 1 else ""
    words = (str(level) if factor in TAGS else f"{factor}={level}" for factor, level in cell.items())
    return f"{' '.join(words) or label(cell)} r{run.get('repeat')}{attempt}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any, longest: int) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= longest else f"{text[: longest - 40]}... ({len(text)} characters)"


def _end(path: Path, limit: int) -> str:
    """The last `limit` bytes of a file, with a first line that says so if it is longer."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - limit))
        text = file.read().decode("utf-8", "replace")
    return text if size <= limit else f"... the last {limit} of {size} bytes\n{text.partition(chr(10))[2]}"


def _chunks(items: Any, size: int) -> Iterator[list[Any]]:
    items = list(items)
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _last_word(verdict: dict[str, Any] | None) -> str | None:
    """Tells one state of verdict.json from another: a later sweep may adopt a finished run."""
    return None if verdict is None else json.dumps([verdict.get("ended"), verdict.get("sweeps")])
