"""The main job itself: the command of the README, on the real target, with fewer steps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 30

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that four runs on the default input leave behind."""
    folder = tmp_path_factory.mktemp("main")
    words = ["-m", "compile=locked,whole", "cache=warm,cold", f"train.steps={STEPS}", "optim.schedule=constant"]
    done = subprocess.run(
        [sys.executable, "-m", "sweeper", *words], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    for word in ("locked", "whole", "warm", "cold", "Ktok/s"):
        assert word in done.stdout
    return folder / "runs"


def verdicts(store: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for folder in (store / "runs").iterdir():
        cell = json.loads((folder / "run.json").read_text())["cell"]
        found[cell["compile"], cell["cache"]] = json.loads((folder / "verdict.json").read_text())
    return found


def test_four_runs_end_well_with_their_caches_proved(store):
    found = verdicts(store)
    assert set(found) == {(c, k) for c in ("locked", "whole") for k in ("warm", "cold")}
    for (_, cache), verdict in found.items():
        assert verdict["verdict"] == "ok", verdict["reason"]
        assert verdict["cache"]["proved"] == cache
        assert verdict["figures"]["steps"] == STEPS
        assert verdict["figures"]["ktok_s"] > 0
        assert verdict["overhead_s"] < 10
    for strategy in ("locked", "whole"):
        cold, warm = (found[strategy, cache]["figures"]["compile_s"] for cache in ("cold", "warm"))
        assert warm < cold


def test_the_drafter_learns_and_every_run_learns_the_same(store):
    for verdict in verdicts(store).values():
        figures = verdict["figures"]
        assert figures["loss_last"] < 0.7 * figures["loss_first"]
        assert figures["accept_last"] > figures["accept_first"]
    losses = [verdict["figures"]["loss_last"] for verdict in verdicts(store).values()]
    assert max(losses) == pytest.approx(min(losses), rel=1e-2)


def test_mlflow_shows_the_sweep_and_its_four_runs(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    experiment = client.get_experiment_by_name("dflash")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    children = [run for run in runs if run.data.tags["kind"] == "run"]
    assert len(runs) == 5
    assert len(children) == 4
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in children:
        data = run.data
        assert {"ktok_s", "time_to_first_step_s", "compile_s"} <= set(data.metrics)
        assert data.params["result.cache"] == data.params["cell.cache"]
        assert data.params["result.verdict"] == "ok"
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == STEPS
