"""A deadlock of compilers, a compile without end, and hangs that are neither."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeper.signatures.stacks import deadlock, endless_compile

LIB = "/v/lib/python3.12/site-packages"
# The stacks of drafters hung on one H200 (benchmarks/results/race-torch2.11.0-h200.json) as faulthandler printed them,
# with the frames that were cut off there put in by the account in docs/STRATEGIES.md: who traces waits for autograd.
TRACES_AND_WAITS = f"""Thread 0x00007f02a0000001 (most recent call first):
  File "{LIB}/torch/autograd/graph.py", line 869 in _engine_run_backward
  File "{LIB}/torch/autograd/__init__.py", line 530 in grad
  File "{LIB}/torch/_higher_order_ops/flex_attention.py", line 702 in joint_f
  File "{LIB}/torch/fx/experimental/proxy_tensor.py", line 1424 in wrapped
  File "{LIB}/torch/_functorch/_aot_autograd/graph_capture.py", line 60 in _create_graph
  File "{LIB}/torch/_inductor/compile_fx.py", line 2600 in compile_fx
  File "{LIB}/torch/_dynamo/convert_frame.py", line 2314 in __call__
  File "{LIB}/torch/_dynamo/eval_frame.py", line 1024 in compile_wrapper
  File "/x/race.py", line 169 in body
"""
COMPILES_BACKWARD = f"""Thread 0x00007fdec72886c0 (most recent call first):
  File "{LIB}/torch/_inductor/compile_fx.py", line 2418 in compile_fx_backward
  File "{LIB}/torch/_inductor/compile_fx.py", line 2757 in bw_compiler
  File "{LIB}/torch/_utils_internal.py", line 96 in wrapper_function
  File "{LIB}/torch/_dynamo/eval_frame.py", line 1263 in _fn
  File "{LIB}/torch/_functorch/_aot_autograd/runtime_wrappers.py", line 2889 in _backward_impl
  File "{LIB}/torch/_functorch/_aot_autograd/runtime_wrappers.py", line 2748 in backward
  File "{LIB}/torch/autograd/function.py", line 317 in apply
"""
STEPS_BACKWARD = f"""Thread 0x00007effd5edd6c0 (most recent call first):
  File "{LIB}/torch/autograd/graph.py", line 869 in _engine_run_backward
  File "{LIB}/torch/autograd/__init__.py", line 381 in backward
  File "{LIB}/torch/_tensor.py", line 631 in backward
  File "{LIB}/torch/_dynamo/eval_frame.py", line 1263 in _fn
  File "/x/race.py", line 169 in body
"""
WAITS_FOR_LOCK = f"""Thread 0x00007fe4259376c0 (most recent call first):
  File "{LIB}/torch/_dynamo/convert_frame.py", line 2314 in __call__
  File "{LIB}/torch/_dynamo/eval_frame.py", line 1024 in compile_wrapper
  File "{LIB}/torch/nn/attention/flex_attention.py", line 1731 in flex_attention
  File "/x/flex.py", line 31 in attend_flex
"""
JOINS = """Thread 0x00007f02d4890140 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 1167 in _wait_for_tstate_lock
  File "/usr/lib/python3.12/threading.py", line 1147 in join
  File "/x/race.py", line 195 in trial
"""
IN_PTXAS = f"""Thread 0x00007f1111111111 (most recent call first):
  File "/usr/lib/python3.12/subprocess.py", line 1264 in wait
  File "/usr/lib/python3.12/subprocess.py", line 550 in run
  File "{LIB}/triton/backends/nvidia/compiler.py", line 440 in make_cubin
  File "{LIB}/triton/compiler/compiler.py", line 320 in compile
  File "{LIB}/torch/_inductor/runtime/triton_heuristics.py", line 800 in _precompile_config
  File "{LIB}/torch/_dynamo/convert_frame.py", line 2314 in __call__
  File "/x/dflash/strategies/locked.py", line 80 in run
"""
AT_THE_GATE = """Thread 0x00007f2222222222 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/usr/lib/python3.12/threading.py", line 390 in wait_for
  File "/x/dflash/strategies/gate.py", line 92 in _wait
