"""The process between harness and child: ends the child's whole tree when either side dies.

    python -I leash.py FD GRACE -- ARGV...

FD is one end of a stream socket whose other end the harness alone holds. The leash makes itself the reaper of
all orphans below it (Linux), so that a grandchild that left its session still is found, starts ARGV in a
session of its own and then speaks lines:

    leash -> harness   "pid N TIME" once started, or "failed WHY";
                       "exit CODE TIME" or "signal N TIME" once the tree is gone (TIME: the child's, Unix s)
    harness -> leash   "term" (ask the child to stop), "kill" (end the tree), "abort" (SIGABRT to the tree)

The harness's end closing, in whatever way it died, means: ask, wait GRACE seconds, kill. Standard library
only; it runs isolated, so nothing of the user's environment is imported into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK = 0.05


def main() -> int:
    """Run the command on the leash until no process of its tree is left; returns the exit status."""
    fd, grace, argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[4:]
    harness = socket.socket(fileno=fd)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def before_exec() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            # Should this leash itself be killed, the child must not outlive it.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    # Signals sent to the harness's group, or by a scheduler to every process of a job, are the harness's to
    # interpret. A handler that does nothing, because the child would inherit an ignored signal and then not hear
    # SIGTERM either.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the harness held them back while there were no handlers
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_exec,
            restore_signals=True,
        )
    except OSError as error:
        _say(harness, f"failed {error}")
        return 1
    _say(harness, f"pid {child.pid} {time.time()}")
    status = _follow(harness, child, grace)
    ended = time.time()
    _end_tree(0.0)
    _say(harness, f"signal {-status} {ended}" if status < 0 else f"exit {status} {ended}")
    return 0


def _follow(harness: socket.socket, child: subprocess.Popen[bytes], grace: float) -> int:
    """Obey the harness until the child has ended; returns its status as subprocess tells it."""
    while True:
        status = child.poll()
        if status is not None:
            return status
        if not select.select([harness], [], [], TICK)[0]:
            continue
        try:
            said = harness.recv(4096)
        except OSError:
            said = b""
        if not said:
            _end_tree(grace, child)
            return child.wait()
        for word in said.split():
            if word == b"term":
                _send(child.pid, signal.SIGTERM)
            elif word == b"abort":
                for pid in _tree():
                    _send(pid, signal.SIGABRT)
            elif word == b"kill":
                _end_tree(0.0, child)
                return child.wait()


def _end_tree(grace: float, child: subprocess.Popen[bytes] | None = None) -> None:
    """End every process below this one: ask, wait up to `grace` seconds, kill, reap until none is left."""
    if grace > 0:
        for pid in _tree():
            _send(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and _tree():
            _reap(child)
            time.sleep(TICK)
    # A tree can grow while it is being walked, so walk until it is gone; a process stuck in the kernel
    # (D state) cannot be ended by anybody and must not hold the sweep for ever.
    deadline = time.monotonic() + 30
    while (pids := _tree()) and time.monotonic() < deadline:
        for pid in pids:
            _send(pid, signal.SIGKILL)
        _reap(child)
        time.sleep(TICK / 5)


def _tree() -> list[int]:
    """Pids of all living descendants (zombies are dead: they only wait to be reaped)."""
    children: dict[int, list[int]] = {}
    dead = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command's name may hold spaces and parentheses; what follows the last one does not.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(name))
        if state in (b"Z", b"X"):
            dead.add(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        found += [pid for pid in below if pid not in dead]
    return found


def _reap(child: subprocess.Popen[bytes] | None) -> None:
    """Collect what has ended; the child's own status goes to its Popen object first."""
    if child is not None and child.poll() is None:
        # waitpid(-1) would take the child's status from Popen, so orphans wait until the child has ended.
        return
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _say(harness: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # once the harness is gone there is nobody to tell
        harness.sendall(line.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
