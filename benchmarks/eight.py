"""The incident's own topology on eight GPUs, every question in one command, the most important first (docs/EIGHT.md).

    python benchmarks/eight.py --work eight --json eight.json
    python benchmarks/eight.py --work eight --json eight.json --limit 560    # again and again: goes on where it ended
    python benchmarks/eight.py --work rehearsal --splits 1t1d --limit 300    # on two GPUs
    python benchmarks/eight.py --work toy --tiny                             # the same at toy size on CPU

Makes a target of Qwen3-8B's sizes with made-up weights and rows of 40,000 tokens of real text below `--work`, then
runs the harness (`+experiment=eight`) part after part: speed of the strategies, of the splits, as processes; failures
of the broken strategies from empty caches; first steps from warm ones; the rest of the matrix; repeats. No run begins
that would end after `--limit` seconds, going by those before it; what is left out is said. The same command again
goes on: runs that are there are not made again. The JSON is written after each part, and beside it at the end two
pages: speed, failures. At toy size `eager` stands for `triton`, which needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import blank_target
import long_documents
import numpy as np

from dflash.events import EVENTS_FILE, STACKS_FILE, EventReader
from dflash.settings import Split
from sweeper import machine, store, usage
from sweeper.analysis import effects, failures
from sweeper.measure import Opening, finite, opening, slower_side, steps
from sweeper.report import table
from sweeper.store import Attempt

HERE = Path(__file__).parent
INCIDENT_KTOK_S = 12.8
STRATEGIES, BROKEN = ("triton", "locked", "whole"), ("unlocked", "firstlock", "suppressed")
TINY_STRATEGIES = ("eager", "locked", "whole")
UNION = "all"  # the sweep that all runs of a store are shown as
GROUPS = 6  # of consecutive steps, whose speeds give a run's own interval
LONGEST = 30_000  # characters of a traceback or of stacks
END_S = 20.0  # for the reports
HARNESS_S = 6.0  # to start the harness
# Seconds of a run of which none like it has ended yet, starting the harness included.
AT_FIRST = {"speed": 75.0, "failures": 45.0}

TINY_SETTINGS = (
    *("device=cpu", "data.row_tokens=128", "drafter.layers=1", "drafter.block=8", "drafter.anchors=16"),
    *("train.queue_mib=0.1", "loss.chunk=128"),
)
# A failure shows before the second step, and the target has no part in it: five of its layers are enough.
BRIEF = ("train.steps=4", "train.steady_after=1", "target.taps=[1,2,3,4,5]", "budget.warmup=75")


@dataclass(frozen=True)
class Part:
    """One command of the harness: cells that differ in one factor. repeats: those up to this one."""

    store: str  # `speed` or `failures`
    factor: str
    levels: tuple[str, ...]
    others: dict[str, str]
    repeats: int = 1

    def cells(self) -> list[dict[str, str]]:
        """The factors' levels of each of its cells."""
        return [{"wheel": "current", **self.others, self.factor: level} for level in self.levels]


