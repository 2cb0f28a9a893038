"""MLflow shows what the run directories hold: read back through its own client."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from made_up import BEGAN, add_events, evaluated, events, fanout, finish_run, proof, write_plan, write_run

from dflash.settings import SettingError
from sweeper import sync, tracking
from sweeper.report import __main__ as report
from sweeper.tracking import place
from sweeper.tracking.view import Unkept, View, alive

LOCAL = {"name": "local", "uri": None, "experiment": "dflash"}
CELL = {"wheel": "current", "cache": "cold", "compile": "locked", "split": "1t2d", "isolation": "threads"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty tracking store, made once: making the tables takes seconds."""
    store = tmp_path_factory.mktemp("fresh")
    View(place.own(store), store)
    return store / "mlflow.db"


@pytest.fixture
def store(fresh: Path, tmp_path: Path) -> Path:
    shutil.copy(fresh, tmp_path / "mlflow.db")
    # The copy's experiment keeps its artifacts where the first store had them; here they belong to this one.
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        place = (tmp_path / "mlartifacts").as_uri()
        base.execute("UPDATE experiments SET artifact_location = ? WHERE name = 'dflash'", (place,))
    base.close()
    return tmp_path


def runs(store: Path, condition: str = "") -> list[Any]:
    view = View(place.own(store), store)
    return list(view.client.search_runs([view.experiment], condition, max_results=1000))


def shown(store: Path) -> dict[str, Any]:
    return {r.data.tags["sweeper.run"]: r for r in runs(store, "tags.kind = 'run'")}


def sweeps(store: Path) -> list[Any]:
    return runs(store, "tags.kind = 'sweep'")


def catch_up(store: Path, *names: str, rebuild: bool = False) -> tuple[int, int]:
    """What `python -m sweeper.sync` does with the sweeps of a store, at its own MLflow."""
    return sync.sync(store, place.own(store), names or ["sweep0123"], rebuild)


def client(store: Path) -> Any:
    return View(place.own(store), store).client


def test_sixteen_runs_read_back_after_a_sync(store: Path) -> None:
    cells = [
        {**CELL, "cache": cache, "compile": compiled}
        for compiled, cache in itertools.product(("locked", "whole"), ("cold", "warm"))
    ]
    written = {}
    for repeat, cell in itertools.product(range(1, 5), cells):
        told = events(steps=12 + repeat, pace=0.5 if cell["compile"] == "whole" else 1.0)
        state = proof("warm", "mixed") if cell["cache"] == "warm" and repeat == 4 else proof(cell["cache"])
        folder = write_run(store, cell, repeat=repeat, told=told, cache=state)
        written[folder.name] = folder
    assert catch_up(store) == (16, 0)
    assert catch_up(store) == (0, 16)

    found = shown(store)
    assert set(found) == set(written)
    for name, run in found.items():
        verdict = json.loads((written[name] / "verdict.json").read_text())
        cell = json.loads((written[name] / "run.json").read_text())["cell"]
        figures, metrics, params, tags = verdict["figures"], run.data.metrics, run.data.params, run.data.tags
        assert run.info.status == "FINISHED"
        assert {k: params[f"cell.{k}"] for k in cell} == cell
        assert (params["spec.train.steps"], params["spec.optim.betas"]) == ("12", "0.9, 0.999")
        assert metrics["ktok_s"] == pytest.approx(figures["ktok_s"])
        speeds = [point.step for point in client(store).get_metric_history(run.info.run_id, "ktok_s")]
        assert len(set(speeds)) == len(speeds), "the speed of the last step is that of the run, and stands there once"
        for figure in ("time_to_first_step_s", "compile_s"):
            assert metrics[figure] == pytest.approx(figures[figure])
        assert metrics["peak_rss_gb"] == pytest.approx(3.0)
        assert metrics["use/overhead_s"] == 0.5
        assert metrics["use/cache.fxgraph.files_after"] == 9
        assert "use/cache.triton.files_after" not in metrics  # a layer in which nothing happened
        cause = (verdict["signature"] or {}).get("cause", "none")
        assert (params["result.verdict"], params["result.signature"]) == (verdict["verdict"], cause)
        assert (params["result.cache"], tags["cache.proved"]) == (verdict["cache"]["proved"],) * 2
        assert (tags["cache.requested"], tags["compile"], tags["sweep_id"]) == (
            cell["cache"],
            cell["compile"],
            "sweep0123",
        )
    assert sum(r.data.tags["verdict"] == "degraded" for r in found.values()) == 2

    some = next(iter(found.values()))
    losses = client(store).get_metric_history(some.info.run_id, "train/loss")
    told = json.loads((written[some.data.tags["sweeper.run"]] / "verdict.json").read_text())
    assert [m.step for m in losses] == list(range(1, told["figures"]["steps"] + 1))
    assert losses[0].value == pytest.approx(4.8)
    assert losses[0].timestamp == int((BEGAN + 20 + (0.5 if "whole" in some.info.run_name else 1.0)) * 1000)
    artifacts = {a.path for a in client(store).list_artifacts(some.info.run_id)}
    assert {"spec.json", "run.json", "verdict.json", "child.log", "events.jsonl"} <= artifacts


