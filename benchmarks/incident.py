"""The runs of an incident sweep in one file, and a picture of what became of them (docs/INCIDENT.md).

python -m sweeper -m +experiment=incident ...
python benchmarks/incident.py collect runs --about "one H200" --json docs/incident/mine.json
python benchmarks/incident.py draw docs/incident/h200-one-before.json docs/incident/h200-two.json --to incident.png
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from sweeper import store

FIGURES = {"ktok_s": "ktok_s", "first_step_s": "time_to_first_step_s", "compile_s": "compile_s", "steps": "steps"}
ENDED_OUTSIDE = "sweep.interrupted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="stores of finished sweeps -> one JSON file, a line a run")
    one.add_argument("stores", nargs="+", type=Path)
    one.add_argument("--about", default="", help="machine and versions, in words")
    one.add_argument("--json", type=Path, required=True)
    two = commands.add_parser("draw", help="such files -> bars of verdicts and signatures, a panel a file")
    two.add_argument("files", nargs="+", type=Path)
    two.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "collect":
        options.json.write_text(collect(options.stores, options.about))
    else:
        draw([json.loads(file.read_text()) for file in options.files], options.to)


def collect(stores: list[Path], about: str) -> str:
    """JSON of every finished run, priming runs too, in order of their start (seconds since the first)."""
    attempts = [store.attempt(folder) for each in stores for folder in (each / "runs").iterdir()]
    runs = [run(one.run, one.verdict) for one in attempts if one.verdict]
    runs.sort(key=lambda each: each["started"])
    for each in runs[::-1]:
        each["started"] = round(each["started"] - runs[0]["started"], 1)
    lines = ",\n  ".join(json.dumps(each) for each in runs)
    return json.dumps({"about": about})[:-1] + f',\n "runs": [\n  {lines}\n ]}}\n'


def run(told: dict[str, Any], ended: dict[str, Any]) -> dict[str, Any]:
    """A run's line, from its record and its verdict; one that a dead harness left has no caches to tell of."""
    signature, cache = ended["signature"] or {}, ended["cache"] or {"proved": "", "layers": {}}
    total = {
        name: sum(layer.get(name, 0) for layer in cache["layers"].values())
        for name in ("files_before", "files_after", "hits", "misses")
    }
    return {
        "role": told["role"],
        **told["cell"],
        "repeat": told["repeat"],
        "started": ended["started"],
        "seconds": ended["wall_s"],
        "verdict": ended["verdict"],
        "cause": signature.get("cause"),
        "evidence": signature.get("evidence", "")[:200],
        **{name: ended["figures"][theirs] for name, theirs in FIGURES.items()},
        "cache_proved": cache["proved"],
        **total,
    }


def draw(sweeps: list[dict[str, Any]], to: Path) -> None:
    """One bar a strategy, cold starts alone: its runs by cause, `ok` first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(sweeps), figsize=(5.2 * len(sweeps), 3.4), layout="constrained", squeeze=False
    )
    counts = [by_strategy(sweep["runs"]) for sweep in sweeps]
    causes = sorted(
        {cause for sweep in counts for bar in sweep.values() for cause in bar}, key=lambda c: (c != "ok", c)
    )
    colours = dict(zip(causes, ["#4a9d6f", "#c1444b", "#e08a3c", "#7b5ea7", "#3f7fb5", "#8c8c8c"], strict=False))
    for panel, sweep, bars in zip(panels[0], sweeps, counts, strict=True):
        names = sorted(bars, key=lambda name: (-bars[name]["ok"] / bars[name].total(), name))
        left = [0] * len(names)
        for cause in causes:
            lengths = [bars[name][cause] for name in names]
            panel.barh(names, lengths, left=left, color=colours[cause], label=cause, height=0.62)
            left = [a + b for a, b in zip(left, lengths, strict=True)]
        panel.invert_yaxis()
        panel.set_title(sweep["about"].split(",")[0], loc="left", fontsize=11)
        panel.set_xlabel("runs from empty caches")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[cause]) for cause in causes]
    figure.legend(handles, causes, loc="outside lower center", ncols=len(causes), frameon=False, fontsize=9)
    figure.savefig(to, dpi=110)


def by_strategy(runs: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    bars: dict[str, Counter[str]] = {}
    for each in runs:
        only_attention = each["verdict"] == "ok" and not each["steps"]  # made a snapshot for cache=standalone
        if each["cache"] == "cold" and each["cause"] != ENDED_OUTSIDE and not only_attention:
            bars.setdefault(each["compile"], Counter())[each["cause"] or each["verdict"]] += 1
    return bars


if __name__ == "__main__":
    main()
