"""The charts of a report, each an SVG element for its page: drawn by matplotlib, coloured by the page (svg.py)."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from sweeper.analysis.records import NO_LEVEL
from sweeper.report.story import Points, Story, Told
from sweeper.report.svg import STYLE, THEME, figure, inline
from sweeper.report.table import label
from sweeper.spec import COPY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERDICTS = ("ok", "degraded", "failed", "hung", "killed", "skipped")
STATES = ("cold", "warm", "foreign", "standalone", "mixed", "unproved")
COLOURS = "cividis"  # one scale from dark to light for every eye, also in grey
CHARACTER = 6.3  # pixels that a character takes at 11 pixels, about
WIDTH, HALF = 1110.0, 540.0  # of the page, for a chart that has it to itself, and for two beside each other
BAR = 440.0  # pixels that all runs of a level are long
MOST_ROWS = 25  # cells below each other where there is one list of them
MOST_LEVELS = 40  # of a factor on an axis
MOST_STRIPS = 16  # levels that stand beside each other, where they could be numbers on an axis
SPARSE = 4  # slots of a grid a cell, beyond which cells are listed instead
TRACKS = 30  # runs' cells in one figure of timelines
POINTS = 30_000  # of all timelines together


def style() -> AbstractContextManager[None]:
    """Matplotlib's settings for these charts, while entered."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


# -- cells


@dataclass(frozen=True)
class Panel:
    """One facet of the heat map: cells by their levels on two axes; a list of cells has no x axis."""

    title: str
    x: str
    y: str
    columns: list[str]
    lines: list[str]
    cells: dict[tuple[str, str], dict[str, Any]]


def heat(story: Story) -> list[str]:
    """Ktok/s of every cell: the scale, and a map a facet. Empty where there is one cell."""
    rows = [row for row in story.rows if COPY not in row["cell"]]
    if len(rows) < 2:
        return []
    speeds = [row["ktok_s"]["median"] for row in rows if row["ktok_s"]]
    low, high = (min(speeds), max(speeds)) if speeds else (0.0, 1.0)
    if not high > low:
        low, high = low * 0.9, high * 1.1 or 1.0
    facets = panels(rows, story.factors)
    maps = [_heat(panel, low, high, HALF if len(facets) > 1 else WIDTH) for panel in facets]
    return [_scale(low, high), *maps] if speeds else maps


def panels(rows: Sequence[dict[str, Any]], factors: Mapping[str, Sequence[str]]) -> list[Panel]:
    """The cells on axes: the two factors with most levels, a facet for each combination of the others.

    Cells that are a sample of a large space would leave such a grid empty; they are listed, fastest first.
    """
    names = sorted(factors, key=lambda factor: -len(factors[factor]))
    slots = math.prod(len(factors[name]) for name in names)
    longest = max((len(factors[name]) for name in names), default=0)
    if len(names) < 2 or longest > MOST_LEVELS or slots > SPARSE * len(rows):
        return _listed(rows, names, by_speed=len(names) > 1)
    # Long names stand well at the left of a row, and a page is wider than high.
    y, x = sorted(names[:2], key=lambda name: -max(map(len, factors[name])))
    placed = [({f: str(row["cell"].get(f, NO_LEVEL)) for f in names}, row) for row in rows]
    found = []
    for rest in product(*(factors[name] for name in names[2:])):
        facet = dict(zip(names[2:], rest, strict=True))
        cells = {(at[x], at[y]): row for at, row in placed if all(at[f] == level for f, level in facet.items())}
        if cells:
            found.append(Panel(label(facet) if facet else "", x, y, list(factors[x]), list(factors[y]), cells))
    return found


def _listed(rows: Sequence[dict[str, Any]], names: Sequence[str], by_speed: bool) -> list[Panel]:
    if by_speed:
        rows = sorted(rows, key=lambda row: -(row["ktok_s"] or {"median": -1})["median"])
    named = {" ".join(str(row["cell"].get(f, NO_LEVEL)) for f in names): row for row in rows}
    lines = list(named)
    return [
        Panel(" ".join(names), "", "", [""], part, {("", name): named[name] for name in part})
        for part in (lines[at : at + MOST_ROWS] for at in range(0, len(lines), MOST_ROWS))
    ]


