"""The benchmark of a step runs on any machine, in toy sizes, and says what it left out."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "step.py"


def test_a_toy_run_writes_its_figures_and_says_what_is_not_to_be_had(tmp_path):
    out = tmp_path / "step.json"
    command = [
        sys.executable,
        SCRIPT,
        "--tiny",
        "--variants",
        "eager,triton,specforge",
        "--samples",
        "2",
        "--json",
        out,
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    assert "packed specforge: left out: no checkout given with --specforge" in done.stdout
    assert "batch triton: left out: compile=triton needs CUDA" in done.stdout
    report = json.loads(out.read_text())
    assert [(r["shape"], r["variant"], len(r["samples_ms"])) for r in report["results"]] == [
        ("batch", "eager", 2),
        ("packed", "eager", 2),
    ]
    assert all(r["ms"] > 0 and r["useful_tflop"] > 0 for r in report["results"])
    assert {"card", "torch", "commit", "ceiling_tflops"} <= report.keys()


def test_first_steps_are_told_from_empty_caches_and_from_those_left(tmp_path):
    out = tmp_path / "first.json"
    command = [sys.executable, SCRIPT.with_name("first_step.py"), "--tiny", "--variants", "eager", "--json", out]
    subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    report = json.loads(out.read_text())
    assert {state: s > 0 for state, s in report["first_step_s"]["eager"].items()} == {"cold": True, "warm": True}
    assert {"card", "torch", "commit"} <= report.keys()
