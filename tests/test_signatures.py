"""Causes from texts, and fingerprints that stay the same where they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.signatures import classify, fingerprint, rules, stack_fingerprint, version
from sweeper.signatures.__main__ import explained
from sweeper.signatures.document import document
from sweeper.signatures.prints import last_traceback, threads
from sweeper.signatures.text import joined, read

DATA = Path(__file__).parent / "data"


def texts(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


CASES = texts("failures")
MORE = texts("failures-tuning") + texts("failures-heldback")
DESIGN = """attention.dense_fallback cache.concurrent_write cache.corrupt cache.shared_filesystem cache.warm_missed
checkpoint.corrupt compile.deadlock compile.fx_trace_race compile.nested_jit_trace compile.no_valid_choices
compile.recompile_limit compile.worker_died cuda.device_assert cuda.driver_too_old cuda.illegal_access
cuda.no_kernel_image cuda.not_initialised ddp.unused_parameters env.library_mismatch env.toolchain_missing
hardware.ecc hardware.gpu_lost host.disk_full host.file_descriptors memory.gpu_oom memory.host_oom
memory.shm_exhausted nccl.system_error nccl.timeout numerics.mismatch numerics.nan process.hung process.segfault
process.sigkill scheduler.cancelled scheduler.job_lost scheduler.node_failed scheduler.preempted scheduler.refused
scheduler.time_limit tracking.store_locked tracking.unreachable
triton.out_of_shared_memory unknown compile.module_call_race compile.recompiled sweep.interrupted
sweep.harness_died sweep.code_changed workload.bad_setting
workload.not_found workload.pattern_unmatched compile.no_end env.wheel_unavailable"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_failures_are_named(case: dict[str, str]) -> None:
    match = classify(case["text"])
    assert match is not None
    assert match.cause == case["cause"]
    assert match.evidence in case["text"]


@pytest.mark.parametrize("case", CASES + MORE, ids=lambda case: case["id"])
def test_and_are_named_in_the_middle_of_a_log(case: dict[str, str]) -> None:
    """Nothing but the right cause, or none: a wrong one is worse."""
    log = f"step 3 loss 5.01\n{case['text']}\nstep 4 loss 4.98\n"
    match = classify(log)
    assert (match.cause if match else "unknown") in (case["cause"], "unknown" if case in MORE else "")


def test_nearly_all_public_failures_of_other_words_are_named() -> None:
    broken = [case for case in MORE if case["cause"] != "unknown"]
    named = [case for case in broken if classify(case["text"]) is not None]
    assert len(named) >= 0.95 * len(broken)


@pytest.mark.parametrize("ordinary", texts("ordinary"), ids=lambda ordinary: ordinary["text"][:40])
def test_ordinary_logs_and_errors_of_the_user_name_nothing(ordinary: dict[str, str]) -> None:
    assert classify(ordinary["text"]) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.parametrize(
    "prefix",
    [
        *("[rank3]:", "[rank3]: ", "3: ", "[default3]:", "[1,3]<stderr>:", "(RayWorker pid=71, ip=10.0.0.2) "),
        "(EngineCore_DP0 pid=43) ERROR 03-20 17:39:14 [core.py:1100] ",
        "(VllmWorkerProcess pid=67) ERROR 09-25 06:40:46 multiproc_worker_utils.py:226] ",
        "[rank6]:E1211 16:33:14.602000 1463070 site-packages/torch/_inductor/codecache.py:810] [0/0] ",
        "[2024-12-07 02:54:42 TP0] ",
        "2024-12-07T02:54:42.123Z ",
    ],
)
def test_a_rank_before_each_line_changes_nothing(case: dict[str, str], prefix: str) -> None:
    match = classify("".join(f"{prefix}{line}\n" for line in case["text"].splitlines()))
    assert match is not None
    assert match.cause == case["cause"]


def test_the_list_is_closed_and_documented() -> None:
    assert set(rules()) == set(DESIGN.split())
    for rule in rules().values():
        assert rule.about
        assert rule.evidence
        assert rule.remedy
        assert rule.source
        assert set(rule.explains) <= set(rules())


