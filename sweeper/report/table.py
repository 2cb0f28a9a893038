"""The table of cells: what each combination of levels came to, over its repeats.

Figures are medians over the runs that ended (`ok` or `degraded`). The bracket behind a median is, from three
runs on, a distribution-free interval of the median, the narrowest pair of order statistics that holds it with
95 %; below six runs no pair does, and the bracket is the range, which holds it with 75 % (three runs), 87.5 %
(four) or 93.8 % (five). Two runs show their range, one none. Source of the interval: the sign test, as in
Conover, Practical Nonparametric Statistics, section 3.2.

tau in the table is a run's mean over its prompt sets. Where there are several sets, or variants of a fanout, a
second table tells them apart.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

from sweeper import store
from sweeper.measure import finite, slower_side

ENDED = ("ok", "degraded")
CONFIDENCE = 0.95
LEAST_STEPS, LEAST_SECONDS = 10, 2.0  # of a measured window; a remark tells of shorter ones
# What a tau means nothing without, in words.
CONDITIONS = {
    "n": "{} prompts",
    "temperature": "T={}",
    "block": "block {}",
    "max_new": "at most {} tokens",
    "tau_untrained": "untrained {}",
    "distinct4": "distinct-4 {}",
    "identical": "share identical to plain decoding {}",
}
# A column of figures: the field of a row, its digits, and what it is told in.
FIGURES = {
    "Ktok/s": ("ktok_s", 3, 1.0),
    "first step s": ("time_to_first_step_s", 1, 1.0),
    "compile s": ("compile_s", 1, 1.0),
    "peak GB": ("peak_bytes", 2, 1e9),
    "tau": ("tau", 2, 1.0),
}


def rows(run_dirs: Iterable[Path]) -> list[dict[str, Any]]:
    """One row a cell, in the order in which cells first appear. Priming runs are left out, and of several
    attempts of one run only the last counts. A directory without a readable run.json or verdict.json is
    counted in the field `unreadable` of the first row.

    A row: cell {factor: level}, label, n, runs [directory], beside (how many of them ran beside others), verdicts
    {verdict: count}, ktok_s, time_to_first_step_s, compile_s, peak_bytes, tau, targets_waited, drafters_waited (each
    {median, low, high, coverage, n}, or None), lost {repeat: checkpoints that it could not write}, short [(steps,
    seconds) of each window that is], cache {proved state: count}, mixed {why, of the runs that are ok: count},
    signatures {cause: count}, learnt {variant, "" without fanout: {loss, accept, tau {set: ...}}}, conditions {set:
    {condition: [value]}}, failures [{label, repeat, verdict, cause, fingerprint, reason, evidence, holders, dir}].
    """
    latest: dict[tuple[str, Any], tuple[Path, dict[str, Any], dict[str, Any]]] = {}
    unreadable = 0
    for folder in run_dirs:
        one = store.attempt(folder)
        run, verdict = one.run, one.verdict
        if not run or not verdict:
            unreadable += 1
        elif run.get("role") != "prime":
            key = (json.dumps(run.get("cell") or {}, sort_keys=True, default=str), run.get("repeat"))
            if key not in latest or (run.get("attempt") or 0) >= (latest[key][1].get("attempt") or 0):
                latest[key] = (folder, run, verdict)
    cells: dict[str, list[tuple[Path, dict[str, Any], dict[str, Any]]]] = {}
    for (cell, _), found in latest.items():
        cells.setdefault(cell, []).append(found)
    table = [_row(runs) for runs in cells.values()]
    if table and unreadable:
        table[0]["unreadable"] = unreadable
    return table


def render(table: list[dict[str, Any]], width: int | None = None) -> str:
    """The table as text, `width` columns wide (default 140), with a line for each run that is not ok."""
    from rich.console import Console
    from rich.table import Table

    if not table:
        return "no runs\n"
    heads, lines = texts(table)
    causes = [cause for row in table for cause in row["signatures"]]
    shown = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for head in heads:
        if head in FIGURES:
            shown.add_column(head, justify="right", no_wrap=True)
        else:
            least = max(map(len, causes), default=None) if head == "signature" else None
            shown.add_column(head, overflow="fold", min_width=least)
    for line in lines:
        shown.add_row(*line)
    out = StringIO()
    console = Console(file=out, width=width or 140, color_system=None, highlight=False, markup=False)
    console.print(shown)
    if any(set(row["learnt"]) - {""} or len(_sets([row])) > 1 for row in table):
        console.print()
        console.print(_learnt_table(table, _factors(table)))
    for note in [*_failures(table), *remarks(table)]:
        console.print(note, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def texts(table: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The table as texts: heads, and a line a cell. Factors that vary come first, then verdicts, FIGURES, the rest."""
    factors = _factors(table)
    figures = [head for head in FIGURES if head != "tau" or any(row["tau"] for row in table)]
    heads = [*(factors or ["cell"]), "verdicts", *figures, "cache proved", "signature"]
    lines = []
    for row in table:
        levels = [str(row["cell"].get(f, "-")) for f in factors] or [row["label"]]
        measured = [_figure(row[field], digits, unit) for field, digits, unit in map(FIGURES.__getitem__, figures)]
        counts = [_counted(row["cache"]), _counted(row["signatures"])]
        lines.append([*levels, _counted(row["verdicts"]), *measured, *counts])
    return heads, lines


