"""A training script as its own user wrote it, who has never heard of a harness: `trainer.py WAY ...`. Stdlib only."""

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path


def train(steps: int = 8, loss: float = 3.0, end: str = "\n", pause: float = 0.12) -> None:
    for step in range(1, steps + 1):
        time.sleep(pause)
        print(f"\x1b[32mstep {step}/{steps}\x1b[0m: loss {loss - step / 10:.2f} | {1024:,} tokens", end=end)


def cache() -> None:
    """Compile something, unless it lies there."""
    kernel = Path(os.environ["TRITON_CACHE_DIR"], "kernel")
    if not kernel.exists():
        kernel.write_text("compiled")


def main(way: str, *_: str) -> int:
    if way == "lines":
        train()
    elif way == "bar":
        train(end="\r")
    elif way == "child":
        worker = multiprocessing.get_context("fork").Process(target=train)
        worker.start()
        worker.join()
    elif way == "shell":  # another program, whose output nothing has unbuffered
        script = "for i in 1 2 3 4 5 6 7 8; do sleep 0.12; echo step $i/8: loss 2.$i '|' 1,024 tokens; done"
        return subprocess.call(["sh", "-c", script])
    elif way == "flood":
        train(steps=4)
        for _ in range(40):
            sys.stdout.write("x" * 500_000)
        print()
        train(steps=8)
    elif way == "nan":
        train(loss=float("nan"))
    elif way == "swallowed":
        train()
        try:
            raise RuntimeError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
            )
        except RuntimeError:
            traceback.print_exc()
    elif way == "shrugged":
        train()

        class Late:
            def __del__(self) -> None:
                raise ValueError("too late")

        Late()
    elif way in ("75", "143"):
        train()
        return int(way)
    elif way == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        faulthandler.disable()
        train(steps=3)
        time.sleep(300)
    elif way == "cached":
        cache()
        train()
    elif way == "told":
        print(json.dumps({"argv": sys.argv, "env": dict(os.environ)}))
    else:
        raise ValueError(way)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
