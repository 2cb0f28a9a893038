"""The commands that a conclusion proposes, composed as they are printed, run the cells that they are meant to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sweeper import help, plan, spec, store, sweep
from sweeper.__main__ import command
from sweeper.analysis.conclude import conclude
from sweeper.analysis.records import read
from sweeper.analysis.sentences import COMMAND, sentences
from sweeper.composed import Composed
from sweeper.run import described

REPEATS = 3
DOCS = Path(__file__).parents[1] / "docs" / "incident"


@pytest.fixture
def compose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Composed], list[str]]]:
    """The cells of a command line, which must be a good one, and its words as a sweep keeps them."""

    def composed(*words: str) -> tuple[list[Composed], list[str]]:
        found: list[Composed] = []
        kept: list[str] = []

        def keep(configs: Sequence[Composed]) -> sweep.Result:
            found.extend(configs)
            kept.extend(plan.command_line())
            return sweep.Result(0, [[] for _ in configs])

        monkeypatch.setattr("sys.argv", ["sweeper"])
        monkeypatch.setattr(sweep, "sweep", keep)
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        assert command(list(words)) == 0, words
        return found, kept

    return composed


def recorded(cells: Sequence[spec.Run], folder: Path, unlucky: dict[str, str] | None = None) -> None:
    """Runs of these cells; one of those with the unlucky levels fails, which leaves open why."""
    runs = [cell.repeated(repeat) for repeat in range(1, REPEATS + 1) for cell in cells]
    failed = next((one for one in runs if unlucky and unlucky.items() <= one.cell.items()), None)
    race = {"verdict": "failed", "signature": {"cause": "compile.fx_trace_race", "fingerprint": ""}}
    for number, one in enumerate(runs):
        place = folder / "runs" / one.slug(1)
        place.mkdir(parents=True)
        store.write(place / store.RUN_FILE, described(one, "sweep", 1) | {"started": 1e9 + number, "host": "here"})
        store.write(place / store.SPEC_FILE, one.spec)
        told = {"verdict": "ok", "signature": None, "figures": {"ktok_s": 1.0}, "wall_s": 1.0}
        store.write(place / store.VERDICT_FILE, told | (race if one is failed else {}))


OWN = """# @package _global_
hydra: {sweeper: {params: {seed: "1,2", compile: "unlocked,locked"}}}
"""


@pytest.mark.parametrize(
    ("words", "ran", "unlucky"),
    [
        # lists, a quoted path with a space, and an experiment that varies by itself
        (
            "-m +experiment=incident compile=unlocked,locked target.taps=[1,2],[1,3] \"data.path='my chats.jsonl'\"",
            {},
            {"compile": "unlocked", "cache": "cold"},
        ),
        # interrupted before a warm run ended: the experiment would vary the cache
        ("-m +experiment=incident compile=unlocked,locked", {"cache": "cold"}, {"compile": "unlocked"}),
        # the same where the command varies it
        ("-m compile=unlocked,locked cache=cold,warm", {"cache": "cold"}, {"compile": "unlocked"}),
        # an experiment of one's own, in a folder of one's own
        ("-m --config-dir own +experiment=own ~eval.every", {"seed": "2"}, {"compile": "unlocked"}),
        # one factor to a person, two words to Hydra; pins; a number that a file leaves out
        ("-m wheel=t213,t214 wheel.transformers=5.1.0 cache=foreign:t212", {}, {"wheel": "t213"}),
        ("-m drafter.window=null,16 loss.alpha=0.5,1 until=ci<5%", {}, {"drafter.window": "None"}),
        # words of a command of one's own, which are text whatever they look like
        (
            "-m workload=command \"workload.argv=[a,'{args.n}','{args.more}'],['10','x, y','{args.n}','{args.more}']\" "
            "args.n=1e5,007 \"+args.more='it\\\\'s, {}','b\\\\\\\\',''\"",
            {},
            {"args.n": "007"},
        ),
    ],
)
def test_a_proposed_command_adds_repeats_to_the_cells_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compose, words: str, ran: dict[str, str], unlucky: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "own.yaml").write_text(OWN)
    configs, kept = compose(*shlex.split(words), f"store={tmp_path / 'my store'}", f"repeat={max(REPEATS, 5)}")
    options, planned = spec.read(configs)
    cells = {one.cell_id: one for one in planned if ran.items() <= one.cell.items()}
    recorded(list(cells.values()), options.folder, unlucky)
    found = conclude(read((options.folder / "runs").iterdir()), help.defaults(), kept)
    lines = [line for line in sentences(found).splitlines() if line.startswith(COMMAND)]
    assert lines, sentences(found)
    for line in lines:
        again, cells_again = spec.read(compose(*shlex.split(line)[3:])[0])
        whole = plan.make_plan(cells_again, again, store.history(again.folder))
        assert again.folder == options.folder
        named = {cells[one.cell_id].label for one in cells_again}  # no other cell than those that ran
        assert len(whole.items) == again.repeat * len(named)
        assert len(whole.items) - len(whole.waiting) == REPEATS * len(named)
        for factor, levels in found["factors"].items():
            if all(re.fullmatch(r"\w+", level) for level in levels):
                (word,) = (word for word in shlex.split(line) if word.startswith(f"{factor}="))
                meant = set(word.partition("=")[2].replace("null", "None").split(","))
                assert {cells[one.cell_id].cell[factor] for one in cells_again} == meant


def test_a_proposed_command_makes_the_cell_that_is_missing(tmp_path: Path, monkeypatch, compose) -> None:
    monkeypatch.chdir(tmp_path)
    configs, kept = compose("-m", "+experiment=incident", "compile=unlocked,locked", "store=here", "seed=1,2")
    options, planned = spec.read(configs)
    cells = [one for one in planned if (one.cell["compile"] == "locked") == (one.cell["seed"] == "1")]
    recorded(cells, options.folder)
    found = conclude(read((options.folder / "runs").iterdir()), help.defaults(), kept)
    assert found["separate"]
    known, wanted = {one.cell_id for one in cells}, {one.cell_id for one in planned}
    for line in found["separate"]:
        _, new = spec.read(compose(*shlex.split(line)[3:])[0])
        assert {one.cell_id for one in new} <= wanted - known


@pytest.mark.parametrize("name", ["h200-one-before", "h200-two"])
def test_what_the_incident_printed_is_still_one_cell(compose, name: str) -> None:
    printed = [line for line in (DOCS / f"{name}.txt").read_text().splitlines() if line.startswith(COMMAND)]
    words = shlex.split(printed[-1])[3:]
    (cell,), _ = compose(*words)
    told = dict(word.lstrip("+").split("=") for word in words)
    assert (cell.choices["compile"], cell.choices["cache"]) == (told["compile"], told["cache"])
    assert (cell.settings["target"]["taps"], cell.settings["split"]) == ([1, 15, 28], "1t3d")
    assert [str(cell.settings[key]) for key in ("seed", "repeat", "store")] == [
        told[key] for key in ("seed", "repeat", "store")
    ]
