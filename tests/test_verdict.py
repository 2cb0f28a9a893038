"""Every run gets exactly one verdict, and the signature names the root."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import BEGAN, events, proof
from test_measure import ODD_EVENTS

from sweeper.signatures import rules
from sweeper.verdict import VERDICTS, Evidence, Verdict, deadlock, judge

RACE = "Detected that you are using FX to symbolically trace a dynamo-optimized function."
MEMORY = "CUDA out of memory. Tried to allocate 36.71 GiB."
DENSE_WARNING = "UserWarning: flex_attention called without torch.compile() - this will use an unfused"


def given_run(**changes: Any) -> Verdict:
    plain: dict[str, Any] = {
        "exit_code": 0,
        "signal": None,
        "ended_by": "itself",
        "hung_stage": None,
        "events": [],
        "bad_events": 0,
        "log_tail": "",
        "stacks": "",
        "cache": None,
    }
    return judge(Evidence(**(plain | changes)))


def failure(kind: str, message: str, at: float = BEGAN + 30, **fields: Any) -> dict[str, Any]:
    return {"t": at, "event": "failure", "type": kind, "message": message, "traceback": "", **fields}


def cause(verdict: Verdict) -> str | None:
    return verdict.signature.cause if verdict.signature else None


def test_a_good_run_is_ok() -> None:
    assert given_run(events=events()) == Verdict("ok", None, "")
    assert given_run(events=events(), cache=proof("warm")).verdict == "ok"


def test_a_command_without_events_is_judged_by_its_exit() -> None:
    assert given_run().verdict == "ok"
    failed = given_run(exit_code=3, log_tail="line\nboom went the run\n")
    assert (failed.verdict, cause(failed)) == ("failed", "unknown")
    assert failed.reason == "exit status 3: boom went the run"


@pytest.mark.parametrize(
    ("changes", "verdict", "named"),
    [
        ({"ended_by": "skipped", "exit_code": None, "reason": "needs CUDA"}, "skipped", None),
        ({"ended_by": "interrupt", "exit_code": None, "signal": 15}, "killed", "sweep.interrupted"),
        ({"ended_by": "hung", "exit_code": None, "signal": 9, "hung_stage": "train"}, "hung", "process.hung"),
        ({"exit_code": None, "signal": 9}, "killed", "process.sigkill"),
        ({"exit_code": 137}, "killed", "process.sigkill"),
        ({"exit_code": -9}, "killed", "process.sigkill"),
        ({"exit_code": None, "signal": 9, "log_tail": "x\nDetected 1 oom-kill event(s)"}, "killed", "memory.host_oom"),
        ({"exit_code": None, "signal": 9, "reason": "Out of memory: Killed process 7"}, "killed", "memory.host_oom"),
        ({"exit_code": None, "signal": 11}, "failed", "process.segfault"),
        ({"exit_code": None, "signal": 7}, "failed", "process.segfault"),
        ({"exit_code": None, "signal": 6, "log_tail": "terminate called"}, "failed", "unknown"),
        ({"exit_code": None, "signal": 15}, "killed", "unknown"),
        ({"exit_code": None}, "failed", "unknown"),
        ({"exit_code": 1, "log_tail": "MemoryError"}, "failed", "memory.host_oom"),
        ({"exit_code": 2, "log_tail": "drafter.block=9: must be from 2 to 8"}, "failed", "workload.bad_setting"),
        ({"exit_code": 2, "log_tail": "usage: train [-h]"}, "failed", "unknown"),
        ({"exit_code": 1, "log_tail": DENSE_WARNING + "\nValueError: other"}, "failed", "unknown"),
        ({"exit_code": 1, "log_tail": DENSE_WARNING + "\n" + MEMORY}, "failed", "attention.dense_fallback"),
    ],
)
def test_ends(changes: dict[str, Any], verdict: str, named: str | None) -> None:
    found = given_run(**changes)
    assert (found.verdict, cause(found)) == (verdict, named)


def test_a_killing_line_outranks_nothing_else_in_the_log() -> None:
    """Only what can explain a kill is taken from the log of a killed run."""
    found = given_run(exit_code=None, signal=9, log_tail="OSError: [Errno 24] Too many open files (handled)")
    assert cause(found) == "process.sigkill"


@pytest.mark.parametrize(
    ("kind", "message", "named"),
    [
        ("RuntimeError", RACE, "compile.fx_trace_race"),
        ("NameError", "module is not installed as a submodule", "compile.module_call_race"),
        ("AssertionError", "CURRENT_PATCHER is None in finally block", "compile.module_call_race"),
        ("OutOfMemoryError", MEMORY, "memory.gpu_oom"),
        ("KeyError", "'custom'", "unknown"),
        ("WorkerDied", "worker process drafter1 ended by signal SIGKILL", "process.sigkill"),
        ("WorkerDied", "worker process target0 ended by signal SIGSEGV", "process.segfault"),
        ("WorkerDied", "worker process drafter0 ended by status 1", "unknown"),
    ],
)
def test_the_failure_event_names_the_cause(kind: str, message: str, named: str) -> None:
    told = [*events(steps=2)[:-1], failure(kind, message)]
    found = given_run(exit_code=1, events=told, log_tail="later noise\nRuntimeError: received 0 items of ancdata")
    assert (found.verdict, cause(found)) == ("failed", named)


def test_the_first_failure_is_the_root() -> None:
    told = [failure("RuntimeError", "the queue is closed", at=9.0), failure("RuntimeError", RACE, at=8.0)]
    assert cause(given_run(exit_code=1, events=told)) == "compile.fx_trace_race"


def test_a_hang_after_a_failure_is_the_failure() -> None:
    found = given_run(ended_by="hung", hung_stage="train", events=[failure("RuntimeError", RACE)])
    assert (found.verdict, cause(found)) == ("hung", "compile.fx_trace_race")
    assert "train" in found.reason


def test_out_of_memory_after_dense_attention_is_the_dense_attention() -> None:
    dense = {"t": BEGAN + 1, "event": "counters", "pid": 1, "uncompiled_calls": 4}
    told = [dense, failure("OutOfMemoryError", MEMORY)]
    assert cause(given_run(exit_code=1, events=told)) == "attention.dense_fallback"
    eager = [{"t": BEGAN, "event": "start", "compile": "eager"}, *told]
    assert cause(given_run(exit_code=1, events=eager)) == "memory.gpu_oom"
    later = [dense | {"t": BEGAN + 99}, failure("OutOfMemoryError", MEMORY)]
    assert cause(given_run(exit_code=1, events=later)) == "memory.gpu_oom"


def test_exit_0_without_a_last_word_is_a_failure() -> None:
    found = given_run(events=events()[:-1])
    assert (found.verdict, cause(found), found.reason) == ("failed", "unknown", "ended without its last word")
    lied = given_run(events=[*events()[:-1], {"t": BEGAN + 99, "event": "end", "status": "failed"}])
    assert lied.verdict == "failed"
    stopped = given_run(events=[*events()[:-1], {"t": BEGAN + 99, "event": "end", "status": "interrupted"}])
    assert (stopped.verdict, cause(stopped)) == ("killed", "sweep.interrupted")


def test_an_interrupt_that_came_when_all_was_done_costs_nothing() -> None:
    late = {"ended_by": "interrupt", "reason": "interrupted"}
    assert given_run(events=events(), **late) == Verdict("ok", None, "")
    assert cause(given_run(**late)) == "sweep.interrupted", "a command that ends with 0 when asked"
    assert cause(given_run(events=events(), **late, exit_code=None, signal=9)) == "sweep.interrupted"


@pytest.mark.parametrize("ends", [{"exit_code": 75}, {"exit_code": 143}, {"exit_code": 0}])
@pytest.mark.parametrize("status", ["requeue", "interrupted"])
def test_a_job_that_was_asked_to_end_is_no_failure(ends: dict[str, Any], status: str) -> None:
    last = {"t": BEGAN + 99, "event": "end", "status": status}
    saved = [{"t": BEGAN + n, "event": "checkpoint", "step": n, "folder": f"/out/step-{n}"} for n in (5, 8)]
    found = given_run(events=[*events(steps=8)[:-1], *saved, last], **ends)
    assert (found.verdict, cause(found)) == ("killed", "sweep.interrupted")
    assert found.reason == "the job was asked to end; checkpoint of step 8 in /out/step-8"
    by_us = given_run(events=[*events(steps=8)[:-1], *saved, last], ended_by="interrupt", **ends)
    assert by_us.reason == "interrupted; checkpoint of step 8 in /out/step-8"
    broken = given_run(events=[failure("RuntimeError", RACE), last], **ends)
    assert cause(broken) == "compile.fx_trace_race", "a failure of its own comes first"


def test_the_status_to_requeue_counts_though_the_last_word_was_lost() -> None:
    assert cause(given_run(exit_code=75, events=events(steps=2)[:-1])) == "sweep.interrupted"
    assert cause(given_run(exit_code=75, log_tail="no such file")) == "unknown", "another command means something else"


def changed(event: str, **fields: Any) -> list[dict[str, Any]]:
    return [e | fields if e["event"] == event else e for e in events()]


@pytest.mark.parametrize(
    ("changes", "named", "said"),
    [
        (
            {"events": changed("counters", uncompiled_calls=7, attention_calls=21)},
            "attention.dense_fallback",
            "7 of 21",
        ),
        (
            {"events": [{"t": 1, "event": "compile", "steady": True, "worker": "drafter-1"}, *events()]},
            "compile.recompiled",
            "drafter-1",
        ),
        ({"events": changed("step", loss=None, nonfinite=["loss"])}, "numerics.nan", "first in step 1"),
        ({"events": changed("step", variant="b8", grad_norm=None, nonfinite=["grad_norm"])}, "numerics.nan", "1 of b8"),
        ({"events": events(), "cache": proof("warm", "mixed")}, "cache.warm_missed", "proved mixed: as counted"),
    ],
)
def test_a_run_whose_figures_mislead_is_degraded(changes: dict[str, Any], named: str, said: str) -> None:
    found = given_run(**changes)
    assert (found.verdict, cause(found)) == ("degraded", named)
    assert said in found.reason


def test_every_doubt_is_told() -> None:
    told = changed("step", loss=None, nonfinite=["loss"])
    found = given_run(events=told, cache=proof("warm", "mixed"))
    assert cause(found) == "numerics.nan"
    assert "proved mixed" in found.reason


def test_eager_attention_is_not_a_fallback() -> None:
    told = [e | {"compile": "eager"} if e["event"] == "start" else e for e in changed("counters", uncompiled_calls=7)]
    assert given_run(events=told).verdict == "ok"


def test_a_mixed_cold_run_is_no_failure_and_compiles_in_warmup_are_none() -> None:
    told = [{"t": 1, "event": "compile", "steady": False, "worker": "d"}, *events()]
    assert given_run(events=told, cache=proof("cold", "mixed")).verdict == "ok"


def test_unreadable_events_are_a_note() -> None:
    found = given_run(events=events(), bad_events=3)
    assert (found.verdict, found.reason) == ("ok", "3 lines of events were unreadable")


DEADLOCK = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/_functorch/_aot_autograd/runtime_wrappers.py", line 2 in _compile_backward
  File "/v/lib/python3.11/site-packages/torch/autograd/function.py", line 307 in apply
Thread 0x00007f0000000002 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/v/lib/python3.11/site-packages/torch/autograd/__init__.py", line 500 in grad
  File "/v/lib/python3.11/site-packages/torch/_higher_order_ops/flex_attention.py", line 9 in joint
  File "/v/lib/python3.11/site-packages/torch/_functorch/_aot_autograd/graph_capture.py", line 8 in trace
Thread 0x00007f0000000003 (most recent call first):
  File "/v/lib/python3.11/threading.py", line 331 in wait
"""
SLOW = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/_inductor/codecache.py", line 2 in compile
  File "/v/lib/python3.11/site-packages/torch/_dynamo/convert_frame.py", line 307 in compile_inner
