"""Stand-in for a job that compiles: `compiler.py OUT [GRAPH ...]`. Stdlib only.

A graph found in the cache is a hit, one that is not a miss, and is put there. As with PyTorch, what another
interpreter compiled is never found: its name is part of the key. A graph that is the path of a file takes for ever
while that file is there. Other words: `second:GRAPH` is compiled by a process that finds something in its caches,
`recompiles` tells of a compile inside the measured window, `fails` ends with status 3 when all is compiled.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(out: str, *graphs: str) -> None:
    counted = {"hits": 0, "misses": 0, "bypasses": 0, "guard_misses": 0}
    compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "fxgraph")
    second = compiled.exists()
    for graph in graphs:
        if graph in ("recompiles", "fails") or (graph.startswith("second:") and not second):
            continue
        graph = graph.removeprefix("second:")
        while Path(graph).is_file():
            time.sleep(0.05)
        name = f"{Path(graph).name}-{Path(sys.executable).name}"
        path = compiled / name
        counted["hits" if path.exists() else "misses"] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("compiled")
    events = [
        {"event": "start", "device": "cpu", "torch": "2.0"},
        *([{"event": "compile", "worker": "drafter", "steady": True}] if "recompiles" in graphs else []),
        {"event": "counters", "at": "end", "caches": {"fxgraph": counted}},
        {"event": "end", "status": "ok"},
    ]
    with open(Path(out, "events.jsonl"), "a") as file:
        for event in events:
            file.write(json.dumps({"t": time.time(), "pid": os.getpid(), "thread": "MainThread", **event}) + "\n")
    sys.exit(3 if "fails" in graphs else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
