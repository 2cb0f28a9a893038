"""Drafters of one process under each strategy: who survives, who is parked, who runs un-compiled, who hangs never."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.attention import DFlashMask, attend_dense, visible
from dflash.events import EventReader
from dflash.probe import Probe
from dflash.settings import COMPILE_STRATEGIES, SettingError
from dflash.strategies import Aborted, Gate, Strategy, Unavailable, make

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
FAST = "aot_eager"  # traces and compiles backward late as inductor does, without the C++ compiler
SECONDS = 240  # nothing here may wait longer, not even for a C++ compiler on a busy machine


@pytest.fixture
def build(probe: Probe) -> Iterator[Callable[..., Strategy]]:
    made: list[Strategy] = []

    def build(name: str, backend: Any = FAST) -> Strategy:
        made.append(make(name, "cpu", probe, backend))
        made[-1].setup_process()
        made[-1].setup_thread()
        return made[-1]

    yield build
    for strategy in made:
        strategy.close()
    for key in ("error_on_nested_fx_trace", "force_compile_during_fx_trace"):
        setattr(torch._dynamo.config, key, key == "error_on_nested_fx_trace")


class Drafter(torch.nn.Module):
    """Two residual layers of attention, 8 wide, 2 heads over 1."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.strategy = strategy
        self.q = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.kv = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor, features: torch.Tensor, mask: DFlashMask) -> torch.Tensor:
        seen = self.strategy.prepare(mask)
        for to_q, to_kv in zip(self.q, self.kv, strict=True):
            q = to_q(x).unflatten(-1, (2, 4)).transpose(1, 2)
            k, v = to_kv(torch.cat([features, x], 1)).unsqueeze(1).chunk(2, -1)
            x = x + self.strategy.attend(q, k, v, seen).transpose(1, 2).flatten(2)
        return x


class Dense:
    prepare = staticmethod(visible)
    attend = staticmethod(attend_dense)


