"""Tracking: shows a store in MLflow while it fills, and catches up from the run directories.

The run directories are the truth and MLflow is a view of them (view.py has runs, sweeps.py sweeps). Inside the
harness one thread writes that view: no call of a tracker blocks on the tracking store or raises. What could not be
written is written later: by the same thread, by the next sweep in this store, or by `python -m sweeper.sync`.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.tracking import place as places
from sweeper.tracking.place import Place

if TYPE_CHECKING:
    from sweeper.tracking.view import View

EVERY = 5.0  # seconds between two looks at a run in progress
PAUSE, LAST_PAUSE = 30.0, 1.0  # seconds of peace for a tracking store that failed; while `close` waits
PATIENCE, NO_PATIENCE = 60.0, 3.0  # seconds that `close` waits for the last writes, and for a store that fails
MOST_NOTES = 10
# What a store says, in MLflow's words, of a request that it understood and will refuse again. That, like a record that
# cannot be read, holds up nothing else.
REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE")


class Nothing:
    """tracking=none: run directories and tables only."""

    def knows(self, sweep_id: str) -> bool:
        return True

    def open_sweep(self, sweep_id: str, title: str, cells: int) -> None:
        pass

    def start(self, run_dir: Path) -> None:
        pass

    def tick(self, run_dir: Path) -> None:
        pass

    def finish(self, run_dir: Path) -> None:
        pass

    def close_sweep(self, sweep_id: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(order=True)
class _Piece:
    """A piece of work, ordered by when it is due (time.monotonic) and when it was asked for."""

    due: float
    asked: int
    key: Any = field(compare=False)
    work: Callable[[View], Any] = field(compare=False)
    known: Callable[[], bool] = field(compare=False)  # whether the files say that there is nothing to tell


class Tracker:
    """The writer thread and what it has yet to do.

    Work is keyed, so asking again for what is waiting already costs nothing, and each piece brings the view
    up to date whatever happened before: pieces may be repeated and retried, in the order of asking. The View is
    opened in the thread, because importing MLflow and making a fresh store's tables takes seconds, and opened anew
    after a failure; not at all while the files say that all was told before. Any thread may call. Notes for the person
    who watches are kept and printed on standard error by `close`.
    """

    def __init__(self, place: Place, store: Path) -> None:
        self.notes: list[str] = []
        self._place, self._store = place, store
        self._view: View | None = None
        self._waiting: dict[Any, _Piece] = {}
        self._asked = itertools.count()
        self._changed = threading.Condition()
        self._closing = self._failing = self._given_up = False
        self._peace = 0.0  # until when a store that failed is left alone (time.monotonic)
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._told = False  # whether a run was to be told of
        self._thread.start()
        self._put("behind", self._catch_up, known=self._caught_up)

    def knows(self, sweep_id: str) -> bool:
        """Whether MLflow was told what the sweep's folder holds, and that the sweep is over: then nothing needs to be
        opened unless there is a run to be done."""
        from sweeper.tracking import sweeps

        return sweeps.up_to_date(self._place, self._store, sweep_id)

    def open_sweep(self, sweep_id: str, title: str, cells: int) -> None:
        """Show the sweep as running; a sweep of the same id is joined. Its folder and plan.json are there."""
        from sweeper.tracking import sweeps

        try:
            sweeps.announce(self._store, sweep_id, self._place)
        except OSError as error:
            self._note(f"where sweep {sweep_id} is tracked could not be kept ({error})")
        self._put(("open", sweep_id), lambda view: sweeps.open_sweep(view, sweep_id, title, cells))

    def start(self, run_dir: Path) -> None:
        """Show a run whose run.json and spec.json are written."""
        self._told = True
        self._put(run_dir, lambda view: view.bring(run_dir))

    def tick(self, run_dir: Path) -> None:
        """Show, within seconds, what a run in progress reported since. Cheap: call it at any rate."""
        self._put(run_dir, lambda view: view.bring(run_dir), delay=EVERY)

    def finish(self, run_dir: Path) -> None:
        """Show a run whose verdict.json is written, or was written anew."""
        self._told = True
        self._put(run_dir, lambda view: view.bring(run_dir))

    def close_sweep(self, sweep_id: str) -> None:
        """Show the sweep as over, with what its folder holds by now, and note where to look at it."""
        from sweeper.tracking import sweeps

        def close(view: View) -> None:
            self._note(how_to_look(self._place, sweeps.close(view, sweep_id)))

        if not self._told and self.knows(sweep_id):
            self._note(how_to_look(self._place, sweeps.links(self._place, self._store, sweep_id)))
        else:
            self._put(("close", sweep_id), close)

    def close(self) -> None:
        """Wait for the last writes, but not for ever, and print the notes."""
        began = time.monotonic()
        with self._changed:
            self._closing, self._peace = True, began
            for piece in self._waiting.values():
                piece.due = began
            self._changed.notify()
        while self._thread.is_alive() and time.monotonic() - began < (NO_PATIENCE if self._failing else PATIENCE):
            self._thread.join(0.1)
        with self._changed:
            self._given_up = True
            self._changed.notify()
        self._thread.join(LAST_PAUSE)
        if self._thread.is_alive() or self._waiting:
            self.notes.append(f"tracking is behind; catch up with: python -m sweeper.sync --store {self._store}")
        for note in self.notes:
            print(note, file=sys.stderr)
        self.notes = []

    def _put(
        self, key: Any, work: Callable[[View], Any], delay: float = 0.0, known: Callable[[], bool] = lambda: False
    ) -> None:
        with self._changed:
            due = max(time.monotonic() + delay, self._peace)  # nothing new goes before what waits already
            if key in self._waiting:
                self._waiting[key].due = min(due, self._waiting[key].due)
            else:
                self._waiting[key] = _Piece(due, next(self._asked), key, work, known)
            self._changed.notify()

    def _next(self) -> _Piece | None:
        """Wait for a piece of work that is due; None when the tracker is closing and all is done or given up."""
        with self._changed:
            while True:
                if self._given_up or (self._closing and not self._waiting):
                    return None
                first = min(self._waiting.values(), default=None)
                wait = first.due - time.monotonic() if first else None
                if first and wait is not None and wait <= 0:
                    return self._waiting.pop(first.key)
                self._changed.wait(wait)

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            try:
                if self._view is None and piece.known():
                    continue
                self._do(piece.work)
                self._failing = False
            except Exception as error:  # whatever MLflow, its store or the disk do, the sweep goes on
                self._view = None
                if getattr(error, "error_code", "") in REFUSED or isinstance(error, LookupError | TypeError):
                    what = piece.key.name if isinstance(piece.key, Path) else "the sweep"
                    self._note(f"tracking refused {what}: {redacted(str(error))}")
                    continue
                self._note(f"tracking failed and will be tried again: {redacted(str(error))}")
                self._failing = True
                with self._changed:
                    self._waiting.setdefault(piece.key, piece)
                    self._peace = time.monotonic() + (min(PAUSE, LAST_PAUSE) if self._closing else PAUSE)
                    for waiting in self._waiting.values():
                        waiting.due = self._peace  # the same for all: then the order of asking counts

    def _do(self, work: Callable[[View], Any]) -> None:
        from sweeper.tracking.view import View, lock

        with lock(self._store):
            if self._view is None:
                self._view = View(self._place, self._store)
            work(self._view)

    def _catch_up(self, view: View) -> None:
        """Ask for what earlier sweeps that are tracked at this place left untold."""
        from sweeper.tracking import sweeps

        for behind in view.reconcile():
            self.finish(behind)
        here, runs = self._behind()
        for folder in runs:
            self.finish(folder)
        for sweep in here:
            self._put(("sweep", sweep), partial(sweeps.bring, sweep=sweep))

    def _caught_up(self) -> bool:
        here, runs = self._behind()
        return bool(here) and not runs and all(map(self.knows, here))

    def _behind(self) -> tuple[list[str], list[Path]]:
        """The sweeps that are tracked at this place, and those of their runs that are not told whole."""
        from sweeper.tracking import sweeps
        from sweeper.tracking.view import up_to_date

        tracked = sweeps.tracked(self._store)
        here = [sweep for sweep, told in tracked.items() if told.get("place") == self._place.key]
        runs = sweeps.runs_of(self._store, set(here))
        return here, [folder for folder in runs if not up_to_date(self._place, folder)]

    def _note(self, text: str) -> None:
        if text and text not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(text)


def make(config: Mapping[str, Any], store: Path) -> Tracker | Nothing:
    """A tracker for the section `tracking` of a sweep. Raises SettingError, as `place.read` does."""
    place = places.read(config, store)
    return Tracker(place, store.resolve()) if place else Nothing()


def how_to_look(place: Place, links: list[str]) -> str:
    """What to open to look at a sweep."""
    if not links:
        return ""
    served = "" if place.ui == place.shown.rstrip("/") else f" (mlflow ui --backend-store-uri {place.shown})"
    return f"in MLflow{served}:\n" + "\n".join(f"  {line}" for line in links)


def redacted(text: str) -> str:
    """The first line of a message, without passwords in addresses."""
    line = next((line for line in text.splitlines() if line.strip()), "no message")
    return re.sub(r"(://)[^/@\s]+@", r"\1***@", line)[:300]