@pytest.mark.parametrize("cause", [rule.cause for rule in rules().values() if rule.examples])
def test_examples_of_rules_fit(cause: str) -> None:
    for example in rules()[cause].examples:
        match = classify(example)
        assert match is not None
        assert match.cause == cause


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 12/60 loss 4.21 accept 1.31 killed 0 of 9 rows, out of memory budget: no",
        "INFO saving checkpoint to /data/nan/oom/timeout/segfault.pt",
        "the drafter was killed by curiosity",
        "nccl version 2.27.3, watchdog started, timeout 600 s",
        "UserWarning: torch.compile: recompiling with dynamic shapes",
        "compiled flex_attention in 12.1 s; cache hit",
        "RuntimeError: something nobody has seen before",
        "loss: nan guard enabled",
        "No space left in queue",
        "retrying: connection refused",
        "DeprecationWarning: torch.jit.trace is deprecated",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "KeyError: 'custom'",
        "NameError: name 'module' is not defined",
    ],
)
def test_ordinary_text_names_nothing(text: str) -> None:
    assert classify(text) is None


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_source_lines_of_a_traceback_name_nothing(prefix: str) -> None:
    text = """Traceback (most recent call last):
  File "/x/site-packages/torch/nn/flex.py", line 10, in run
    raise RuntimeError("Detected that you are using FX to symbolically trace a dynamo-optimized function")
  File "/x/train.py", line 3, in main
    check("CUDA out of memory. Tried to allocate")
ValueError: other
"""
    assert classify("".join(prefix + line for line in text.splitlines(keepends=True))) is None


def test_the_earliest_failure_is_the_root() -> None:
    illegal = "RuntimeError: CUDA error: an illegal memory access was encountered"
    full = "OSError: [Errno 28] No space left on device"
    assert classify(f"{illegal}\n{full}").cause == "cuda.illegal_access"  # type: ignore[union-attr]
    assert classify(f"{full}\n{illegal}").cause == "host.disk_full"  # type: ignore[union-attr]


def test_echoes_resolve_to_their_root() -> None:
    dense = "UserWarning: flex_attention called without torch.compile() - this will use an unfused implementation"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 36.71 GiB."
    match = classify(f"{dense}\nstep 1\n{memory}")
    assert match is not None
    assert (match.cause, match.failed) == ("attention.dense_fallback", True)
    killed = "Signal 9 (SIGKILL) received by PID 14750\nslurmstepd: error: Detected 1 oom-kill event(s) in step 3."
    assert classify(killed).cause == "memory.host_oom"  # type: ignore[union-attr]


TIMEOUT = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 36.71 GiB."
SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-05-21_15:43:05
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 12)
  traceback : Signal 11 (SIGSEGV) received by PID 12
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-05-21_15:43:03
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 13)
  traceback : {told}
============================================================"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        # Who died takes his peers' collectives along, whichever is printed first.
        (f"[rank0]: {TIMEOUT}\n[rank3]: {MEMORY}", "memory.gpu_oom"),
        (f"[rank3]: {MEMORY}\n[rank0]: {TIMEOUT}", "memory.gpu_oom"),
        (f"[rank0]: {REMOTE}\nDataLoader worker (pid 7) is killed by signal: Killed.", "process.sigkill"),
        (f"{REMOTE}\nOut of memory: Killed process 7 (python) total-vm:5kB\nkilled by SIGKILL", "memory.host_oom"),
        # A launcher kills the rest once a collective timed out.
        (f"{TIMEOUT}\nsrun: error: n1: task 3: Killed", "nccl.timeout"),
        (
            "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***\nKilled",
            "scheduler.time_limit",
        ),
        # torchrun knows who was first.
        (SUMMARY.format(rank=0, code=-9, told="Signal 9 (SIGKILL) received by PID 13"), "process.sigkill"),
        (
            f"{REMOTE}\n{SUMMARY.format(rank=0, code=-9, told='Signal 9 (SIGKILL) received by PID 13')}",
            "process.sigkill",
        ),
        (
            "[rank1]: OSError: [Errno 24] Too many open files\n[rank0]: OSError: [Errno 28] No space left on device\n"
            + SUMMARY.format(rank=0, code=1, told="To enable traceback see"),
            "host.disk_full",
        ),
        # Of two logs one after the other the times tell.
        (
            "2026-01-02 10:00:09,1 ERROR OSError: [Errno 24] Too many open files\n"
            "2026-01-02 10:00:07,5 ERROR OSError: [Errno 28] No space left on device\n",
            "host.disk_full",
        ),
        (
            "host: out of resource: shared memory, Required: 9\nNoValidChoicesError: No choices",
            "triton.out_of_shared_memory",
        ),
        ("write: No space left on device\nPytorchStreamReader failed reading file data.pkl", "host.disk_full"),
    ],
)
def test_the_one_that_failed_first_is_named(log: str, cause: str) -> None:
    match = classify(log)
    assert match is not None
    assert match.cause == cause
    assert match.evidence in log


