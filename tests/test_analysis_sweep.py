"""A sweep that concludes: the sentences below its table, the first cell run twice, blocks until the answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.command import runs, sweeper, workload

from sweeper.analysis.__main__ import main


def test_a_sweep_ends_with_its_conclusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    ways = [workload(way)[1].partition("=")[2] for way in ("ok", "exit3")]
    done = sweeper(store, "-m", "workload=command", f"workload.argv={','.join(ways)}", "repeat=5")
    (folder,) = (store / "sweeps").iterdir()
    said = (folder / "conclusion.txt").read_text()
    assert done.stdout.endswith(said)
    assert "5 of 10 runs" in said
    assert "Fails under workload.argv=" in said
    kept = json.loads((folder / "conclusion.json").read_text())
    assert kept["failures"][0]["exposed"]["k"] == 5
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == said


def test_the_first_cell_can_be_run_twice_in_each_block(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sweeper(store, "-m", *workload("ok"), "compile=locked,whole", "repeat=2", "aa=true")
    assert len(runs(store)) == 6
    assert sum("aa=again" in name for name in runs(store)) == 2
    assert "The first cell run twice: " in done.stdout
    sweeper(store, "-m", *workload("ok"), "compile=locked,whole", "repeat=2")
    assert len(runs(store)) == 6, "the cells are the same with and without it"


def test_blocks_are_run_until_the_answer_is_known(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["-m", *workload("ok"), "compile=locked,whole", "repeat=7"]
    done = sweeper(store, *command, "until=ci<9000%")
    assert done.returncode == 0, done.stderr
    assert len(runs(store)) == 10
    assert "Stopped after 5 blocks" in done.stdout
    assert sweeper(store, *command, "until=9000%").stdout == done.stdout
    assert len(runs(store)) == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["until=soon", "repeat=9"], "until=soon: must be none, or a width such as ci<5%"),
        (["until=ci<0%", "repeat=9"], "until=ci<0%: must be none, or a width such as ci<5%"),
        (["until=ci<5%"], "until=ci<5%: needs repeat=5 or more"),
    ],
)
def test_what_until_cannot_mean_is_said_at_once(tmp_path: Path, words: list[str], said: str) -> None:
    done = sweeper(tmp_path / "store", *workload("ok"), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "store").exists()