def _heat(panel: Panel, low: float, high: float, room: float) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    columns, lines = len(panel.columns), len(panel.lines)
    left = min(260.0, max(map(len, panel.lines)) * CHARACTER + 10) + (16 if panel.y else 0)
    wide = max(42.0, min(104.0, (room - left - 8) / columns)) if panel.x else 96.0
    high_px = 30.0 if lines <= 12 else 22.0
    turned = max(map(len, panel.columns)) * CHARACTER > wide - 6
    below = (min(90.0, max(map(len, panel.columns)) * CHARACTER * 0.75 + 14) if turned else 18.0) + 18 if panel.x else 4
    title = textwrap.wrap(panel.title, max(12, int(columns * wide / CHARACTER))) if panel.x else [panel.title]
    above = 8.0 + 15.0 * len(title) if panel.title else 6.0
    drawn = figure(left + columns * wide + 8, above + lines * high_px + below)
    axes = _axes(drawn, left, above, columns * wide, lines * high_px)
    axes.set(xlim=(0, columns), ylim=(lines, 0))
    scale = colormaps[COLOURS]
    digits = max(0, 2 - math.floor(math.log10(high)))  # three of the fastest cell's speed
    titles: dict[str, str | list[str]] = {}
    for (x, y), row in panel.cells.items():
        at, line = panel.columns.index(x), panel.lines.index(y)
        name = f"cell{len(titles)}"
        titles[name] = told(row)
        said, small = _short(row, wide, digits)
        if row["ktok_s"]:
            share = (row["ktok_s"]["median"] - low) / (high - low)
            colour = scale(share)
            fill = to_hex(colour)
            ink = "#ffffff" if 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.5 else "#000000"
            look: dict[str, Any] = {"facecolor": fill, "edgecolor": THEME["paper"], "linewidth": 1.5}
        else:
            worst = next((v for v in reversed(VERDICTS[:5]) if v in row["verdicts"]), "skipped")
            ink = THEME[worst]
            look = {"facecolor": "none", "edgecolor": THEME[worst], "linewidth": 1.0, "linestyle": "--"}
        axes.add_patch(Rectangle((at + 0.02, line + 0.03), 0.96, 0.94, gid=name, **look))
        lift = 0.12 if small and high_px > 25 else 0.0
        text: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
        axes.text(at + 0.5, line + 0.5 - lift, said, fontsize=10.5, **text)
        if small and high_px > 25:
            axes.text(at + 0.5, line + 0.78, small, fontsize=8, **text)
    if panel.x:
        axes.set_xticks([i + 0.5 for i in range(columns)], [_cut(level, 24) for level in panel.columns])
        if turned:
            axes.tick_params(axis="x", labelrotation=40)
            for tick in axes.get_xticklabels():
                tick.set(ha="right", rotation_mode="anchor")
        axes.set_xlabel(panel.x, labelpad=3)
    else:
        axes.set_xticks([])
    axes.set_yticks([i + 0.5 for i in range(lines)], [_cut(level, 38) for level in panel.lines])
    if panel.y:
        axes.set_ylabel(panel.y, labelpad=3)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if panel.title:
        axes.set_title("\n".join(title), loc="left" if panel.x else "right", pad=6)
    return inline(drawn, f"Ktok/s of each cell {panel.title}", titles)


def _scale(low: float, high: float) -> str:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    drawn = figure(420, 42)
    axes = _axes(drawn, 60, 4, 300, 12)
    drawn.colorbar(ScalarMappable(Normalize(low, high), COLOURS), cax=axes, orientation="horizontal")
    axes.tick_params(length=3, labelsize=10)
    drawn.text(52 / 420, 1 - 10 / 42, "Ktok/s", ha="right", va="center")
    return inline(drawn, f"the colours stand for {low:.3g} to {high:.3g} Ktok/s")