def _learnt_table(table: list[dict[str, Any]], factors: list[str]) -> Any:
    """A row for each cell and variant: last loss and acceptance, and tau on each set of prompts."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    sets, with_variants = _sets(table), any(set(row["learnt"]) - {""} for row in table)
    for head in [*(factors if len(table) > 1 else []), *(["variant"] if with_variants else [])]:
        shown.add_column(head, overflow="fold")
    for head in ("loss", "accept", *(f"tau {name}" for name in sets)):
        shown.add_column(head, justify="right", overflow="fold")
    for row in table:
        for variant, learnt in row["learnt"].items():
            levels = [str(row["cell"].get(f, "-")) for f in factors] if len(table) > 1 else []
            taus = [_figure(learnt["tau"].get(name), 2) for name in sets]
            named = [variant or "-"] if with_variants else []
            shown.add_row(*levels, *named, _figure(learnt["loss"], 3), _figure(learnt["accept"], 3), *taus)
    return shown


def _sets(table: list[dict[str, Any]]) -> list[str]:
    """The prompt sets on which anything was measured."""
    return list(dict.fromkeys(name for row in table for learnt in row["learnt"].values() for name in learnt["tau"]))


def median_interval(values: list[float]) -> dict[str, Any] | None:
    """Median with a distribution-free interval: {median, low, high, coverage, n}; None without values.

    For order statistics r and n+1-r the interval holds the median with 1 - 2 P(Binomial(n, 1/2) < r).
    """
    values = sorted(values)
    n = len(values)
    if n == 0:
        return None
    r, coverage = 1, _coverage(n, 1)
    while r < n // 2 and _coverage(n, r + 1) >= CONFIDENCE:
        r += 1
        coverage = _coverage(n, r)
    found = {"median": statistics.median(values), "low": values[r - 1], "high": values[n - r], "n": n}
    return found | {"coverage": coverage if n >= 3 else None}


def label(cell: dict[str, Any]) -> str:
    """A cell in words: compile=locked cache=warm ..."""
    return " ".join(f"{factor}={level}" for factor, level in cell.items()) or "the only cell"


def holders(folder: Path) -> list[str]:
    """Who held the FX-tracing flag when the run's first failure happened: thread, code path, since when."""
    found: list[str] = []
    try:
        with open(folder / "events.jsonl", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if '"failure"' in line]
    except OSError:
        return found
    for line in lines[:1]:
        try:
            told = json.loads(line).get("holders") or []
        except (ValueError, AttributeError):
            continue
        for holder in told if isinstance(told, list) else []:
            if isinstance(holder, dict):
                before = finite(holder.get("seconds_before"))
                when = "still open" if holder.get("open") else f"{before or 0:.2f} s before"
                found.append(f"{holder.get('thread')} in {holder.get('path')} ({when})")
    return found


