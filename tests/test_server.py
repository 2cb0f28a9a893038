"""A tracking server that others share is told everything once, whatever becomes of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.server import Server, free_port, missing, wait_for
from made_up import add_events, events, finish_run, write_plan, write_run

from sweeper import sync, tracking
from sweeper.tracking import place
from sweeper.tracking.view import View

CELL = {"wheel": "current", "cache": "cold", "compile": "locked", "split": "1t1d", "isolation": "threads"}


class Between:
    """Lies between the harness and the server, and behaves as networks do.

    `lose` is how many of the next answers never arrive, though the server did what it was asked for; `silent` takes
    every connection and never says anything.
    """

    def __init__(self, to: int) -> None:
        self.port, self._to = free_port(), to
        self.url = f"http://127.0.0.1:{self.port}"
        self.lose, self.silent, self.heard = 0, False, b""
        self._listening: socket.socket | None = None
        self._held: list[socket.socket] = []

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def close(self) -> None:
        if self._listening:
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None
        for held in self._held:
            held.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            self._held.append(client)
            if not self.silent:
                server = socket.create_connection(("127.0.0.1", self._to))
                self._held.append(server)
                threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if asks:
                    self.heard += data
                elif self.lose > 0:
                    self.lose -= 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="sweeper-server-"))
    try:
        with Server(folder) as one:
            yield one
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def network(server: Server) -> Iterator[Between]:
    with Between(server.port) as one:
        yield one


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "EVERY", 0.2)
    monkeypatch.setattr(tracking, "PAUSE", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")


def tracker_at(url: str, store: Path, experiment: str) -> Any:
    return tracking.make({"name": "server", "uri": url, "experiment": experiment}, store)


def held(server: Server, store: Path, experiment: str) -> dict[str, dict[str, Any]]:
    """What the server shows of a store's sweeps, cells and runs, by their names."""
    view = View(place.Place(server.url, experiment), store)
    found: dict[str, dict[str, Any]] = {}
    for run in view.search(""):
        tags = run.data.tags
        name = tags.get("sweeper.run") or f"{tags['kind']} {tags.get('sweeper.cell', '')}"
        assert name not in found, "shown twice"
        losses = view.client.get_metric_history(run.info.run_id, "train/loss")
        found[name] = {"tags": tags, "losses": [m.step for m in losses]}
        found[name]["status"] = run.info.status
    return found


@pytest.mark.slow
def test_sixteen_runs_at_once_lose_nothing_when_the_server_is_killed(server: Server, tmp_path: Path) -> None:
    steps, began, killed = 40, threading.Barrier(17), threading.Event()
    told = events(steps=steps)
    tracker = tracker_at(server.url, tmp_path, "sixteen")
    tracker.open_sweep("sweep0123", "sixteen at once", 16)
    slowest = []

    def train(number: int) -> None:
        began.wait()
        folder = write_run(tmp_path, CELL, repeat=number, told=told[:2], finished=False)
        took = time.monotonic()
        tracker.start(folder)
        for place_in_order, event in enumerate(told[2:], 2):
            add_events(folder, [event])
            tracker.tick(folder)
            if place_in_order == steps // 2 and number % 2:
                killed.wait()
            time.sleep(0.02)
        finish_run(folder, told)
        tracker.finish(folder)
        slowest.append(time.monotonic() - took)

    jobs = [threading.Thread(target=train, args=(number,)) for number in range(1, 17)]
    for job in jobs:
        job.start()
    began.wait()
    time.sleep(1.0)
    server.kill()
    killed.set()
    for job in jobs:
        job.join()
    assert max(slowest) < 10, "a run waited for the server"
    assert not server.healthy()
    folders = sorted((tmp_path / "runs").iterdir())
    write_plan(folders, conclusion="Nothing failed in 16 runs.\n")
    tracker.close_sweep("sweep0123")
    server.start()
    tracker.close()

    kept = server.rows()
    tags: dict[str, dict[str, str]] = {}
    for run, key, value in kept["tags"]:
        tags.setdefault(run, {})[key] = value
    ours = {run: told for run, told in tags.items() if told["sweeper.folder"] == str(tmp_path)}
    ended = {run: status for run, _, status, _, _ in kept["runs"]}
    assert sorted(told["kind"] for told in ours.values()) == ["cell", *["run"] * 16, "sweep"]
    assert {ended[run] for run in ours} == {"FINISHED"}
    runs = {told["sweeper.run"]: run for run, told in ours.items() if told["kind"] == "run"}
    assert set(runs) == {folder.name for folder in folders}
    for run in runs.values():
        points = [row[1:] for row in kept["metrics"] if row[0] == run]
        assert len({(key, step) for key, step, *_ in points}) == len(points), "a step twice"
        losses = [(step, value) for key, step, _, value, _ in points if key == "train/loss"]
        assert losses == [(n, 5.0 - 0.2 * n) for n in range(1, steps + 1)]
    (sweep,) = (told for told in ours.values() if told["kind"] == "sweep")
    assert sweep["verdicts"] == "16 ok"
    (cell,) = (run for run, told in ours.items() if told["kind"] == "cell")
    assert [value for run, key, *_, value, _ in kept["metrics"] if (run, key) == (cell, "ktok_s.n")] == [16]
    shown = View(place.Place(server.url, "sixteen"), tmp_path).client.list_artifacts(runs[folders[0].name])
    assert {"spec.json", "run.json", "verdict.json", "events.jsonl", "cache.json"} <= {one.path for one in shown}

    where = place.Place(server.url, "sixteen")
    assert sync.sync(tmp_path, where, ["sweep0123"]) == (0, 16)
    assert sync.sync(tmp_path, where, ["sweep0123"], rebuild=True) == (16, 0)
    assert server.rows() == kept, "told twice, kept once"


