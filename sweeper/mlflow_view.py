"""The MLflow view of a store: one MLflow run a run directory, one parent a sweep.

Everything here is idempotent: `bring` looks at what a directory holds and at what MLflow was told of it
(tracking.json beside the other records), and tells the difference. So starting, following, finishing,
retrying and rebuilding are one operation, and a view that was lost can be made again from the directories.

Names in MLflow: its compare view sorts them and shows some ten rows, so what a reader compares comes first.
Parameters: the levels `cell.*`, then `result.*` once the run is over, then the child's settings `spec.*`.
Metrics: the headline figures by their plain names, `tau*/<set>`, then `train/*` (series over steps among them) and
`use/*` (times, and cache counts as `use/cache.<layer>.<count>`). A variant of a fanout is the last part of a name,
`train/loss/b16`: the UI makes a section of what is equal before the last slash, so variants stand side by side.
Callers hold the store's tracking lock; only one thread uses a view.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from filelock import FileLock

from dflash.events import EVENTS_FILE, STACKS_FILE, EventReader
from sweeper import store as records
from sweeper.measure import (
    SERIES,
    SIDES,
    Evaluation,
    Step,
    finite,
    overlap,
    parse_evaluation,
    parse_step,
    pauses,
    window_start,
)
from sweeper.report.table import label
from sweeper.store import read_json

STATE_FILE = "tracking.json"
LOCK_FILE = "tracking.lock"
METRICS, PARAMS = 500, 100  # a call; the tracking server takes 1000 and 100
LONGEST_PARAM, LONGEST_TAG = 6000, 5000  # characters; MLflow cuts longer ones in silence
LOG_BYTES, EVENTS_BYTES = 256 << 10, 4 << 20  # of the logs' ends that are kept as artifacts
STATUS = {"ok": "FINISHED", "degraded": "FINISHED", "skipped": "FINISHED", "killed": "KILLED"}
EVAL_FILE = "eval.csv"
REPORT_FILES = ("report.html", "report.md", "report.csv")  # of a sweep, in its folder
# Points a series has at most, about: a long run must not fill the store with rows, nor the UI with details.
POINTS, DETAIL_POINTS = 10_000, 200
EVALUATED = ("tau", "tau_low", "tau_high", "tau_untrained", "distinct4", "identical", "speedup")
WRITTEN = ("t", "event", "pid", "thread", "nonfinite")  # what the writer adds to an event of its own
HEADLINES = ("ktok_s", "time_to_first_step_s", "compile_s")
TAGS = ("wheel", "cache", "compile", "split", "isolation")


@dataclass
class _Job:
    """What a job told so far: its steps by variant and number, of which the first event counts, and evaluations."""

    reader: EventReader
    steps: dict[str, dict[int, Step]] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)

    def metrics(self, after: dict[str, int], evaluated: int) -> list[Any]:
        """Read on, and give the metrics of the steps that follow number `after[variant]` and of the evaluations
        that follow the first `evaluated` ones.

        ktok_s is that of the measured window so far, so that its last value is the run's.
        """
        for event in self.reader.poll():
            if step := parse_step(event):
                self.steps.setdefault(step.variant, {}).setdefault(step.step, step)
            elif measured := parse_evaluation(event):
                self.evaluations.append(measured)
        found: list[Any] = []
        for number, (variant, steps) in enumerate(self.steps.items()):
            done = [steps[n] for n in sorted(steps)]
            new = [step for step in done if step.step > after.get(variant, 0)]
            for step in new:
                found += _metrics(_told(step), step.t, step.step, variant)
            if number == 0:  # the stream's speed, which the variants share
                found += self._speeds(done, new)
        for one in self.evaluations[evaluated:]:
            told = {name: value for name in EVALUATED if (value := finite(one.told.get(name))) is not None}
            values = {f"{name}/{_part(one.set)}": value for name, value in told.items()}
            found += _metrics(values, one.t, one.step, one.variant)
        return found

    def _speeds(self, done: list[Step], new: list[Step]) -> Iterator[Any]:
        """Ktok/s of the measured window up to each new step, `done` being all steps so far."""
        opened, still = window_start(done), pauses(done, self.evaluations)
        tokens = sum(step.tokens for step in done[: len(done) - len(new)] if step.steady)
        for step in new:
            tokens += step.tokens if step.steady else 0
            if tokens and opened is not None and _shown(step, POINTS):
                seconds = step.t - opened - overlap(still, opened, step.t)
                if seconds > 0:
                    yield from _metrics({"ktok_s": tokens / seconds / 1000}, step.t, step.step, "")

    @property
    def last(self) -> dict[str, int]:
        """The number of the last step of each variant."""
        return {variant: max(steps) for variant, steps in self.steps.items()}


class View:
    """An open tracking store. The constructor makes a fresh store's tables, which takes some seconds, and
    raises what MLflow raises when the store cannot be reached."""

    def __init__(self, uri: str | None, experiment: str, store: Path) -> None:
        self.store = store.resolve()
        self.uri = uri or f"sqlite:///{self.store / 'mlflow.db'}"
        self._client = _client(self.uri)
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            place = (self.store / "mlartifacts").as_uri() if not uri else None
            self.experiment = str(self._client.create_experiment(experiment, artifact_location=place))
        else:
            self.experiment = str(found.experiment_id)
        self._parents: dict[str, str] = {}
        self._following: dict[Path, _Job] = {}

    def bring(self, folder: Path) -> bool:
        """Tell MLflow what it does not yet know of a run directory; False if there was nothing to tell.

        Priming runs are not shown: they are no cell of a sweep.
        """
        run, verdict = read_json(folder / records.RUN_FILE), read_json(folder / records.VERDICT_FILE)
        if run is None or run.get("role") == "prime":
            return False
        state = self._state(folder)
        word = _last_word(verdict)
        if word is not None and state.get("done") == word:
            return False
        run_id = state.get("run_id") or self._open(folder, run)
        state |= {"run_id": run_id, "place": self._place(), "ui": ui(self.uri), "experiment": self.experiment}
        job = self._following.setdefault(folder, _Job(EventReader(folder / EVENTS_FILE)))
        logged = state.get("steps") or {}
        self._log(run_id, metrics=job.metrics(logged, int(state.get("evaluations") or 0)))
        state |= {"steps": logged | job.last, "evaluations": len(job.evaluations)}
        if verdict is not None:
            if job.evaluations:
                self._client.log_text(run_id, _csv(job.evaluations), EVAL_FILE)
            self._close(folder, run_id, verdict, max(state["steps"].values(), default=0))
            state["done"] = word
            del self._following[folder]
        records.write(folder / STATE_FILE, state)
        return True

    def open_sweep(self, sweep: str, title: str, cells: int) -> None:
        """Show a sweep as running; the same sweep started again joins its parent."""
        parent = self._parent(sweep, title)
        self._client.update_run(parent, status="RUNNING", name=title)
        for key, value in {"sweeper.cells": str(cells), **_owner()}.items():
            self._client.set_tag(parent, key, value)

    def close_sweep(self, sweep: str, table: list[dict[str, Any]], text: str, conclusion: str) -> None:
        """Show a sweep as over, with its table and its conclusion, if there is one."""
        parent = self._parent(sweep)
        counts: dict[str, int] = {}
        for row in table:
            for verdict, count in row.get("verdicts", {}).items():
                counts[verdict] = counts.get(verdict, 0) + count
        self._client.set_tag(parent, "verdicts", ", ".join(f"{n} {v}" for v, n in sorted(counts.items())))
        self._client.log_text(parent, text, "table.txt")
        if conclusion:
            self._client.log_text(parent, conclusion, "conclusion.txt")
        self._client.log_text(parent, json.dumps(table, indent=1, default=str), "table.json")
        for name in REPORT_FILES:
            if (file := self.store / "sweeps" / sweep / name).exists():
                self._client.log_artifact(parent, str(file))
        self._client.set_terminated(parent, "FINISHED")

    def reconcile(self) -> list[Path]:
        """Close what dead harnesses left running; returns the run directories that still need `bring`."""
        behind = []
        for run in self._search("attributes.status = 'RUNNING'"):
            folder = self.store / "runs" / run.data.tags.get("sweeper.run", "")
            if "sweeper.run" not in run.data.tags:
                told = run.data.tags
                if not alive(told.get("sweeper.harness_pid"), told.get("sweeper.host"), run.info.start_time / 1000):
                    self._client.set_terminated(run.info.run_id, "KILLED")
            elif (folder / records.VERDICT_FILE).exists():
                behind.append(folder)
            else:
                told = read_json(folder / records.RUN_FILE) or {}
                if not alive(told.get("harness_pid"), told.get("host"), told.get("started")):
                    self._client.set_terminated(run.info.run_id, "KILLED")
        return behind

    def known(self, folder: Path) -> bool:
        """Whether the MLflow run that tracking.json names is still in the store."""
        from mlflow.exceptions import MlflowException

        run_id = self._state(folder).get("run_id")
        if run_id is None:
            return False
        try:
            self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def compare_link(self, folders: Iterable[Path]) -> str:
        """The part of the UI's address, after the host, that sets these runs side by side."""
        runs = [run_id for folder in folders if (run_id := self._state(folder).get("run_id"))]
        if len(runs) < 2:
            return ""
        experiments = quote(json.dumps([self.experiment]))
        return f"/#/compare-runs?runs={quote(json.dumps(runs))}&experiments={experiments}"

    def _open(self, folder: Path, run: dict[str, Any]) -> str:
        """Create the MLflow run of a directory, or find the one that a harness made just before it died."""
        from mlflow.entities import Param

        for found in self._search(f"tags.`sweeper.run` = '{folder.name}'"):
            return str(found.info.run_id)
        cell, sweep = run.get("cell") or {}, str(run.get("sweep") or "")
        tags = {k: run.get(k) for k in ("repeat", "attempt", "identity")} | {k: cell.get(k) for k in TAGS}
        tags["cache.requested"] = tags.pop("cache")
        tags |= {"sweep_id": sweep, "sweeper.run": folder.name, "sweeper.store": str(self.store)}
        if sweep:
            tags["mlflow.parentRunId"] = self._parent(sweep)
        started = self._client.create_run(
            self.experiment,
            start_time=_milliseconds(run.get("started")),
            tags={k: _short(v, LONGEST_TAG) for k, v in tags.items() if v is not None},
            run_name=_name(cell, run),
        )
        spec = read_json(folder / records.SPEC_FILE) or {}
        settings = {f"cell.{k}": v for k, v in cell.items()} | dict(_flat(spec, "spec."))
        settings["cell.repeat"] = run.get("repeat")
        params = [Param(k, _short(v, LONGEST_PARAM)) for k, v in settings.items()]
        self._log(started.info.run_id, params=params)
        return str(started.info.run_id)

    def _close(self, folder: Path, run_id: str, verdict: dict[str, Any], step: int) -> None:
        """Log what is known only at the end: figures, proof, signature, artifacts, status."""
        from mlflow.entities import Metric, Param, RunTag

        at = _milliseconds(verdict.get("ended")) or int(time.time() * 1000)
        metrics = [Metric(name, value, at, step) for name, value in sorted(_final(verdict).items())]
        cache, signature = verdict.get("cache") or {}, verdict.get("signature") or {}
        results = {
            "verdict": verdict.get("verdict"),
            "signature": signature.get("cause") or "none",
            "cache": cache.get("proved") or "none",
        }
        tags = {
            "verdict": results["verdict"],
            "signature": results["signature"],
            "fingerprint": signature.get("fingerprint"),
            "cache.proved": results["cache"],
            "cache.why": cache.get("why"),
            "reason": verdict.get("reason"),
            "sweep_ids": ",".join(map(str, verdict.get("sweeps") or [])),
        }
        self._log(
            run_id,
            metrics=metrics,
            params=[Param(f"result.{k}", _short(v, LONGEST_PARAM)) for k, v in results.items()],
            tags=[RunTag(k, _short(v, LONGEST_TAG)) for k, v in tags.items() if v],
        )
        for name in (records.SPEC_FILE, records.RUN_FILE, records.VERDICT_FILE, STACKS_FILE):
            if (folder / name).exists():
                self._client.log_artifact(run_id, str(folder / name))
        for name, limit in (("child.log", LOG_BYTES), (EVENTS_FILE, EVENTS_BYTES)):
            if (folder / name).exists():
                self._client.log_text(run_id, _end(folder / name, limit), name)
        self._client.set_terminated(run_id, STATUS.get(str(verdict.get("verdict")), "FAILED"), at)

    def _parent(self, sweep: str, title: str = "") -> str:
        if sweep not in self._parents:
            for found in self._search(f"tags.`sweeper.sweep_id` = '{sweep}'"):
                self._parents[sweep] = str(found.info.run_id)
                break
            else:
                tags = {"sweeper.sweep_id": sweep, "sweeper.store": str(self.store)} | _owner()
                plan = read_json(self.store / "sweeps" / sweep / "plan.json") or {}
                name = title or plan.get("title") or f"sweep {sweep}"
                made = self._client.create_run(self.experiment, tags=tags, run_name=name)
                if not title:  # rebuilt from directories: nobody is running it
                    self._client.set_terminated(made.info.run_id, "FINISHED")
                self._parents[sweep] = str(made.info.run_id)
        return self._parents[sweep]

    def _search(self, condition: str) -> list[Any]:
        here = f"tags.`sweeper.store` = '{self.store}'"
        return list(self._client.search_runs([self.experiment], f"{condition} and {here}", max_results=1000))

    def _state(self, folder: Path) -> dict[str, Any]:
        """What MLflow was told of a directory; nothing, if that was in another tracking store."""
        state = read_json(folder / STATE_FILE) or {}
        return state if state.get("place") == self._place() else {}

    def _place(self) -> str:
        """Names the tracking store without showing its address, which may hold a password."""
        return hashlib.sha256(f"{self.uri}\n{self.experiment}".encode()).hexdigest()[:16]

    def _log(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        for some in _chunks(metrics, METRICS):
            self._client.log_batch(run_id, metrics=some)
        for some in _chunks(params, PARAMS):
            self._client.log_batch(run_id, params=some)
        for some in _chunks(tags, PARAMS):
            self._client.log_batch(run_id, tags=some)


def ui(uri: str) -> str:
    """Where a browser finds what is tracked at `uri`, without a password; for a file where `mlflow ui` serves it."""
    shown = re.sub(r"(://)[^/@\s]+@", r"\1", uri.rstrip("/"))
    return shown if uri.startswith(("http://", "https://")) else "http://127.0.0.1:5000"


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


def _client(uri: str) -> Any:
    """An MLflow client that talks to nobody but `uri`, gives up soon and prints nothing of its own."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _told(step: Step) -> dict[str, float]:
    """The metrics of a step: its series, and now and then the details."""
    values: dict[str, float | None] = {}
    if _shown(step, POINTS):
        values |= {f"train/{name}": value for name, value in step.series.items()}
        values |= {f"train/{name}": math.nan for name in SERIES if name in step.nonfinite}
    if _shown(step, DETAIL_POINTS):
        for name, slots in step.slots.items():
            kind = name.removesuffix("_at")
            values |= {f"train/{kind}_slot/{slot:02}": value for slot, value in enumerate(slots, 1)}
        values |= {f"train/tok_s/{side}": rate for side, rate in step.tok_s.items()}
        for side in SIDES if step.seconds else ():
            waits = [waited for worker, waited in step.waits.items() if worker.startswith(side)]
            if waits:
                values[f"train/waited/{side}"] = min(1.0, sum(waits) / len(waits) / (step.seconds or 1.0))
    return {name: value for name, value in values.items() if value is not None}


def _shown(step: Step, points: int) -> bool:
    """Whether a step is one of the at most about `points` that a series shows: evenly spread, and the last."""
    every = max(1, math.ceil(step.steps / points))
    return step.step % every == 0 or step.step in (1, step.steps)


def _metrics(values: dict[str, float], t: float, step: int, variant: str) -> list[Any]:
    from mlflow.entities import Metric

    last = f"/{_part(variant)}" if variant else ""
    return [Metric(name + last, value, int(t * 1000), step) for name, value in values.items()]


def _part(text: str) -> str:
    """A name of the user's as one part of a metric's name."""
    return re.sub(r"[^\w.-]", "_", text).lstrip(".")[:60] or "_"


def _csv(measured: list[Evaluation]) -> str:
    """The evaluations as a table, a row each, which the UI shows as such."""
    columns = list(dict.fromkeys(name for one in measured for name in one.told if name not in WRITTEN))
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(columns)
    for one in measured:
        values = [one.told.get(name) for name in columns]
        rows.writerow([" ".join(map(str, value)) if isinstance(value, list) else value for value in values])
    return out.getvalue()


def _final(verdict: dict[str, Any]) -> dict[str, float]:
    """The metrics of a finished run: its figures, its times and the cache counts that are not all zero."""
    figures = dict(verdict.get("figures") or {})
    found: dict[str, Any] = {name: figures.pop(name, None) for name in HEADLINES}
    for kind in ("rss", "gpu"):
        size = finite(figures.pop(f"peak_{kind}_bytes", None))
        found[f"peak_{kind}_gb"] = None if size is None else size / 1e9
    for variant, learnt in (figures.pop("variants", None) or {}).items():
        found |= {f"train/{name}/{_part(variant)}": value for name, value in learnt.items()}
    found |= {f"train/{name}": value for name, value in figures.items()}
    found |= {f"use/{name}": verdict.get(name) for name in ("wall_s", "child_s", "overhead_s")}
    layers = (verdict.get("cache") or {}).get("layers") or {}
    for layer, counts in layers.items():
        if isinstance(counts, dict) and any(finite(n) for n in counts.values()):
            found |= {f"use/cache.{layer}.{name}": count for name, count in counts.items()}
    return {name: number for name, value in found.items() if (number := finite(value)) is not None}


def _name(cell: dict[str, Any], run: dict[str, Any]) -> str:
    """A run in a few words, for column heads: its levels, repeat, and attempt after the first."""
    attempt = f" attempt {run['attempt']}" if (run.get("attempt") or 1) != 1 else ""
    return f"{' '.join(map(str, cell.values())) or label(cell)} r{run.get('repeat')}{attempt}"[:250]


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


def _milliseconds(seconds: Any) -> int | None:
    number = finite(seconds)
    return None if number is None else int(number * 1000)


def _last_word(verdict: dict[str, Any] | None) -> str | None:
    """Tells one state of verdict.json from another: a later sweep may adopt a finished run."""
    return None if verdict is None else json.dumps([verdict.get("ended"), verdict.get("sweeps")])


def _owner() -> dict[str, str]:
    return {"sweeper.harness_pid": str(os.getpid()), "sweeper.host": socket.gethostname()}
