"""Loss and teacher-forced acceptance length against the training step, for any runs.

python -m sweeper.report.curves RUN_DIR... -o curves.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from dflash.events import EVENTS_FILE, EventReader
from sweeper.measure import Step, steps
from sweeper.report.table import label, read_json

CURVES = (("loss", "loss (nats a supervised slot)"), ("accept", "teacher-forced acceptance length (tokens)"))
WINDOW = 8  # steps whose mean is the strong line; the faint one is every step
STYLES = ("-", "--", "-.", ":")  # runs of one seed lie on each other: each must show


def draw(run_dirs: list[Path], out: Path) -> list[str]:
    """Draw the runs' curves into the image `out`; returns the runs that had no steps to draw.

    Raises OSError when the image cannot be written and ValueError when no run has steps.
    """
    found = [(folder, steps(EventReader(folder / EVENTS_FILE).poll())) for folder in run_dirs]
    empty = [folder.name for folder, done in found if not done]
    drawn = [(folder, done) for folder, done in found if done]
    if not drawn:
        raise ValueError("none of these runs has steps")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = _names([folder for folder, _ in drawn])
    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(11, 4.2), layout="constrained")
    for axis, (name, title) in zip(axes, CURVES, strict=True):
        for number, (name_of_run, (_, done)) in enumerate(zip(names, drawn, strict=True)):
            numbers, values = series(done, name)
            line = axis.plot(numbers, smooth(values), STYLES[number % len(STYLES)], linewidth=1.8, label=name_of_run)[0]
            axis.plot(numbers, values, linewidth=0.6, alpha=0.35, color=line.get_color())
        axis.set_xlabel(f"step (strong line: mean of {WINDOW})")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    try:
        figure.savefig(out, dpi=130)
    finally:
        pyplot.close(figure)
    return empty


def series(done: list[Step], name: str) -> tuple[list[int], list[float]]:
    """Step numbers and values of the steps that have the value."""
    having = [step for step in done if name in step.series]
    return [step.step for step in having], [step.series[name] for step in having]


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and the up to WINDOW - 1 before it."""
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def _names(folders: list[Path]) -> list[str]:
    """Each run by the levels in which these runs differ, and its repeat."""
    told = [read_json(folder / "run.json") or {} for folder in folders]
    cells = [run.get("cell") or {} for run in told]
    factors = list(dict.fromkeys(factor for cell in cells for factor in cell))
    varied = [f for f in factors if len({str(cell.get(f)) for cell in cells if cell}) > 1] or factors
    return [
        f"{label({f: cell[f] for f in varied if f in cell})} r{run.get('repeat')}" if cell else folder.name
        for folder, run, cell in zip(folders, told, cells, strict=True)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sweeper.report.curves", description="Curves of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directories of a store")
    parser.add_argument("-o", "--out", type=Path, default=Path("curves.png"), help="image (default: curves.png)")
    chosen = parser.parse_args(arguments)
    try:
        empty = draw(chosen.runs, chosen.out)
    except (OSError, ValueError) as error:
        print(f"runs={' '.join(map(str, chosen.runs))}: {error}", file=sys.stderr)
        return 2
    for name in empty:
        print(f"{name} has no steps and is not drawn", file=sys.stderr)
    print(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
