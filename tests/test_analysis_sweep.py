"""A sweep that concludes: the sentences below its table, the first cell run twice, blocks until the answer is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fakes.command import runs, sweeper, workload

from dflash.settings import SettingError
from sweeper.analysis.__main__ import main
from sweeper.spec import Options


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
    cells = [json.loads(path.read_text())["cell"] for path in store.glob("runs/*/run.json")]
    assert [cell["compile"] for cell in cells if "aa" in cell] == ["locked", "locked"]
    assert "The first cell run twice: " in done.stdout
    plan = sweeper(store, "-m", *workload("ok"), "compile=locked,whole", "repeat=2", "dry=true")
    assert "4 runs, 4 done" in plan.stdout, "the cells are the same with and without it"


def test_blocks_are_run_until_the_answer_is_known(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sweeper(store, "-m", *workload("ok"), "compile=locked,whole", "repeat=7", "until=ci<9000%")
    assert done.returncode == 0, done.stderr
    assert len(runs(store)) == 10
    assert "Stopped after 5 blocks" in done.stdout


@pytest.mark.parametrize(
    ("until", "repeat", "said"),
    [
        ("soon", 9, "until=soon: must be none, or a width such as ci<5%"),
        ("ci<0%", 9, "until=ci<0%: must be none, or a width such as ci<5%"),
        ("ci<5%", 1, "until=ci<5%: needs repeat=5 or more, the most blocks that may be run"),
    ],
)
def test_what_until_cannot_mean_is_said_at_once(until: str, repeat: int, said: str) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(said)}$"):
        Options(until=until, repeat=repeat).check()
    assert (Options(until="ci<5%").width, Options(until="2.5%").width, Options().width) == (0.05, 0.025, None)
