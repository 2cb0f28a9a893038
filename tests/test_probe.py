"""The probe names who traced, counts what ran un-compiled, and tells caches and memory."""

import json
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.events import KINDS, EventReader
from dflash.probe import Probe, environment

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class Tracing:
    """A thread called `tracer` that is inside an FX trace for as long as the `with` block lasts."""

    def __init__(self, trace: Callable[[Callable[[Any], Any]], object]) -> None:
        self._inside, self._go = threading.Event(), threading.Event()

        def traced(x: Any) -> Any:
            self._inside.set()
            self._go.wait(20)
            return x

        self._thread = threading.Thread(target=trace, args=(traced,), name="tracer")

    def __enter__(self) -> None:
        self._thread.start()
        assert self._inside.wait(20)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(20)


def test_the_race_and_who_held_the_flag(probe: Probe) -> None:
    """A warm compiled call dies while another thread traces, up to torch 2.13; the probe names that thread."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
    compiled(torch.zeros(4))
    with Tracing(lambda f: make_fx(f)(torch.zeros(4))):
        if VERSION <= (2, 13):
            with pytest.raises(RuntimeError, match="FX to symbolically trace"):
                compiled(torch.zeros(4))
        else:
            compiled(torch.zeros(4))
        (holder,) = probe.holders(time.time())
    assert holder["thread"] == "tracer"
    assert holder["open"] is True
    assert holder["seconds_before"] == 0
    assert holder["path"] == "proxy_tensor.dispatch_trace > PythonKeyTracer.trace"
    compiled(torch.zeros(4))  # and lives once nobody traces
    (holder,) = probe.holders(time.time())
    assert holder["open"] is False
    assert holder["seconds_before"] > 0
    assert not probe.holders(time.time() + 5)


def test_a_plain_trace_breaks_modules_on_other_threads(probe: Probe) -> None:
    """The second race, on every torch seen so far: it patches nn.Module for the whole process."""
    module = torch.nn.Linear(4, 4)
    with Tracing(torch.fx.symbolic_trace):
        with pytest.raises(NameError, match="module is not installed as a submodule"):
            module(torch.zeros(1, 4))
        (holder,) = probe.holders(time.time())
    assert (holder["thread"], holder["path"]) == ("tracer", "Tracer.trace")


def test_a_thread_is_not_its_own_holder(probe: Probe) -> None:
    at = []
    torch.fx.symbolic_trace(lambda x: at.append(time.time()) or x)
    assert probe.holders(at[0]) == []
    assert probe.holders(at[0], ident=0)[0]["open"] is True


@pytest.mark.skipif(VERSION > (2, 13), reason="the flag belongs to the thread")
def test_a_stuck_flag_is_seen(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    if probe.flag_stuck() == "thread-local":
        pytest.skip("this process has been patched")
    assert probe.flag_stuck() is False
    with Tracing(lambda f: make_fx(f)(torch.zeros(4))):
        assert probe.flag_stuck() is False
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    assert probe.flag_stuck() is True


def test_compiles_are_told_apart_by_worker(probe: Probe, tmp_path: Path) -> None:
    compiled = torch.compile(lambda x: x.cos() * 2, backend="aot_eager", dynamic=False)

    def work(size: int) -> None:
        for _ in range(2):
            with probe.compiles(f"drafter{size}", (1, size)):
                compiled(torch.zeros(size, requires_grad=True)).sum().backward()

    for size in (3, 4):
        thread = threading.Thread(target=work, args=(size,), name=f"drafter{size}")
        thread.start()
        thread.join()
    events = [e for e in EventReader(tmp_path / "events.jsonl").poll() if e["event"] == "compile"]
    assert [(e["event"], e["worker"], e["what"]) for e in events] == [
        ("compile", "drafter3", "(1, 3)"),
        ("compile", "drafter4", "(1, 4)"),
    ]
    assert all(e["graphs"] >= 1 and e["seconds"] > 0 and e["steady"] is False for e in events)
    totals = probe.counters()
    assert set(totals["compile_seconds_by_thread"]) == {"drafter3", "drafter4"}
    assert totals["recompiles"] == 1  # the second size, for Dynamo a recompile of the same code
    assert totals["compiles"] == sum(e["graphs"] for e in events)


def test_counters_and_memory_have_the_fields_of_the_contract(probe: Probe) -> None:
    totals = probe.counters() | {"at": "end"}
    for field in ("caches", "graphs", "recompiles", "compile_seconds", "attention_calls", "uncompiled_calls", "at"):
        assert field in KINDS["counters"]
        assert field in totals
    assert {"hits", "misses", "bypasses"} <= totals["caches"]["aotautograd"].keys()
    assert {"hits", "misses", "bypasses"} <= totals["caches"]["fxgraph"].keys()
    memory = probe.memory()
    assert 50e6 < memory["rss_bytes"] < 64e9  # torch alone is more than 50 MB; bytes, not kilobytes
    json.dumps([totals, memory])


def test_environment_tells_the_build() -> None:
    told = environment("cpu")
    assert told["torch"] == torch.__version__
    assert told["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert told["gpus"] == []
    assert told["cpu_threads"] >= 1


def test_close_leaves_torch_as_it_was() -> None:
    trace, records = torch.fx.Tracer.trace, torch._dynamo.utils._compilation_metrics
    probe = Probe()
    probe.install()
    assert torch.fx.Tracer.trace is not trace
    probe.close()
    assert torch.fx.Tracer.trace is trace
    assert torch._dynamo.utils._compilation_metrics is records


def test_what_triton_finds_on_disk_and_what_it_compiles_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton calls its listener once a kernel, whoever else listens; the real one needs a GPU."""
    seen: list[bool] = []
    theirs = types.SimpleNamespace(listener=lambda *, cache_hit, **_: seen.append(cache_hit))
    knobs = types.SimpleNamespace(compilation=theirs)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(knobs=knobs))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = theirs.listener
    probe = Probe()
    probe.install()
    for hit in (True, False, True):
        theirs.listener(cache_hit=hit, src=None, metadata={}, metadata_group={}, times=None)
    probe.close()
    triton = probe.counters()["caches"]["triton"]
    assert (triton["hits"], triton["misses"]) == (2, 1)
    assert seen == [True, False, True]
    assert theirs.listener is before