def test_a_sweep_as_it_happens(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(tracking, "EVERY", 0.05)
    tracker = tracking.make(LOCAL, store)
    tracker.open_sweep("sweep0123", "compile=locked cache=cold", 2)
    folders = []
    for repeat in (1, 2):
        told = events(steps=20)
        folder = write_run(store, CELL, repeat=repeat, told=told[:5], finished=False)
        folders.append(folder)
        tracker.start(folder)
        wait_for(lambda name=folder.name: shown(store)[name].data.metrics["train/loss"] == pytest.approx(4.2))
        assert shown(store)[folder.name].info.status == "RUNNING"
        assert sweeps(store)[0].info.status == "RUNNING"
        add_events(folder, told[5:])
        tracker.tick(folder)
        finish_run(folder, told)
        tracker.finish(folder)
    write_plan(folders, conclusion="Nothing failed in 2 runs.\n")
    tracker.close_sweep("sweep0123")
    tracker.close()

    (sweep,) = sweeps(store)
    kept = {one.path for one in client(store).list_artifacts(sweep.info.run_id)}
    assert kept >= {"table.json", "conclusion.txt"}
    assert (sweep.info.status, sweep.info.run_name) == ("FINISHED", "compile=locked cache=cold")
    assert sweep.data.tags["verdicts"] == "2 ok"
    assert "Nothing failed in 2 runs." in sweep.data.tags["mlflow.note.content"]
    found = shown(store)
    assert {r.info.status for r in found.values()} == {"FINISHED"}
    history = client(store).get_metric_history(found[folders[0].name].info.run_id, "train/loss")
    assert [m.step for m in history] == list(range(1, 21))  # each step once
    link = capsys.readouterr().err
    assert "/#/compare-runs?runs=" in link
    assert all(run.info.run_id in link for run in found.values())


def wait_for(true: Any, seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if true():
                return
        except KeyError:
            pass
        time.sleep(0.1)
    raise AssertionError("did not happen in time")


def test_the_same_sweep_again_joins_its_parent(store: Path) -> None:
    for repeat in (1, 2):
        tracker = tracking.make(LOCAL, store)
        tracker.open_sweep("sweep0123", "title", 1)
        folder = write_run(store, CELL, repeat=repeat)
        tracker.finish(folder)
        write_plan([folder], conclusion="Nothing failed.\n")
        tracker.close_sweep("sweep0123")
        tracker.close()
    assert len(sweeps(store)) == 1
    assert {r.data.tags["sweep_id"] for r in shown(store).values()} == {"sweep0123"}


def test_a_sweep_that_was_told_whole_is_not_looked_up_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Importing MLflow takes longer than all else when a finished sweep is started again."""

    def again() -> str:
        tracker = tracking.make(LOCAL, store)
        if not tracker.knows("sweep0123"):
            tracker.open_sweep("sweep0123", "title", 1)
        tracker.close_sweep("sweep0123")
        tracker.close()
        return str(capsys.readouterr().err)

    folders = [write_run(store, CELL, repeat=repeat) for repeat in (1, 2)]
    write_run(store, CELL, repeat=3, role="prime")
    sweep = write_plan(folders, conclusion="Nothing failed.\n")
    links = again()
    assert "/#/compare-runs?runs=" in links

    def unwanted(*_: Any) -> None:
        raise OSError("nobody needs this")

    with monkeypatch.context() as without:
        without.setattr("sweeper.tracking.view.View", unwanted)
        plan = json.loads((sweep / "plan.json").read_text())
        (sweep / "plan.json").write_text(json.dumps(plan | {"written": BEGAN + 60}))  # as a start does
        assert again() == links
        assert sync.sweeps.up_to_date(place.own(store), store, "sweep0123")

        add_events(folders[0], [])
        finish_run(folders[0], events(), sweeps=["sweep0123", "another"])
        assert "nobody needs this" in again(), "a run has a new verdict"
    again()
    assert shown(store)[folders[0].name].data.tags["sweep_ids"] == "sweep0123,another"

    (sweep / "report.md").write_text("a report")
    again()
    (told,) = sweeps(store)
    assert "report.md" in {one.path for one in client(store).list_artifacts(told.info.run_id)}
    assert told.info.status == "FINISHED"

    (store / "mlflow.db").unlink()
    assert not sync.sweeps.up_to_date(place.own(store), store, "sweep0123")


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ({"exit_code": 1}, "FAILED"),
        ({"ended_by": "hung", "exit_code": None}, "FAILED"),
        ({"exit_code": None, "signal": 9}, "KILLED"),
        ({"ended_by": "skipped", "exit_code": None, "reason": "needs CUDA"}, "FINISHED"),
    ],
)
def test_status_follows_the_verdict(store: Path, ends: dict[str, Any], status: str) -> None:
    folder = write_run(store, CELL, told=events(steps=2)[:-1], **ends)
    catch_up(store)
    run = shown(store)[folder.name]
    assert run.info.status == status
    assert "ktok_s" not in run.data.metrics  # it never reached its measured window


def test_values_that_are_not_finite_show_as_such(store: Path) -> None:
    told = [e | {"loss": None, "nonfinite": ["loss"]} if e.get("step") == 12 else e for e in events()]
    folder = write_run(store, CELL, told=told)
    catch_up(store)
    run = shown(store)[folder.name]
    assert math.isnan(client(store).get_metric_history(run.info.run_id, "train/loss")[-1].value)
    assert run.data.params["result.signature"] == "numerics.nan"


def history(store: Path, run: Any, name: str) -> dict[int, float]:
    return {m.step: m.value for m in client(store).get_metric_history(run.info.run_id, name)}


def test_a_run_whose_directory_cannot_be_written_holds_up_no_other(store: Path) -> None:
    folders = [write_run(store, CELL, repeat=number) for number in (1, 2)]
    write_plan(folders, conclusion="Nothing failed.\n")
    (folders[0] / "tracking.json").mkdir()
    with pytest.raises(Unkept, match=f"could not be kept in {folders[0]}"):
        catch_up(store)
    assert {run.info.status for run in [*shown(store).values(), *sweeps(store)]} == {"FINISHED"}
    assert set(shown(store)) == {folder.name for folder in folders}


def test_a_profile_that_a_run_left_is_an_artifact_of_it(store: Path) -> None:
    folder = write_run(store, CELL)
    (folder / "profile.json.gz").write_bytes(b"a trace")
    (folder / "profile.txt").write_text("a table")
    (folder / ".profile-half").mkdir()
    catch_up(store)
    (run,) = shown(store).values()
    kept = {one.path for one in client(store).list_artifacts(run.info.run_id)}
    assert {name for name in kept if "profile" in name} == {"profile.json.gz", "profile.txt"}
    path = client(store).download_artifacts(run.info.run_id, "profile.json.gz", str(store))
    assert Path(path).read_bytes() == b"a trace"


def test_variants_slots_and_evaluations_have_names_of_their_own(store: Path) -> None:
    slots = {"loss_at": [1.5, 2.5, None], "accuracy_at": [0.5, 0.25, None]}
    waits = {
        "wait_s": {"target0": 0.1, "target1": 0.3, "drafter0": 0.5},
        "stage_tok_s": {"target": 900, "drafter": 600},
    }
    told = [e | slots | waits if e["event"] == "step" else e for e in fanout(events(), "b16", "b8")]
    told[-1:-1] = [
        evaluated(12, 1.9, "mt bench/../x", "b8"),
        evaluated(6, 1.4, variant="b8", at=100),
        evaluated(12, 1.7, variant="b16"),
    ]
    folder = write_run(store, CELL, told=told)
    catch_up(store)
    run = shown(store)[folder.name]
    metrics = run.data.metrics
    for variant, more in (("b16", 0.0), ("b8", 0.5)):
        assert history(store, run, f"train/loss/{variant}") == pytest.approx(
            {n: 5 - 0.2 * n + more for n in range(1, 13)}
        )
        assert metrics[f"train/loss_slot/01/{variant}"] == 1.5
        assert metrics[f"train/accuracy_slot/02/{variant}"] == 0.25
        assert f"train/loss_slot/03/{variant}" not in metrics
        assert metrics[f"train/waited/target/{variant}"] == pytest.approx(0.2)
        assert metrics[f"train/tok_s/drafter/{variant}"] == 600
        assert f"train_end/loss_last/{variant}" in metrics
    assert "train/loss" not in metrics
    assert metrics["ktok_s"] == pytest.approx(json.loads((folder / "verdict.json").read_text())["figures"]["ktok_s"])
    assert (metrics["tau/gsm8k/b8"], metrics["tau/gsm8k/b16"]) == (1.4, 1.7)
    assert metrics["tau_low/mt_bench_.._x/b8"] == pytest.approx(1.8)
    path = client(store).download_artifacts(run.info.run_id, "eval.csv", str(store))
    rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    assert [(row["variant"], row["step"], row["tau"], row["n"]) for row in rows] == [
        ("b8", "12", "1.9", "32"),
        ("b8", "6", "1.4", "32"),
        ("b16", "12", "1.7", "32"),
    ]
    assert rows[0]["accept_at"] == "0.6 0.3"


def test_an_evaluation_is_shown_while_the_run_goes_on_and_once(store: Path) -> None:
    folder = write_run(store, CELL, told=[*events()[:8], evaluated(6, 1.4)], finished=False)
    catch_up(store)
    assert history(store, shown(store)[folder.name], "tau/gsm8k") == {6: 1.4}
    add_events(folder, [*events()[8:-1], evaluated(12, 1.6), events()[-1]])
    finish_run(folder, events())
    catch_up(store)
    again = client(store).get_metric_history(shown(store)[folder.name].info.run_id, "tau/gsm8k")
    assert [(m.step, m.value) for m in again] == [(6, 1.4), (12, 1.6)]


def test_a_long_run_shows_its_details_now_and_then(store: Path) -> None:
    told = [e | {"loss_at": [2.0, 3.0]} if e["event"] == "step" else e for e in events(steps=2050)]
    folder = write_run(store, CELL, told=told)
    catch_up(store)
    run = shown(store)[folder.name]
    assert len(history(store, run, "train/loss")) == 2050
    details = history(store, run, "train/loss_slot/02")
    assert 150 <= len(details) <= 250
    assert {1, 2050} <= set(details)


def everything(store: Path) -> dict[str, Any]:
    """All that MLflow shows of a store, but for what it numbers and dates by itself."""
    found: dict[str, Any] = {}
    its = client(store)
    for run in runs(store):
        tags = {key: value for key, value in run.data.tags.items() if key != "sweeper.harness_pid"}
        points = {
            key: [(m.step, m.timestamp, m.value) for m in its.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        files = {
            one.path: Path(its.download_artifacts(run.info.run_id, one.path)).read_bytes()
            for one in its.list_artifacts(run.info.run_id)
        }
        name = f"{tags['kind']} {tags.get('sweeper.run', '')}{tags.get('sweeper.cell', '')}"
        assert name not in found
        found[name] = [run.info.run_name, run.info.status, run.data.params, tags, points, files]
    for model in its.search_logged_models(["1"]):
        folder = Path(model.artifact_location.removeprefix("file://"))
        weights = (folder / "model.safetensors").read_bytes()
        found[f"model {model.name}"] = [model.params, str(model.status), model.tags["sweeper.run"], weights]
    return found


def test_a_deleted_tracking_store_is_rebuilt_whole(fresh: Path, store: Path) -> None:
    ended = [write_run(store, CELL, repeat=n, told=events(steps=12 + n)) for n in (1, 2, 3)]
    failed = write_run(store, CELL | {"compile": "whole"}, told=events(steps=2)[:-1], exit_code=1)
    save_drafter(ended[0])
    write_plan([*ended, failed], conclusion="1 of 4 runs failed.\n")
    assert catch_up(store) == (4, 0)
    before = everything(store)
    assert len(before) == 4 + 2 + 1 + 1  # runs, cells, sweep, model
    assert {run.info.run_name for run in shown(store).values()} == {"locked r1", "locked r2", "locked r3", "whole r1"}
    shutil.rmtree(store / "mlartifacts")
    kept = {path: path.read_bytes() for path in store.glob("runs/*/*") if path.is_file()}
    shutil.copy(fresh, store / "mlflow.db")
    with sqlite3.connect(store / "mlflow.db") as base:
        base.execute("UPDATE experiments SET artifact_location = ?", ((store / "mlartifacts").as_uri(),))
    base.close()
    assert not shown(store)
    assert catch_up(store) == (4, 0)
    assert everything(store) == before
    assert catch_up(store, rebuild=True) == (4, 0)
    assert everything(store) == before
    for path, content in kept.items():
        assert path.name == "tracking.json" or path.read_bytes() == content


def save_drafter(folder: Path, variant: str = "") -> None:
    """What a job that saves its drafter leaves in its directory."""
    place = folder / "drafter" / variant
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 64, "block_size": 8}))
    (place / "model.safetensors").write_bytes(b"weights of " + variant.encode())


def test_a_saved_drafter_is_a_model_with_its_figures(store: Path, tmp_path: Path) -> None:
    told = fanout(events(), "b16", "b8")
    told[-1:-1] = [evaluated(12, 1.7, variant="b16"), evaluated(12, 1.9, variant="b8")]
    folder = write_run(store, CELL, told=told)
    save_drafter(folder, "b16")
    save_drafter(folder, "b8")
    failed = write_run(store, CELL, repeat=2, exit_code=1)
    save_drafter(failed)
    catch_up(store)
    found = {one.name: one for one in client(store).search_logged_models(["1"])}
    assert set(found) == {"drafter-b16", "drafter-b8"}
    model = found["drafter-b8"]
    assert (str(model.status), model.source_run_id) == ("READY", shown(store)[folder.name].info.run_id)
    assert model.params == {"variant": "b8", "layers": "2", "hidden": "64", "block": "8"}
    figures = {metric.key: metric.value for metric in model.metrics}
    assert (figures["tau/gsm8k/b8"], "tau/gsm8k/b16" in figures) == (1.9, False)
    assert figures["ktok_s"] > 0
    kept = {path.name for path in Path(model.artifact_location.removeprefix("file://")).iterdir()}
    assert kept == {"MLmodel", "config.json", "model.safetensors"}
    assert catch_up(store) == (0, 2)
    finish_run(folder, told, sweeps=["sweep0123", "sweep4567"])
    assert catch_up(store) == (1, 1)
    assert len(client(store).search_logged_models(["1"])) == 2


def test_what_a_run_took_of_its_machine_is_a_system_metric_over_time(store: Path) -> None:
    folder = write_run(store, CELL)
    looks = [{"t": BEGAN + 2 * n, "rss_bytes": n * 1e9, "cpu": 1.5, "gpu_busy": {"0": 0.25}} for n in range(30)]
    (folder / "usage.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    catch_up(store)
    run = shown(store)[folder.name]
    used = client(store).get_metric_history(run.info.run_id, "system/process_memory_megabytes")
    assert [m.step for m in used] == list(range(len(used)))
    assert all(m.value == pytest.approx((m.timestamp / 1000 - BEGAN) / 2 * 1000) for m in used)
    assert run.data.metrics["system/gpu_0_utilization_percentage"] == 25


def test_what_the_documentation_searches_for_is_found(store: Path) -> None:
    told = (Path(__file__).parent.parent / "docs" / "MLFLOW.md").read_text()
    searches = re.findall(r"^\| `((?:tags|params)\.[^`]+)` \|", told, re.MULTILINE)
    assert len(searches) >= 8
    ok = [write_run(store, CELL, repeat=n) for n in (1, 2)]
    warm = write_run(store, CELL | {"cache": "warm"}, cache=proof("warm"))
    race = "  File x\nRuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function."
    failed = write_run(store, CELL, repeat=3, exit_code=1, log_tail=race)
    write_plan([*ok, warm, failed], conclusion="1 of 4 runs failed.\n")
    catch_up(store)
    prints = json.loads((failed / "verdict.json").read_text())["signature"]["fingerprint"]
    found = [
        {run.data.tags.get("sweeper.run", run.data.tags["kind"]) for run in runs(store, words)}
        for words in (one.replace("SWEEP", "sweep0123").replace("FINGERPRINT", prints) for one in searches)
    ]
    several = {one.name for one in (*ok, warm, failed)}
    assert found == [
        {"sweep"},
        several,
        {"cell"},
        {failed.name},
        {failed.name},
        {failed.name},
        {warm.name},
        several - {failed.name},
    ]
    cells = {run.data.tags["cell"]: run.data for run in runs(store, "tags.kind = 'cell'")}
    speeds = [json.loads((one / "verdict.json").read_text())["figures"]["ktok_s"] for one in ok]
    (cold,) = (data for data in cells.values() if data.params["cell.cache"] == "cold")
    assert cold.metrics["ktok_s.median"] == pytest.approx(sum(speeds) / 2)
    assert (cold.metrics["ktok_s.low"], cold.metrics["ktok_s.high"]) == (min(speeds), max(speeds))
    assert (cold.metrics["ktok_s.n"], cold.metrics["runs"], cold.metrics["runs.failed"]) == (2, 3, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "tracking.uri=null: must be the address of an MLflow server"),
        ({"uri": "mlflow.example"}, "tracking.uri=mlflow.example: must be the address of an MLflow server"),
        ({"uri": "ftp://h"}, "tracking.uri=ftp://h: must begin with one of http://, https://, postgresql://"),
        ({"uri": "http://:80"}, "tracking.uri=http://:80: must name a host"),
        ({"uri": "http://h:99999"}, "tracking.uri=http://h:99999: must be an address"),
        ({"uri": "http://me:hush@h"}, "tracking.uri=http://me@h: must hold no name and no password; set MLFLOW_"),
        ({"uri": "postgresql+nodriver://me:hush@h/x"}, "tracking.uri=postgresql\\+nodriver://me@h/x: is no address"),
        ({"name": "local", "uri": "http://h"}, "tracking.uri=http://h: needs tracking=server"),
        ({"uri": "http://h", "models": "perhaps"}, "tracking.models=perhaps: must be true or false"),
        ({"uri": "http://h", "experiment": ""}, "tracking.experiment=: must be a name"),
    ],
)
def test_a_wrong_address_is_one_sentence(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said) as told:
        place.read(LOCAL | {"name": "server"} | given, tmp_path)
    assert "hush" not in str(told.value)


def test_a_crash_between_creating_and_noting_makes_no_second_run(store: Path) -> None:
    folder = write_run(store, CELL)
    catch_up(store)
    (folder / "tracking.json").unlink()
    catch_up(store)
    assert len(shown(store)) == len([r for r in runs(store) if "sweeper.run" in r.data.tags]) == 1


def test_a_verdict_written_anew_is_shown(store: Path) -> None:
    """A later sweep may adopt a finished run: its verdict then names both sweeps."""
    folder = write_run(store, CELL)
    catch_up(store)
    finish_run(folder, events(), sweeps=["sweep0123", "sweep4567"])
    assert catch_up(store)[0] == 1
    assert shown(store)[folder.name].data.tags["sweep_ids"] == "sweep0123,sweep4567"


def test_what_a_dead_harness_left_running_is_closed(store: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lost, live, late = (write_run(store, CELL, repeat=r, finished=False) for r in (1, 2, 3))
    for folder in (lost, late):
        run = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(run | {"harness_pid": ended.pid}))
    now = json.loads((live / "run.json").read_text())
    (live / "run.json").write_text(json.dumps(now | {"started": time.time()}))
    view = View(place.own(store), store)
    for folder in (lost, live, late):
        view.bring(folder)
    finish_run(late, events())
    tracker = tracking.make(LOCAL, store)
    tracker.close()
    status = {name: run.info.status for name, run in shown(store).items()}
    assert status == {lost.name: "KILLED", live.name: "RUNNING", late.name: "FINISHED"}


def test_a_harness_elsewhere_may_live() -> None:
    assert alive(1, "some-other-host", 0.0)
    assert not alive(None, None, None)
    assert not alive(1, socket.gethostname(), 1.0)  # that process began after the run


def test_primes_are_not_shown(store: Path) -> None:
    write_run(store, CELL, role="prime")
    assert catch_up(store) == (0, 1)
    assert not shown(store)


def test_an_unreachable_store_neither_blocks_nor_raises(tmp_path: Path, capsys: Any) -> None:
    tracker = tracking.Tracker(place.Place("http://user:secret@127.0.0.1:9"), tmp_path)
    folder = write_run(tmp_path, CELL)
    tracker.open_sweep("sweep0123", "title", 1)
    tracker.finish(folder)
    tracker.close_sweep("sweep0123")
    tracker.close()
    told = capsys.readouterr().err
    assert "tracking failed" in told
    assert "sweeper.sync" in told
    assert "secret" not in told
    assert not [t for t in threading.enumerate() if t.name == "tracking" and t.is_alive()]


def test_what_failed_is_tried_again(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(tracking, "PAUSE", 0.05)
    outages = iter([OSError("disk I/O error"), OSError("disk I/O error")])

    class Flaky(View):
        def __init__(self, *given: Any) -> None:
            for outage in outages:
                raise outage
            super().__init__(*given)

    monkeypatch.setattr("sweeper.tracking.view.View", Flaky)
    folder = write_run(store, CELL)
    write_plan([folder], conclusion="Nothing failed.\n")
    tracker = tracking.make(LOCAL, store)
    tracker.open_sweep("sweep0123", "title", 1)
    tracker.finish(folder)
    wait_for(lambda: shown(store)[folder.name].info.status == "FINISHED")
    tracker.close_sweep("sweep0123")
    tracker.close()
    assert capsys.readouterr().err.count("disk I/O error") == 1  # told once
    assert [p.info.status for p in sweeps(store)] == ["FINISHED"]


@pytest.mark.slow
def test_two_harnesses_share_a_fresh_store(tmp_path: Path) -> None:
    """Both make the tables at the same time, the case in which MLflow alone loses most writers."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path\n"
        "from made_up import write_run\n"
        "from sweeper import tracking\n"
        "store, repeat = Path(sys.argv[1]), int(sys.argv[2])\n"
        "tracker = tracking.make({'name': 'local', 'uri': None, 'experiment': 'dflash'}, store)\n"
        "tracker.open_sweep('both', 'both', 2)\n"
        f"folder = write_run(store, {CELL!r}, repeat=repeat, sweep='both')\n"
        "tracker.finish(folder)\n"
        "tracker.close()\n"
        "sys.exit(bool(tracker.notes))\n"
    )
    here = str(Path(__file__).parent)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(n), here], stderr=subprocess.PIPE, text=True
        )
        for n in (1, 2)
    ]
    for process in started:
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
    assert len(shown(tmp_path)) == 2
    assert len(sweeps(tmp_path)) == 1