def step(drafter: Drafter, forward: Callable[..., torch.Tensor], context: int) -> Callable[[], torch.Tensor]:
    """A restartable forward and backward; gives the loss and all gradients as one vector."""
    made = torch.Generator().manual_seed(context)
    features, x = torch.randn(1, context, 8, generator=made), torch.randn(1, 6, 8, generator=made)
    mask = DFlashMask(torch.zeros(1, context, dtype=torch.long), torch.tensor([[1, context // 2, -1]]), block=2)

    def body() -> torch.Tensor:
        drafter.zero_grad()
        loss = forward(x, features, mask).square().mean()
        loss.backward()
        return torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in drafter.parameters())])

    return body


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread; raise the first error, or when one does not come back."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(w,), name=f"work{i}", daemon=True) for i, w in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[0]


def train_together(strategy: Strategy, contexts: list[list[int]], announced: bool = True) -> None:
    """A thread per list of contexts, one step for each; every result must equal the un-compiled one."""
    done = threading.Event()

    def drafter_work(name: str, mine: list[int]) -> None:
        strategy.setup_thread()
        with strategy.quiet():
            drafter = Drafter(strategy)
            twin = Drafter(Dense())
            twin.load_state_dict(drafter.state_dict())
            forward = strategy.compile_forward(drafter)
        for context in mine:
            shape_class = context if announced else "always the same"
            got = strategy.run(name, shape_class, step(drafter, forward, context))
            with strategy.quiet():
                expected = step(twin, twin, context)()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    def target_work() -> None:
        strategy.setup_thread()
        with strategy.quiet():
            module = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        while not done.is_set():
            with strategy.quiet(), torch.no_grad():
                module(torch.zeros(2, 8))

    drafters = [lambda i=i, mine=mine: drafter_work(f"drafter{i}", mine) for i, mine in enumerate(contexts)]
    target = threading.Thread(target=target_work, name="target", daemon=True)
    target.start()
    try:
        together(*drafters)
    finally:
        done.set()
        target.join(SECONDS)


def traced(during: Callable[[str], None]) -> Any:
    """A backend: aot_eager, with a plain symbolic trace in every compile, as Inductor makes one a process.

    While `during("forward")` or `during("backward")` runs, nn.Module is patched for all threads and, up to torch
    2.13, the FX-tracing flag is up for all. Backward compiles late.
    """

    def compiler(part: str, graph: Any) -> Any:
        def in_the_middle(x: Any) -> Any:
            during(part)
            return x

        torch.fx.symbolic_trace(in_the_middle)
        return make_boxed_func(graph)

    return aot_autograd(
        fw_compiler=lambda graph, _: compiler("forward", graph),
        bw_compiler=lambda graph, _: compiler("backward", graph),
    )


@pytest.mark.parametrize("name", ["locked", "whole"])
def test_parked_compiles_survive_new_shapes(name: str, build: Callable[..., Strategy], probe: Probe) -> None:
    """Three drafters, each with shapes of its own that keep coming, more in all than Dynamo allows by itself.

    Forward and late backward compiles throughout, each with a trace so long that anybody at work would die of it.
    """
    parts: list[str] = []

    def during(part: str) -> None:
        parts.append(part)
        time.sleep(0.02)

    train_together(build(name, traced(during)), [[8, 8, 10, 8, 16, 13], [9, 9, 11, 17], [12, 8, 12, 8, 18]])
    totals = probe.counters()
    assert totals["uncompiled_calls"] == 0
    assert totals["unexpected_compiles"] == 0
    assert totals["recompile_limit_hits"] == 0
    assert parts.count("forward") == parts.count("backward") > 8
    if name == "locked":  # one attention for all drafters
        assert parts.count("forward") == 9


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("name", ["locked", "whole", "unlocked"])
def test_an_uncompiled_module_is_called_while_another_thread_compiles(
    name: str, part: str, build: Callable[..., Strategy]
) -> None:
    """It waits under a discipline, and dies without one, whatever the version of torch."""
    tracing, called = threading.Event(), threading.Event()
    order: list[str] = []

    def during(what: str) -> None:
        if what == part:
            tracing.set()
            called.wait(SECONDS if name == "unlocked" else 0.2)
            order.append("traced")

    strategy = build(name, traced(during))

    def compiles() -> None:
        strategy.setup_thread()
        with strategy.quiet():
            drafter = Drafter(strategy)
            forward = strategy.compile_forward(drafter)
        strategy.run("drafter0", 8, step(drafter, forward, 8))

    def calls() -> None:
        module = torch.nn.Linear(2, 2)
        assert tracing.wait(SECONDS)
        try:
            with strategy.quiet(), torch.no_grad():
                module(torch.zeros(1, 2))
                order.append("called")
        finally:
            called.set()

    if name == "unlocked":
        with pytest.raises(NameError, match="not installed as a submodule"):
            together(compiles, calls)
    else:
        together(compiles, calls)
        assert order == ["traced", "called"]


@pytest.mark.parametrize("name", ["locked", "whole", "unlocked"])
def test_a_new_shape_comes_in_the_middle_of_anothers_step(name: str, build: Callable[..., Strategy]) -> None:
    """The compile waits for the end of that step; without a discipline the step, compiled long since, dies of it."""
    warm, in_the_middle, tracing, ended = (threading.Event() for _ in range(4))
    order: list[str] = []

    def during(_: str) -> None:
        if warm.is_set():
            tracing.set()
            ended.wait(SECONDS if name == "unlocked" else 0)
            order.append("traced")

    strategy = build(name, traced(during))

    def made() -> tuple[Drafter, Callable[..., torch.Tensor]]:
        strategy.setup_thread()
        with strategy.quiet():
            drafter = Drafter(strategy)
            return drafter, strategy.compile_forward(drafter)

    def steps() -> None:
        whole_step = step(*made(), 8)
        strategy.run("drafter0", 8, whole_step)
        warm.set()

        def body() -> None:
            in_the_middle.set()
            tracing.wait(SECONDS if name == "unlocked" else 0.2)
            whole_step()
            order.append("stepped")

        try:
            strategy.run("drafter0", 8, body)
        finally:
            ended.set()

    def compiles() -> None:
        new = made()
        assert in_the_middle.wait(SECONDS)
        strategy.run("drafter1", 9, step(*new, 9))

    if name == "unlocked":
        with pytest.raises((NameError, RuntimeError), match=r"not installed as a submodule|FX to symbolically trace"):
            together(steps, compiles)
    else:
        together(steps, compiles)
        assert order == ["stepped", "traced", "traced"]


@pytest.mark.parametrize("name", ["locked", "whole"])
def test_an_unannounced_shape_is_caught_and_reported(
    name: str, build: Callable[..., Strategy], probe: Probe, tmp_path: Path
) -> None:
    train_together(build(name), [[8, 8, 10, 10, 8], [8, 12, 8, 12]], announced=False)
    totals = probe.counters()
    assert totals["unexpected_compiles"] >= 2
    assert totals["uncompiled_calls"] == 0
    events = list(EventReader(tmp_path / "events.jsonl").poll())
    warned = [e for e in events if e["event"] == "warning" and e["code"] == "compile.unexpected"]
    assert len(warned) == totals["unexpected_compiles"]
    assert "always the same" in warned[0]["message"]


def test_a_late_backward_is_caught_too(build: Callable[..., Strategy], tmp_path: Path, probe: Probe) -> None:
    """Torch's stance does not see a backward that compiles long after its forward; the strategy does."""
    strategy = build("locked")
    q = torch.ones(1, 2, 6, 4, requires_grad=True)
    k = torch.ones(1, 1, 14, 4)
    seen = torch.ones(1, 1, 6, 14, dtype=torch.bool)

    def forward() -> torch.Tensor:
        return strategy.attend(q, k, k, seen).sum()

    strategy.run("drafter0", 8, forward)
    strategy.run("drafter0", 8, lambda: forward().backward())
    events = EventReader(tmp_path / "events.jsonl").poll()
    (reason,) = [e["message"] for e in events if e.get("code") == "compile.unexpected"]
    assert "outside the time set aside" in reason
    assert probe.counters()["unexpected_compiles"] == 1
    assert q.grad is not None


def test_locked_with_inductor(build: Callable[..., Strategy], probe: Probe) -> None:
    train_together(build("locked", "inductor"), [[8, 8], [10, 10], [8, 8]])
    totals = probe.counters()
    assert totals["uncompiled_calls"] == 0
    assert totals["graphs"] >= 2


class PausedTrace:
    """A thread inside make_fx for as long as the block lasts: the FX-tracing flag is up."""

    def __enter__(self) -> None:
        inside, self._go = threading.Event(), threading.Event()

        def traced(x: torch.Tensor) -> torch.Tensor:
            inside.set()
            self._go.wait(SECONDS)
            return x + 1

        self._thread = threading.Thread(target=lambda: make_fx(traced)(torch.zeros(2)), name="tracer")
        self._thread.start()
        assert inside.wait(SECONDS)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(SECONDS)


def attention_during_a_trace(strategy: Strategy) -> None:
    """One warm compiled call while another thread traces, on functions: modules fail of the other race."""
    q, k, v = (torch.randn(1, 2, n, 4) for n in (4, 12, 12))
    seen = torch.ones(1, 1, 4, 12, dtype=torch.bool)
    strategy.attend(q, k, v, seen)
    with PausedTrace():
        out = strategy.attend(q, k, v, seen)
    torch.testing.assert_close(out, attend_dense(q, k, v, seen))


@pytest.mark.skipif(VERSION > (2, 13), reason="the flag belongs to the thread")
@pytest.mark.parametrize("name", ["unlocked", "firstlock"])
def test_without_discipline_a_trace_elsewhere_kills(name: str, build: Callable[..., Strategy]) -> None:
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        attention_during_a_trace(build(name))


@pytest.mark.skipif(VERSION > (2, 13), reason="the flag belongs to the thread")
def test_suppressed_runs_dense_and_the_probe_counts_it(build: Callable[..., Strategy], probe: Probe) -> None:
    attention_during_a_trace(build("suppressed"))
    assert probe.counters()["uncompiled_calls"] == 1
    assert probe.counters()["attention_calls"] == 2


def test_forced_stays_compiled_during_a_trace(build: Callable[..., Strategy], probe: Probe) -> None:
    attention_during_a_trace(build("forced"))
    assert probe.counters()["uncompiled_calls"] == 0


def test_patched_cures_the_flag() -> None:
    """In a process of its own, because the patch stays."""
    code = """
import torch
from dflash.probe import Probe
from dflash.strategies import make
from test_strategies import attention_during_a_trace

early = torch.compile(torch.sin, backend="aot_eager")  # made before the patch, and cured all the same
early(torch.zeros(2))
probe = Probe()
probe.install()
strategy = make("patched", "cpu", probe, "aot_eager")
strategy.setup_process()
strategy.setup_thread()
attention_during_a_trace(strategy)
from test_strategies import PausedTrace
with PausedTrace():
    early(torch.zeros(2))
assert probe.counters()["uncompiled_calls"] == 0
assert probe.flag_stuck() == "thread-local"
print(probe.notes[-1])
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    assert ("was made thread-local" if VERSION <= (2, 13) else "nothing to do") in ended.stdout


def test_what_compiling_needs_is_there_before_anybody_is_parked_for_it() -> None:
    code = """
import sys
from dflash.probe import Probe
from dflash.strategies import make

for name, wanted in (("eager", False), ("locked", True)):
    make(name, "cpu", Probe()).compile_forward(abs)
    assert ("torch._inductor.compile_fx" in sys.modules) == wanted, name
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


def test_eager_compiles_nothing(build: Callable[..., Strategy], probe: Probe) -> None:
    train_together(build("eager"), [[8, 9], [10]])
    totals = probe.counters()
    assert totals["compiles"] == 0
    assert totals["uncompiled_calls"] == 0
    assert totals["attention_calls"] == 6


def test_close_lets_the_process_compile_again(build: Callable[..., Strategy]) -> None:
    strategy = build("locked")
    doubled = torch.compile(lambda x: x * 2, backend=FAST)
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        doubled(torch.ones(3))
    strategy.close()
    assert doubled(torch.ones(3)).tolist() == [2, 2, 2]
    strategy.setup_process()  # so that the fixture closes what is open


@pytest.mark.parametrize("name", ["locked", "whole"])
def test_a_worker_that_dies_releases_the_others(name: str, build: Callable[..., Strategy]) -> None:
    strategy = build(name)

    def dies() -> None:
        def body() -> None:
            raise ValueError("no batch")

        for _ in range(2):
            with pytest.raises(ValueError, match="no batch"):
                strategy.run("drafter0", 1, body)
        with pytest.raises(KeyError), strategy.quiet():
            raise KeyError

    together(dies)
    together(lambda: strategy.run("drafter1", 1, lambda: None), lambda: strategy.run("drafter2", 1, lambda: None))


def test_abort_wakes_everybody_who_waits(build: Callable[..., Strategy]) -> None:
    strategy = build("locked")
    compiling, aborted = threading.Event(), threading.Event()

    def slow_body() -> None:
        compiling.set()
        assert aborted.wait(SECONDS)

    def waits(enter: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            assert compiling.wait(SECONDS)
            with pytest.raises(Aborted):
                enter()

        return work

    def aborts() -> None:
        assert compiling.wait(SECONDS)
        time.sleep(0.05)  # let the others begin to wait; they must come back in either case
        strategy.abort()
        aborted.set()

    together(
        lambda: strategy.run("drafter0", 1, slow_body),
        waits(lambda: strategy.run("drafter1", 1, lambda: None)),
        waits(lambda: strategy.quiet().__enter__()),
        aborts,
    )
    with pytest.raises(Aborted):
        strategy.run("drafter0", 1, lambda: None)


def test_the_gate_never_mixes_work_and_compiling() -> None:
    gate = Gate()
    working, compiling, seen = [0], [0], set()
    count = threading.Lock()

    def enter(counter: list[int], by: int) -> None:
        with count:
            counter[0] += by
            seen.add((working[0] > 0, compiling[0]))

    def works() -> None:
        for _ in range(300):
            with gate.shared(), gate.shared():
                enter(working, 1)
                enter(working, -1)

    def compiles() -> None:
        for _ in range(50):
            with gate.exclusive(), gate.shared():
                assert gate.compiling
                enter(compiling, 1)
                enter(compiling, -1)

    together(works, works, works, compiles, compiles)
    assert seen <= {(True, 0), (False, 1), (False, 0)}
    assert (False, 1) in seen
    assert not gate.compiling


def test_work_that_never_stops_does_not_starve_a_compile() -> None:
    gate, done = Gate(), threading.Event()

    def works() -> None:
        while not done.is_set():
            with gate.shared():
                time.sleep(0.001)

    def compiles() -> None:
        with gate.exclusive():
            done.set()

    together(works, works, works, compiles)
    assert done.is_set()


def test_asking_to_be_alone_from_inside_is_refused() -> None:
    gate = Gate()
    with gate.shared(), pytest.raises(RuntimeError, match="wait for itself"), gate.exclusive():
        pass


def test_names(probe: Probe) -> None:
    with pytest.raises(SettingError, match="compile=fast: must be one of locked, whole"):
        make("fast", "cpu", probe)
    with pytest.raises(Unavailable, match="needs CUDA"):
        make("triton", "cpu", probe)
    for name in set(COMPILE_STRATEGIES) - {"triton"}:
        assert make(name, "cpu", probe).name == name
