"""How often do drafters that share a process die while they compile? One strategy against another, cold.

    python benchmarks/race.py --strategies unlocked,locked --trials 10 --drafters 3 --json out.json

A trial is a fresh process with empty compile caches. In it each drafter is a thread with a small model of its
own and a shape of its own (on one GPU or on CPU that stands for a device of its own), doing forward, backward
and SGD, while a target thread calls un-compiled modules. All keep stepping until every drafter has made --steps
steps or died, as a training job would. Trials of the strategies alternate. The table gives the share of trials
in which something went wrong, with Wilson's 95 % interval.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KINDS = {
    "FX to symbolically trace": "fx_flag",
    "not installed as a submodule": "module_patch",
    "CURRENT_PATCHER": "patcher",
    "recompile_limit": "recompile_limit",
}


def main() -> None:
    options = parse()
    if options.trial:
        print("RESULT " + json.dumps(trial(options.trial, options)), flush=True)
        os._exit(0)  # threads of a failed trial may hang for ever
    strategies = options.strategies.split(",")
    plan = [(name, number) for number in range(options.trials) for name in strategies]
    results: list[dict[str, Any]] = []

    def one(item: tuple[str, int]) -> None:
        result = run_trial(*item, options)
        results.append(result)
        bad = [f"{e['kind']} in {e['thread']}" for e in result["errors"]]
        print(f"{len(results)}/{len(plan)} {item[0]}: {result['outcome']} {result['seconds']} s {bad}", flush=True)
        if options.json:
            Path(options.json).write_text(report(results))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, plan))
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
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="each drafter makes at least so many")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--same-shape", action="store_true", help="give all drafters one shape")
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--share", action="store_true", help="put all drafters on the first GPU")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a trial counts as hung")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--json", help="file for every trial's outcome")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_trial(strategy: str, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One trial in a process of its own, its caches empty and removed afterwards."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
        environment = os.environ | {name: str(Path(folder, name.lower())) for name in caches}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compile processes to wait for or to leak
        child = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--trial", strategy],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = child.communicate(timeout=options.timeout + 60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
    lines = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {"errors": [], "uncompiled_calls": 0}
    result |= {"strategy": strategy, "number": number, "seconds": round(time.monotonic() - began, 1)}
    if not lines:
        hung = "Timeout (" in err or child.returncode == -signal.SIGKILL
        result["outcome"] = "hung" if hung else "crashed"
        result["returncode"], result["stacks"] = child.returncode, stacks(err)
    else:
        result["outcome"] = "failed" if result["errors"] else "dense" if result["uncompiled_calls"] else "ok"
    return result


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


def trial(strategy_name: str, options: argparse.Namespace) -> dict[str, Any]:
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    import torch

    from dflash.attention import DFlashMask
    from dflash.probe import Probe
    from dflash.strategies import make

    wanted = options.device
    device_type = "cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu"
    torch.set_num_threads(1)
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
        model = toy_drafter(strategy, options.layers, width, heads=4).to(device)
        forward = strategy.compile_forward(model)
        anchors = torch.arange(1, blocks + 1, device=device)[None] * (context // (blocks + 1))
        mask = DFlashMask(torch.zeros(1, context, dtype=torch.long, device=device), anchors, block)
        features = torch.randn(1, context, width, device=device)
        inputs = torch.randn(1, blocks * block, width, device=device)

        def body() -> float:
            model.zero_grad()
            loss = forward(inputs, features, mask).square().mean()
            loss.backward()
            return float(loss)

        try:
            while under_way():
                loss = strategy.run(f"drafter{i}", (1, context), body)
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
    return {
        "errors": errors,
        "steps": steps,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device_type == "cuda" else "cpu",
        "rss_bytes": probe.memory()["rss_bytes"],
        "gpu_bytes": probe.memory()["gpu_bytes"],
        **probe.counters(),
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


def table(strategies: list[str], results: list[dict[str, Any]]) -> str:
    head = ("strategy", "trials", "not ok", "share", "95 % interval", "how", "uncompiled", "holders")
    rows = [head]
    for name in strategies:
        mine = [r for r in results if r["strategy"] == name]
        bad = sum(r["outcome"] != "ok" for r in mine)
        low, high = wilson(bad, len(mine))
        how: Counter[str] = Counter()
        for r in mine:
            how.update({e["kind"] for e in r["errors"]} or ({r["outcome"]} if r["outcome"] != "ok" else ()))
        holders = Counter(f"{h['thread']}: {h['path']}" for r in mine for e in r["errors"] for h in e["holders"][:1])
        rows.append(
            (
                name,
                str(len(mine)),
                str(bad),
                f"{bad / max(1, len(mine)):.0%}",
                f"{low:.0%} to {high:.0%}",
                ", ".join(f"{kind} {n}" for kind, n in how.most_common()) or "-",
                str(sum(r["uncompiled_calls"] for r in mine)),
                "; ".join(f"{n} x {path}" for path, n in holders.most_common(3)) or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


if __name__ == "__main__":
    main()
