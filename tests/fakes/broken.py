"""Jobs in which something really breaks, one a cause: `broken.py CAUSE OUT`. Prints no error of its own."""

import ctypes
import functools
import json
import multiprocessing.reduction  # noqa: F401  (its import opens files, which one of the jobs cannot)
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def emit(out: Path, event: str, **fields: object) -> None:
    with open(out / "events.jsonl", "a") as file:
        file.write(json.dumps({"t": time.time(), "event": event, "pid": os.getpid(), **fields}) + "\n")


def attention_dense_fallback(out: Path) -> None:
    """Only told, as a job tells it: that the probe counts what runs un-compiled is for its own tests to say."""
    emit(out, "counters", uncompiled_calls=1, attention_calls=1)
    emit(out, "end", status="ok")


def host_disk_full(out: Path) -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def host_file_descriptors(out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    kept = [os.pipe() for _ in range(100)]
    assert not kept


def memory_host_oom(out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 33)


def memory_shm_exhausted(out: Path) -> None:
    small = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "
    small += "\"$0\" -c 'import torch; torch.ones(1 << 20).share_memory_()'"
    sys.exit(subprocess.run(["unshare", "-rm", "sh", "-c", small, sys.executable]).returncode)


def process_segfault(out: Path) -> None:
    ctypes.string_at(0)


def process_sigkill(out: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cache_concurrent_write(out: Path) -> None:
    """What Triton's cache does when another process has taken its temporary file."""
    kept = out / ".triton" / "cache" / "ab"
    kept.mkdir(parents=True)
    os.replace(kept / f"kernel.ttir.tmp.pid_{os.getpid()}_7", kept / "kernel.ttir")


def cache_corrupt(out: Path) -> None:
    library = out / "torchinductor_me" / "ab" / "kernel.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    ctypes.CDLL(str(library))


def checkpoint_corrupt(out: Path) -> None:
    from safetensors import safe_open

    (out / "model.safetensors").write_bytes(b"\x40" + bytes(7) + b'{"weight": {"dtype"')
    safe_open(out / "model.safetensors", "np")


def env_library_mismatch(out: Path) -> None:
    ctypes.CDLL("libcudart.so.99")


def env_toolchain_missing(out: Path) -> None:
    import torch

    os.environ["CXX"] = "no-such-compiler"
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64))


def env_wheel_unavailable(out: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", "torch==0.0.1"]
    sys.exit(subprocess.run(pip).returncode)


def compile_no_end(out: Path) -> None:
    """The compiler itself says that warm-up has begun: how long the imports take to get there is no matter."""
    import torch

    compiler, told = out / "endless-g++", json.dumps({"t": time.time(), "event": "stage", "stage": "warmup"})
    answers = 'case "$*" in *--version*|*-print*|*-E*) exec g++ "$@";; esac'
    compiler.write_text(f"#!/bin/sh\n{answers}\necho '{told}' >> '{out}/events.jsonl'\nexec sleep 300\n")
    compiler.chmod(0o700)
    os.environ["CXX"] = str(compiler)
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64))


def compile_worker_died(out: Path) -> None:
    """A worker of Inductor's own pool kills itself over what it was given to compile; PyTorch waits for it."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    from torch._inductor.async_compile import AsyncCompile

    work = AsyncCompile.process_pool().submit(functools.partial(signal.raise_signal, signal.SIGKILL))
    AsyncCompile().wait({"kernel": work})


def compile_fx_trace_race(out: Path) -> None:
    import torch

    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    torch.fx.symbolic_trace(lambda x: compiled(x) + 1)


def compile_nested_jit_trace(out: Path) -> None:
    import torch

    torch.jit.trace(torch.compile(lambda x: x.sin(), backend="eager"), torch.ones(2))


def compile_module_call_race(out: Path) -> None:
    import torch

    linear = torch.nn.Linear(2, 2)
    tracing, done = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        tracing.set()
        done.wait(20)
        return x + 1

    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=[traced])
    tracer.start()
    tracing.wait(20)
    try:
        linear(torch.ones(2))
    finally:
        done.set()
        tracer.join()


def compile_recompile_limit(out: Path) -> None:
    import torch

    torch._dynamo.config.recompile_limit = 2
    compiled = torch.compile(lambda x, n: x * n, backend="eager", fullgraph=True, dynamic=False)
    for n in range(5):
        compiled(torch.ones(2), n)


def compile_recompiled(out: Path) -> None:
    import torch

    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    torch.compiler.set_stance("fail_on_recompile")
    compiled(torch.ones(3))


def ddp_unused_parameters(out: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=0, world_size=1)

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = torch.nn.parallel.DistributedDataParallel(Half())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def nccl_timeout(out: Path) -> None:
    """Over gloo, as there is no GPU: the other rank joins and then never comes to the barrier."""
    from datetime import timedelta

    import torch.distributed as dist

    rank = 1 if os.fork() == 0 else 0
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)
    if rank == 1:
        time.sleep(5)
        os._exit(0)
    dist.monitored_barrier(timeout=timedelta(seconds=1))


def numerics_mismatch(out: Path) -> None:
    import numpy

    numpy.testing.assert_allclose(numpy.ones(4), numpy.ones(4) + 1e-2)


def numerics_nan(out: Path) -> None:
    import torch

    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(2, requires_grad=True)
        (x.sqrt() * 0).sum().backward()


def tracking_store_locked(out: Path) -> None:
    import sqlite3

    import sqlalchemy

    other = sqlite3.connect(out / "mlflow.db", isolation_level=None)
    other.execute("create table metrics (value)")
    other.execute("begin exclusive")
    engine = sqlalchemy.create_engine(f"sqlite:///{out}/mlflow.db", connect_args={"timeout": 0.1})
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("insert into metrics values (1)"))


def tracking_unreachable(out: Path) -> None:
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    import socket

    from mlflow import MlflowClient

    with socket.socket() as taken:  # bound and not listening: nobody else answers there
        taken.bind(("127.0.0.1", 0))
        MlflowClient(f"http://127.0.0.1:{taken.getsockname()[1]}").create_experiment("any")


def cache_shared_filesystem(out: Path) -> None:
    import errno

    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _slurm(why: str) -> None:
    print(f"slurmstepd: error: *** JOB 37 ON {os.uname().nodename} CANCELLED AT 2026-01-02T03:04:05 DUE TO {why} ***")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def scheduler_preempted(out: Path) -> None:
    _slurm("PREEMPTION")


def scheduler_time_limit(out: Path) -> None:
    _slurm("TIME LIMIT")


def workload_bad_setting(out: Path) -> None:
    from dflash.settings import SettingError

    raise SettingError("drafter.block", 9000, "must be from 2 to 64")


def process_hung(out: Path) -> None:
    emit(out, "stage", stage="train")
    threading.Event().wait(300)


if __name__ == "__main__":
    globals()[sys.argv[1].replace(".", "_")](Path(sys.argv[2]))
