"""Tracking: shows a store in MLflow while it fills, and catches up from the run directories.

    python -m sweeper.tracking sync --store runs

The run directories are the truth and MLflow is a view of them (sweeper/mlflow_view.py). Inside the harness
one thread writes that view: no call of a tracker blocks on the tracking store or raises. What could not be
written is written later: by the same thread, by the next sweep, or by `sync`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeper.report import table as cells

if TYPE_CHECKING:
    from sweeper.mlflow_view import View

EVERY = 5.0  # seconds between two looks at a run in progress
PAUSE = 30.0  # seconds of peace for a tracking store that failed
PATIENCE = 60.0  # seconds that `close` waits for the last writes


class Nothing:
    """tracking=none: run directories and tables only."""

    def open_sweep(self, sweep_id: str, title: str, cells: int) -> None:
        pass

    def start(self, run_dir: Path) -> None:
        pass

    def tick(self, run_dir: Path) -> None:
        pass

    def finish(self, run_dir: Path) -> None:
        pass

    def close_sweep(self, sweep_id: str, table: list[dict[str, Any]], conclusion: str = "") -> None:
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


class Tracker:
    """The writer thread and what it has yet to do.

    Work is keyed, so asking again for what is waiting already costs nothing, and each piece brings the view
    up to date whatever happened before: pieces may be repeated and retried, in the order of asking.
    `open_view` makes the View, in the thread, because importing MLflow and making a fresh store's tables
    takes seconds. Notes for the person who watches are kept and printed on standard error by `close`.
    """

    def __init__(self, open_view: Callable[[], View], store: Path) -> None:
        self.notes: list[str] = []
        self._open_view, self._store = open_view, store
        self._view: View | None = None
        self._waiting: dict[Any, _Piece] = {}
        self._asked = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()
        self._put("reconcile", self._reconcile)

    def open_sweep(self, sweep_id: str, title: str, cells: int) -> None:
        """Show the sweep as running; a sweep of the same id is joined."""
        self._put(("open", sweep_id), lambda view: view.open_sweep(sweep_id, title, cells))

    def start(self, run_dir: Path) -> None:
        """Show a run whose run.json and spec.json are written."""
        self._put(run_dir, lambda view: view.bring(run_dir))

    def tick(self, run_dir: Path) -> None:
        """Show, within seconds, what a run in progress reported since. Cheap: call it at any rate."""
        self._put(run_dir, lambda view: view.bring(run_dir), delay=EVERY)

    def finish(self, run_dir: Path) -> None:
        """Show a run whose verdict.json is written, or was written anew."""
        self._put(run_dir, lambda view: view.bring(run_dir))

    def close_sweep(self, sweep_id: str, table: list[dict[str, Any]], conclusion: str = "") -> None:
        """Show the sweep as over, with its table (rows of report.table) and what was concluded from it, if anything;
        notes how to compare its runs."""

        def close(view: View) -> None:
            view.close_sweep(sweep_id, table, cells.render(table), conclusion)
            link = view.compare_link(self._store / "runs" / name for row in table for name in row.get("runs", []))
            if link:
                self.notes.append(how_to_compare(view.uri, link))

        self._put(("close", sweep_id), close)

    def close(self) -> None:
        """Wait for the last writes, at most PATIENCE seconds, and print the notes."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(PATIENCE)
        if self._thread.is_alive() or self._waiting:
            self.notes.append(
                f"tracking is behind; catch up with: python -m sweeper.tracking sync --store {self._store}"
            )
        for note in self.notes:
            print(note, file=sys.stderr)
        self.notes = []

    def _put(self, key: Any, work: Callable[[View], Any], delay: float = 0.0) -> None:
        due = time.monotonic() + delay
        with self._changed:
            if key in self._waiting:
                self._waiting[key].due = min(due, self._waiting[key].due)
            else:
                self._waiting[key] = _Piece(due, next(self._asked), key, work)
            self._changed.notify()

    def _next(self) -> _Piece | None:
        """Wait for a piece of work that is due; None when all is done and the tracker is closing."""
        with self._changed:
            while True:
                if not self._waiting and self._closing:
                    return None
                first = min(self._waiting.values(), default=None)
                wait = first.due - time.monotonic() if first else None
                if first and wait is not None and (wait <= 0 or self._closing):
                    return self._waiting.pop(first.key)
                self._changed.wait(wait)

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._do(piece.work)
            except Exception as error:  # whatever MLflow, its store or the disk do, the sweep goes on
                self._note(error)
                with self._changed:
                    self._waiting[piece.key] = piece
                    for waiting in self._waiting.values():
                        waiting.due = time.monotonic() + PAUSE
                    if self._closing:
                        return

    def _do(self, work: Callable[[View], Any]) -> None:
        from sweeper.mlflow_view import lock

        with lock(self._store):
            if self._view is None:
                self._view = self._open_view()
            work(self._view)

    def _reconcile(self, view: View) -> None:
        for behind in view.reconcile():
            self.finish(behind)

    def _note(self, error: Exception) -> None:
        text = f"tracking failed and will be tried again: {redacted(str(error))}"
        if text not in self.notes:
            self.notes.append(text)


