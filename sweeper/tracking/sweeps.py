"""Sweeps in MLflow: a run for the sweep, with its table, conclusion and report, and one for each cell's repeats.

MLflow's UI has no statistics over runs, so a cell that ran several times is shown as a run of its own: median,
interval and number of its repeats, as the table has them. `tracking.json` in the sweep's folder says where the sweep
is tracked and what was told of it, so that anybody can catch up later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sweeper import store as records
from sweeper.measure import finite
from sweeper.report import table
from sweeper.store import Attempt, read_json
from sweeper.tracking.place import DATABASE_FILE, Place, own
from sweeper.tracking.view import STATE_FILE, Unkept, View, alive, milliseconds, owner, told_of

PLAN_FILE = "plan.json"
# What a sweep or a bisect leaves in its folder once it is over, the first of them at the least.
CONCLUDED = ("conclusion.txt", "bisect.txt")
KEPT = (*CONCLUDED, "conclusion.json", "table.txt", "report.html", "report.md", "report.csv")
FIGURES = ("ktok_s", "time_to_first_step_s", "compile_s", "peak_bytes", "tau")
MOST_COMPARED = 50  # runs of a compare view; more are neither readable nor fit in an address
LONGEST_NOTE = 7000  # characters of the description that the UI shows


def announce(store: Path, sweep: str, place: Place) -> None:
    """Keep in the sweep's folder that this process tracks it at `place`. Raises OSError."""
    path = store / "sweeps" / sweep / STATE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, _announced(read_json(path) or {}, place) | {"open": True} | owner())


def _announced(known: dict[str, Any], place: Place) -> dict[str, Any]:
    told = known if known.get("place") == place.key else {}
    said = {"uri": None if place.own else place.shown, "name": place.experiment, "place": place.key, "ui": place.ui}
    return told | said | {"models": place.models}


def tracked(store: Path) -> dict[str, dict[str, Any]]:
    """What is kept of every sweep that was ever tracked, by the sweep's id."""
    found = {path.parent.name: read_json(path) for path in sorted((store / "sweeps").glob(f"*/{STATE_FILE}"))}
    return {sweep: told for sweep, told in found.items() if told}


def place_of(told: dict[str, Any], store: Path, uri: str | None = None, experiment: str | None = None) -> Place:
    """Where a sweep is tracked by what is kept of it, unless another address or experiment is asked for."""
    address, name = uri or told.get("uri"), experiment or str(told.get("name") or "dflash")
    models = bool(told.get("models", True))
    return Place(address, name, models=models) if address else own(store, name, models)


def runs_of(store: Path, sweeps: set[str]) -> list[Path]:
    """The directories of all runs that one of these sweeps made or counts as its own, oldest first."""
    found = []
    for several in records.history(store).values():
        for one in several:
            if sweeps & {str(one.run.get("sweep")), *map(str, (one.verdict or {}).get("sweeps") or ())}:
                found.append((finite(one.run.get("started")) or 0.0, one.folder))
    return [folder for _, folder in sorted(found)]


def open_sweep(view: View, sweep: str, title: str, cells: int) -> None:
    """Show a sweep as running; the same sweep started again joins its run."""
    run_id = _run_of(view, sweep) or _make(view, sweep, title)
    view.client.update_run(run_id, status="RUNNING", name=title[:250])
    view.log(run_id, tags={"sweeper.cells": cells, **owner()})


def bring(view: View, sweep: str, anew: bool = False) -> bool:
    """Tell MLflow what it does not know of a sweep that is over, or was left; False if there was nothing to tell."""
    folder = view.store / "sweeps" / sweep
    plan, state = read_json(folder / PLAN_FILE), read_json(folder / STATE_FILE) or {}
    if plan is None:
        return False
    word = _word(folder)
    if state.get("place") == view.place.key and state.get("done") == word and not anew:
        return False
    run_id = _run_of(view, sweep) or _make(view, sweep, str(plan.get("title") or f"sweep {sweep}"))
    attempts = records.planned(folder)
    rows = table.rows(one.folder for one in attempts)
    counts: dict[str, int] = {}
    for row in rows:
        for verdict, count in row.get("verdicts", {}).items():
            counts[verdict] = counts.get(verdict, 0) + count
    concluded = next((path for name in CONCLUDED if (path := folder / name).exists()), None)
    tags: dict[str, Any] = {"verdicts": ", ".join(f"{n} {v}" for v, n in sorted(counts.items()))}
    tags |= {"sweeper.cells": len({one["cell_id"] for one in plan["runs"]})}
    tags["mlflow.note.content"] = _note(folder, rows, concluded)
    view.log(run_id, tags=tags)
    for name in KEPT:
        if (folder / name).exists():
            view.client.log_artifact(run_id, str(folder / name))
    view.client.log_text(run_id, json.dumps(rows, indent=1, default=str), "table.json")
    ended = max((finite((one.verdict or {}).get("ended")) or 0.0 for one in attempts), default=0.0)
    _cells(view, sweep, rows, attempts)
    if not (state.get("open") and alive(state.get("sweeper.harness_pid"), state.get("sweeper.host"), plan["written"])):
        view.client.set_terminated(run_id, "FINISHED" if concluded else "KILLED", milliseconds(ended or None))
    told = _announced(state, view.place)
    records.write(folder / STATE_FILE, told | {"run_id": run_id, "experiment": view.experiment, "done": word})
    return True


def up_to_date(place: Place, store: Path, sweep: str) -> bool:
    """Whether MLflow was told what a sweep's folder holds, and that the sweep is over, as far as this side knows."""
    folder = store / "sweeps" / sweep
    state = told_of(place, folder)
    lost = place.own and not (store / DATABASE_FILE).exists()
    return state.get("done") == _word(folder) and not state.get("open") and not lost