def told(row: Mapping[str, Any]) -> str:
    """A cell in a few lines: what a reader learns by pointing at it."""
    lines = [row["label"]]
    if speed := row["ktok_s"]:
        several = f" [{speed['low']:.3f}, {speed['high']:.3f}]" if speed["n"] > 1 else ""
        lines.append(f"{speed['median']:.3f}{several} Ktok/s, {_runs(speed['n'])}")
    lines.append(", ".join(f"{n} {verdict}" for verdict, n in row["verdicts"].items()))
    lines += [f"{cause} ({_runs(n)})" for cause, n in row["signatures"].items()]
    return "\n".join(lines)


def _short(row: Mapping[str, Any], wide: float, digits: int) -> tuple[str, str]:
    """What stands in a cell: its speed or its verdict, and below, in small, how many of its runs that is."""
    bad = sum(n for verdict, n in row["verdicts"].items() if verdict not in ("ok", "skipped"))
    of = f"{bad} of {row['n']} not ok" if wide >= 76 else f"{bad}/{row['n']} bad"
    if row["ktok_s"]:
        return f"{row['ktok_s']['median']:.{digits}f}", of if bad else ""
    return next((v for v in reversed(VERDICTS) if v in row["verdicts"]), "-"), of if 0 < bad < row["n"] else ""


# -- repeats


def strips(story: Story) -> list[str]:
    """For each factor, Ktok/s of every run by its level, with the median."""
    measured = [run for run in story.runs if run.ktok_s is not None]
    if len(measured) < 2:
        return []
    charts = []
    for factor, levels in story.factors.items():
        if len(levels) > MOST_STRIPS and (sizes := _numbers(levels)):
            charts.append(_cloud(factor, sizes, measured))
        elif len(levels) <= MOST_LEVELS:
            charts.append(_strip(factor, levels, measured))
    return charts


def _numbers(levels: Sequence[str]) -> dict[str, float]:
    """The levels as numbers, if all of them are."""
    try:
        return {level: float(level) for level in levels}
    except ValueError:
        return {}


def _cloud(factor: str, sizes: Mapping[str, float], runs: Sequence[Told]) -> str:
    """Ktok/s over a factor of many numbers, on an axis of factors of ten where they span more than thirty."""
    shown = [run for run in runs if run.cell.get(factor) in sizes]
    drawn = figure(HALF, 236)
    axes = _axes(drawn, 58, 10, HALF - 70, 190)
    at = [sizes[run.cell[factor]] for run in shown]
    dots: dict[str, Any] = {"s": 18, "color": THEME["accent"], "alpha": 0.6, "linewidths": 0, "clip_on": False}
    axes.scatter(at, [run.ktok_s or 0.0 for run in shown], gid="runs", **dots)
    if at and min(at) > 0 and max(at) > 30 * min(at):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _finish(axes, factor, "Ktok/s", False)
    titles: dict[str, str | list[str]] = {"runs": [f"{run.label}: {run.ktok_s:.3f} Ktok/s" for run in shown]}
    return inline(drawn, f"Ktok/s of each run over {factor}", titles)


def _strip(factor: str, levels: Sequence[str], runs: Sequence[Told]) -> str:
    labels = [_cut(level, 20) for level in levels]
    wide = max(26.0, min(110.0, (HALF - 68) / len(levels)))
    turned = max(map(len, labels)) * CHARACTER > wide - 6
    below = (max(map(len, labels)) * CHARACTER * 0.75 + 16 if turned else 18.0) + 18
    drawn = figure(58 + max(110, wide * len(levels)) + 10, 200 + below)
    axes = _axes(drawn, 58, 10, max(110, wide * len(levels)), 190)
    titles: dict[str, str | list[str]] = {}
    for at, level in enumerate(levels):
        here = [run for run in runs if run.cell.get(factor) == level]
        if not here:
            continue
        speeds = [run.ktok_s or 0.0 for run in here]
        size = 26 if len(runs) < 200 else 12
        spread = [at + 0.5 * aside for aside in _spread(len(here))]
        axes.scatter(
            spread, speeds, s=size, color=THEME["accent"], alpha=0.6, linewidths=0, clip_on=False, gid=f"level{at}"
        )
        titles[f"level{at}"] = [f"{run.label}: {run.ktok_s:.3f} Ktok/s" for run in here]
        if len(here) == 1:
            continue
        middle = statistics.median(speeds)
        axes.hlines(middle, at - 0.34, at + 0.34, color=THEME["ink"], linewidth=2, gid=f"median{at}")
        titles[f"median{at}"] = [f"median of {factor}={level}: {middle:.3f} Ktok/s, {_runs(len(here))}"]
    axes.set_xticks(range(len(levels)), labels)
    axes.set_xlim(-0.6, len(levels) - 0.4)
    _finish(axes, factor, "Ktok/s", turned)
    return inline(drawn, f"Ktok/s of each run by {factor}", titles)