def test_tracking_none_writes_nothing(tmp_path: Path) -> None:
    tracker = tracking.make(LOCAL | {"name": "none"}, tmp_path)
    folder = write_run(tmp_path, CELL)
    tracker.open_sweep("s", "t", 1)
    tracker.start(folder)
    tracker.finish(folder)
    tracker.close_sweep("s")
    tracker.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]


def test_the_sync_command(store: Path, capsys: Any) -> None:
    folder = write_run(store, CELL)
    write_plan([folder], conclusion="Nothing failed.\n")
    here = ["--store", str(store)]
    assert sync.main(here) == 0
    assert capsys.readouterr().out.startswith("no sweep of this store was tracked; name one")
    assert not shown(store)
    assert sync.main([*here, "sweep0123"]) == 0
    assert capsys.readouterr().out.endswith("/mlflow.db: 1 runs written, 0 unchanged\n")
    assert sync.main(here) == 0  # it is tracked by now
    assert capsys.readouterr().out.endswith("/mlflow.db: 0 runs written, 1 unchanged\n")
    for words, said in (
        (["--store", str(store / "none")], f"--store={store}/none: must be a folder in which a sweep has run"),
        ([*here, "sweep4567"], f"sweep=sweep4567: is not in {store}; known: sweep0123"),
        ([*here, "--uri", "nosuch://x"], "--uri=nosuch://x: must begin with one of http://,"),
    ):
        assert sync.main(words) == 2
        assert capsys.readouterr().err.startswith(f"sweeper.sync: {said}")


