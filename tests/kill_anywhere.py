"""Kill a sweep anywhere, start it again, and look whether anything was lost, doubled or left behind.

    python tests/kill_anywhere.py --times 50 --seed 1 [--where local server slurm] [--keep DIR]

A round is a sweep of four runs, which save checkpoints, leave and take caches and each have a helper in a session of
its own. While the command works, some of its processes, of its runs' or of the servers it depends on are ended at
random moments in random ways; then the same command is given until it is through, and `faults` looks at what is
there: the run directories, the rows of MLflow's database, the processes of this machine, the locks. Everything is real
but the job and the GPUs, which are made up. Prints a line a round; status 1 when a round left something wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from fakes import driver
from fakes import server as tracking_server
from fakes.command import CHILD, workload
from slurm import cluster as slurm

from dflash.events import EVENTS_FILE, EventReader
from sweeper import store as records
from sweeper.caches import snapshots
from sweeper.supervisor import RUN_MARK
from sweeper.tracking.view import STATUS

PLACES = ("local", "server", "slurm")
GPUS = 4
STEPS = 12
PATIENCE_S = 240.0  # for one command; Slurm takes its time
MOST_STARTS = 4  # in which something is to be hit; a sweep that is through is started again in vain
WAYS = ("kill", "stop", "term")
Rows = dict[str, list[tuple[Any, ...]]]


@dataclass
class Place:
    """Where rounds are made: a store, how the command is told of it, and what else can be killed there.

    rows: what MLflow's database holds. servers: by name, what ends one, asked for a way and telling which it took, and
    what starts it again.
    """

    name: str
    folder: Path
    words: list[str]
    env: dict[str, str]
    rows: Callable[[], Rows]
    servers: dict[str, tuple[Callable[[str], str], Callable[[], None]]] = field(default_factory=dict)
    tend: Callable[[], None] = lambda: None  # what a person would do for the servers meanwhile
    settle_s: float = 0.0  # that processes may take to be gone after the command's end

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def command(self, number: int) -> subprocess.Popen[str]:
        job = self.folder / CHILD.name  # a copy: who edits the job while this works makes another sweep of it
        if not job.exists():
            shutil.copy(CHILD, job)
        words = [word.replace(str(CHILD), str(job)) for word in workload("resumable")]
        line = [sys.executable, "-m", "sweeper", "-m", *words, f"store={self.store}", f"seed={number}"]
        line += ["workload.sections=[train]", "+train={save_every:3}", "compile=locked,whole", "cache=cold,warm"]
        line += ["grace=2", "report=false", *self.words]
        log = open(self.folder / f"command-{number}.log", "a")  # noqa: SIM115
        with log:
            return subprocess.Popen(line, stdout=log, stderr=log, text=True, env=self.env, start_new_session=True)


@dataclass
class Round:
    """What was done in a round, and what was wrong afterwards."""

    strikes: list[str] = field(default_factory=list)
    starts: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def play(place: Place, number: int, rng: random.Random) -> Round:
    """Start, strike, start again until it is through; then look."""
    done, began = Round(), time.monotonic()
    known = set((place.store / "sweeps").glob("*"))
    wanted = rng.randint(1, 2)
    while done.starts < wanted or (not done.strikes and done.starts < MOST_STARTS):
        command = place.command(number)
        done.starts += 1
        down: list[Callable[[], None]] = []
        hurry = 1.0 if done.starts <= wanted else 0.2  # a sweep that is through ends soon
        try:
            time.sleep(rng.uniform(0.3, 4.0) * hurry)
            for _ in range(rng.randint(1, 3)):
                time.sleep(rng.uniform(0.0, 2.0) * hurry)
                if command.poll() is not None:
                    break
                done.strikes.append(_strike(place, command, rng, down))
            for start in down:
                start()
            down.clear()
            # A command that lives goes on, and is struck no more.
            _wait(place, command)
        except subprocess.TimeoutExpired:
            done.faults.append(f"a command that was struck did not end within {PATIENCE_S:g} s")
        finally:
            for start in down:
                start()
            _end(command)
    for _ in range(3):
        command = place.command(number)
        done.starts += 1
        try:
            status = _wait(place, command)
        except subprocess.TimeoutExpired:
            done.faults.append(f"the command was not through within {PATIENCE_S:g} s")
            break
        finally:
            _end(command)
        if status == 0 and not _unfinished(place, known):
            break
    else:
        done.faults.append(f"the command is not through after three more starts, status {status}")
    done.faults += faults(place, known)
    done.seconds = time.monotonic() - began
    return done


def _wait(place: Place, command: subprocess.Popen[str]) -> int:
    """The exit status. Raises TimeoutExpired after PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return command.wait(2.0)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise
        place.tend()