# -- cold and warm


def first_steps(story: Story) -> str:
    """Seconds to the first step by what the caches were proved to be; a line joins runs that differ in nothing else.

    Empty where all runs were proved alike.
    """
    shown = [run for run in story.runs if run.first_step_s is not None and run.proved]
    states = [state for state in STATES if any(run.proved == state for run in shown)]
    if len(states) < 2:
        return ""
    from matplotlib.collections import LineCollection

    drawn = figure(150 + 150 * len(states), 290)
    axes = _axes(drawn, 58, 10, 120 * len(states), 240)
    titles: dict[str, str | list[str]] = {}
    for number, (strategy, colour) in enumerate(_by_strategy(shown).items()):
        here = [run for run in shown if run.cell.get("compile", "") == strategy]
        contexts: dict[str, dict[str, list[Told]]] = {}
        for run in here:
            context = label({f: level for f, level in run.cell.items() if f not in ("cache", "cache_from")})
            contexts.setdefault(context, {}).setdefault(run.proved, []).append(run)
        joins, said = [], []
        dots: list[tuple[float, Told]] = []
        for context, by_state in contexts.items():
            middle = {
                state: statistics.median(run.first_step_s or 0.0 for run in by_state[state])
                for state in states
                if state in by_state
            }
            joins.append([(states.index(state), seconds) for state, seconds in middle.items()])
            said.append(f"{context}: " + ", ".join(f"{state} {seconds:.1f} s" for state, seconds in middle.items()))
            for state, several in by_state.items():
                places = (states.index(state) + 0.1 * aside for aside in _spread(len(several)))
                dots += zip(places, several, strict=True)
        look: dict[str, Any] = {"colors": colour, "linewidths": 1.4, "alpha": 0.7, "clip_on": False}
        axes.add_collection(LineCollection(joins, gid=f"joins{number}", **look))
        titles[f"joins{number}"] = said
        seconds = [run.first_step_s or 0.0 for _, run in dots]
        look = {"s": 28, "color": colour, "linewidths": 0, "alpha": 0.85, "clip_on": False, "gid": f"dots{number}"}
        axes.scatter([at for at, _ in dots], seconds, **look)
        titles[f"dots{number}"] = [f"{run.label}: {run.first_step_s:.1f} s, proved {run.proved}" for _, run in dots]
        if colour != THEME["accent"]:
            text = f"● {_cut(strategy, 18)}"
            axes.text(1.02, 0.96 - 0.075 * number, text, color=colour, transform=axes.transAxes)
    axes.set_xticks(range(len(states)), states)
    axes.set_xlim(-0.4, len(states) - 0.6)
    _finish(axes, "caches as proved", "seconds to the first step", False)
    return inline(drawn, "seconds to the first step, by proved cache state", titles)


def _by_strategy(runs: Iterable[Told]) -> dict[str, str]:
    """A colour a strategy, as far as colours go."""
    names = sorted({run.cell.get("compile", "") for run in runs})
    if not 1 < len(names) <= 6:
        return dict.fromkeys(names, THEME["accent"])
    return {name: THEME[f"line{i}"] for i, name in enumerate(names)}


# -- verdicts