def test_a_report_written_anew_is_that_of_the_sweep_in_mlflow(store: Path, tmp_path: Path, capsys: Any) -> None:
    folder = write_run(store, CELL)
    sweep = write_plan([folder], conclusion="Nothing failed.\n")
    words = [sweep.name, "--store", str(store)]
    assert report.main(words) == 0
    assert "MLflow" not in capsys.readouterr().err, "it was never tracked"
    assert not sweeps(store)
    catch_up(store)

    (folder / "profile.txt").write_text("it came later")  # so the page has more to say
    assert report.main([*words, "--out", str(tmp_path / "elsewhere")]) == 0
    assert "MLflow" not in capsys.readouterr().err, "what lies elsewhere is nobody's"
    assert report.main(words) == 0
    assert f"in MLflow at sqlite:///{store}/mlflow.db" in capsys.readouterr().err
    (shown_sweep,) = sweeps(store)
    for name in ("report.html", "report.md", "report.csv"):
        kept = client(store).download_artifacts(shown_sweep.info.run_id, name, str(tmp_path))
        assert Path(kept).read_text() == (sweep / name).read_text()
    assert "profile.txt" in (sweep / "report.html").read_text()
    assert shown_sweep.info.status == "FINISHED"
    assert report.main(words) == 0
    assert "MLflow" not in capsys.readouterr().err, "nothing is new"


