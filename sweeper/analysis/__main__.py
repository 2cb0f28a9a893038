"""The conclusion of a sweep, or of all runs of a store, printed again: `python -m sweeper.analysis STORE|SWEEP`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sweeper import help
from sweeper.analysis.conclude import conclude
from sweeper.analysis.records import of_store, of_sweep
from sweeper.analysis.sentences import sentences
from sweeper.store import read_json
from sweeper.words import leave

BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sweeper.analysis", description="What finished runs say together.")
    parser.add_argument("path", metavar="STORE|SWEEP", help="a store, also as store=DIR, or a folder below its sweeps/")
    parser.add_argument("--json", action="store_true", help="every figure as one JSON object")
    chosen = parser.parse_args(arguments)
    folder = Path(chosen.path.removeprefix("store=")).expanduser().absolute()
    if (folder / "runs").is_dir():
        records, plans = of_store(folder), [read_json(path) for path in folder.glob("sweeps/*/plan.json")]
    elif (folder / "plan.json").is_file():
        try:
            records, plans = of_sweep(folder), [read_json(folder / "plan.json")]
        except (OSError, ValueError, KeyError, TypeError):
            print(f"path={chosen.path}: its plan.json must be one that a sweep wrote", file=sys.stderr)
            return BAD_INPUT
    else:
        print(f"path={chosen.path}: must be a store in which a sweep has run, or a sweep's folder", file=sys.stderr)
        return BAD_INPUT
    newest = max((plan for plan in plans if plan), key=lambda plan: float(plan.get("written", 0)), default={})
    found = conclude(records, help.defaults(), newest.get("command", []))
    print(json.dumps(found, indent=1) if chosen.json else sentences(found), end="\n" if chosen.json else "")
    return 0


if __name__ == "__main__":
    leave(main)
