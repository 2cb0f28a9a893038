"""Do a target and a drafter keep their GPUs busy? The trainer's own workers, each stage alone and together.

    python benchmarks/pipeline.py --json out.json --timeline timeline.png
    python benchmarks/pipeline.py --shapes packed --ways target,drafter,threads
    python benchmarks/pipeline.py --tiny                    # a toy on any machine, to see that it runs

`target` is its worker alone, whose features nobody takes; `drafter` its worker alone, given one batch again and
again; `threads` and `processes` are the whole pipeline, `split=1t1d`, started as the trainer starts it. The target has
the sizes of Qwen3-8B, cut behind its last tap as always, the drafter those of benchmarks/step.py; weights and tokens
are made up, and nothing is read from disk. All ways take turns in an order drawn anew each round, until the rounds or
`--limit` seconds are used up, each way at least one turn a shape; the file also has the seconds of every measured step.

Ktok/s are what the trainer's are: unpadded context tokens a second of wall time, over the steps after the backlog of
warm-up is used up (for a target alone, over all batches but the first two). The last column is a way's median as a
share of what the stages alone allow: on two GPUs the slower one's; on a single GPU they can only take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for workers that are processes too
import blank_target
from step import SHAPES, TINY_SHAPES, Shape, machine

from dflash import settings
from dflash.data.dataset import Dataset
from dflash.data.rows import Row
from dflash.devices import Placement
from dflash.events import EVENTS_FILE, EventReader, EventWriter
from dflash.geometry import Geometry
from dflash.pipeline.average import ThreadAverager
from dflash.pipeline.batch import Batch, BatchSource, batch_outline
from dflash.pipeline.channel import ChannelStats
from dflash.pipeline.drafter_worker import Work, run_drafter
from dflash.pipeline.layout import Layout
from dflash.pipeline.processes import run_in_processes
from dflash.pipeline.shared import make_strategy
from dflash.pipeline.target_worker import run_target
from dflash.pipeline.threads import run_in_threads
from dflash.pipeline.tools import Tools
from dflash.plan import Plan, Variant, make_drafter
from dflash.probe import Probe
from dflash.settings import JobSettings
from dflash.target import Target
from sweeper.measure import figures

WAYS = ("target", "drafter", "threads", "processes")
WARM = 2  # steps of warm-up


@dataclass(frozen=True)
class MadeUpRows:
    """Rows of documents of one length, all supervised; the same row for the same number."""

    shape: Shape
    vocabulary: int

    def row(self, number: int) -> Row:
        place = np.arange(self.shape.context)
        document, position = np.divmod(place, self.shape.document)
        tokens = np.random.default_rng(number).integers(0, self.vocabulary - 1, len(place))
        return Row(tokens, np.ones(len(place), dtype=bool), document, position, len(place))


@dataclass
class Bench:
    """One shape's pipeline and its stages; each way of running it gives Ktok/s."""

    plan: Plan
    placement: Placement
    compile: str

    @classmethod
    def of(cls, shape: Shape, options: argparse.Namespace) -> Bench:
        placement = options.placement
        target = {"model": str(options.target), "made_up": True}
        outline = Target.outline(settings.Target(**target), placement.targets[0][0])
        width, dtype = outline.width, outline.embedding.dtype
        two = 2 * batch_outline(shape.rows, shape.context, shape.anchors, width, dtype).bytes / 2**20
        job = JobSettings.from_dict(
            {
                "data": {"path": "-", "row_tokens": shape.context},
                "target": target,
                "drafter": {"block": shape.block, "anchors": shape.anchors, "layers": 2 if options.tiny else 5},
                "train": {"rows": shape.rows, "steady_after": WARM, "save": False, "queue_mib": two},
                "compile": options.compile,
                "device": "auto",
            }
        )
        geometry = Geometry.settle(job.drafter, outline)
        variant = Variant("", job, geometry, outline.vocab_size - 1, outline.taps, Path(), Path(), {})
        data = Dataset(MadeUpRows(shape, outline.vocab_size), {})
        plan = Plan(job, Layout.of(job), data, {"": variant}, width, dtype, {})
        return cls(plan, placement, options.compile)

    def run(self, way: str, steps: int, spans: bool = False) -> tuple[float, list[float], list[Any]]:
        """Ktok/s of so many steps, seconds of each that was measured, and spans if they are asked for."""
        job = replace(self.plan.job, train=replace(self.plan.job.train, steps=steps))
        variant = replace(self.plan.variants[""], job=job)
        plan = replace(self.plan, job=job, variants={"": variant}, spans=spans)
        with tempfile.TemporaryDirectory() as folder:
            events = EventWriter(Path(folder) / EVENTS_FILE)
            probe = Probe(events)
            speed = getattr(self, f"_{way}")(plan, Path(folder), events, probe)
            told = list(EventReader(Path(folder) / EVENTS_FILE).poll())
            events.close()
        failure = next((e for e in told if e["event"] == "failure"), None)
        if failure:
            raise SystemExit(f"{way} failed in {failure['worker']}: {failure['message']}\n{failure['traceback']}")
        speed = speed or figures(told).ktok_s
        if speed is None:
            raise SystemExit(f"{way}: {steps} steps are too few to see one without backlog; raise --steps")
        seconds = [e["seconds"] for e in told if e["event"] == "step" and e["steady"]]
        return speed, seconds, [one for e in told if e["event"] == "spans" for one in e["spans"]]

    def _threads(self, plan: Plan, out: Path, events: EventWriter, probe: Probe) -> None:
        run_in_threads(plan, self.placement, out, events, probe, threading.Event())

    def _processes(self, plan: Plan, out: Path, events: EventWriter, probe: Probe) -> None:
        run_in_processes(plan, self.placement, out, events, probe, threading.Event())

    def _target(self, plan: Plan, out: Path, events: EventWriter, probe: Probe) -> float:
        devices = self.placement.targets[0]
        sink = Sink(plan.job.train.steps)
        target = Target.load(plan.job.target, devices)
        self._worker(plan, sink, events, probe, lambda tools: run_target(tools, 0, target, source(plan)))
        taken = sink.taken[WARM - 1 :]
        return sum(tokens for _, tokens in taken[1:]) / (taken[-1][0] - taken[0][0]) / 1e3

    def _drafter(self, plan: Plan, out: Path, events: EventWriter, probe: Probe) -> None:
        device, (variant,) = self.placement.drafters[0], plan.variants.values()
        job = plan.job
        batch = source(plan).anchored(source(plan).batch(0), job.drafter.anchors)
        features = torch.randn(*batch.tokens.shape, plan.feature_width, device=device, dtype=plan.feature_dtype)
        ends = Target.ends(job.target, device)

        def work(tools: Tools) -> None:
            made = make_drafter(variant, ends, tools.strategy, device)
            seat = tools.layout.seats[0]
            run_drafter(tools, Work(seat, variant, *made, ThreadAverager(1), None, ends, {}))

        self._worker(plan, Again(replace(batch, features=features)), events, probe, work)

    def _worker(
        self, plan: Plan, channel: Any, events: EventWriter, probe: Probe, work: Callable[[Tools], None]
    ) -> None:
        """One worker alone, in a thread that bears its name while it lasts."""
        strategy = make_strategy(plan.job, self.placement.kind, probe)
        tools = Tools(plan.job, plan.layout, plan.done, {(0, 0): channel}, events, probe, strategy, lambda: False)
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                work(tools)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        strategy.close()
        if failed:
            raise failed[0]