Thread 0x00007f0000000002 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 500 in backward
  File "/x/dflash/train.py", line 9 in step
"""


def test_a_compile_deadlock_is_told_from_a_slow_compile() -> None:
    found = given_run(ended_by="hung", hung_stage="warmup", stacks=DEADLOCK)
    assert (found.verdict, cause(found)) == ("hung", "compile.deadlock")
    assert found.signature is not None
    assert "0x00007f0000000002" in found.signature.evidence
    assert deadlock(SLOW) is None
    assert cause(given_run(ended_by="hung", hung_stage="warmup", stacks=SLOW)) == "process.hung"


SPY = """\
== py-spy dump --native of pid 71
Thread 71 (idle): "MainThread"
    join (threading.py:1119)
Thread 72 (idle): "drafter1"
    pthread_cond_wait (libc.so.6)
    torch::autograd::ReadyQueue::pop (engine.cpp:200)
    _engine_run_backward (torch/autograd/graph.py:829)
    joint (torch/_higher_order_ops/flex_attention.py:9)
    trace (torch/_functorch/_aot_autograd/graph_capture.py:8)
"""
SAME_THREAD = """
== what the child printed when aborted
Thread 0x00007f0000000002 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/v/lib/python3.11/site-packages/torch/_higher_order_ops/flex_attention.py", line 9 in joint
  File "/v/lib/python3.11/site-packages/torch/_functorch/_aot_autograd/graph_capture.py", line 8 in trace
