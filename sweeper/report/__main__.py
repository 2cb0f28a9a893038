"""The report of a sweep: `python -m sweeper.report [SWEEP]` prints its table and writes HTML, Markdown and CSV.

Those in the sweep's own folder are shown in MLflow too, where the sweep is tracked there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sweeper.words import leave, with_store

BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sweeper.report", description="The report of a sweep.")
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="its id or folder (default: the newest of the store)")
    parser.add_argument("--store", type=Path, default=Path("runs"), help="the store, also as store=DIR (default: runs)")
    parser.add_argument("--out", type=Path, help="folder of report.html, .md and .csv (default: the sweep's own)")
    chosen = parser.parse_args(with_store(arguments))

    from sweeper.report import page, table

    folder = _folder(chosen.sweep, chosen.store)
    if isinstance(folder, str):
        print(folder, file=sys.stderr)
        return BAD_INPUT
    try:
        story, files = page.write(folder, out=chosen.out)
    except OSError as error:
        print(f"out={chosen.out or folder}: the report cannot be written ({error.strerror})", file=sys.stderr)
        return BAD_INPUT
    except (ValueError, KeyError, TypeError):
        print(f"sweep={folder}: its plan.json must be one that a sweep wrote", file=sys.stderr)
        return BAD_INPUT
    print(table.render(story.rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    print(story.said, end="")
    print(*files, sep="\n", file=sys.stderr)
    if chosen.out is None and (said := _tracked(folder)):
        print(said, file=sys.stderr)
    return 0


def _tracked(folder: Path) -> str:
    """Show a sweep's new report where the sweep is tracked, if it is; says what came of it."""
    from sweeper import store
    from sweeper.tracking import redacted, sweeps
    from sweeper.tracking.view import STATE_FILE, View, lock

    kept, runs = store.read_json(folder / STATE_FILE), folder.parent.parent
    if not kept:
        return ""
    place = sweeps.place_of(kept, runs)
    if sweeps.up_to_date(place, runs, folder.name):
        return ""
    try:
        with lock(runs):
            sweeps.bring(View(place, runs), folder.name)
    except Exception as error:  # a view: the report itself is written
        again = f"python -m sweeper.sync {folder.name} --store {runs}"
        return f"MLflow at {place.shown} does not have it yet ({redacted(str(error))}); {again} tries again"
    return f"in MLflow at {place.shown}"


def _folder(sweep: str | None, store: Path) -> Path | str:
    """The folder that is meant, or one sentence that says what would be."""
    there = {path.parent.name: path.parent for path in store.absolute().glob("sweeps/*/plan.json")}
    if sweep is None:
        newest = max(there.values(), key=lambda folder: (folder / "plan.json").stat().st_mtime, default=None)
        return newest or f"store={store}: must be a store in which a sweep has run"
    given = Path(sweep).expanduser().absolute()
    if (given / "plan.json").is_file():
        return given
    found = [folder for name, folder in there.items() if name.startswith(sweep)]
    if len(found) == 1:
        return found[0]
    of = f"one of the store's ({', '.join(sorted(there)[:8]) or 'which has none'})"
    return f"sweep={sweep}: must be a sweep's folder or {of}" if not found else f"sweep={sweep}: means several: {of}"


if __name__ == "__main__":
    leave(main)