def test_a_report_is_written_though_mlflow_cannot_be(store: Path, capsys: Any) -> None:
    sweep = write_plan([write_run(store, CELL)], conclusion="Nothing failed.\n")
    told = {"uri": "http://127.0.0.1:9", "name": "dflash", "place": "0", "ui": "http://127.0.0.1:9", "done": "0"}
    (sweep / "tracking.json").write_text(json.dumps(told))
    assert report.main([sweep.name, "--store", str(store)]) == 0
    said = capsys.readouterr().err
    assert "MLflow at http://127.0.0.1:9 does not have it yet (http://127.0.0.1:9 cannot be reached" in said
    assert f"python -m sweeper.sync sweep0123 --store {store} tries again" in said
    assert (sweep / "report.html").is_file()


def test_no_password_of_a_database_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("psycopg2", reason="the driver psycopg2 is not installed")
    base = "tracking.uri='postgresql+psycopg2://me:hush@127.0.0.1:9/none'"
    words = ["workload=command", "workload.argv=['true']", f"store={tmp_path}/store", "tracking=server", base]
    done = subprocess.run([sys.executable, "-m", "sweeper", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "postgresql+psycopg2://me@127.0.0.1:9/none cannot be reached" in done.stderr.replace("***@", "me@")
    assert "hush" not in done.stdout + done.stderr
    assert list(tmp_path.glob("store/runs/*/verdict.json"))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hush" not in path.read_bytes(), path
