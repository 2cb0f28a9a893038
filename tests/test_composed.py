"""Cells that are composed together are what Hydra makes of each alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose as hydras
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from sweeper.__main__ import _resolvers, compose
from sweeper.composed import Composed, plain
from sweeper.help import CONF
from sweeper.sweep import Result

COMMAND = ["workload=command", "workload.argv=[a,'{args.n}',b]"]


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        (["seed=range(3)", "compile=locked,eager", "drafter.layers=1,5"], 12),
        (["data.path='a b',c,null", "loss.alpha=0.5,1,true"], 9),
        (["drafter.window=null,16", "eval.prompts=[],[a],[a,b]"], 6),
        (["train={steps:3},{steps:4}", "train.rows=1,2"], 4),
        ([*COMMAND, "args.n=1e5,007,true", "+args.more=x,y"], 6),
        (["store=/tmp/x,/tmp/y", "wheel=current,t213", "wheel@cache_from=t212,cu128"], 8),
        (["+experiment=incident", "compile=locked,whole", "seed=1,2"], 8),  # with the two levels of its own cache
        (["fanout.a.drafter.block=8,16", "~eval", "optim.lr=1e-3"], 2),
    ],
)
def test_cells_composed_together_are_what_hydra_makes_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], cells: int
) -> None:
    found: list[Composed] = []

    def keep(configs: Sequence[Composed]) -> Result:
        found.extend(configs)
        return Result(0, [[] for _ in configs])

    monkeypatch.setattr(sys, "argv", ["sweeper"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert compose(["-m", *words], keep) == 0
    assert len(found) == cells
    GlobalHydra.instance().clear()
    _resolvers(str(tmp_path))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for one in found:
            alone = plain(hydras("config", list(one.overrides), return_hydra_config=True))
            assert (one.settings, one.overrides) == (alone.settings, alone.overrides)
            assert {k: v for k, v in one.choices.items() if not k.startswith("hydra/")} == {
                k: v for k, v in alone.choices.items() if not k.startswith("hydra/")
            }
