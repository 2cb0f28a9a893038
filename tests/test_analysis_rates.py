"""The conclusion is seldom wrong: sweeps with a known truth, as in benchmarks/attribution.py, but few."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "attribution.py"
    spec = importlib.util.spec_from_file_location("benchmark_attribution", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_wrong_and_confident_is_rare_and_right_is_not(benchmark: ModuleType) -> None:
    told = benchmark.attributions(150, random.Random(11))["counts"]["all"]
    assert told.get("wrong", 0) <= 2
    assert told["right"] > 30


@pytest.mark.parametrize("contexts", [1, 2, 4])
def test_intervals_hold_what_they_say(benchmark: ModuleType, contexts: int) -> None:
    rng = np.random.default_rng(3)
    for noise in benchmark.NOISES:
        bounds = [benchmark.interval(benchmark.differences(rng, noise, contexts, 4)) for _ in range(300)]
        held = sum(low <= 0 <= high for low, high in bounds) / len(bounds)
        assert held > 0.91, noise
