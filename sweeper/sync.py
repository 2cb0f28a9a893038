"""Bring MLflow up to date with the run directories: python -m sweeper.sync [SWEEP ...]

Without SWEEP every sweep is told where it was tracked. What MLflow knows already is told nothing twice: each point
of a metric stands there once, however often this is called. What it lost is made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash.settings import SettingError
from sweeper.tracking import place as places
from sweeper.tracking import redacted, sweeps
from sweeper.tracking.place import Place
from sweeper.words import leave, with_store

BAD_INPUT, NOT_DONE = 2, 1


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status: 0, 2 for a bad setting, 1 when a tracking store could not be written."""
    chosen = _parser().parse_args(with_store(arguments))
    try:
        wanted = _wanted(chosen.store, chosen.sweeps, chosen.uri, chosen.experiment)
    except SettingError as error:
        print(f"sweeper.sync: {error}", file=sys.stderr)
        return BAD_INPUT
    if not wanted:
        print("no sweep of this store was tracked; name one to show it in the store's own MLflow, or give --uri")
    status = 0
    for place, names in wanted.items():
        try:
            written, unchanged = sync(chosen.store, place, names, chosen.rebuild)
        except Exception as error:
            print(f"{place.shown}: {redacted(str(error))}", file=sys.stderr)
            status = NOT_DONE
        else:
            print(f"{place.shown}: {written} runs written, {unchanged} unchanged")
    return status


def sync(store: Path, place: Place, names: Sequence[str], rebuild: bool = False) -> tuple[int, int]:
    """Tell `place` what it does not know of these sweeps and their runs, with `rebuild` everything; returns how many
    runs were written and how many were known. Raises what MLflow raises, and, once all else is told, Unkept."""
    from sweeper.tracking.view import Unkept, View, lock, told_of

    written, unkept = 0, None
    with lock(store):
        view = View(place, store)
        known = view.known()
        folders = sweeps.runs_of(store, set(names))
        for folder in folders:
            lost = told_of(place, folder).get("run_id") not in known
            try:
                written += view.bring(folder, anew=rebuild or lost)
            except Unkept as error:
                unkept = error
        for sweep in names:
            lost = told_of(place, store / "sweeps" / sweep).get("run_id") not in known
            sweeps.bring(view, sweep, anew=rebuild or lost)
        view.reconcile()
    if unkept:
        raise unkept
    return written, len(folders) - written


def _wanted(store: Path, names: Sequence[str], uri: str | None, experiment: str | None) -> dict[Place, list[str]]:
    """The sweeps to tell, by the place to tell them to. Raises SettingError."""
    if not (store / "sweeps").is_dir():
        raise SettingError("--store", store, "must be a folder in which a sweep has run")
    if uri is not None:
        places.check(uri, "--uri")
    there = sorted(path.parent.name for path in (store / "sweeps").glob("*/plan.json"))
    tracked = sweeps.tracked(store)
    for name in names:
        if name not in there:
            raise SettingError("sweep", name, f"is not in {store}; known: {', '.join(there) or 'none'}")
    found: dict[Place, list[str]] = {}
    for name in dict.fromkeys(names or (there if uri else [name for name in there if name in tracked])):
        place = sweeps.place_of(tracked.get(name) or {}, store, uri, experiment)
        found.setdefault(place, []).append(name)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m sweeper.sync", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help="ids of sweeps (default: all that were tracked)")
    parser.add_argument("--store", type=Path, default=Path("runs"), help="the store, also as store=DIR (default: runs)")
    parser.add_argument("--uri", help="an MLflow server or its database (default: where the sweep was tracked)")
    parser.add_argument("--experiment", help="experiment (default: the sweep's)")
    parser.add_argument("--rebuild", action="store_true", help="tell everything again, whatever was told before")
    return parser


if __name__ == "__main__":
    leave(main)
