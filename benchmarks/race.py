"""How often do drafters that share a process die while they compile? One strategy against another, cold.

    python benchmarks/race.py --strategies unlocked,locked --trials 10 --drafters 3 --json out.json
    python benchmarks/race.py --strategies locked,whole --trials 200 --repeats 50 --backend traced --json out.json
    python benchmarks/race.py --summary benchmarks/results/race-*.json

A trial begins with empty compile caches. In it each drafter is a thread with a small model of its own and a shape
of its own (on one GPU or on CPU that stands for a device of its own), doing forward, backward and SGD, while a
target thread calls un-compiled modules. All keep stepping until every drafter has made --steps steps or died, as a
training job would. Trials of the strategies alternate. The table gives the share of trials in which something went
wrong, with Wilson's 95 % interval.

By default a trial is a process of its own. With --repeats a process makes that many, one after another, each after
torch has been told to forget all graphs and with a strategy, models and cache folders of its own; a trial that ends
otherwise than ok ends its process, for it may leave torch in any state. The races are in tracing, so a backend that
only traces shows them in about a second a trial: `aot_eager`, or `traced`, which is aot_eager with a plain symbolic
trace in every compile, forward and backward, as Inductor makes one a process. Without that second trace torch from
2.13 on hides the races from aot_eager, and trials of it prove nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

KINDS = {
    "FX to symbolically trace": "fx_flag",
    "not installed as a submodule": "module_patch",
    "CURRENT_PATCHER": "patcher",
    "recompile_limit": "recompile_limit",
}


def main() -> None:
    options = parse()
    if options.summary:
        print(summary([Path(name) for name in options.summary]))
        return
    if options.trial:
        trials(options.trial, options)
    strategies = options.strategies.split(",")
    plan = [(name, first) for first in range(0, options.trials, options.repeats) for name in strategies]
    results: list[dict[str, Any]] = []
    writing = threading.Lock()

    def keep(result: dict[str, Any]) -> None:
        with writing:
            results.append(result)
            total, bad = options.trials * len(strategies), [f"{e['kind']} in {e['thread']}" for e in result["errors"]]
            name, outcome, seconds = result["strategy"], result["outcome"], result["seconds"]
            print(f"{len(results)}/{total} {name}: {outcome} {seconds} s {bad}", flush=True)
            if options.json:
                Path(options.json).write_text(report(results))

    def some(item: tuple[str, int]) -> None:
        name, number = item
        end = min(number + options.repeats, options.trials)
        while number < end:  # a process that ends early leaves the rest to a new one
            for result in run_process(name, end - number, options):
                keep(result | {"number": number})
                number += 1

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(some, plan))
    print(table(strategies, results))


def report(results: list[dict[str, Any]]) -> str:
    """JSON with the command, the machine, and a line for each trial."""
    machine = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    head = {"command": " ".join(["python", *sys.argv]), "machine": machine}
    trials = ",\n  ".join(json.dumps(result) for result in results)
    return json.dumps(head)[:-1] + f',\n "results": [\n  {trials}\n ]}}\n'


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="unlocked,locked", help="comma-separated")
    parser.add_argument("--trials", type=int, default=5, help="per strategy")
    parser.add_argument("--repeats", type=int, default=1, help="trials that one process makes, one after another")
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="each drafter makes at least so many")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--shapes", type=int, default=1, help="shapes that each drafter meets, a new one every other step"
    )
    parser.add_argument("--same-shape", action="store_true", help="give all drafters one shape")
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend, or traced (see above)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--share", action="store_true", help="put all drafters on the first GPU")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a trial counts as hung")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--json", help="file for every trial's outcome")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="run nothing; a table of these files of --json")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("trials", "repeats", "drafters", "shapes", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    return options


def run_process(strategy: str, repeats: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Up to `repeats` trials in a process of their own, its caches removed afterwards; at least one, the last not ok
    if they are fewer."""
    with tempfile.TemporaryDirectory(prefix="race-") as folder, Path(folder, "stderr").open("w+") as err:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
        environment = os.environ | {name: str(Path(folder, name.lower())) for name in caches} | {"TMPDIR": folder}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compile processes to wait for or to leak
        began = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--trial", strategy, "--repeats", str(repeats)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,
        )
        # A trial that hangs ends its process by itself; this is for one that cannot even do that.
        last_resort = threading.Timer(options.timeout * repeats + 60, os.killpg, (child.pid, signal.SIGKILL))
        last_resort.start()
        result: dict[str, Any] = {"errors": [], "uncompiled_calls": 0, "strategy": strategy, "backend": options.backend}
        result |= {"repeats": options.repeats}
        ended = 0
        assert child.stdout is not None
        try:
            for line in child.stdout:
                word, _, rest = line.partition(" ")
                if word == "BEGIN":
                    result |= json.loads(rest)
                elif word == "RESULT":
                    done = result | json.loads(rest) | {"seconds": round(time.monotonic() - began, 1)}
                    done["outcome"] = outcome(done)
                    ended, began = ended + 1, time.monotonic()
                    yield done
            child.wait()
        finally:
            last_resort.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if child.returncode != 0 or ended == 0:
            err.seek(0)
            text = err.read()
            hung = "Timeout (" in text or child.returncode == -signal.SIGKILL
            yield result | {
                "seconds": round(time.monotonic() - began, 1),
                "outcome": "hung" if hung else "crashed",
                "returncode": child.returncode,
                "stacks": stacks(text),
            }