def main() -> None:
    options = parse()
    began = time.time()
    work: Path = options.work.absolute()
    words = [*prepare(work, options), "tracking=none", "order=given", "report=false", *options.settings]
    left_out: dict[str, set[int]] = {}
    for part in parts(options.splits, options.tiny):
        until = began + options.limit - END_S
        fits = trimmed(part, work, until - time.time(), left_out)
        for one in fits:
            sweep(one, work, words, until + END_S)
            options.json.write_text(json.dumps(report(work, options, left_out, began), indent=1) + "\n")
    said = {name: page(work / name) for name in AT_FIRST}
    options.json.write_text(json.dumps(report(work, options, left_out, began) | {"said": said}, indent=1) + "\n")
    for name, text in said.items():
        if text:
            page_file = options.json.with_name(f"{options.json.stem}-{name}.html")
            shutil.copy(work / name / "sweeps" / UNION / "report.html", page_file)
            print(f"\n== {name}\n{text}\n{page_file}")
    if left_out:
        print(f"\nLeft out for want of time ({options.limit:.0f} s), the same command goes on with:")
        print("\n".join(f"  {line}" for line in told(left_out)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for target, data and runs")
    parser.add_argument("--json", type=Path, help="file for the figures (WORK/eight.json)")
    parser.add_argument("--limit", type=float, help="seconds in all (1200; with --tiny 600)")
    parser.add_argument("--splits", default="5t3d,6t2d,7t1d,4t4d", help="the first is that of all other questions")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--tiny", action="store_true", help="toys on CPU; figures say nothing")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for every run, as the harness takes them")
    options = parser.parse_args()
    options.splits = tuple(options.splits.split(","))
    options.limit = options.limit or (600.0 if options.tiny else 1200.0)
    options.json = options.json or options.work / "eight.json"
    needed = max(split.targets + split.drafters for split in map(Split.parse, options.splits))
    if not options.tiny and machine.gpus() < needed:
        parser.error(f"--splits needs {needed} GPUs and this machine shows {machine.gpus()}; --tiny runs toys on CPU")
    return options


def parts(splits: Sequence[str], tiny: bool) -> Iterator[Part]:
    """Every question, the most important first; repeats of all of it at the end."""
    first, others, strategies = splits[0], tuple(splits[1:]), TINY_STRATEGIES if tiny else STRATEGIES
    threads, processes = ({"cache": "cold", "isolation": isolation} for isolation in ("threads", "processes"))
    broken = Part("failures", "compile", BROKEN, threads | {"split": first})
    speed = [Part("speed", "compile", strategies, threads | {"split": first})]
    speed += [Part("speed", "split", others, threads | {"compile": strategies[0]})]
    speed += [Part("speed", "compile", strategies, processes | {"split": first})]
    more = [
        Part("speed", "split", others, isolated | {"compile": strategy})
        for isolated in (threads, processes)
        for strategy in strategies
        if (isolated, strategy) != (threads, strategies[0])
    ]
    speed, more = ([part for part in several if part.levels] for several in (speed, more))
    warm = Part("speed", "compile", strategies, threads | {"cache": "warm", "split": first})
    yield from speed
    yield replace(broken, repeats=3)
    yield warm
    yield from more
    yield replace(broken, repeats=8)
    for repeats in (2, 3):
        yield from (replace(part, repeats=repeats) for part in (*speed, warm, *more))
    yield replace(broken, repeats=20)


def prepare(work: Path, options: argparse.Namespace) -> list[str]:
    """Make what is not there yet: the target's folder, the text, its tokens. Gives the settings that name them."""
    target, text, data = work / "target", work / "text.jsonl", work / "data"
    blank_target.write(target, blank_target.TINY if options.tiny else blank_target.QWEN3_8B)
    if not data.is_dir():
        long_documents.write(text, target, *((40, 200) if options.tiny else (2000, 800)))
        words = ["--data", text, "--target", target, "--out", data]
        subprocess.run([sys.executable, "-m", "dflash", "prepare", *map(str, words)], check=True)
    return [f"target.model={target}", f"data.path={data}", *(TINY_SETTINGS if options.tiny else ())]


def told(left_out: dict[str, set[int]]) -> list[str]:
    """Each cell with the repeats of it that there was no time for."""
    return [f"{cell}: repeat {', '.join(map(str, sorted(repeats)))}" for cell, repeats in left_out.items()]


def trimmed(part: Part, work: Path, seconds: float, left_out: dict[str, set[int]]) -> list[Part]:
    """The part, or as many of its cells and repeats as fit into `seconds`; what does not is noted."""
    there = attempts(work / part.store)
    done = {(key(one.run["cell"]), one.run["repeat"]) for one in there if one.done}
    costs = {level: cost(there, part, level) for level in part.levels}
    fits = []
    for repeat in range(1, part.repeats + 1):
        levels = []
        for level, cell in zip(part.levels, part.cells(), strict=True):
            if (key(cell), repeat) in done:
                continue
            if costs[level] > seconds:
                name = " ".join(f"{factor}={cell[factor]}" for factor in ("compile", "split", "isolation", "cache"))
                left_out.setdefault(name, set()).add(repeat)
                continue
            seconds -= costs[level]
            levels.append(level)
        if levels:
            fits.append(replace(part, levels=tuple(levels), repeats=repeat))
    return fits


def cost(there: Sequence[Attempt], part: Part, level: str) -> float:
    """Seconds that a run will take: as the longest so far of those most like it."""
    asked = {**part.others, part.factor: level}
    took = [(one.run["cell"], seconds) for one in there if (seconds := finite((one.verdict or {}).get("wall_s")))]
    for same in (("compile", "isolation", "cache"), ("compile", "isolation"), ("isolation",), ()):
        if known := [seconds for cell, seconds in took if all(cell[name] == asked[name] for name in same)]:
            return max(known) + HARNESS_S
    return AT_FIRST[part.store]


def key(cell: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(level)) for name, level in cell.items()))