def test_a_warning_does_not_claim_a_failure() -> None:
    dense = "UserWarning: flex_attention called without torch.compile() - this will use an unfused implementation"
    match = classify(f"{dense}\nValueError: other")
    assert match is not None
    assert not match.failed


TRACEBACK = """[rank{rank}]: 2026-01-{day:02}T10:00:{day:02} pid {pid}
Traceback (most recent call last):
  File "{home}/{user}/proj{number}/train.py", line {line}, in main
    step(model)
  File "{home}/{user}/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line {library}, in _call_impl
    return forward_call(*args, **kwargs)
  File "{home}/{user}/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line {library}, in _call_impl
    return forward_call(*args, **kwargs)
  File "{home}/{user}/proj{number}/drafter.py", line {line}, in forward
    raise ValueError
ValueError: rank {rank}: tensor at 0x{address:x} of {size:.2f} GiB on cuda:{rank} took {seconds:.3f} s, see {home}/x
"""
PLACES = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 511),
        "day": st.integers(1, 28),
        "pid": st.integers(2, 4_000_000),
        "home": st.sampled_from(["/home", "/mnt/fs/users", "/data", "C:/Users", "/root/a b".replace(" ", "-")]),
        "user": st.from_regex(r"[a-z][a-z0-9_.-]{0,11}", fullmatch=True),
        "number": st.integers(0, 99),
        "line": st.integers(1, 5000),
        "library": st.integers(1, 5000),
        "address": st.integers(1, 2**48),
        "size": st.floats(0.01, 900),
        "seconds": st.floats(0, 9999),
    }
)


@given(PLACES, PLACES)
def test_fingerprint_does_not_change_with_place_and_time(one: dict, other: dict) -> None:
    assert fingerprint(TRACEBACK.format(**one)) == fingerprint(TRACEBACK.format(**other))


@given(PLACES, PLACES)
def test_fingerprint_of_a_log_line_does_not_change_either(one: dict, other: dict) -> None:
    line = "worker {rank} (pid {pid}) lost {size:.1f} MiB at 0x{address:x} in {home}/{user}/cache after {seconds:.1f} s"
    assert fingerprint(line.format(**one)) == fingerprint(line.format(**other))


def test_fingerprint_does_not_change_with_a_unit() -> None:
    text = "OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has {} free."
    assert fingerprint(text.format("36.71 GiB", "512 bytes")) == fingerprint(text.format("900.00 MiB", "1.43 GiB"))


def test_fingerprint_tells_failures_apart() -> None:
    place = {"rank": 0, "day": 1, "pid": 7, "home": "/home", "user": "a", "number": 1, "line": 1, "library": 1}
    text = TRACEBACK.format(**place, address=4096, size=1.0, seconds=1.0)
    changed = [
        text.replace("ValueError: rank", "TypeError: rank"),
        text.replace("in forward", "in backward"),
        text.replace("drafter.py", "target.py"),
        text.replace("tensor at", "module at"),
    ]
    prints = {fingerprint(t) for t in [text, *changed]}
    assert len(prints) == 5
    assert all(len(p) == 12 and int(p, 16) >= 0 for p in prints)


def test_library_frames_do_not_matter_where_there_are_own_ones() -> None:
    place = {"rank": 0, "day": 1, "pid": 7, "home": "/home", "user": "a", "number": 1, "line": 1, "library": 1}
    text = TRACEBACK.format(**place, address=4096, size=1.0, seconds=1.0)
    assert fingerprint(text) == fingerprint(text.replace("_call_impl", "_wrapped_call"))


