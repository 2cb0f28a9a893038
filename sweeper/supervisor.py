"""One child process: started on a leash, followed by its reports, its hang noticed, its whole tree ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dflash.events import EVENTS_FILE, STACKS_FILE, STAGES, EventReader
from sweeper import machine
from sweeper.progress import Printed
from sweeper.signatures import classify
from sweeper.usage import Meter

LOG_FILE = "child.log"
LEASH = Path(__file__).with_name("leash.py")
LOG_TAIL = 64 * 1024  # bytes of the log that are looked at; the file itself keeps everything
POLL_S = 0.1
TICK_S = 5.0
STACKS_S = 20.0  # for py-spy on one process
RUN_MARK = "SWEEPER_RUN"  # in the environment of every process of a run: its directory
EVENTS_MARK = "SWEEPER_EVENTS"  # and the file that it may append events to

# What a child may see of the environment of the harness.
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("HF_HOME", "CC", "CXX"),
)
ALLOWED_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "SLURM_",
)
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
# Signals that ask a job to end; a scheduler sends them to every process of it at once.
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ECHO_S = 2.0  # from the signal of one process of a job to that of another, on a node that is busy
# Events that tell of the run and not of its going on.
NO_PROGRESS = ("memory", "counters", "warning")


@dataclass
class Outcome:
    """How a child ended. `ended_by` is itself, hung or interrupt.

    `started` and `ended` are Unix seconds of the child's own life, as its leash saw it.
    """

    exit_code: int | None = None
    signal: int | None = None
    ended_by: str = "itself"
    hung_stage: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    bad_events: int = 0
    log_tail: str = ""
    stacks: str = ""
    reason: str = ""
    started: float = 0.0
    ended: float = 0.0


def environment(run_dir: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: what is allow-listed here, never a secret, then what the harness decides."""
    env = {
        name: value
        for name, value in os.environ.items()
        if (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not any(x in name.upper() for x in SECRET)
    }
    return env | {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        RUN_MARK: str(run_dir),
        EVENTS_MARK: str(run_dir / EVENTS_FILE),
        **extra,
    }


def supervise(
    argv: Sequence[str],
    run_dir: Path,
    env: Mapping[str, str],
    *,
    budget: Mapping[str, float],
    grace: float,
    interrupted: Callable[[], int],
    printed: Printed | None = None,
    keep: Sequence[int] = (),
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    on_log: Callable[[str], None] | None = None,
    on_tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run `argv` until it and all it started have ended.

    `interrupted` counts the interrupts so far: at one the child is asked to stop and killed after `grace`
    seconds, at two its tree is killed at once. `budget` gives, per stage, the seconds without progress after
    which a child counts as hung. `keep` are open files, the locks of a lease, that stay open while any process of
    the run lives, whatever becomes of this one. Raises OSError when the run's directory cannot be written.
    """
    outcome = Outcome(started=time.time(), ended=time.time())
    killed_before = machine.oom_kills()
    log = run_dir / LOG_FILE
    ours, theirs = socket.socketpair()
    with theirs, open(log, "ab") as output, _held_back():
        process = subprocess.Popen(
            [sys.executable, "-I", str(LEASH), str(theirs.fileno()), str(grace), "--", *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno(), *keep],
            start_new_session=True,
        )
    with ours:
        ours.setblocking(False)
        watch = _Watch(ours, run_dir, budget, grace, outcome, printed, on_event, on_log)
        meter = Meter(run_dir, process.pid, env)
        next_tick = time.monotonic() + TICK_S
        while not watch.closed:
            watch.step(interrupted())
            meter.look()
            if time.monotonic() >= next_tick:
                on_tick()
                next_tick = time.monotonic() + TICK_S
        process.wait()
    if watch.lost:
        # Somebody killed the leash itself; what it would have ended is ended here, by its mark.
        _end_marked(run_dir)
        outcome.signal = signal.SIGKILL
        outcome.reason = "the process that holds the child was killed from outside"
        outcome.ended = time.time()
    if outcome.ended_by == "itself" and _asked(outcome):
        # Who signalled the child itself may have signalled this process too, a moment later.
        deadline = time.monotonic() + ECHO_S
        while not interrupted() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if outcome.ended_by == "itself" and interrupted() and (outcome.signal or outcome.exit_code):
        outcome.ended_by = "interrupt"
    if outcome.signal == signal.SIGKILL and (kills := machine.oom_kills() - killed_before) > 0:
        outcome.reason = f"ended by SIGKILL: Detected {kills} oom_kill events in the control group of the run"
    watch.read()
    if printed:
        printed.close()
        watch.read()
    outcome.bad_events = watch.reader.bad
    outcome.log_tail = tail(log)
    if outcome.exit_code and shutil.disk_usage(run_dir).free < LOG_TAIL and classify(outcome.log_tail) is None:
        # What the child had to say of it found no room.
        outcome.log_tail += f"\nOSError: [Errno 28] No space left on device: '{run_dir}'\n"
    stacks = run_dir / STACKS_FILE
    outcome.stacks = tail(stacks) if stacks.exists() else ""
    return outcome


@contextmanager
def _held_back() -> Iterator[None]:
    """Signals that ask for an end wait while entered, and for who is started here until it lets them in.

    Slurm signals every process of a job. One that comes while the leash's interpreter starts would kill it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ASKED, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _asked(outcome: Outcome) -> bool:
    """Whether the child died of a signal that asks for an end, or passed one on as a shell does."""
    return outcome.signal in ASKED or (outcome.exit_code or 0) - 128 in ASKED


class _Watch:
    """The state of one supervision between two looks."""

    def __init__(
        self,
        leash: socket.socket,
        run_dir: Path,
        budget: Mapping[str, float],
        grace: float,
        outcome: Outcome,
        printed: Printed | None,
        on_event: Callable[[dict[str, Any]], None],
        on_log: Callable[[str], None] | None,
    ) -> None:
        self.leash, self.run_dir, self.budget, self.grace, self.outcome = (
            leash,
            run_dir,
            budget,
            grace,
            outcome,
        )
        self.printed, self.on_event, self.on_log = printed, on_event, on_log
        self.reader = EventReader(run_dir / EVENTS_FILE)
        # A command that is read by its output tells no stages: until its first step it may load and compile.
        self.stage = "warmup" if printed else STAGES[0]
        self.progress = time.monotonic()
        self.log_at = 0
        self.log_rest = b""
        self.stopping: float | None = None  # when the child was asked to stop
        self.killed = False
        self.closed = self.lost = False
        self.child: int | None = None
        self.told = b""

    def step(self, interrupts: int) -> None:
        self.listen()
        if self.closed:
            return
        self.read()
        now = time.monotonic()
        if interrupts and self.stopping is None:
            self.outcome.ended_by = "interrupt"
            self.stopping = now
            self.say(b"term")
        if self.stopping is not None:
            if not self.killed and (interrupts > 1 or now > self.stopping + self.grace):
                self.kill()
        elif now - self.progress > self.budget[self.stage]:
            self.hung()
        time.sleep(POLL_S)

    def listen(self) -> None:
        try:
            said = self.leash.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self.told += said
        *lines, self.told = self.told.split(b"\n")
        for line in lines:
            word, *rest = line.decode("utf-8", "replace").split()
            if word == "failed":
                self.outcome.exit_code = 127
                self.outcome.reason = f"the command could not be started: {' '.join(rest)}"
            elif word == "pid":
                self.child, self.outcome.started = int(rest[0]), float(rest[1])
            elif word == "exit":
                self.outcome.exit_code, self.outcome.ended = int(rest[0]), float(rest[1])
            elif word == "signal":
                self.outcome.signal, self.outcome.ended = int(rest[0]), float(rest[1])
        if not said:
            self.closed = True
            self.lost = self.outcome.exit_code is None and self.outcome.signal is None

    def read(self) -> None:
        """Take in new log and new events; either may be progress."""
        with open(self.run_dir / LOG_FILE, "rb") as log:
            log.seek(self.log_at)
            while data := log.read(LOG_TAIL):
                self.log_at += len(data)
                # A job that reports events is judged by them; of any other, output is the only sign of life.
                if not self.outcome.events:
                    self.progress = time.monotonic()
                if self.printed is not None:
                    self.printed.feed(data)
                if self.on_log is not None:
                    self.stream(data)
        for event in self.reader.poll():
            self.outcome.events.append(event)
            if event["event"] == "stage" and event.get("stage") in STAGES:
                self.stage = event["stage"]
            elif event["event"] == "step" and self.stage == STAGES[0]:
                self.stage = "train"  # of a command that tells its steps alone
            if event["event"] not in NO_PROGRESS:
                self.progress = time.monotonic()
            self.on_event(event)

    def stream(self, data: bytes) -> None:
        assert self.on_log is not None
        *lines, rest = (self.log_rest + data).split(b"\n")
        self.log_rest = rest[-LOG_TAIL:]
        for line in lines:
            self.on_log(line.decode("utf-8", "replace"))

    def hung(self) -> None:
        self.outcome.ended_by = "hung"
        self.outcome.hung_stage = self.stage
        self.outcome.reason = f"no progress for {self.budget[self.stage]:g} s in stage {self.stage}"
        if self.printed and (unmatched := self.printed.unmatched()):
            self.outcome.reason += f"; {unmatched}"
        before = (self.run_dir / LOG_FILE).stat().st_size
        stacks = _dump_stacks(self.child)
        # faulthandler, switched on in the child's environment, answers SIGABRT with every thread's stack.
        self.say(b"abort")
        deadline = time.monotonic() + min(self.grace, 5.0)
        while time.monotonic() < deadline and not self.closed:
            self.listen()
            time.sleep(POLL_S)
        with open(self.run_dir / LOG_FILE, "rb") as file:
            file.seek(before)
            stacks += "== what the child printed when aborted\n" + file.read(LOG_TAIL).decode("utf-8", "replace")
        with open(self.run_dir / STACKS_FILE, "a", encoding="utf-8") as out:
            out.write(stacks)
        self.stopping = time.monotonic()
        self.kill()

    def kill(self) -> None:
        self.killed = True
        self.say(b"kill")

    def say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # if the leash has ended, `listen` learns how
            self.leash.send(word + b"\n")


def _dump_stacks(child: int | None) -> str:
    """Stacks of all threads of each Python process of the tree, by py-spy where there is one."""
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if tool is None or child is None:
        return ""
    text = ""
    try:
        tree = [psutil.Process(child), *psutil.Process(child).children(recursive=True)]
    except psutil.Error:
        return ""
    for process in tree[:16]:
        try:
            if "python" not in process.name().lower() and "python" not in os.path.basename(process.exe()):
                continue
        except psutil.Error:
            continue
        for native in (["--native"], []):
            try:
                done = subprocess.run(
                    [tool, "dump", "--pid", str(process.pid), *native],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=STACKS_S,
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0:
                text += f"== py-spy dump {' '.join(native)} of pid {process.pid}\n{done.stdout}\n"
                break
    return text


def ended(run_dir: Path) -> bool:
    """Whether no process of a run is left."""
    return not any(_marked(run_dir))


def end_left(run_dir: Path, patience_s: float, interrupted: Callable[[], int]) -> bool:
    """Whether no process of a run whose harness died is left, which is waited for; False after an interrupt.

    Its leash ends them and lets the child save meanwhile. Where the leash was killed too, or did not do it in
    `patience_s` seconds, they are killed here.
    """
    deadline = time.monotonic() + patience_s
    while (left := list(_marked(run_dir))) and not interrupted():
        leashed = any(str(LEASH) in words for _, words in left)
        if not leashed or time.monotonic() > deadline:
            _end_marked(run_dir)
        time.sleep(POLL_S)
    return not left


def _end_marked(run_dir: Path) -> None:
    for process, _ in _marked(run_dir):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _marked(run_dir: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """The living processes of a run, and the words that each was started with."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_MARK) == str(run_dir) and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.cmdline()
        except psutil.Error:
            continue


def tail(path: Path, size: int = LOG_TAIL) -> str:
    """The last `size` bytes of a file as text; undecodable bytes are replaced."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size))
        return file.read().decode("utf-8", "replace")