def sweep(part: Part, work: Path, words: Sequence[str], until: float) -> None:
    """Run one command of the harness; one that overruns is asked to end."""
    asked = {**part.others, part.factor: ",".join(part.levels)}
    command = [sys.executable, "-m", "sweeper", "-m", "+experiment=eight", f"store={work / part.store}"]
    command += [*(f"{name}={level}" for name, level in asked.items()), f"repeat={part.repeats}", *words]
    command += BRIEF if part.store == "failures" else ()
    print("==", " ".join(command[2:]), flush=True)
    harness = subprocess.Popen(command)
    try:
        harness.wait(max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        harness.send_signal(signal.SIGINT)
        harness.wait()


def attempts(folder: Path) -> list[Attempt]:
    """The newest attempt with a verdict of each run in a store, in order of their start; priming runs left out."""
    newest = (several[-1] for several in store.history(folder).values()) if folder.is_dir() else ()
    found = [one for one in newest if one.verdict and one.run.get("role") != "prime"]
    return sorted(found, key=lambda one: float(one.run.get("started") or 0))


def page(folder: Path) -> str:
    """Show all runs of a store as one sweep, with its report; what that says."""
    if not (there := attempts(folder)):
        return ""
    runs = [{name: one.run[name] for name in ("cell", "cell_id", "identity", "repeat")} for one in there]
    union = folder / "sweeps" / UNION
    union.mkdir(parents=True, exist_ok=True)
    title = f"The incident's topology: {folder.name}"
    store.write(union / "plan.json", {"sweep": UNION, "title": title, "command": [f"store={folder}"], "runs": runs})
    command = [sys.executable, "-m", "sweeper.report", UNION, "--store", str(folder)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout


# What the runs tell.


def report(work: Path, options: argparse.Namespace, left_out: dict[str, set[int]], began: float) -> dict[str, Any]:
    speed, broken = (attempts(work / name) for name in ("speed", "failures"))
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE)
    start = next((event for one in (*speed, *broken) if (event := first(one, "start"))), {})
    return {
        "benchmark": "eight",
        "commit": options.commit or head.stdout.strip() or None,
        **{name: start.get(name) for name in ("gpus", "python", "torch", "cuda", "triton", "transformers")},
        "tiny": options.tiny,
        "settings": options.settings,
        "limit_s": options.limit,
        "seconds": time.time() - began,
        "incident_ktok_s": INCIDENT_KTOK_S,
        "left_out": told(left_out),
        "fastest": [lead.to_dict() for lead in effects.fastest(records(speed))],
        "speed": [cell(row, work) for row in table.rows(one.folder for one in speed)],
        "first_step_s": first_steps(speed),
        "failures": {name: rate([one for one in broken if one.run["cell"]["compile"] == name]) for name in BROKEN},
    }


def records(there: Sequence[Attempt]) -> list[Any]:
    """As the analysis takes them; cold runs alone, for warm ones are there for their first step."""
    from sweeper.analysis.records import only_varied, read

    return only_varied(read(one.folder for one in there if one.run["cell"]["cache"] == "cold"))


def cell(row: dict[str, Any], work: Path) -> dict[str, Any]:
    """One cell's figures over its repeats, and each run's own."""
    waits = [row[name]["median"] if row[name] else None for name in ("targets_waited", "drafters_waited")]
    known = all(wait is not None for wait in waits)
    return {
        **{name: row["cell"][name] for name in ("split", "compile", "isolation", "cache")},
        **{name: row[name] for name in ("verdicts", "ktok_s", "time_to_first_step_s", "compile_s", "peak_bytes")},
        "times_the_incident": row["ktok_s"]["median"] / INCIDENT_KTOK_S if row["ktok_s"] else None,
        "targets_waited": waits[0],
        "drafters_waited": waits[1],
        "slower_side": slower_side(*waits) if known else "",
        "signatures": row["signatures"],
        "runs": [within(store.attempt(work / "speed" / "runs" / name)) for name in row["runs"]],
    }


def within(one: Attempt) -> dict[str, Any]:
    """One run's window: Ktok/s with Student's interval over groups of consecutive steps, and how busy devices were."""
    verdict = one.verdict or {}
    figures: dict[str, Any] = {"repeat": one.run["repeat"], "verdict": verdict["verdict"], "run": one.folder.name}
    events = list(EventReader(one.folder / EVENTS_FILE).poll())
    done = next(iter(steps(events).values()), [])
    window, opened = [step for step in done if step.steady], opening(done)
    if opened is None:
        return figures
    groups = [g for g in np.array_split(np.arange(len(window)), min(GROUPS, len(window) // 2)) if len(g)]
    begins = [opened, *(Opening(step.t, step) for step in window[:-1])]
    speeds = [sum(window[i].tokens for i in g) / begins[g[0]].seconds(window[g[-1]], []) / 1e3 for g in groups]
    if speeds:
        mean = effects.estimate([speeds])
        figures["within_ktok_s"] = {"mean": mean.mean, "low": mean.low, "high": mean.high, "groups": len(speeds)}
    closed = window[-1].t
    figures |= {"steps": len(window), "seconds": closed - opened.t, "busy": busy(one, events, opened.t, closed)}
    return figures


def busy(one: Attempt, events: Sequence[dict[str, Any]], opened: float, closed: float) -> dict[str, float]:
    """{worker: share of the window in which its GPU ran a kernel}; without GPUs {processors: how many were busy}."""
    looks = [look for look in usage.read(one.folder) if opened <= look.t <= closed]
    workers = {str(event["device"]): event["name"] for event in events if event["event"] == "thread"}
    shares: dict[str, list[float]] = {}
    for look in looks:
        for number, share in enumerate(look.gpu_busy.values()):
            shares.setdefault(workers.get(f"cuda:{number}", f"cuda:{number}"), []).append(share)
        if not look.gpu_busy and look.cpu is not None:
            shares.setdefault("processors", []).append(look.cpu)
    return {name: statistics.fmean(several) for name, several in shares.items()}


def first_steps(there: Sequence[Attempt]) -> dict[str, list[float]]:
    """{split, strategy, isolation, cache state as proved: seconds to the first step of each run}."""
    found: dict[str, list[float]] = {}
    for one in there:
        verdict, given = one.verdict or {}, one.run["cell"]
        seconds = finite((verdict.get("figures") or {}).get("time_to_first_step_s"))
        if verdict["verdict"] in table.ENDED and seconds is not None:
            proved = (verdict.get("cache") or {}).get("proved")
            name = f"{given['split']} {given['compile']} {given['isolation']} {proved}"
            found.setdefault(name, []).append(seconds)
    return found


def rate(there: Sequence[Attempt]) -> dict[str, Any] | None:
    """How often a strategy fails, with the exact interval, and one run of each way in which it does."""
    told = [one for one in there if one.done and (one.verdict or {})["verdict"] != "skipped"]
    if not told:
        return None
    verdicts = [one.verdict or {} for one in told]
    ways: dict[str, Attempt] = {}
    for one in told:
        if one.cause:
            ways.setdefault(one.cause, one)
    return {
        **asdict(failures.share(sum(v["verdict"] in ("failed", "hung", "killed") for v in verdicts), len(told))),
        "verdicts": dict(Counter(v["verdict"] for v in verdicts)),
        "causes": dict(Counter(one.cause for one in told if one.cause)),
        "ways": {cause: way(one) for cause, one in ways.items()},
    }


def way(one: Attempt) -> dict[str, Any]:
    """What one failure left: its signature, who is to blame, the stacks."""
    failure, signature = first(one, "failure"), (one.verdict or {})["signature"]
    try:
        stacks = (one.folder / STACKS_FILE).read_text(errors="replace")
    except OSError:
        stacks = str(failure.get("stacks") or "")
    return {
        "run": one.folder.name,
        **{name: signature.get(name) for name in ("fingerprint", "evidence", "remedy")},
        **{name: failure.get(name) for name in ("worker", "type", "message", "holders")},
        "traceback": str(failure.get("traceback") or "")[-LONGEST:],
        "stacks": to_blame(stacks, one, failure, str(signature.get("evidence") or ""))[:LONGEST],
    }


def to_blame(stacks: str, one: Attempt, failure: dict[str, Any], evidence: str) -> str:
    """Of a dump the stacks of threads that the evidence names, of those that held the tracing flag, and of the other
    drafters, in this order; all of it where none of them is found."""
    told = EventReader(one.folder / EVENTS_FILE).poll()
    drafters = [event for event in told if event["event"] == "thread" and event.get("role") == "drafter"]
    words = [
        re.findall(r"0x[0-9a-f]+|\b\d{3,}\b", evidence),
        [str(holder.get("thread")) for holder in failure.get("holders") or ()],
        [str(event["name"]) for event in drafters] + [str(event["ident"]).removeprefix("0x") for event in drafters],
    ]
    blocks = re.split(r"^(?=Thread |Current thread )", stacks, flags=re.MULTILINE)
    found: dict[str, None] = {}
    for several in words:
        for block in blocks:
            head = block.partition("\n")[0]
            if any(re.search(rf"{re.escape(word)}\b", head) for word in several):
                found[block] = None
    return "".join(found) or stacks


def first(one: Attempt, kind: str) -> dict[str, Any]:
    """The first event of a kind that a run told."""
    return next((e for e in EventReader(one.folder / EVENTS_FILE).poll() if e["event"] == kind), {})


if __name__ == "__main__":
    main()