def _row(runs: list[tuple[Path, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    cell = runs[0][1].get("cell") or {}
    ended = [v.get("figures") or {} for _, _, v in runs if v.get("verdict") in ENDED]
    peaks = [{"peak": f.get("peak_gpu_bytes") or f.get("peak_rss_bytes")} for f in ended]
    proofs = [v["cache"].get("proved") or "unproved" for _, _, v in runs if isinstance(v.get("cache"), dict)]
    fine = [v["cache"] for _, _, v in runs if v.get("verdict") == "ok" and isinstance(v.get("cache"), dict)]
    signatures = [s for _, _, v in runs if (s := v.get("signature"))]
    return {
        "cell": cell,
        "label": label(cell),
        "n": len(runs),
        "runs": [folder.name for folder, _, _ in runs],
        "beside": sum(bool(run.get("beside")) for _, run, _ in runs),
        "verdicts": dict(Counter(str(v.get("verdict")) for _, _, v in runs)),
        "ktok_s": median_interval(_column(ended, "ktok_s")),
        "time_to_first_step_s": median_interval(_column(ended, "time_to_first_step_s")),
        "compile_s": median_interval(_column(ended, "compile_s")),
        "peak_bytes": median_interval(_column(peaks, "peak")),
        "lost": {run.get("repeat"): n for _, run, v in runs if (n := v.get("lost_checkpoints"))},
        "short": [window for f in ended if (window := _short(f))],
        "tau": median_interval([statistics.fmean(taus.values()) for f in ended if (taus := _taus(f))]),
        "targets_waited": median_interval(_column(ended, "targets_waited")),
        "drafters_waited": median_interval(_column(ended, "drafters_waited")),
        "learnt": _learnt(ended),
        "conditions": _conditions(ended),
        "cache": dict(Counter(proofs)),
        "mixed": dict(Counter(str(cache.get("why")) for cache in fine if cache.get("proved") == "mixed")),
        "signatures": dict(Counter(str(s.get("cause")) for s in signatures)),
        "failures": [_failure(*run) for run in runs if run[2].get("verdict") != "ok"],
    }


def _learnt(ended: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each variant learnt, over the repeats."""
    runs = [f.get("variants") or {"": f} for f in ended]
    found = {}
    for variant in dict.fromkeys(name for run in runs for name in run):
        several = [run[variant] for run in runs if variant in run]
        taus = [_taus(one) for one in several]
        found[variant] = {
            "loss": median_interval(_column(several, "loss_last")),
            "accept": median_interval(_column(several, "accept_last")),
            "tau": {name: median_interval(_column(taus, name)) for name in dict.fromkeys(n for t in taus for n in t)},
        }
    return found


def _taus(figures: dict[str, Any]) -> dict[str, float]:
    return {name: measured["tau"] for name, measured in (figures.get("tau") or {}).items()}


def _conditions(ended: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Under what each set's tau was measured: {set: {condition: its values over runs and variants}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for learnt in (one for f in ended for one in (f, *(f.get("variants") or {}).values())):
        for name, measured in (learnt.get("tau") or {}).items():
            for condition in CONDITIONS:
                if (value := finite(measured.get(condition))) is not None:
                    found.setdefault(name, {}).setdefault(condition, []).append(value)
    return found


def _failure(folder: Path, run: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    signature = verdict.get("signature") or {}
    return {
        "label": label(run.get("cell") or {}),
        "repeat": run.get("repeat"),
        "verdict": verdict.get("verdict"),
        "cause": signature.get("cause"),
        "fingerprint": signature.get("fingerprint"),
        "reason": verdict.get("reason") or "",
        "evidence": signature.get("evidence") or "",
        "holders": holders(folder),
        "dir": folder.name,
    }


def _short(figures: dict[str, Any]) -> tuple[int, float] | None:
    """Steps and seconds of a run's measured window if they are few; None if not, or without a window."""
    count, seconds = finite(figures.get("steady_steps")), finite(figures.get("steady_seconds"))
    if not count or seconds is None or (count >= LEAST_STEPS and seconds >= LEAST_SECONDS):
        return None
    return int(count), seconds


def _column(figures: list[dict[str, Any]], name: str) -> list[float]:
    return [value for f in figures if (value := finite(f.get(name))) is not None]


def _coverage(n: int, r: int) -> float:
    return 1 - 2 * sum(math.comb(n, k) for k in range(r)) / 2**n


def _factors(table: list[dict[str, Any]]) -> list[str]:
    """The factors that vary between these cells, or all of them if there is one cell."""
    names = list(dict.fromkeys(name for row in table for name in row["cell"]))
    varied = [name for name in names if len({str(row["cell"].get(name)) for row in table}) > 1]
    return varied or names


def _figure(value: dict[str, Any] | None, digits: int, unit: float = 1.0) -> str:
    if value is None:
        return "-"
    text = f"{value['median'] / unit:.{digits}f}"
    if value["n"] > 1:
        text += f" [{value['low'] / unit:.{digits}f}, {value['high'] / unit:.{digits}f}]"
    return text


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" if sum(counts.values()) > 1 else name for name, count in counts.items())


def _starving(row: dict[str, Any], where: str) -> list[str]:
    """Which side stood waiting for the other, where that is clear."""
    if not row["targets_waited"] or not row["drafters_waited"]:
        return []
    targets, drafters = row["targets_waited"]["median"], row["drafters_waited"]["median"]
    if not (slower := slower_side(targets, drafters)):
        return []
    told = f"targets waited {targets:.0%} of the window for room, drafters {drafters:.0%} for batches"
    return [f"{slower} are the slower side: {where}: {told}"]


def _measured(table: list[dict[str, Any]]) -> list[str]:
    """The conditions of tau, a line for each set of prompts; a range where they differ."""
    notes = []
    for name in _sets(table):
        told = []
        for condition, words in CONDITIONS.items():
            values = [value for row in table for value in row["conditions"].get(name, {}).get(condition, [])]
            ends = [f"{value:.4g}" for value in (min(values), max(values))] if values else []
            told += [words.format(" to ".join(dict.fromkeys(ends)))] if ends else []
        notes.append(f"tau on {name}: {', '.join(told)}")
    return notes


def _failures(table: list[dict[str, Any]]) -> list[str]:
    """A line for each run that is not ok, and below it who held the flag."""
    told, factors = [], _factors(table)
    for row in table:
        for failure in row["failures"]:
            signature = f" {failure['cause']} ({failure['fingerprint']})" if failure["cause"] else ""
            reason = " ".join((failure["reason"] or failure["evidence"]).split())[:300]
            where = f"{_where(row, factors)} r{failure['repeat']}"
            told.append(f"{failure['verdict']}: {where}:{signature} {reason}".rstrip())
            told += [f"    flag held by {holder}" for holder in failure["holders"][:3]]
    return told


def _where(row: dict[str, Any], factors: list[str]) -> str:
    return label({f: row["cell"][f] for f in factors if f in row["cell"]})


def remarks(table: list[dict[str, Any]]) -> list[str]:
    """What the columns cannot say: mixed caches, who starves, conditions of tau, what brackets mean, what is lost."""
    notes, factors = [], _factors(table)
    for row in table:
        where = _where(row, factors)
        notes += [f"mixed: {where}: {why} (runs: {n})" for why, n in row["mixed"].items()]
        notes += [f"lost: {where} r{repeat}: {n} of its checkpoints" for repeat, n in row["lost"].items()]
        notes += _starving(row, where)
    notes += _measured(table)
    coverages = {row["ktok_s"]["n"]: row["ktok_s"]["coverage"] for row in table if row["ktok_s"]}
    told = [f"{c:.1%} at n={n}" for n, c in sorted(coverages.items()) if c is not None]
    if told:
        notes.append(f"Brackets hold the median with {', '.join(told)} (distribution-free).")
    elif any(n > 1 for n in coverages):
        notes.append("Brackets are ranges; an interval needs three runs of a cell (repeat=3).")
    if mixed := sum(row["cache"].get("mixed", 0) for row in table):
        words = "neither proved cold nor proved warm: left out of comparisons of cold and warm"
        notes.append(f"Mixed are {mixed} of {sum(row['n'] for row in table)} runs, {words}.")
    if beside := sum(row["beside"] for row in table):
        words = "ran beside others on their machine: their speed is not that of a machine to themselves"
        notes.append(f"{beside} of {sum(row['n'] for row in table)} runs {words}.")
    if short := [window for row in table for window in row["short"]]:
        steps, seconds = min(short)
        notes.append(
            f"{len(short)} of {sum(row['n'] for row in table)} runs were measured for less than {LEAST_STEPS} steps or "
            f"{LEAST_SECONDS:g} s (the shortest: {steps} steps, {seconds:.1f} s): too little for a speed to rely on. "
            "More steps make it longer (train.steps=, or those of your command)."
        )
    lost = sum(row.get("unreadable", 0) for row in table)
    if lost:
        notes.append(f"{lost} run directories have no readable run.json or verdict.json and are not counted.")
    return notes