def _end(command: subprocess.Popen[str]) -> None:
    if command.poll() is None:
        command.kill()
    command.wait()


def _strike(place: Place, command: subprocess.Popen[str], rng: random.Random, down: list[Callable[[], None]]) -> str:
    """End one process of those that are there in one way; says what was done."""
    there: dict[str, list[int]] = collections.defaultdict(list)
    for process, kind in processes(place.store):
        there[kind].append(process.pid)
    there["harness"] = [command.pid]
    victims = [kind for kind in ("harness", "leash", "child", "helper", "job") if there[kind]]
    name, way = rng.choice(["harness", *victims, *place.servers]), rng.choice(WAYS)
    if name in place.servers:
        kill, start = place.servers[name]
        way = kill(way)
        down.append(start)
        if rng.random() < 0.5:  # back soon, or only for the next command
            time.sleep(rng.uniform(0.0, 2.0))
            down.pop()()
        return f"{name} {way}"
    end(rng.choice(there[name]), way, rng.uniform(0.0, 1.5))
    return f"{name} {way}"


def end(pid: int, way: str, pause: float = 0.5) -> None:
    """SIGKILL; SIGSTOP and then SIGKILL; or SIGTERM, which asks."""
    with contextlib.suppress(ProcessLookupError):
        if way == "term":
            os.kill(pid, signal.SIGTERM)
            return
        if way == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pause)
        os.kill(pid, signal.SIGKILL)


