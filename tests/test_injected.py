"""Causes made to happen, under the harness, each in a run of its own that must end in its signature."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import broken
from fakes.command import runs, sweeper

from sweeper.signatures import Rule, rules

BROKEN = Path(broken.__file__)
TESTS = Path(__file__).parent
WAYS = [cause for cause in rules() if hasattr(broken, cause.replace(".", "_"))]
# A process may mount a small /dev/shm of its own, or this cannot be tried without harming others.
SMALL_SHM = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]


def can_shrink_shm() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(SMALL_SHM, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Two sweeps side by side, whose cells differ in what breaks: verdicts by cause."""
    causes = [cause for cause in WAYS if cause != "memory.shm_exhausted" or can_shrink_shm()]
    stores = [tmp_path_factory.mktemp("injected") / "store" for _ in range(2)]

    def sweep(number: int) -> subprocess.CompletedProcess[str]:
        cells = ",".join(f"['{{python}}','{BROKEN}',{cause},'{{out}}']" for cause in causes[number::2])
        words = ["-m", "workload=command", f"workload.argv={cells}", "budget.train=2", "budget.warmup=2", "grace=5"]
        return sweeper(stores[number], *words, seconds=300)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(sweep, range(2)):
            assert done.returncode == 0, done.stderr
    return {
        json.loads((store / "runs" / name / "run.json").read_text())["argv"][2]: verdict
        for store in stores
        for name, verdict in runs(store).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("cause", WAYS)
def test_what_breaks_is_named(verdicts: dict[str, dict], cause: str) -> None:
    if cause not in verdicts:
        pytest.skip("this machine lets nobody mount a small /dev/shm")
    found = verdicts[cause]
    assert found["signature"]["cause"] == cause, found
    assert found["signature"]["evidence"]
    assert re.fullmatch(r"\d+\.\d+", found["signature"]["version"])
    expected = {"process.hung": "hung", "compile.no_end": "hung", "attention.dense_fallback": "degraded"}
    killed = found["exit"]["signal"] in (signal.SIGKILL, signal.SIGTERM)
    assert found["verdict"] == expected.get(cause, "killed" if killed else "failed")


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule.cause)
def test_the_page_says_truly_how_a_cause_is_tested(rule: Rule) -> None:
    """By a job that is broken that way, by the test that is named, or by so many public texts."""
    assert bool(rule.injected) != bool(rule.not_injected) == bool(rule.instead)
    named = re.findall(r"\btest_\w+\.py\b", rule.injected)
    assert all((TESTS / name).is_file() for name in named)
    if rule.not_injected:
        assert rule.cause not in WAYS
        texts = [line for path in TESTS.glob("data/failures*.jsonl") for line in path.read_text().splitlines()]
        counted = sum(json.loads(line)["cause"] == rule.cause for line in texts)
        files = [Path(name).name for name in re.findall(r"tests/(data/\S+\.txt)", rule.instead)]
        assert all((TESTS / "data" / "stacks" / name).is_file() for name in files)
        assert rule.instead.startswith(f"{counted} public texts") if counted else files
    elif rule.cause not in WAYS:
        tests = [(TESTS / name).read_text() for name in named]
        assert any(rule.cause in text for text in tests), "the test that is named says nothing of this cause"
