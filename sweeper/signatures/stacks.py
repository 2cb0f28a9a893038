"""Why a run hangs, told from the stacks of its threads (faulthandler's and py-spy's formats).

Two hangs of compilers are told apart. A deadlock: a thread traces under Dynamo's compile lock and waits for the
device's one autograd thread, which waits for that lock because it must compile a backward. A compile without end:
one thread stands in ptxas, in a C++ compiler or waits for a compile worker; the others wait for it, in our gate
(dflash/strategies/gate.py) or for the lock. Measured on an H200: benchmarks/results/race-torch2.11.0-h200.json and
docs/LOG.md, 2026-11-30.
"""

from __future__ import annotations

import re

from sweeper.signatures.prints import threads

_DUMP = re.compile(r"^== .*$", re.MULTILINE)
_AUTOGRAD = re.compile(r"(?:^|[/\\])torch[/\\]autograd[/\\](?:graph|__init__)\.py$")
# Frames that stand on the stack while something is traced or compiled, and at no other time.
_TRACING = re.compile(
    r"torch[/\\](?:_dynamo[/\\](?:convert_frame|symbolic_convert|output_graph)|_functorch[/\\]_aot_autograd[/\\]graph_"
    r"|fx[/\\](?:experimental[/\\]proxy_tensor|_symbolic_trace)|_inductor[/\\](?:compile_fx|graph))"
)
_BACKWARD = re.compile(r"torch[/\\](?:_inductor|_functorch)[/\\]")
_WAITS_FOR_PROCESS = re.compile(r"(?:^|[/\\])(?:subprocess|selectors)\.py$")
_WAITS_FOR_POOL = re.compile(r"(?:^|[/\\])(?:threading|concurrent[/\\]futures[/\\]_base)\.py$")
_COMPILES = re.compile(
    r"triton[/\\](?:backends[/\\]\w+[/\\]compiler|compiler[/\\]compiler|runtime[/\\]build)"
    r"|torch[/\\](?:_inductor[/\\](?:codecache|cpp_builder|runtime|compile_worker)|utils[/\\]cpp_extension)"
)
_TRITON = re.compile(r"(?:^|[/\\])triton[/\\]")
_POOL = re.compile(r"torch[/\\]_inductor[/\\](?:async_compile|codecache|select_algorithm)\.py$")

Frames = list[tuple[str, str]]


def deadlock(stacks: str) -> str | None:
    """The two threads of a compile deadlock in words, or None.

    A thread that waits for autograd outside any compile is an ordinary training step and proves nothing, nor does
    one that compiles while others wait for it.
    """
    for dump in _DUMP.split(stacks):  # the same thread has another name in another tool's dump
        told = [(head, frames) for head, frames in threads(dump) if frames]
        for waiter, frames in told:
            if _AUTOGRAD.search(frames[0][0]) and any(_TRACING.search(path) for path, _ in frames):
                for other, its in told:
                    if other != waiter and any("backward" in name and _BACKWARD.search(path) for path, name in its):
                        who, whom = _who(waiter), _who(other)
                        return f"{who} waits for autograd inside a compile while {whom} compiles a backward"
    return None


def endless_compile(stacks: str) -> str | None:
    """The thread that waits for a compiler, in words, or None; with what the compile worker it waits for is at."""
    dumps = [threads(dump) for dump in _DUMP.split(stacks)]
    for head, frames in [thread for dump in dumps for thread in dump]:
        waits = frames and _waits_for_compiler(frames)
        if waits:
            return f"{_who(head)} waits for {waits}" + (_worker(dumps) if "worker" in waits else "")
    return None


def _worker(dumps: list[list[tuple[str, Frames]]]) -> str:
    """Where the one compile worker stands that is not idle, ", which is at ..."; "" if none shows."""
    for _, frames in [thread for dump in dumps for thread in dump]:
        if frames and _TRITON.search(frames[0][0]) and any("compile_worker" in path for path, _ in frames):
            return f", which is at {frames[0][1]}"
    return ""


def _who(head: str) -> str:
    """A thread's header without what every header says."""
    return (
        head.removesuffix(":").removesuffix("(most recent call first)").replace("(idle)", "").replace(" :", "").strip()
    )


def _waits_for_compiler(frames: Frames) -> str:
    inner = frames[0][0]
    for path, name in frames:
        if _WAITS_FOR_PROCESS.search(inner) and _COMPILES.search(path):
            return f"the compiler's process in {name}"
        if _WAITS_FOR_POOL.search(inner) and _POOL.search(path):
            return f"a compile worker in {name}"
    return ""
