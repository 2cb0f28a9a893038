"""Commands without the seconds that their imports take: forks of a process that has made them.

`python -m dflash train` needs four seconds of CPU before it reads its first setting, as much as a tiny job. Here one
process a kind of command imports what that kind needs and then forks for each command, so that what begins is a
process of its own, with its own directory, environment, output, signals and exit status. What it does not show:
that the imports work, and settings that are read from the environment while importing; tests of those, and of a
command's start, run `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

# What a package's commands import on their way.
PRELOADED = {
    "dflash": ["dflash.train", "dflash.evaluator", "torch._dynamo"],
    "sweeper": [
        *("sweeper.__main__", "sweeper.sweep", "sweeper.complaints", "sweeper.display", "sweeper.analysis.conclude"),
        *("sweeper.report.page", "sweeper.report.charts", "matplotlib.figure", "matplotlib.backends.backend_svg"),
        *("scipy.stats", "jinja2", "rich.table", "hydra_plugins.sweeper_launcher.launcher"),
        *("hydra._internal.core_plugins.basic_sweeper", "hydra._internal.core_plugins.bash_completion"),
    ],
}


class Forked:
    """A command at work; as much of subprocess.Popen as tests use."""

    def __init__(self, module: str, *arguments: str, cwd: Path | str | None = None, session: bool = False) -> None:
        self.args = [sys.executable, "-m", module, *arguments]
        self.returncode: int | None = None
        self._said, self._readers = ["", ""], list[threading.Thread]()
        (out, out_end), (err, err_end), (self._status, status_end) = os.pipe(), os.pipe(), socket.socketpair()
        self.stdout, self.stderr = (os.fdopen(end, errors="replace") for end in (out, err))
        asked = {"module": module, "arguments": arguments, "cwd": str(cwd or Path.cwd()), "session": session}
        line = json.dumps(asked | {"environment": dict(os.environ)}) + "\n"
        _server(module.partition(".")[0]).send(line.encode(), [out_end, err_end, status_end.fileno()])
        for end in (out_end, err_end):
            os.close(end)
        status_end.close()
        self._told = self._status.makefile()
        pid = self._told.readline()
        assert pid, f"the process that forks commands of {module} could not import what they need"
        self.pid = int(pid)

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                told = self._status.recv(16)  # one short line, written at once
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self.returncode = int(told)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that was written to standard output and error, once the command has ended and nobody holds them."""
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(number,), daemon=True) for number in (0, 1)]
            for reader in self._readers:
                reader.start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._said[0], self._said[1]

    def _read(self, number: int) -> None:
        with (self.stdout, self.stderr)[number] as stream:
            self._said[number] = stream.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(
    module: str, *arguments: str, timeout: float, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or kill it after `timeout` seconds and raise subprocess.TimeoutExpired."""
    process = Forked(module, *arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


class _Server:
    """The process that forks; it ends when this one does."""

    def __init__(self, package: str) -> None:
        self._asking = threading.Lock()
        self._control, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), *PRELOADED[package]]
        # A session of its own: an interrupt from the terminal is for the tests to deal with.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        atexit.register(self._close)

    def send(self, line: bytes, ends: list[int]) -> None:
        with self._asking:
            sent = socket.send_fds(self._control, [line], ends)
            self._control.sendall(line[sent:])

    def _close(self) -> None:
        self._control.close()
        self._process.wait()


_server = functools.cache(_Server)


def _forks(control: socket.socket) -> dict:
    """Serve until nobody can ask any more; comes back only in a process that is to become what it returns."""
    while True:
        line, ends, _, _ = socket.recv_fds(control, 1 << 20, 3)
        while line and not line.endswith(b"\n"):
            line += control.recv(1 << 20)
        if not line:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(json.loads(line), *ends)
        for end in ends:
            os.close(end)


def _keep(asked: dict, out: int, err: int, status: int) -> dict:
    """Fork the command itself, wait for it and tell how it ended; comes back only in the command."""
    child = os.fork()
    if child:
        os.close(out)
        os.close(err)
        os.write(status, f"{child}\n".encode())
        _, how = os.waitpid(child, 0)
        os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
        os._exit(0)
    if asked["session"]:
        os.setsid()
    for end, number in ((out, 1), (err, 2)):
        os.dup2(end, number)
    for end in (out, err, status):
        os.close(end)
    return asked


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    sys.path.pop(0)  # where this file lies
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    request = _forks(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    sys.path.insert(0, request["cwd"])
    sys.modules.pop(f"{request['module']}.__main__", None)  # or runpy warns that it is there already
    # The interpreter then ends as it ends for any command: status, traceback, threads, atexit.
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