def test_stack_fingerprint_ignores_order_and_number_of_threads() -> None:
    a = 'Thread 0x00007f01 (most recent call first):\n  File "/x/a.py", line 3 in wait\n'
    b = 'Thread 0x00007f02 (most recent call first):\n  File "/y/b.py", line 9 in put\n'
    assert stack_fingerprint(a + b) == stack_fingerprint(b + a.replace("0x00007f01", "0x0000aaaa") + a)
    assert stack_fingerprint(a) != stack_fingerprint(b)


def test_stack_fingerprint_is_the_same_from_either_tool() -> None:
    spy = """Thread 71 (idle): "left"
    0x7ff4 (libc.so.6)
    job.<locals>.hold (child.py:52)
    Thread.run (threading.py:9)
"""
    fault = """Thread 0x07 (most recent call first):
  File "/x/child.py", line 52 in hold
  File "/l/threading.py", line 1 in run
"""
    assert stack_fingerprint(spy) == stack_fingerprint(fault) == stack_fingerprint(f"{spy}\n{fault}")


def test_both_stack_formats_are_read() -> None:
    spy = 'Thread 71 (idle): "drafter-0"\n    wait (threading.py:331)\n    get (dflash/pipeline/channel.py:88)\n'
    ((head, frames),) = threads(spy)
    assert "drafter-0" in head
    assert frames == [("threading.py", "wait"), ("dflash/pipeline/channel.py", "get")]


def test_last_traceback_keeps_a_chain_together() -> None:
    old = "Traceback (most recent call last):\nKeyError: 'handled'\nretrying\n"
    chain = (
        "Traceback (most recent call last):\nOSError: first\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nValueError: second\n"
    )
    assert last_traceback(old + chain) == chain
    assert last_traceback("no such thing") == ""