def test_a_server_that_is_down_is_told_later(server: Server, network: Between, tmp_path: Path, capsys: Any) -> None:
    began = time.monotonic()
    tracker = tracker_at(network.url, tmp_path, "down")
    tracker.open_sweep("sweep0123", "told later", 1)
    folder = write_run(tmp_path, CELL)
    tracker.finish(folder)
    write_plan([folder], conclusion="Nothing failed.\n")
    tracker.close_sweep("sweep0123")
    tracker.close()
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    assert f"python -m sweeper.sync --store {tmp_path}" in said
    assert sync.main(["--store", str(tmp_path)]) == 1  # still down
    assert "cannot be reached" in capsys.readouterr().err

    network.open()
    assert sync.main(["--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{network.url}: 1 runs written, 0 unchanged\n"
    assert {one["status"] for one in held(server, tmp_path, "down").values()} == {"FINISHED"}

    network.close()  # down again at the end of the next sweep ...
    tracker = tracker_at(network.url, tmp_path, "down")
    tracker.open_sweep("sweep4567", "told by the next", 1)
    tracker.finish(write_run(tmp_path, CELL, repeat=2, sweep="sweep4567"))
    tracker.close()
    network.open()  # ... and up when another begins
    tracker = tracker_at(network.url, tmp_path, "down")
    tracker.close()
    assert sum(one["tags"]["kind"] == "run" for one in held(server, tmp_path, "down").values()) == 2


def test_answers_that_are_lost_double_nothing(server: Server, network: Between, tmp_path: Path) -> None:
    network.open()
    folders = [write_run(tmp_path, CELL, repeat=number) for number in (1, 2)]
    write_plan(folders, conclusion="Nothing failed.\n")
    tracker = tracker_at(network.url, tmp_path, "lost")
    for folder in folders:
        network.lose = 3
        tracker.open_sweep("sweep0123", "lost answers", 1)
        tracker.finish(folder)
        wait_for(lambda: network.lose == 0)
    tracker.close_sweep("sweep0123")
    wait_for(lambda: sum(one["status"] == "FINISHED" for one in held(server, tmp_path, "lost").values()) == 4)
    tracker.close()
    found = held(server, tmp_path, "lost")  # which looks for what is shown twice
    for folder in folders:
        assert found[folder.name]["losses"] == list(range(1, 13))


def test_a_server_that_says_nothing_holds_nobody_up(
    network: Between, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    network.silent = True
    network.open()
    tracker = tracker_at(network.url, tmp_path, "silent")
    folder = write_run(tmp_path, CELL)
    began = time.monotonic()
    for _ in range(100):
        tracker.tick(folder)
    tracker.finish(folder)
    assert time.monotonic() - began < 0.5
    tracker.close()
    assert time.monotonic() - began < 10
    assert "tracking is behind" in capsys.readouterr().err


def test_credentials_come_from_mlflows_own_variables_and_stay_there(network: Between, tmp_path: Path) -> None:
    network.open()
    tells = "import os; print(sorted(os.environ.items()))"
    words = ["workload=command", f'workload.argv=["{{python}}",-c,"{tells}"]', f"store={tmp_path}/store"]
    done = subprocess.run(
        [sys.executable, "-m", "sweeper", *words, "tracking=server", f"tracking.uri={network.url}"],
        env=os.environ | {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "hush-hush"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert b"Authorization: Basic " + base64.b64encode(b"me:hush-hush") in network.heard
    assert "hush" not in done.stdout + done.stderr
    (log,) = tmp_path.glob("store/runs/*/child.log")
    assert "PATH" in log.read_text()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hush" not in path.read_bytes(), path
    told = json.loads(next(tmp_path.glob("store/sweeps/*/tracking.json")).read_text())
    assert (told["uri"], told["open"]) == (network.url, False)
