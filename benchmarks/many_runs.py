"""Many quick runs: what the harness itself costs a run, whether that grows, and how long plan and resume take.

    python benchmarks/many_runs.py --runs 500 --json benchmarks/results/many-runs.json

A sweep of `--runs` cells whose command does nothing, tracked in the store's own MLflow, in a process of its own:
planned (`dry=true`), carried out, started again with all done, and with one run missing. Runs are told in tenths of
the sweep: seconds from one start to the next, the harness's CPU seconds and its memory, so that what grows shows.
CPU seconds say more than wall seconds on a machine that others use; the load is kept beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

LOOK_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser("many_runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=500, help="how many cells (default: 500)")
    parser.add_argument("--tracking", default="local", choices=["local", "none"], help="default: local")
    parser.add_argument("--json", type=Path, help="where the figures go")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-runs-") as scratch:
        found = measure(chosen.runs, chosen.tracking, Path(scratch))
    print(told(found))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(runs: int, tracking: str, scratch: Path) -> dict[str, Any]:
    """All figures of a sweep of so many runs."""
    words = ["-m", "workload=command", "workload.argv=['true']", f"seed=range({runs})", f"tracking={tracking}"]
    words.append(f"store={scratch / 'store'}")
    found: dict[str, Any] = {
        "runs": runs,
        "tracking": tracking,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    found["plan"] = timed([*words, "dry=true"])
    found["sweep"], seen = watched(words)
    found["tenths"] = tenths(scratch / "store", seen)
    found["resume, all done"] = timed(words)
    shutil.rmtree(sorted((scratch / "store" / "runs").iterdir())[0])
    found["resume, one missing"] = timed(words)
    found["load after"] = os.getloadavg()[0]
    return found


def timed(words: list[str]) -> dict[str, float]:
    """Wall and CPU seconds of the command, and its greatest memory."""
    return watched(words)[0]


def watched(words: list[str]) -> tuple[dict[str, float], list[tuple[float, float, int]]]:
    """The same, and what was seen while it ran: (time, CPU seconds, bytes resident) every LOOK_S."""
    began = time.time()
    with tempfile.TemporaryFile() as said:
        process = psutil.Popen([sys.executable, "-m", "sweeper", *words], stdout=said, stderr=said)
        seen: list[tuple[float, float, int]] = []
        while process.poll() is None:
            try:
                cpu = process.cpu_times()
                seen.append((time.time(), cpu.user + cpu.system, process.memory_info().rss))
            except psutil.Error:
                break
            time.sleep(LOOK_S)
        if process.wait():
            said.seek(0)
            raise SystemExit(said.read().decode(errors="replace"))
    last = max(cpu for _, cpu, _ in seen)
    figures = {"wall_s": time.time() - began, "cpu_s": last, "peak_mb": max(rss for _, _, rss in seen) / 1e6}
    return {name: round(value, 2) for name, value in figures.items()}, seen


def tenths(store: Path, seen: list[tuple[float, float, int]]) -> list[dict[str, float]]:
    """The sweep in ten parts of equally many runs, in the order in which they began."""
    verdicts = [json.loads(path.read_text()) for path in store.glob("runs/*/verdict.json")]
    verdicts.sort(key=lambda verdict: verdict["started"])
    size = max(1, len(verdicts) // 10)
    found = []
    for start in range(0, len(verdicts) - size + 1, size):
        part = verdicts[start : start + size]
        began, ended = part[0]["started"], part[-1]["ended"]
        inside = [one for one in seen if began <= one[0] <= ended] or [min(seen, key=lambda one: abs(one[0] - ended))]
        apart = [two["started"] - one["started"] for one, two in itertools.pairwise(part)]
        found.append(
            {
                "runs": len(part),
                "a_run_s": round(statistics.median(apart), 4) if apart else 0.0,
                "overhead_s": round(statistics.median(verdict["overhead_s"] for verdict in part), 4),
                "cpu_a_run_s": round((inside[-1][1] - inside[0][1]) / len(part), 4),
                "memory_mb": round(inside[-1][2] / 1e6, 1),
            }
        )
    return found


def told(found: dict[str, Any]) -> str:
    lines = [
        f"{found['runs']} runs, tracking={found['tracking']}, load {found['load']:.1f} to {found['load after']:.1f}"
    ]
    for name in ("plan", "sweep", "resume, all done", "resume, one missing"):
        figures = found[name]
        lines.append(
            f"{name:<20} {figures['wall_s']:>8.1f} s  {figures['cpu_s']:>7.1f} CPU s  {figures['peak_mb']:>6.0f} MB"
        )
    lines.append("tenth  s a run  overhead s  CPU s a run  MB")
    for number, part in enumerate(found["tenths"], 1):
        lines.append(
            f"{number:>5}  {part['a_run_s']:>7.3f}  {part['overhead_s']:>10.3f}  {part['cpu_a_run_s']:>11.3f}  "
            f"{part['memory_mb']:.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