def explain(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sweeper.signatures", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def test_explain_reads_files_and_standard_input(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text(f"step 1\n{CASES[0]['text']}\n")
    told = explain("explain", str(log))
    assert told.returncode == 0
    for word in (CASES[0]["cause"], "isolation=processes", "fingerprint"):
        assert word in told.stdout
    found = json.loads(explain("explain", "--json", "-", text=CASES[4]["text"]).stdout)
    assert found["cause"] == CASES[4]["cause"]
    assert json.loads(explain("explain", "--json", "-", text="all is well").stdout)["cause"] == "unknown"
    missing = explain("explain", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert missing.stderr.startswith("file=")
    assert "compile.fx_trace_race" in explain("causes").stdout


def test_explain_loads_nothing_heavy() -> None:
    code = (
        "import sys, sweeper.signatures.__main__, sweeper.verdict\n"
        "print(sorted({'torch', 'mlflow', 'hydra', 'rich', 'numpy'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.stdout.strip() == "[]"


ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    "data",
    [
        f"step 1\n{ERROR}\n".encode(),
        f"step 1\n{ERROR}\n".encode("utf-16"),
        f"step 1\n{ERROR}\n".encode("utf-16-le"),
        f"step 1\n{ERROR}\n".encode("utf-16-be"),
        f"\ufeffstep 1\r\n{ERROR}\r\n".encode(),
        f"\x1b[31m\x1b[1m{ERROR.replace('illegal', chr(27) + '[0millegal')}\x1b[0m\x1b[K\n".encode(),
        f" 10%|#   |\r 20%|##  |\r{ERROR}\r 20%|##  |".encode(),
        bytes(range(256)) * 40 + f"\n{ERROR}\n".encode() + bytes(range(256)) * 40,
        f"{ERROR}\n".encode() + b"step 5 loss 4.2\n" * 100_000,
        b"step 5 loss 4.2\n" * 100_000 + f"{ERROR}\n".encode(),
        b"x" * 3_000_000 + f"\n{ERROR}\n".encode(),
    ],
    ids=["utf-8", "utf-16", "le", "be", "bom-crlf", "colours", "progress", "binary", "head", "tail", "long-line"],
)
def test_a_log_is_read_whatever_it_is_made_of(tmp_path: Path, data: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(data)
    for text in (read(log), joined(data)):
        match = classify(text)
        assert match is not None
        assert (match.cause, match.evidence) == ("cuda.illegal_access", ERROR)


@given(st.binary(max_size=3000))
def test_rubbish_is_no_error_of_ours(data: bytes) -> None:
    assert set(explained(joined(data))) == {"cause", "about", "evidence", "remedy", "fingerprint", "version", "source"}


def test_the_log_of_a_good_run_is_said_to_look_like_no_failure() -> None:
    told = explained("step 1 loss 2.0\r 50%|#####     | 5/10 [00:01<00:01]\r100%|##########| 10/10 [00:02<00:00]\n")
    assert told["cause"] == "unknown"
    assert told["about"] == "Nothing in this text looks like a failure."
    assert (told["evidence"], told["remedy"]) == ("", "None is needed, unless this is not the text of what failed.")
    for text in ("ValueError: 3", "aborted", 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nOdd: 1'):
        assert explained(text)["about"] == rules()["unknown"].about, text


@pytest.mark.parametrize("log", ["sh: 1: lsmod: not found\nstep 1\nKeyError: 3\n", "bash: x: not found\nstep 2\n"])
def test_a_word_that_a_shell_lacked_on_the_way_is_no_cause(log: str) -> None:
    assert classify(log) is None


def test_an_empty_text_is_unknown_and_has_a_fingerprint() -> None:
    assert explained("")["cause"] == "unknown"
    assert len(explained("")["fingerprint"]) == 12


ENDS = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "{home}/{user}/proj{number}/train.py", line {line}, in main
[rank{rank}]:     step(model)
[rank{rank}]:   File "{home}/{user}/lib/python3.{number}/site-packages/torch/serialization.py", line {library}, in load
[rank{rank}]:     return read(file)
[rank{rank}]: OSError: [Errno 28] No space left on device: '{home}/{user}/a b/x.pt' on gpu-{rank}:{pid}, {size:.1f} GiB
step {pid} took {seconds:.2f} s
"""


@given(PLACES, PLACES)
def test_signature_of_a_log_does_not_change_with_place_and_time(one: dict, other: dict) -> None:
    first, second = explained(ENDS.format(**one)), explained(ENDS.format(**other))
    assert (first["cause"], first["fingerprint"]) == (second["cause"], second["fingerprint"])
    assert first["cause"] == "host.disk_full"


def test_the_fingerprint_is_of_the_traceback_that_holds_the_evidence() -> None:
    place = {"day": 1, "pid": 7, "home": "/home", "user": "a", "number": 1, "line": 1, "library": 1}
    log = ENDS.format(rank=1, size=1.0, seconds=1.0, **place)
    later = (
        "[rank2]: Traceback (most recent call last):\n" + '[rank2]:   File "/x/other.py", line 1, in f\nKeyError: 1\n'
    )
    assert explained(log)["fingerprint"] == explained(log + later)["fingerprint"]
    assert explained(log)["fingerprint"] != explained(log.replace("train.py", "eval.py"))["fingerprint"]
    assert explained(log)["fingerprint"] != explained(log.replace("OSError", "IOError"))["fingerprint"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cannot reach gpu-3.a.b:29500", "cannot reach n17.cluster:1234"),
        ("peer node2<42830> closed", "peer gpu004.ds-a4<1> closed"),
        ("host: node-17 failed", "host: alpha failed"),
        ("user=bob has no quota", "user=alice has no quota"),
        ("cannot open runs/a/b.pt", "cannot open out/other.pt"),
        ("took 3 s for 5 GiB", "took 900 ms for 12 bytes"),
        ("cuda:0 is busy", "cuda:12 is busy"),
    ],
)
def test_what_varies_in_a_message_is_taken_out(one: str, other: str) -> None:
    assert fingerprint(one) == fingerprint(other)


def test_the_page_of_causes_is_true() -> None:
    page = Path(__file__).parents[1] / "docs" / "SIGNATURES.md"
    assert page.read_text() == document(), "write it anew: python -m sweeper.signatures document > docs/SIGNATURES.md"
    for cause in rules():
        assert f"\n## {cause}\n" in page.read_text()


def test_every_signature_carries_the_version_of_its_rules() -> None:
    assert version().count(".") == 1
    assert explained("x")["version"] == version()
