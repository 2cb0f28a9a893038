"""The command as a person uses it, with a fake training job: for tests of the harness."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked import Forked

# A page costs some seconds, and few tests look at it; those ask for it.
QUICK = ["report=false"]
CHILD = Path(__file__).with_name("child.py")


def workload(way: str, argument: Path | str = "") -> list[str]:
    """Overrides that make the fake job `way` the workload."""
    words = ["'{python}'", f"'{CHILD}'", way, "'{out}'"] + ([f"'{argument}'"] if argument else [])
    return ["workload=command", f"workload.argv=[{','.join(words)}]"]


@contextmanager
def started(store: Path, *arguments: str, module: str = "sweeper") -> Iterator[Forked]:
    """The command, running, with a store of its own and no tracking, in the directory that holds the store.

    Whatever becomes of the test, the command has ended afterwards, and its leash ends what it started.
    """
    process = Forked(module, *arguments, f"store={store}", "tracking=none", cwd=store.parent, session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def sweeper(store: Path, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    with started(store, *arguments) as process:
        out, err = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def runs(store: Path) -> dict[str, dict[str, Any]]:
    """Verdicts by directory name; a directory that has none gives an empty one."""
    found = {}
    for folder in sorted((store / "runs").iterdir()):
        verdict = folder / "verdict.json"
        found[folder.name] = json.loads(verdict.read_text()) if verdict.exists() else {}
    return found


def only(store: Path, part: str = "") -> dict[str, Any]:
    """The verdict of the one run whose directory name contains `part`."""
    (verdict,) = (verdict for name, verdict in runs(store).items() if part in name)
    return verdict


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for a condition; returns its value. Fails the test when it does not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not come within {seconds} s")


def stepping(store: Path) -> bool:
    """Whether some run in the store has reported a step."""
    return any("step" in path.read_text() for path in store.glob("runs/*/events.jsonl"))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
