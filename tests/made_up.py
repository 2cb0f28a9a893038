"""Run directories as the harness leaves them, made up: for tests that read a store without training."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from dflash.events import EventWriter
from sweeper.measure import figures
from sweeper.verdict import Evidence, judge

BEGAN = 1_790_000_000.0


def events(
    steps: int = 12, pace: float = 1.0, tokens: int = 500, steady_after: int = 3, started: float = BEGAN
) -> list[dict[str, Any]]:
    """The events of a good run: start, steps `pace` seconds apart, counters, memory, end."""
    told: list[dict[str, Any]] = [
        {"t": started, "event": "start", "compile": "locked", "pid": 1, "thread": "MainThread"}
    ]
    for step in range(1, steps + 1):
        told.append(
            {
                "t": started + 20 + step * pace,
                "event": "step",
                "step": step,
                "steps": steps,
                "tokens": tokens,
                "loss": 5.0 - 0.2 * step,
                "accept": 1.0 + 0.05 * step,
                "accuracy": 0.1,
                "lr": 1e-4,
                "grad_norm": 1.0,
                "seconds": pace,
                "steady": step > steady_after,
                "queue_bytes": 1000,
            }
        )
    after = started + 21 + steps * pace
    told.append({"t": after, "event": "counters", "pid": 1, "compile_seconds": 17.5, "uncompiled_calls": 0})
    told.append({"t": after, "event": "memory", "pid": 1, "rss_bytes": 3_000_000_000})
    told.append({"t": after, "event": "end", "pid": 1, "status": "ok"})
    return told


def fanout(told: list[dict[str, Any]], *variants: str) -> list[dict[str, Any]]:
    """The same run with a step of every variant at each step; each variant's loss is 0.5 above the one before."""
    spread = []
    for event in told:
        if event["event"] != "step":
            spread.append(event)
            continue
        for number, variant in enumerate(variants):
            # In the same second, one a little after the other.
            later = {"t": event["t"] + 0.01 * number, "loss": event["loss"] + 0.5 * number}
            spread.append(event | later | {"variant": variant})
    return spread


def evaluated(step: int, tau: float, prompts: str = "gsm8k", variant: str = "", at: float = 200.0) -> dict[str, Any]:
    """An evaluation that ended `at` seconds after the start."""
    figures = {"n": 32, "tokens": 4000, "tau": tau, "tau_low": tau - 0.1, "tau_high": tau + 0.1, "tau_untrained": 1.0}
    figures |= {"accept_at": [0.6, 0.3], "distinct4": 0.8, "identical": 1.0, "seconds": 3.0}
    conditions = {"temperature": 0.0, "block": 8, "max_new": 128}
    return {"t": BEGAN + at, "event": "eval", "variant": variant, "step": step, "set": prompts} | figures | conditions


def write_run(
    store: Path,
    cell: dict[str, str],
    repeat: int = 1,
    told: list[dict[str, Any]] | None = None,
    finished: bool = True,
    sweep: str = "sweep0123",
    attempt: int = 1,
    role: str = "cell",
    **evidence: Any,
) -> Path:
    """Write a run directory; `evidence` overrides fields of Evidence. Returns the directory."""
    told = events() if told is None else told
    name = f"{'-'.join(cell.values())}-0123456789ab-r{repeat}.a{attempt}"
    folder = store / "runs" / name
    folder.mkdir(parents=True)
    run = {
        "identity": f"{name:0<64}"[:64],
        "cell_id": "-".join(cell.values()),
        "cell": cell,
        "repeat": repeat,
        "attempt": attempt,
        "role": role,
        "sweep": sweep,
        "wheel": {
            "name": "current",
            "python": "python",
            "fingerprint": "f00",
            "versions": {"torch": "2.13.0"},
        },
        "env": {},
        "argv": ["python", "-m", "dflash"],
        "host": socket.gethostname(),
        "harness_pid": os.getpid(),
        "started": BEGAN,
    }
    (folder / "run.json").write_text(json.dumps(run))
    spec = {"compile": cell.get("compile"), "train": {"steps": 12}, "optim": {"betas": [0.9, 0.999]}}
    (folder / "spec.json").write_text(json.dumps(spec))
    (folder / "child.log").write_text("a line\n" * 3)
    add_events(folder, told)
    if finished:
        finish_run(folder, told, **evidence)
    return folder


def write_plan(folders: list[Path], sweep: str = "sweep0123", conclusion: str = "") -> Path:
    """Write the folder of a sweep of these runs, which has ended if there is a conclusion. Returns the folder."""
    folder = folders[0].parent.parent / "sweeps" / sweep
    folder.mkdir(parents=True, exist_ok=True)
    runs = [json.loads((one / "run.json").read_text()) for one in folders]
    planned = [{name: run[name] for name in ("cell", "cell_id", "identity", "repeat")} for run in runs]
    plan = {"sweep": sweep, "title": "a sweep", "written": BEGAN, "command": ["-m"], "runs": planned}
    (folder / "plan.json").write_text(json.dumps(plan))
    if conclusion:
        (folder / "conclusion.txt").write_text(conclusion)
    return folder


def add_events(folder: Path, told: list[dict[str, Any]]) -> None:
    """Append events as a job would, but at their own times."""
    with open(folder / "events.jsonl", "a") as file:
        for event in told:
            file.write(json.dumps(event) + "\n")


def finish_run(folder: Path, told: list[dict[str, Any]], sweeps: list[str] | None = None, **evidence: Any) -> None:
    """Judge a run and write its verdict.json."""
    cache = evidence.pop("cache", proof("cold"))
    given = {
        "exit_code": 0,
        "signal": None,
        "ended_by": "itself",
        "hung_stage": None,
        "bad_events": 0,
        "log_tail": "",
        "stacks": "",
    } | evidence
    verdict = judge(Evidence(events=told, cache=cache, **given))
    record = verdict.to_dict() | {
        "figures": figures(told).to_dict(),
        "cache": cache,
        "exit": {"code": given["exit_code"], "signal": given["signal"]},
        "ended_by": given["ended_by"],
        "hung_stage": given["hung_stage"],
        "started": BEGAN,
        "ended": BEGAN + 60,
        "wall_s": 60.0,
        "child_s": 59.5,
        "overhead_s": 0.5,
        "attempt": 1,
        "sweeps": sweeps or ["sweep0123"],
    }
    (folder / "verdict.json").write_text(json.dumps(record))


def proof(requested: str, proved: str | None = None) -> dict[str, Any]:
    """A cache proof, as the harness records it."""
    warm = (proved or requested) == "warm"
    counts = {
        "files_before": 9 if warm else 0,
        "files_after": 9,
        "hits": 4 if warm else 0,
        "misses": 0 if warm else 4,
    }
    layers = {"fxgraph": counts, "triton": {"files_before": 0, "files_after": 0}}
    return {"requested": requested, "proved": proved or requested, "why": "as counted", "layers": layers}


def open_writer(folder: Path) -> EventWriter:
    """The job's own writer on a run directory."""
    return EventWriter(folder / "events.jsonl")