def processes(store: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Living processes that belong to a store, each with what it is: leash, child, helper, job, or another."""
    for process in psutil.process_iter():
        try:
            words, mark = process.cmdline(), process.environ().get(RUN_MARK, "")
            if process.status() == psutil.STATUS_ZOMBIE or not words:
                continue
        except psutil.Error:
            continue
        if mark.startswith(f"{store}/"):
            if any(word.endswith("leash.py") for word in words):
                yield process, "leash"
            else:
                yield process, "child" if any(word.endswith("child.py") for word in words) else "helper"
        elif any(str(store) in word for word in words):
            yield process, "job" if any("submitit" in word for word in words) else "other"


def _unfinished(place: Place, known: set[Path]) -> list[str]:
    return [fault for sweep in _sweeps(place, known) for fault in _verdicts(sweep)]


def _sweeps(place: Place, known: set[Path]) -> list[Path]:
    return sorted(set((place.store / "sweeps").glob("*")) - known)


def faults(place: Place, known: set[Path]) -> list[str]:
    """Everything that is wrong with the sweep made since `known`, and around it."""
    found = _left_running(place)
    sweeps = _sweeps(place, known)
    if len(sweeps) != 1:
        return [*found, f"{len(sweeps)} sweeps instead of one"]
    found += _verdicts(sweeps[0]) + _steps(sweeps[0])
    found += _tracked(place, sweeps[0])
    found += [f"{path.name} is still locked" for path in locked(Path(place.env["SWEEPER_LEASES"]))]
    found += [f"{path.name} is still locked" for path in locked(place.store / "locks")]
    return found + _snapshots(place.store)


def _left_running(place: Place) -> list[str]:
    until = time.monotonic() + place.settle_s
    while (left := list(processes(place.store))) and time.monotonic() < until:
        time.sleep(0.2)
    found = []
    for process, kind in left:
        found.append(f"a {kind} was left running")
        with contextlib.suppress(psutil.Error):
            process.kill()  # or every round after this one finds it too
    return found


def _attempts(sweep: Path) -> dict[str, list[records.Attempt]]:
    """All attempts of each run that a sweep planned, by identity."""
    planned = [one["identity"] for one in json.loads((sweep / "plan.json").read_text())["runs"]]
    past = records.history(sweep.parent.parent)
    return {identity: past.get(identity, []) for identity in planned}


def _verdicts(sweep: Path) -> list[str]:
    if not (sweep / "plan.json").exists():
        return ["a sweep without a plan"]
    found = []
    for identity, attempts in _attempts(sweep).items():
        counts = [one for one in attempts if one.done]
        if len(counts) != 1:
            causes = [one.cause or (one.verdict or {}).get("verdict", "no verdict") for one in attempts]
            found.append(f"{identity[:12]} has {len(counts)} verdicts that count, of {causes}")
        found += [f"{one.folder.name} has no verdict" for one in attempts if one.verdict is None]
        found += [f"{one.folder.name} kept its caches" for one in attempts if (one.folder / records.CACHES).exists()]
    return found


def _steps(sweep: Path) -> list[str]:
    """Runs that ended well made every step, and none that was saved before was made again."""
    found = []
    for attempts in _attempts(sweep).values():
        saved, made = 0, set[int]()
        for one in attempts:
            events = list(EventReader(one.folder / EVENTS_FILE).poll())
            steps = [event["step"] for event in events if event["event"] == "step"]
            if steps and min(steps) != saved + 1:
                found.append(f"{one.folder.name} went on from step {min(steps) - 1}, and {saved} was saved")
            saved = max([saved, *(event["step"] for event in events if event["event"] == "checkpoint")])
            made |= set(steps)
        if (attempts[-1].verdict or {}).get("verdict") in ("ok", "degraded") and made != set(range(1, STEPS + 1)):
            found.append(f"{attempts[-1].folder.name} ended well with the steps {sorted(made)}")
    return found


def _tracked(place: Place, sweep: Path) -> list[str]:
    """Each attempt, each sweep stands once in MLflow, over, as its verdict says, with every point once."""
    rows, found = place.rows(), []
    tags: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for run, key, value in rows["tags"]:
        tags[run][key] = value
    ours = {run: told for run, told in tags.items() if told.get("sweeper.folder") == str(place.store.resolve())}
    status = {run: how for run, _, how, *_ in rows["runs"]}
    untagged = set(status) - set(tags)
    if untagged:
        found.append(f"{len(untagged)} runs in MLflow belong to nobody")
    found += [
        f"MLflow shows {told.get('mlflow.runName')} as {status[run]}"
        for run, told in ours.items()
        if status[run] == "RUNNING"
    ]
    shown = collections.defaultdict(list)
    for run, told in ours.items():
        shown[told.get("sweeper.run") or f"{told['kind']} {told['sweep_id']}"].append(run)
    found += [f"{name} stands {len(runs)} times in MLflow" for name, runs in shown.items() if len(runs) != 1]
    points = collections.defaultdict(list)
    for run, key, step, at, value, _ in rows["metrics"]:
        points[run].append((key, step, at, value))
    if [status[run] for run in shown[f"sweep {sweep.name}"]] != ["FINISHED"]:
        found.append(f"the sweep is {[status[run] for run in shown[f'sweep {sweep.name}']]} in MLflow")
    for one in (one for attempts in _attempts(sweep).values() for one in attempts):
        name = one.folder.name
        if not shown[name]:
            found.append(f"{name} is not in MLflow")
            continue
        run = shown[name][0]
        verdict = (one.verdict or {}).get("verdict", "")
        if status[run] != STATUS.get(verdict, "FAILED"):
            found.append(f"MLflow shows {name} as {status[run]}, and it is {verdict}")
        doubled = [k for k, n in collections.Counter((key, step) for key, step, *_ in points[run]).items() if n > 1]
        found += [f"{name}: {key} of step {step} stands twice" for key, step in doubled]
        told = sorted((step, value) for key, step, _, value in points[run] if key == "train/loss")
        events = EventReader(one.folder / EVENTS_FILE).poll()
        if told != [(event["step"], event["loss"]) for event in events if event["event"] == "step"]:
            found.append(f"{name}: MLflow has the losses of steps {[step for step, _ in told]}")
    return found


def locked(folder: Path) -> list[Path]:
    """The files of a folder that somebody holds a lock on."""
    found = []
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found.append(path)
    return found


def _snapshots(store: Path) -> list[str]:
    """Snapshots that others would take and that are not whole."""
    found = []
    for manifest in (store / "snapshots").glob("v*/manifest.json"):
        if "." in manifest.parent.name:
            continue
        with tempfile.TemporaryDirectory() as copy:
            try:
                snapshots.take(store, json.loads(manifest.read_text())["key"], Path(copy))
            except snapshots.Fault as fault:
                found.append(f"{manifest.parent.name}: {fault}")
    return found


@contextlib.contextmanager
def opened(name: str, folder: Path) -> Iterator[Place]:
    """A place of that name with the servers that it needs. Raises RuntimeError when it cannot be had here."""
    folder.mkdir(parents=True)
    folder = folder.resolve()
    env = os.environ | {"SWEEPER_LEASES": str(folder / "leases"), "OMP_NUM_THREADS": "1"}
    if name == "slurm":
        yield from _with_slurm(folder, env)
    elif name == "server":
        yield from _with_server(folder, env | driver.gpus(folder, GPUS))
    else:
        rows = lambda: sqlite_rows(folder / "store" / "mlflow.db")  # noqa: E731
        yield Place(name, folder, ["jobs=auto", "split=1t1d", "device=cuda"], env | driver.gpus(folder, GPUS), rows)


def _with_server(folder: Path, env: dict[str, str]) -> Iterator[Place]:
    if why := tracking_server.missing():
        raise RuntimeError(why)
    home = Path(tempfile.mkdtemp(prefix="sweeper-server-"))  # which another user, PostgreSQL's, can reach
    try:
        with tracking_server.Server(home) as server:

            def killed(kill: Callable[[], None]) -> Callable[[str], str]:
                def at_once(way: str) -> str:
                    kill()
                    return "kill"

                return at_once

            words = ["jobs=auto", "split=1t1d", "device=cuda", "tracking=server", f"tracking.uri={server.url}"]
            servers = {
                "server": (killed(server.kill), server.start),
                "database": (killed(server.kill_database), server.start_database),
            }
            yield Place("server", folder, words, env, server.rows, servers)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _with_slurm(folder: Path, env: dict[str, str]) -> Iterator[Place]:
    if why := slurm.missing():
        raise RuntimeError(why)
    cluster = slurm.Cluster(folder / "slurm")
    cluster.start()
    try:
        words = ["hydra/launcher=slurm", "slurm.cpus=1", "slurm.memory=300M", "slurm.time=30", "device=cpu"]
        env = env | {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}

        def daemon(name: str) -> Callable[[str], str]:
            def kill(way: str) -> str:
                pid = int((cluster.root / f"{name}.pid").read_text())
                end(pid, way)
                while psutil.pid_exists(pid):  # it may save what it knows
                    time.sleep(0.05)
                return way

            return kill

        def resume() -> None:
            """A controller that was killed uses numbers of jobs again, and then takes its node for a faulty one."""
            if "drain" in cluster.answers("sinfo", "-h", "-o", "%T"):
                cluster.answers("scontrol", "update", f"NodeName={cluster.host}", "State=RESUME")

        servers = {
            "slurmctld": (daemon("slurmctld"), cluster.controller),
            "slurmd": (daemon("slurmd"), cluster.node),
        }
        rows = lambda: sqlite_rows(folder / "store" / "mlflow.db")  # noqa: E731
        yield Place("slurm", folder, words, env, rows, servers, resume, settle_s=10.0)
    finally:
        cluster.stop()


def sqlite_rows(path: Path) -> Rows:
    """What an MLflow store in a file holds of runs."""
    base = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
    with contextlib.closing(base):
        return {
            name: base.execute(f"SELECT {wanted} FROM {name} ORDER BY {wanted}").fetchall()
            for name, wanted in tracking_server.COLUMNS.items()
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50, help="rounds, divided among the places")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--keep", type=Path, help="a folder that does not exist; kept afterwards")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and everything that was started is stopped
    rng = random.Random(told.seed)
    home = told.keep or Path(tempfile.mkdtemp(prefix="kill-anywhere-")) / "all"
    struck: collections.Counter[str] = collections.Counter()
    bad = 0
    for place_number, name in enumerate(told.where):
        times = told.times // len(told.where) + (place_number < told.times % len(told.where))
        try:
            with opened(name, home / name) as place:
                for number in range(1, times + 1):
                    done = play(place, number, rng)
                    struck.update(done.strikes)
                    bad += bool(done.faults)
                    what = ", ".join(done.strikes) or "nothing hit"
                    print(f"{name} {number}: {what}; {done.starts} starts, {done.seconds:.0f} s", flush=True)
                    for fault in done.faults:
                        print(f"    {fault}", flush=True)
        except RuntimeError as error:
            print(f"{name}: cannot be had here: {error}", flush=True)
    print(f"{sum(struck.values())} strikes: " + ", ".join(f"{n} {what}" for what, n in sorted(struck.items())))
    print(f"{bad} rounds left something wrong")
    if not told.keep:
        shutil.rmtree(home.parent, ignore_errors=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