def verdicts(story: Story) -> str:
    """For each level of each factor, what became of its runs. Empty where nothing varies."""
    lines = [
        (factor, level, [run for run in story.runs if run.cell.get(factor) == level])
        for factor, levels in story.factors.items()
        if len(levels) <= MOST_LEVELS
        for level in levels
    ]
    lines = [line for line in lines if line[2]]
    if not lines:
        return ""
    names = [_cut(f"{factor}={level}", 40) for factor, level, _ in lines]
    left = max(map(len, names)) * CHARACTER + 12
    # A gap between two factors.
    places, at = [], 0.0
    for number, (factor, _, _) in enumerate(lines):
        at += 0.5 if number and lines[number - 1][0] != factor else 0.0
        places.append(at)
        at += 1
    drawn = figure(left + BAR + 60, at * 22 + 30)
    axes = _axes(drawn, left, 4, BAR, at * 22)
    axes.set(xlim=(0, 1), ylim=(at, 0))
    titles: dict[str, str | list[str]] = {}
    for (factor, level, runs), place in zip(lines, places, strict=True):
        start = 0.0
        for verdict in VERDICTS:
            count = sum(run.verdict == verdict for run in runs)
            if not count:
                continue
            share, name = count / len(runs), f"bar{len(titles)}"
            look: dict[str, Any] = {"color": THEME[verdict], "edgecolor": THEME["paper"], "linewidth": 1.0}
            (bar,) = axes.barh(place + 0.5, share, left=start, height=0.78, **look)
            bar.set_gid(name)
            titles[name] = f"{factor}={level}: {count} of {_runs(len(runs))} {verdict} ({share:.0%})"
            said = f"{verdict} {count}" if share * BAR > (len(verdict) + 4) * CHARACTER else str(count)
            if share * BAR > 14:
                inside: dict[str, Any] = {"ha": "center", "va": "center", "color": THEME["paper"], "fontsize": 10}
                axes.text(start + share / 2, place + 0.5, said, **inside)
            start += share
        axes.text(1.01, place + 0.5, f"n={len(runs)}", va="center", color=THEME["muted"], fontsize=10)
    axes.set_yticks([place + 0.5 for place in places], names)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25", "50", "75", "100 %"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return inline(drawn, "verdicts by level", titles)


# -- timelines