def source(plan: Plan) -> BatchSource:
    return BatchSource(plan.data.rows, plan.job.train.rows, plan.job.seed)


class Sink:
    """A channel that keeps nothing but when what came."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.taken: list[tuple[float, int]] = []

    @property
    def left(self) -> bool:
        return len(self.taken) >= self.batches

    def put(self, batch: Batch) -> None:
        self.taken.append((time.perf_counter(), batch.context_tokens))


@dataclass
class Again:
    """A channel that gives one batch again and again, as if just made."""

    batch: Batch
    full: bool = False

    def get(self, device: torch.device) -> Batch:
        return replace(self.batch, made=time.time())

    def leave(self) -> None:
        """No target waits."""

    def stats(self) -> ChannelStats:
        return ChannelStats(0, 0.0, 0.0)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        options.target = Path(folder)
        blank_target.write(options.target, blank_target.TINY if options.tiny else blank_target.QWEN3_8B)
        results = measured(options)
    if options.timeline:
        draw(results, options.timeline)


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all shapes, written to the file after each."""
    began = time.perf_counter()
    results: list[dict[str, Any]] = []
    report: dict[str, Any] = {"benchmark": "pipeline", "compile": options.compile, "results": results}
    report |= {"shapes": [asdict(s) for s in options.shapes], "devices": devices(options), **copies(options)}
    report |= machine(options.placement.drafters[0], options.commit)
    for number, shape in enumerate(options.shapes):
        until = began + options.limit * (number + 1) / len(options.shapes)
        bench = Bench.of(shape, options)
        for result in measure(bench, shape, options, until):
            results.append(result)
        print(table([r for r in results if r["shape"] == shape.name]), flush=True)
        report["seconds"] = time.perf_counter() - began
        if options.json:  # after each shape, so that a run cut short leaves what it has
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
        release()
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="packed,batch", help="comma-separated names: batch, long, packed")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"comma-separated, of {', '.join(WAYS)}")
    parser.add_argument("--compile", help="the drafter's strategy (triton; with --tiny eager)")
    parser.add_argument("--rounds", type=int, default=4, help="most turns of each way at each shape")
    parser.add_argument("--steps", type=int, default=16, help="steps of a turn, some six of them before the window")
    parser.add_argument("--limit", type=float, default=270.0, help="no further round begins that would end after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--timeline", help="file for a picture of who does what when")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on CPU; figures say nothing")
    options = parser.parse_args()
    gpus = 0 if options.tiny else torch.cuda.device_count()
    if not gpus and not options.tiny:
        parser.error("needs a GPU, better two, and this machine shows none; --tiny runs a toy on CPU")
    on = [torch.device("cpu")] * 2 if options.tiny else [torch.device("cuda", n % gpus) for n in range(2)]
    options.placement = Placement([(on[0],)], [on[1]], cpu_threads=1 if options.tiny else 8)
    options.compile = options.compile or ("eager" if options.tiny else "triton")
    known = {s.name: s for s in (TINY_SHAPES if options.tiny else SHAPES)}
    for what, allowed in (("shapes", tuple(known)), ("ways", WAYS)):
        asked = getattr(options, what).split(",")
        for name in asked:
            if name not in allowed:
                parser.error(f"--{what}: {name} is none of {', '.join(allowed)}")
        setattr(options, what, asked)
    options.shapes = [known[name] for name in options.shapes]
    return options