def close(view: View, sweep: str) -> list[str]:
    """Show a sweep as over; returns what to open to look at it, a line each."""
    path = view.store / "sweeps" / sweep / STATE_FILE
    if told := read_json(path):
        records.write(path, told | {"open": False})
    for folder in runs_of(view.store, {sweep}):
        with contextlib.suppress(Unkept):  # it was said when the run ended
            view.bring(folder)
    return links(view.place, view.store, sweep) if bring(view, sweep, anew=True) else []


def links(place: Place, store: Path, sweep: str) -> list[str]:
    """Where MLflow's UI shows the runs of a sweep that it was told of: as a list, as charts, and, where they are few,
    side by side."""
    experiment = told_of(place, store / "sweeps" / sweep).get("experiment")
    here = f"{place.ui}/#/experiments/{experiment}/runs"
    words = {"startTime": "ALL", "searchFilter": f"tags.kind = 'run' and tags.sweep_ids LIKE '%{sweep}%'"}
    listed = "&".join(f"{key}={quote(value)}" for key, value in words.items())
    lines = [f"runs:    {here}?{listed}", f"charts:  {here}?{listed}&compareRunsMode=CHART"]
    folders = [one.folder for one in records.planned(store / "sweeps" / sweep)]
    runs = [run_id for folder in folders if (run_id := told_of(place, folder).get("run_id"))]
    if 1 < len(runs) <= MOST_COMPARED:
        told = f"runs={quote(json.dumps(runs))}&experiments={quote(json.dumps([experiment]))}"
        lines.append(f"compare: {place.ui}/#/compare-runs?{told}")
    return lines


def _run_of(view: View, sweep: str) -> str | None:
    found = next(view.search(f"tags.kind = 'sweep' and tags.sweep_id = '{sweep}'"), None)
    return str(found.info.run_id) if found else None


def _make(view: View, sweep: str, title: str) -> str:
    plan = read_json(view.store / "sweeps" / sweep / PLAN_FILE) or {}
    tags = {"kind": "sweep", "sweep_id": sweep, "sweep_ids": sweep, **owner()}
    return view.create(title, tags, plan.get("written"))


def _cells(view: View, sweep: str, rows: list[dict[str, Any]], attempts: list[Attempt]) -> None:
    """Show the cells of a sweep that repeats its cells, each as a run of its own."""
    from mlflow.entities import Metric

    if max((row["n"] for row in rows), default=0) < 2:
        return
    there = {run.data.tags["sweeper.cell"]: str(run.info.run_id) for run in _cell_runs(view, sweep)}
    ended = {one.folder.name: finite((one.verdict or {}).get("ended")) or 0.0 for one in attempts}
    ids = {one.folder.name: one.run.get("cell_id") for one in attempts}
    for row in rows:
        # Not by the levels: a later sweep that adopts a run may name more of them.
        name = ids[row["runs"][0]]
        tags = {"kind": "cell", "sweep_id": sweep, "sweep_ids": sweep, "sweeper.cell": name}
        run_id = there.get(name) or view.create(f"cell {row['label']}", tags)
        at = milliseconds(max((ended.get(run, 0.0) for run in row["runs"]), default=0.0)) or 0
        metrics = [Metric(key, value, at, row["n"]) for key, value in sorted(_summary(row).items())]
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(row["verdicts"].items()))
        told = {"verdicts": verdicts, "signatures": ", ".join(row["signatures"]) or None, "cell": row["label"]}
        view.log(run_id, metrics, {f"cell.{k}": v for k, v in row["cell"].items()}, told)
        view.client.set_terminated(run_id, "FINISHED", at)


def _cell_runs(view: View, sweep: str) -> Iterator[Any]:
    return view.search(f"tags.kind = 'cell' and tags.sweep_id = '{sweep}'")


def _summary(row: dict[str, Any]) -> dict[str, float]:
    """Median, interval and number of repeats of each figure of a cell, and how many of its runs ended how."""
    found: dict[str, Any] = {"runs": row["n"]} | {f"runs.{verdict}": n for verdict, n in row["verdicts"].items()}
    for figure in FIGURES:
        measured, name, unit = row.get(figure) or {}, figure, 1.0
        if figure == "peak_bytes":
            name, unit = "peak_gb", 1e9
        for part in ("median", "low", "high"):
            value = finite(measured.get(part))
            found[f"{name}.{part}"] = None if value is None else value / unit
        found[f"{name}.n"] = measured.get("n")
    return {name: number for name, value in found.items() if (number := finite(value)) is not None}


def _note(folder: Path, rows: list[dict[str, Any]], concluded: Path | None) -> str:
    """The description that the UI shows above a sweep's run, in Markdown."""
    said = concluded.read_text(encoding="utf-8", errors="replace") if concluded else ""
    kept = folder / "table.txt"
    shown = kept.read_text(encoding="utf-8", errors="replace") if kept.exists() else f"{table.render(rows, 160)}\n"
    text = f"```\n{shown}{said}```\n"
    return text if len(text) <= LONGEST_NOTE else f"{text[:LONGEST_NOTE]}\n```\nThe rest is in the artifacts.\n"


def _word(folder: Path) -> str:
    """Tells one state of a sweep's folder from another; starting a sweep again changes nothing by itself."""
    plan = read_json(folder / PLAN_FILE) or {}
    told = [plan.get("title"), [one.get("identity") for one in plan.get("runs") or ()]]
    digest = hashlib.sha256(json.dumps(told).encode())
    for name in KEPT:
        if (path := folder / name).exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