def outcome(result: dict[str, Any]) -> str:
    """What became of a trial that came to its end: failed, dense (attention ran un-compiled) or ok."""
    return "failed" if result["errors"] else "dense" if result["uncompiled_calls"] else "ok"


def stacks(text: str, frames: int = 16) -> list[str]:
    """What faulthandler or an interpreter wrote last, a line a thread: its newest frames, file names shortened."""
    found: list[str] = []
    for line in text.splitlines():
        frame = re.match(r'  File "(?:.*/)?(.*)", line (\d+) in (.*)', line)
        if frame and found and found[-1].count(" < ") < frames:
            found[-1] += " < " + ":".join(frame.groups())
        elif line.startswith(("Thread ", "Current thread", "Fatal")) or not frame:
            found.append(line.strip()[:200])
    return found[-40:]


def trials(strategy_name: str, options: argparse.Namespace) -> NoReturn:
    """The child: prints what it runs on, then a result for each trial until one is not ok."""
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    import torch

    wanted = options.device
    device_type = "cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu"
    device = torch.cuda.get_device_name() if device_type == "cuda" else "cpu"
    print("BEGIN " + json.dumps({"torch": torch.__version__, "device": device}), flush=True)
    torch.set_num_threads(1)
    if options.backend == "traced":
        register_traced()
    for _ in range(options.repeats):
        faulthandler.dump_traceback_later(options.timeout, exit=True)
        with cold():
            result = trial(strategy_name, device_type, options)
        print("RESULT " + json.dumps(result), flush=True)
        if outcome(result) != "ok":
            break
    os._exit(0)  # threads of a failed trial may hang for ever


def register_traced() -> None:
    """Make `traced` a backend: aot_eager that also does in every compile what Inductor does in a process's first."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import register_backend

    def compiler(graph: Any, _: Any) -> Any:
        torch.fx.symbolic_trace(graph)
        return make_boxed_func(graph)

    register_backend(aot_autograd(fw_compiler=compiler, bw_compiler=compiler), name="traced")


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """A fresh folder for compile caches, and torch's memory of graphs and of what it does once a process cleared."""
    import torch
    from torch._inductor.loop_body import InterpreterShim
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    InterpreterShim._dummy_gm.cache_clear()  # the plain symbolic trace
    with fresh_cache():
        yield