def timelines(story: Story) -> list[str]:
    """A line a run: queue, memory and how busy its devices were, over its time; runs of a cell share a row."""
    cells: dict[str, list[Told]] = {}
    for run in story.runs:
        if run.timeline.queue or run.timeline.memory or run.timeline.busy:
            cells.setdefault(label(run.cell), []).append(run)
    if not cells:
        return []
    runs = [run for several in cells.values() for run in several]
    points = max(12, min(300, POINTS // (3 * len(runs))))
    rows = list(cells.items())
    return [_tracks(rows[at : at + TRACKS], runs, points) for at in range(0, len(rows), TRACKS)]


def _tracks(rows: Sequence[tuple[str, list[Told]]], all_runs: Sequence[Told], points: int) -> str:
    from matplotlib.collections import LineCollection

    row, gap, above = (34.0 if len(rows) <= 12 else 26.0), 30.0, 40.0
    # Levels alone, for the factors' names would be the same in each row and stand above.
    names = [_cut(" ".join(several[0].cell.values()), 40) for _, several in rows]
    over = _cut(" ".join(rows[0][1][0].cell), 40)
    left = min(270.0, max(map(len, [*names, over])) * CHARACTER + 10)
    wide = (WIDTH - left - 2 * gap - 14) / 3
    drawn = figure(WIDTH, above + row * len(rows) + 36)
    on_gpu = any(run.timeline.on_gpu for run in all_runs)
    busy = "GPUs busy (share)" if on_gpu else "processors busy"
    memory = "memory of its GPUs (GB)" if on_gpu else "resident memory (GB)"
    longest = max((points[-1][0] for run in all_runs for points in _series(run) if points), default=1.0) or 1.0
    drawn.text((left - 4) / WIDTH, 1 - 32 / (72 * drawn.get_figheight()), over, ha="right", color=THEME["muted"])
    titles: dict[str, str | list[str]] = {}
    windows = [
        point
        for place, (_, several) in enumerate(rows)
        for run in several
        if (at := run.timeline.window) is not None
        for point in ((at, place + 0.08), (at, place + 0.94), (math.nan, 0.0))
    ]
    for column, head in enumerate(("queue (MiB)", memory, busy)):
        axes = _axes(drawn, left + column * (wide + gap), above, wide, row * len(rows))
        top = max((value for run in all_runs for _, value in _series(run)[column]), default=0.0)
        top = 1.0 if column == 2 and on_gpu else top or 1.0
        shown = [(place, run) for place, (_, runs) in enumerate(rows) for run in runs if _series(run)[column]]
        lines = [
            [(t, place + 0.94 - 0.84 * min(value, top) / top) for t, value in _thinned(_series(run)[column], points)]
            for place, run in shown
        ]
        axes.hlines([place + 0.94 for place in range(len(rows))], 0, longest, color=THEME["grid"], linewidth=0.7)
        if windows:
            axes.plot(*zip(*windows, strict=True), color=THEME["muted"], linewidth=0.8, linestyle=":")
        colours = [THEME.get(run.verdict, THEME["accent"]) for _, run in shown]
        axes.add_collection(LineCollection(lines, colors=colours, linewidths=1.2, clip_on=False, gid=f"column{column}"))
        titles[f"column{column}"] = [
            f"{run.label} ({run.verdict}): {head}, at most {max(value for _, value in _series(run)[column]):.3g}"
            for _, run in shown
        ]
        axes.set(xlim=(0, longest), ylim=(len(rows), 0))
        scale = f"0 to {top:.3g} in each row" if lines else "nothing was told"
        axes.set_title(f"{head}\n{scale}", loc="left", fontsize=10.5)
        axes.set_yticks([])
        for place, name in enumerate(names if column == 0 else []):
            axes.text(-6 * longest / wide, place + 0.5, name, ha="right", va="center")
        axes.set_xlabel("seconds since the run began", labelpad=2)
        axes.tick_params(axis="x", length=3, labelsize=10)
        axes.spines["left"].set_visible(False)
    return inline(drawn, "queue, memory and use of devices of each run over its time", titles)


def _series(run: Told) -> tuple[Points, Points, Points]:
    return run.timeline.queue, run.timeline.memory, run.timeline.busy


def _thinned(series: Points, most: int) -> Points:
    """At most about `most` points: of each stretch of time its lowest and its highest, so that no peak is lost."""
    if len(series) <= most:
        return series
    size = math.ceil(2 * len(series) / most)
    kept: Points = []
    for at in range(0, len(series), size):
        part = series[at : at + size]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


# -- pieces


def _axes(drawn: Any, left: float, above: float, wide: float, high: float) -> Axes:
    """Axes at a place in pixels from the figure's upper left corner."""
    width, height = (size * 72 for size in drawn.get_size_inches())
    axes: Axes = drawn.add_axes((left / width, 1 - (above + high) / height, wide / width, high / height))
    return axes


def _finish(axes: Axes, below: str, beside: str, turned: bool) -> None:
    """Names, grid and ticks of a chart whose y is a quantity that starts at 0."""
    axes.set_ylim(0, max(axes.get_ylim()[1], 1e-9))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(below, labelpad=3)
    axes.set_ylabel(beside, labelpad=4)
    if turned:
        axes.tick_params(axis="x", labelrotation=40)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")


def _spread(n: int) -> list[float]:
    """Where to put n dots beside each other, from -0.5 to 0.5: evenly, and no slope where their values have one."""
    order = sorted(range(n), key=lambda i: (i * 0.618034) % 1)
    place = {i: rank for rank, i in enumerate(order)}
    return [(place[i] + 0.5) / n - 0.5 for i in range(n)]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _runs(n: int) -> str:
    return f"{n} run{'s' * (n != 1)}"