"""
WAITS_FOR_POOL = f"""Thread 0x00007f3333333333 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/usr/lib/python3.12/concurrent/futures/_base.py", line 451 in result
  File "{LIB}/torch/_inductor/async_compile.py", line 690 in _wait_futures
  File "{LIB}/torch/_inductor/async_compile.py", line 660 in wait
"""


def test_the_deadlock_of_two_drafters_on_one_gpu() -> None:
    found = deadlock(JOINS + WAITS_FOR_LOCK + COMPILES_BACKWARD + TRACES_AND_WAITS + STEPS_BACKWARD)
    assert found is not None
    assert "0x00007f02a0000001" in found
    assert "0x00007fdec72886c0" in found


@pytest.mark.parametrize(
    "stacks",
    [
        "",
        JOINS,
        STEPS_BACKWARD + COMPILES_BACKWARD + JOINS,  # a step's own late backward compile: slow, not stuck
        STEPS_BACKWARD + WAITS_FOR_LOCK,
        TRACES_AND_WAITS + WAITS_FOR_LOCK + JOINS,  # a trace that others wait for
        IN_PTXAS + AT_THE_GATE + JOINS,
        f"== py-spy dump of pid 1\n{TRACES_AND_WAITS}\n== py-spy dump of pid 2\n{COMPILES_BACKWARD}",
    ],
)
def test_what_is_no_deadlock(stacks: str) -> None:
    assert deadlock(stacks) is None


@pytest.mark.parametrize("stacks", [IN_PTXAS + AT_THE_GATE, JOINS + IN_PTXAS, WAITS_FOR_POOL + AT_THE_GATE])
def test_a_compile_without_end(stacks: str) -> None:
    found = endless_compile(stacks)
    assert found is not None
    assert "make_cubin" in found or "compile worker" in found


@pytest.mark.parametrize("stacks", ["", AT_THE_GATE + JOINS, WAITS_FOR_LOCK, STEPS_BACKWARD])
def test_waiting_alone_is_no_compile(stacks: str) -> None:
    assert endless_compile(stacks) is None


def test_py_spy_tells_the_same() -> None:
    spy = """== py-spy dump --native of pid 71
Thread 72 (idle): "drafter0"
    __poll (libc.so.6)
    wait (subprocess.py:1264)
    run (subprocess.py:550)
    make_cubin (triton/backends/nvidia/compiler.py:440)
    compile (triton/compiler/compiler.py:320)
"""
    found = endless_compile(spy)
    assert found is not None
    assert '"drafter0"' in found


def kept(name: str) -> list[str]:
    """What py-spy and faulthandler told of a hang on H200s (docs/INCIDENT.md), a dump each."""
    text = (Path(__file__).parent / "data" / "stacks" / f"{name}.txt").read_text()
    return re.split(r"(?m)^(?=== )", text)[1:]


def test_a_deadlock_as_two_tools_saw_it() -> None:
    """compile=suppressed, three drafters on two H200s: either tool alone is enough."""
    spy, faulthandler = kept("h200-deadlock")
    says = "{} waits for autograd inside a compile while {} compiles a backward"
    assert deadlock(spy) == says.format('Thread 21682 "drafter2"', "Thread 21722")
    assert deadlock(faulthandler) == says.format("Thread 0x00007fd674ffd6c0", "Thread 0x00007fd5b9fff6c0")
    assert endless_compile(spy + faulthandler) is None


def test_a_kernel_that_takes_minutes_as_two_tools_saw_it() -> None:
    """compile=whole: 31 idle compile workers and one in Triton's first stages, at the sort of the tile lists."""
    dumps = kept("h200-endless-kernel")
    assert deadlock("".join(dumps)) is None
    found = endless_compile("".join(dumps))
    assert found is not None
    assert "waits for a compile worker" in found
    assert found.endswith("which is at CUDABackend.make_llir")
    assert endless_compile(dumps[-1]) is not None
    assert all(endless_compile(idle) is None for idle in dumps[1:3])
