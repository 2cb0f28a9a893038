"""Seconds to a drafter's first step, forward and backward, from empty compile caches and from those that leaves.

    python benchmarks/first_step.py --json out.json            # triton, locked, whole at the packed shape, on one GPU
    python benchmarks/first_step.py --tiny                     # a toy on any machine, to see that it runs

Each is a process of its own: `step.py` with one variant. The first has a folder of its own for the compile caches, the
second the same folder. A first step includes what the device's libraries load, not the process's start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEP = Path(__file__).parent / "step.py"


def main() -> None:
    options = parse()
    found: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for variant in options.variants:
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                told = first_step(variant, Path(folder), options)
                found.setdefault(variant, {})[state] = told["results"][0]["first_step_s"]
        cold, warm = found[variant]["cold"], found[variant]["warm"]
        print(f"{variant}: cold {cold:.1f} s, warm {warm:.1f} s ({warm / cold:.0%})", flush=True)
        machine = {name: told.get(name) for name in ("card", "python", "torch", "triton", "transformers", "commit")}
        if options.json:  # after each, so that a run cut short leaves what it has
            report = {"benchmark": "first_step", "shape": options.shape, "first_step_s": found, **machine}
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def first_step(variant: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What step.py tells of a variant whose caches lie in `folder`."""
    out = folder / "step.json"
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, str(STEP), "--variants", variant, "--shapes", options.shape]
    command += ["--samples", "1", "--steps", "1", "--json", str(out)]
    command += ["--tiny"] if options.tiny else []
    command += ["--commit", options.commit] if options.commit else []
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant}: step.py ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="", help="comma-separated, of step.py's (triton,locked,whole)")
    parser.add_argument("--shape", default="packed", help="of step.py's: batch, long, packed")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--tiny", action="store_true", help="a toy on CPU; figures say nothing")
    options = parser.parse_args()
    default = "eager,whole" if options.tiny else "triton,locked,whole"
    options.variants = (options.variants or default).split(",")
    return options


if __name__ == "__main__":
    main()