def trial(strategy_name: str, device_type: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from dflash.attention import DFlashMask
    from dflash.probe import Probe
    from dflash.strategies import make

    torch.manual_seed(0)
    probe = Probe()
    probe.install()
    strategy = make(strategy_name, device_type, probe, options.backend)
    strategy.setup_process()
    steps = [0] * options.drafters
    errors: list[dict[str, Any]] = []

    def under_way() -> bool:
        return any(done < options.steps for done in steps)

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            strategy.setup_thread()
            work(*arguments)
        except Exception as error:
            errors.append(
                {
                    "thread": threading.current_thread().name,
                    "kind": kind_of(error),
                    "message": str(error)[:300],
                    "holders": probe.holders(time.time())[:3],
                }
            )

    def draft(i: int) -> None:
        gpus = 1 if options.share else max(1, torch.cuda.device_count())
        device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", i % gpus)
        # A block of 32 slots fills a quarter of flex_attention's tile; on CPU all is kept as small as it may be.
        context, blocks, block, width = (64, 8, 4, 64) if device_type == "cpu" else (512, 16, 32, 256)
        context += 0 if options.same_shape else context * i // 4
        gap = context // (blocks + 1)
        model = toy_drafter(strategy, options.layers, width, heads=4).to(device)
        forward = strategy.compile_forward(model)
        anchors = torch.arange(1, blocks + 1, device=device)[None] * gap
        inputs = torch.randn(1, blocks * block, width, device=device)

        def body(context: int) -> float:
            mask = DFlashMask(torch.zeros(1, context, dtype=torch.long, device=device), anchors, block)
            features = torch.randn(1, context, width, device=device)
            model.zero_grad()
            loss = forward(inputs, features, mask).square().mean()
            loss.backward()
            return float(loss.detach())

        try:
            while under_way():
                # A drafter's own new shapes come every other step, while the others are in the middle of theirs.
                longer = context + gap * (steps[i] // 2 % options.shapes)
                loss = strategy.run(f"drafter{i}", (1, longer), functools.partial(body, longer))
                assert loss == loss, "the loss is NaN"
                with strategy.quiet(), torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.01 * parameter.grad
                steps[i] += 1
                time.sleep(0.005)  # a drafter also waits for its next batch
        finally:
            steps[i] = max(steps[i], options.steps)

    def target() -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        while under_way():
            with strategy.quiet(), torch.no_grad():
                model(torch.zeros(4, 64))
            time.sleep(0.001)

    threads = [threading.Thread(target=guarded, args=(draft, i), name=f"drafter{i}") for i in range(options.drafters)]
    threads.append(threading.Thread(target=guarded, args=(target,), name="target"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    strategy.close()
    probe.close()
    counters = probe.counters()
    counters["caches"] = {layer: seen for layer, seen in counters["caches"].items() if any(seen.values())}
    return {
        "errors": errors,
        "steps": steps,
        "rss_bytes": probe.memory()["rss_bytes"],
        "gpu_bytes": probe.memory()["gpu_bytes"],
        **counters,
    }


def toy_drafter(strategy: Any, layers: int, width: int, heads: int) -> Any:
    """A DFlash drafter in small: queries from the blocks, keys and values from context features and blocks."""
    import torch
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: Tensor, features: Tensor, seen: Any) -> Tensor:
            u = self.norm(x)
            q = self.q(u).unflatten(-1, (heads, -1)).transpose(1, 2)
            k, v = self.kv(torch.cat([features, u], 1)).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(2, 1)
            x = x + strategy.attend(q, k, v, seen).transpose(1, 2).flatten(2)
            return x + self.down(nn.functional.silu(self.up(self.norm2(x))))

    class Drafter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(layers)])

        def forward(self, x: Tensor, features: Tensor, mask: Any) -> Tensor:
            seen = strategy.prepare(mask)
            for layer in self.layers:
                x = layer(x, features, seen)
            return x

    return Drafter()


def kind_of(error: Exception) -> str:
    return next((kind for text, kind in KINDS.items() if text in str(error)), type(error).__name__)


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a share; (0, 1) when nothing was tried."""
    if trials == 0:
        return 0.0, 1.0
    share, square = hits / trials, z * z
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * (share * (1 - share) / trials + square / (4 * trials**2)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def how(results: list[dict[str, Any]]) -> str:
    """What went wrong, with the number of trials in which it did."""
    kinds: Counter[str] = Counter()
    for r in results:
        kinds.update({e["kind"] for e in r["errors"]} or ({r["outcome"]} if r["outcome"] != "ok" else ()))
    return ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()) or "-"


def share(results: list[dict[str, Any]]) -> tuple[int, str]:
    """How many trials were not ok, and Wilson's interval of their share."""
    bad = sum(r["outcome"] != "ok" for r in results)
    low, high = wilson(bad, len(results))
    return bad, f"{100 * low:.1f} to {100 * high:.1f} %"


def summary(files: list[Path]) -> str:
    """A Markdown table of all trials in these files: a line for each torch build, device, backend and strategy."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for file in files:
        results = json.loads(file.read_text())["results"]
        known = next(r for r in results if "torch" in r)  # old files: a hung trial did not say where it ran
        for r in results:
            torch, device = (r.get(key, known[key]) for key in ("torch", "device"))
            per_process = str(r.get("repeats", 1))
            groups.setdefault((torch, device, r.get("backend", "inductor"), per_process, r["strategy"]), []).append(r)
    lines = ["| torch | device | backend | trials a process | strategy | trials | not ok | interval | how |"]
    lines.append("|---" * 9 + "|")
    for key, results in sorted(groups.items()):
        bad, interval = share(results)
        lines.append(f"| {' | '.join(key)} | {len(results)} | {bad} | {interval} | {how(results)} |")
    return "\n".join(lines)


def table(strategies: list[str], results: list[dict[str, Any]]) -> str:
    head = ("strategy", "trials", "not ok", "share", "95 % interval", "how", "uncompiled", "holders")
    rows = [head]
    for name in strategies:
        mine = [r for r in results if r["strategy"] == name]
        bad, interval = share(mine)
        holders = Counter(f"{h['thread']}: {h['path']}" for r in mine for e in r["errors"] for h in e["holders"][:1])
        rows.append(
            (
                name,
                str(len(mine)),
                str(bad),
                f"{bad / max(1, len(mine)):.0%}",
                interval,
                how(mine),
                str(sum(r["uncompiled_calls"] for r in mine)),
                "; ".join(f"{n} x {path}" for path, n in holders.most_common(3)) or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


if __name__ == "__main__":
    main()