def make(config: dict[str, Any], store: Path) -> Tracker | Nothing:
    """A tracker for `config`: {name: local|none, uri: null or an address MLflow knows, experiment}.

    Without a uri the tracking store is `mlflow.db` in the store, with `mlartifacts` beside it.
    """
    if config.get("name") == "none":
        return Nothing()
    uri, experiment = config.get("uri"), str(config.get("experiment") or "dflash")

    def open_view() -> View:
        from sweeper.mlflow_view import View

        return View(uri, experiment, store)

    return Tracker(open_view, store.resolve())


def sync(store: Path, uri: str | None = None, experiment: str = "dflash") -> dict[str, int]:
    """Bring the whole view up to date from the run directories; returns {written, unchanged}.

    Runs that the tracking store has lost are made again. Raises what MLflow raises.
    """
    from sweeper.mlflow_view import STATE_FILE, View, lock

    counts = {"written": 0, "unchanged": 0}
    with lock(store):
        view = View(uri, experiment, store)
        for folder in sorted((store / "runs").glob("*/")):
            if not view.known(folder):
                (folder / STATE_FILE).unlink(missing_ok=True)
            counts["written" if view.bring(folder) else "unchanged"] += 1
        view.reconcile()
    return counts


def how_to_compare(uri: str, link: str) -> str:
    """What to do to see a sweep's runs side by side."""
    if uri.startswith(("http://", "https://")):
        return f"compare these runs: {redacted(uri.rstrip('/'))}{link}"
    return f"compare these runs: mlflow ui --backend-store-uri {redacted(uri)}\n  http://127.0.0.1:5000{link}"


def redacted(text: str) -> str:
    """The first line of a message, without passwords in addresses."""
    line = next((line for line in text.splitlines() if line.strip()), "no message")
    return re.sub(r"(://)[^/@\s]+@", r"\1***@", line)[:300]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sweeper.tracking", description="MLflow's view of a store.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "sync", help="bring MLflow up to date with the run directories"
    )
    command.add_argument("--store", type=Path, default=Path("runs"), help="the store (default: runs)")
    command.add_argument("--uri", help="tracking store or server (default: the one in the store)")
    command.add_argument("--experiment", default="dflash", help="experiment (default: dflash)")
    chosen = parser.parse_args(arguments)
    if not (chosen.store / "runs").is_dir():
        print(f"store={chosen.store}: must be a folder in which a sweep has run", file=sys.stderr)
        return 2
    try:
        counts = sync(chosen.store, chosen.uri, chosen.experiment)
    except Exception as error:
        print(f"uri={redacted(str(chosen.uri or 'local'))}: {redacted(str(error))}", file=sys.stderr)
        return 1
    print(f"{counts['written']} runs written, {counts['unchanged']} unchanged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
