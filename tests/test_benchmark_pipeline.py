"""The benchmark of the pipeline runs on any machine, in toy sizes: each stage alone, threads, processes, a picture."""

import json
import sys

import pytest
import torch
from benchmark_module import benchmark_module

from dflash.devices import Placement


@pytest.fixture
def benchmark():
    with benchmark_module("pipeline") as module:
        yield module


@pytest.mark.slow
def test_a_toy_run_sets_both_ways_against_the_slower_stage_and_draws_who_did_what(benchmark, tmp_path, monkeypatch):
    out, picture = tmp_path / "pipeline.json", tmp_path / "timeline.png"
    words = f"pipeline.py --tiny --shapes packed --rounds 1 --steps 10 --json {out} --timeline {picture}"
    monkeypatch.setattr(sys, "argv", words.split())
    benchmark.main()
    results = {r["way"]: r for r in json.loads(out.read_text())["results"]}
    assert set(results) == {"target", "drafter", "threads", "processes"}
    slower = min(results["target"]["ktok_s"], results["drafter"]["ktok_s"])
    for way in ("threads", "processes"):
        assert results[way]["of_stages"] == results[way]["ktok_s"] / slower
        assert len(results[way]["step_seconds"][0]) >= 2
        spans = results[way]["spans"]
        last_step = max(began for who, what, began, _ in spans if (who, what) == ("drafter0", "step"))
        made = [(began, ended) for who, what, began, ended in spans if (who, what) == ("target0", "target")]
        longest = max(ended - began for began, ended in made)
        # It works to the end; what it was at when the drafter left may not be told.
        assert max(ended for _, ended in made) > last_step - longest
        told = {(who, what) for who, what, began, ended in spans if began <= ended}
        assert told >= {("target0", "target"), ("target0", "hand over"), ("drafter0", "wait"), ("drafter0", "step")}
    assert picture.stat().st_size > 10_000


def test_a_machine_without_gpus_is_told(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["pipeline.py"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "needs a GPU, better two, and this machine shows none; --tiny runs a toy on CPU" in capsys.readouterr().err


def test_two_stages_on_one_gpu_can_only_take_turns(benchmark):
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert benchmark.allows([60.0, 30.0], Placement([(one,)], [other], 1)) == 30
    assert benchmark.allows([60.0, 30.0], Placement([(one,)], [one], 1)) == pytest.approx(20)
