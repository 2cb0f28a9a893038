"""MLflow shows what the run directories hold: read back through its own client."""

from __future__ import annotations

import csv
import itertools
import json
import math
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

from sweeper import sync, tracking
from sweeper.tracking import place
from sweeper.tracking.view import View, alive

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
        assert f"train/loss_last/{variant}" in metrics
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


def test_a_lost_tracking_store_is_rebuilt(fresh: Path, store: Path) -> None:
    write_run(store, CELL, repeat=1)
    write_run(store, CELL, repeat=2, told=events(steps=2)[:-1], exit_code=1)
    catch_up(store)
    before = {name: run.data.params for name, run in shown(store).items()}
    shutil.copy(fresh, store / "mlflow.db")
    assert not shown(store)
    assert catch_up(store)[0] == 2
    assert {name: run.data.params for name, run in shown(store).items()} == before


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
