"""Stand-ins for a training job, one a way of ending: `child.py WAY OUT [ARGUMENT]`. Stdlib only."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CACHE_FILES = {"TORCHINDUCTOR_CACHE_DIR": "fxgraph/ab/graph", "TRITON_CACHE_DIR": "kernel"}


def emit(out: str, event: str, **fields: object) -> None:
    line = {"t": time.time(), "event": event, "pid": os.getpid(), "thread": "MainThread", **fields}
    with open(Path(out, "events.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")


def train(out: str, steps: int = 6, pause: float = 0.02) -> None:
    """Report a plausible training run."""
    emit(out, "start", python=sys.version.split()[0])
    for stage in ("load", "data", "warmup", "train"):
        emit(out, "stage", stage=stage)
    for step in range(1, steps + 1):
        time.sleep(pause)
        curve = {"loss": 5 - step / 10, "accept": 1 + step / 10}
        emit(out, "step", step=step, steps=steps, tokens=512, steady=step > 2, **curve)


def fanout(out: str, steps: int = 6) -> None:
    """Report a run of two variants that are evaluated at the end."""
    emit(out, "stage", stage="train")
    for step in range(1, steps + 1):
        for variant, loss in (("b16", 5.0), ("b8", 4.0)):
            figures = {"loss": loss - step / 10, "accept": 1 + step / 10, "loss_at": [loss, loss + 1]}
            emit(out, "step", variant=variant, step=step, steps=steps, tokens=512, steady=step > 2, **figures)
        time.sleep(0.02)
    for variant, tau in (("b16", 1.75), ("b8", 1.5)):
        told = {"tau": tau, "tau_low": tau - 0.1, "tau_high": tau + 0.1, "n": 32, "temperature": 0.0, "block": 8}
        emit(out, "eval", variant=variant, step=steps, set="gsm8k", **told)


def checkpointed(out: str) -> int:
    """Save a checkpoint and ask to be started again; once there is one, go on from it."""
    folder = Path(out, "checkpoints", "step-00000003")
    if folder.exists():
        emit(out, "resume", step=3, folder=str(folder))
        train(out)
        emit(out, "end", status="ok")
        return 0
    train(out, steps=3)
    folder.mkdir(parents=True)
    emit(out, "checkpoint", step=3, folder=str(folder))
    emit(out, "end", status="requeue")
    return 75


def resumable(out: str, steps: int = 12) -> None:
    """Go on from the newest checkpoint, save one every third step, and have a helper that no group's signal reaches."""
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    subprocess.Popen(sleep, start_new_session=True)
    saved = sorted(Path(out, "checkpoints").glob("step-*"))
    done = int(saved[-1].name.removeprefix("step-")) if saved else 0
    if done:
        emit(out, "resume", step=done, folder=str(saved[-1]))
    emit(out, "stage", stage="train")
    for step in range(done + 1, steps + 1):
        time.sleep(0.08)
        emit(out, "step", step=step, steps=steps, tokens=512, steady=step > 2, loss=5 - step / 10)
        if step % 3 == 0:
            folder = Path(out, "checkpoints", f"step-{step:08}")
            folder.mkdir(parents=True)
            emit(out, "checkpoint", step=step, folder=str(folder))


def caches(out: str) -> None:
    """Use the compile caches as a compiler would: a file that is there is a hit, one that is not a miss."""
    counted = {"hits": 0, "misses": 0, "bypasses": 0}
    for variable, name in CACHE_FILES.items():
        path = Path(os.environ[variable], name)
        counted["hits" if path.exists() else "misses"] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("compiled")
    emit(out, "counters", at="end", caches={"fxgraph": counted})


def deadlock() -> None:
    """Two threads that each hold what the other wants."""
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def hold(mine: threading.Lock, theirs: threading.Lock) -> None:
        with mine:
            both.wait()
            with theirs:
                pass

    workers = [
        threading.Thread(target=hold, args=pair, name=name)
        for pair, name in (((first, second), "left"), ((second, first), "right"))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def grandchild(pids: str) -> None:
    """Start a process in a session of its own, which no signal to this one's group reaches."""
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    sleeper = subprocess.Popen(sleep, start_new_session=True)
    Path(pids).write_text(f"{os.getpid()} {sleeper.pid}")


def leave(*_: object) -> None:
    """End as asked. Slurm and then the harness ask; the second time may come while the interpreter ends already."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main(way: str, out: str, argument: str = "") -> int:
    if way == "ok":
        train(out)
        caches(out)
        emit(out, "end", status="ok")
    elif way == "fanout":
        fanout(out)
        emit(out, "end", status="ok")
    elif way == "checkpointed":
        return checkpointed(out)
    elif way == "resumable":
        resumable(out)
        caches(out)
        emit(out, "end", status="ok")
    elif way == "slow":
        signal.signal(signal.SIGTERM, leave)
        train(out, steps=1000, pause=0.1)
    elif way == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train(out, steps=1000, pause=0.1)
    elif way == "sigkill":
        train(out)
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "segfault":
        ctypes.string_at(0)
    elif way == "deadlock":
        train(out, steps=2)
        deadlock()
    elif way == "oom":
        train(out, steps=2)
        raise MemoryError("cannot allocate 640000000000 bytes")
    elif way == "greedy":
        train(out, steps=2)
        held = [bytearray(64 << 20) for _ in range(64)]
        return len(held)
    elif way == "exit3":
        print("this is the last word of the job", file=sys.stderr)
        return 3
    elif way == "rubbish":
        train(out)
        with open(Path(out, "events.jsonl"), "ab") as file:
            file.write(b'\xff\xfe no json\n{"event": "no such kind", "t": 1}\n[1]\n{"t": "x", "event": "step"}\n\n')
        emit(out, "step", step="seven", loss=None, tokens={})
        sys.stdout.buffer.write(b"\x00\xff\x1b[31m no text\n")
        emit(out, "end", status="ok")
    elif way == "orphan":
        grandchild(argument)
        train(out, steps=1000, pause=0.1)
    elif way == "leaves":
        grandchild(argument)
        train(out)
        emit(out, "end", status="ok")
    elif way == "silent":
        return 0
    elif way == "quiet":
        time.sleep(300)
    else:
        raise ValueError(way)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
