"""Loss, teacher-forced acceptance length and, where measured, tau against the training step, for any runs.

Each variant of a fanout has curves of its own.

python -m sweeper.report.curves RUN_DIR... -o curves.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.events import EVENTS_FILE, EventReader
from sweeper.measure import Evaluation, Step, evaluations, finite, steps
from sweeper.report.table import label
from sweeper.store import read_json
from sweeper.words import leave

CURVES = (("loss", "loss (nats a supervised slot)"), ("accept", "teacher-forced acceptance length (tokens)"))
WINDOW = 8  # steps whose mean is the strong line; the faint one is every step
STYLES = ("-", "--", "-.", ":")  # runs of one seed lie on each other: each must show


@dataclass(frozen=True)
class Curve:
    """What is drawn of one variant of one run."""

    name: str
    done: list[Step]
    measured: list[Evaluation]


def draw(run_dirs: list[Path], out: Path) -> list[str]:
    """Draw the runs' curves into the image `out`; returns the runs that had no steps to draw.

    Raises OSError when the image cannot be written and ValueError when no run has steps.
    """
    told = {folder: list(EventReader(folder / EVENTS_FILE).poll()) for folder in run_dirs}
    found = {folder: steps(events) for folder, events in told.items()}
    empty = [folder.name for folder, variants in found.items() if not variants]
    having = [folder for folder, variants in found.items() if variants]
    if not having:
        raise ValueError("none of these runs has steps")
    drawn = [
        Curve(f"{name} {variant}".rstrip(), done, [e for e in evaluations(told[folder]) if e.variant == variant])
        for folder, name in zip(having, _names(having), strict=True)
        for variant, done in found[folder].items()
    ]

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = any(curve.measured for curve in drawn)
    columns = len(CURVES) + measured
    figure, axes = pyplot.subplots(1, columns, figsize=(5.5 * columns, 4.2), layout="constrained")
    for axis, (name, title) in zip(axes[: len(CURVES)], CURVES, strict=True):
        for number, curve in enumerate(drawn):
            numbers, values = series(curve.done, name)
            style = STYLES[number % len(STYLES)]
            line = axis.plot(numbers, smooth(values), style, linewidth=1.8, label=curve.name)[0]
            axis.plot(numbers, values, linewidth=0.6, alpha=0.35, color=line.get_color())
        _label(axis, f"step (strong line: mean of {WINDOW})", title)
    if measured:
        sets = list(dict.fromkeys(e.set for curve in drawn for e in curve.measured))
        for number, curve in enumerate(drawn):  # a colour a set, a line style a curve
            for prompts in dict.fromkeys(e.set for e in curve.measured):
                points = [e for e in curve.measured if e.set == prompts]
                bars = [[e.tau - _bound(e, "tau_low") for e in points], [_bound(e, "tau_high") - e.tau for e in points]]
                legend = f"{prompts} ({curve.name})" if len(drawn) > 1 else prompts
                look: dict[str, Any] = {"color": f"C{sets.index(prompts)}", "linestyle": STYLES[number % len(STYLES)]}
                at, tau = [e.step for e in points], [e.tau for e in points]
                axes[-1].errorbar(at, tau, bars, marker="o", label=legend, **look)
        _label(axes[-1], "step (bars: 95 %)", "tau (tokens a round, by decoding)")
        axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    try:
        figure.savefig(out, dpi=130)
    finally:
        pyplot.close(figure)
    return empty


def _label(axis: Any, below: str, title: str) -> None:
    axis.set_xlabel(below)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.25)


def _bound(measured: Evaluation, name: str) -> float:
    """An end of tau's interval; tau itself where none was told."""
    bound = finite(measured.told.get(name))
    if bound is None:
        return measured.tau
    return min(bound, measured.tau) if name == "tau_low" else max(bound, measured.tau)


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
    leave(main)