"""


def test_one_thread_in_two_dumps_is_no_deadlock() -> None:
    assert deadlock(SPY + SAME_THREAD) is None
    other = """Thread 73 (idle): "autograd"
    _compile_backward (torch/_functorch/_aot_autograd/runtime_wrappers.py:2)
"""
    found = deadlock(SPY + other + SAME_THREAD)
    assert found is not None
    assert "drafter1" in found


ANY_RUN = st.fixed_dictionaries(
    {
        "exit_code": st.one_of(st.none(), st.integers(-70, 300)),
        "signal": st.one_of(st.none(), st.integers(1, 70)),
        "ended_by": st.sampled_from(["itself", "hung", "interrupt", "skipped"]),
        "events": st.lists(ODD_EVENTS, max_size=5),
        "bad_events": st.integers(0, 3),
        "log_tail": st.sampled_from(["", "\n", "x=1: y", RACE, DENSE_WARNING, "Traceback (most recent call last):\n"]),
        "stacks": st.sampled_from(["", "Thread 1", DEADLOCK]),
        "cache": st.sampled_from([None, {}, {"requested": "warm"}, proof("cold")]),
    }
)


@given(ANY_RUN)
def test_any_run_gets_one_verdict_with_a_known_cause(changes: dict[str, Any]) -> None:
    found = given_run(**changes)
    assert found.verdict in VERDICTS
    assert (found.signature is None) == (found.verdict in ("ok", "skipped"))
    if found.signature:
        assert found.signature.cause in rules()
        assert len(found.signature.fingerprint) == 12
        assert found.signature.remedy