def measure(bench: Bench, shape: Shape, options: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """All ways at one shape, in turn until the time is up, all at least once."""
    speeds: dict[str, list[float]] = {way: [] for way in options.ways}
    each: dict[str, list[list[float]]] = {way: [] for way in options.ways}
    spans: dict[str, list[Any]] = {}
    longest = 0.0
    order = random.Random(options.seed)
    for number in range(options.rounds):
        began = time.perf_counter()
        if number and began + longest > until:
            break
        for way in order.sample(options.ways, len(options.ways)):
            speed, seconds, told = bench.run(way, options.steps, spans=number == 0 and bool(options.timeline))
            print(f"{shape.name} {way}: {speed:.2f} Ktok/s", flush=True)
            speeds[way].append(speed)
            each[way].append(seconds)
            if told:
                spans[way] = told
            release()
        longest = max(longest, time.perf_counter() - began)
    alone = [statistics.median(speeds[way]) for way in ("target", "drafter") if way in speeds]
    allowed = allows(alone, options.placement) if len(alone) == 2 else None
    return [
        {
            "shape": shape.name,
            "way": way,
            "ktok_s": (median := statistics.median(found)),
            "samples_ktok_s": found,
            "steps": options.steps,
            "step_seconds": each[way],
            "of_stages": median / allowed if allowed else None,
            "spans": spans.get(way),
        }
        for way, found in speeds.items()
    ]


def allows(alone: list[float], placement: Placement) -> float:
    """Ktok/s that two stages can reach together, from what each reaches alone."""
    shared = placement.kind == "cuda" and placement.targets[0][0] == placement.drafters[0]
    return 1 / sum(1 / speed for speed in alone) if shared else min(alone)


def release() -> None:
    """Give back device memory that no tensor has: workers that are processes need it."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copies(options: argparse.Namespace) -> dict[str, Any]:
    """GB/s at which features could travel: from GPU to GPU, and to and from page-locked host memory."""
    source, drain = options.placement.targets[0][0], options.placement.drafters[0]
    if source.type != "cuda":
        return {"copy_gb_s": None}
    size = 1 << 30
    there, here = torch.ones(size, dtype=torch.uint8, device=source), torch.empty(size, dtype=torch.uint8, device=drain)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ways = {"gpu_to_gpu": (there, here), "gpu_to_host": (there, host), "host_to_gpu": (host, here)}
    rates = {}
    for name, (origin, goal) in ways.items():
        spent = []
        for _ in range(6):
            began = time.perf_counter()
            goal.copy_(origin)
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(drain)
            spent.append(time.perf_counter() - began)
        rates[name] = size / min(spent) / 1e9
    return {"copy_gb_s": rates, "peer_access": torch.cuda.can_device_access_peer(source, drain)}


def devices(options: argparse.Namespace) -> list[str]:
    placement = options.placement
    return [
        torch.cuda.get_device_name(d) if d.type == "cuda" else "CPU"
        for d in (*placement.targets[0], *placement.drafters)
    ]


def table(results: list[dict[str, Any]]) -> str:
    lines = ["shape    way          Ktok/s  range            turns  of what the stages allow"]
    for r in results:
        found = r["samples_ktok_s"]
        share = f"{r['of_stages']:.1%}" if r["of_stages"] else ""
        spread = f"{min(found):.2f}..{max(found):.2f}"
        lines.append(f"{r['shape']:8s} {r['way']:10s} {r['ktok_s']:8.2f}  {spread:16s} {len(found):5d}  {share}")
    return "\n".join(lines)


# The picture.

COLOURS = {
    "target": "#4477aa",
    "copy": "#ccbb44",
    "step": "#228833",
    "optimiser": "#66ccee",
    "wait": "#dddddd",
    "hand over": "#dddddd",
}


def draw(results: list[dict[str, Any]], file: str) -> None:
    """A few steps in the middle of each pipeline's first turn: what devices did, and above it what threads waited."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    shown = [r for r in results if r["spans"] and r["way"] in ("threads", "processes")]
    if not shown:
        return
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(11, 1.2 + 2.0 * len(shown)), squeeze=False)
    for axis, result in zip(axes[:, 0], shown, strict=True):
        spans = result["spans"]
        stepped = sorted(began for _, what, began, _ in spans if what == "step")
        middle = len(stepped) * 2 // 3
        left, right = stepped[max(0, middle - 2)], stepped[min(len(stepped) - 1, middle + 2)]
        lanes: list[str] = []
        for who in ("target0", "drafter0"):
            lanes += [f"{who} waits", f"{who} copies", f"{who} computes"]
        for who, what, began, ended in spans:
            if ended < left or began > right or who not in ("target0", "drafter0"):
                continue
            kind = {"copy": "copies", "wait": "waits", "hand over": "waits"}.get(what, "computes")
            at = lanes.index(f"{who} {kind}")
            began, ended = max(began, left), min(ended, right)
            axis.broken_barh([(began - left, ended - began)], (at - 0.4, 0.8), color=COLOURS[what])
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        axis.set_xlim(0, right - left)
        axis.set_title(f"{result['shape']}, {result['way']}: {result['ktok_s']:.1f} Ktok/s", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds")
    patches = [Patch(color=COLOURS[w], label=w) for w in ("target", "copy", "step", "optimiser", "wait")]
    figure.legend(handles=patches, loc="upper right", ncols=5, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
