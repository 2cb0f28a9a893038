"""A run's identity is what it computes from: nothing more, nothing less."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from dflash.settings import Data, JobSettings, SettingError, Target
from sweeper import spec, wheels
from sweeper.__main__ import _resolvers
from sweeper.composed import plain
from sweeper.help import CONF


def read(tmp_path: Path, *overrides: str, **more: Any) -> spec.Run:
    """The run that a command line without -m means."""
    _resolvers(str(tmp_path))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"store={tmp_path}/store", *overrides], return_hydra_config=True)
    _, (run,) = spec.read([plain(config)])
    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_folder_without_weights_is_a_target_whose_weights_are_made_up(tmp_path: Path, model: Path) -> None:
    full = read(tmp_path, f"target.model={model}", "target.made_up=true")
    (model / "model.safetensors").unlink()
    assert read(tmp_path, f"target.model={model}", "target.made_up=true").identity == full.identity
    with pytest.raises(SettingError, match="must hold weights"):
        read(tmp_path, f"target.model={model}")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": []}\n')
    return path


def test_the_default_is_a_valid_job(tmp_path: Path) -> None:
    run = read(tmp_path)
    assert run.cell == {
        "wheel": "current",
        "cache": "cold",
        "compile": "locked",
        "split": "1t1d",
        "isolation": "threads",
    }
    assert run.spec["device"] in ("cpu", "cuda")
    assert Path(run.spec["data"]["path"]).is_file()


@pytest.mark.parametrize(
    "changed",
    [
        ["compile=whole"],
        ["cache=warm"],
        ["split=1t2d"],
        ["isolation=processes"],
        ["seed=1"],
        ["drafter.layers=3"],
        ["train.steps=61"],
        ["optim.lr=0.002"],
    ],
    ids=lambda changed: changed[0],
)
def test_what_is_computed_is_the_identity(tmp_path: Path, model: Path, chats: Path, changed: list[str]) -> None:
    base = [f"target.model={model}", f"data.path={chats}"]
    assert read(tmp_path, *base).identity != read(tmp_path, *base, *changed).identity


@pytest.mark.parametrize(
    "changed",
    [
        ["tracking=none"],
        ["tracking.experiment=other"],
        ["verbose=true"],
        ["budget.train=7"],
        ["grace=1"],
        ["order=given"],
        ["strict=true"],
        ["repeat=3"],
        ["target.models_dir=elsewhere"],
    ],
    ids=lambda changed: changed[0],
)
def test_how_it_is_run_is_not_it(tmp_path: Path, model: Path, chats: Path, changed: list[str]) -> None:
    base = [f"target.model={model}", f"data.path={chats}"]
    assert read(tmp_path, *base).identity == read(tmp_path, *base, *changed).identity


def test_content_counts_and_paths_do_not(tmp_path: Path, model: Path, chats: Path) -> None:
    before = read(tmp_path, f"target.model={model}", f"data.path={chats}").identity
    moved, copied = model.rename(tmp_path / "moved"), tmp_path / "copy.jsonl"
    copied.write_bytes(chats.read_bytes())
    assert read(tmp_path, f"target.model={moved}", f"data.path={copied}").identity == before
    other = tmp_path / "other.jsonl"
    other.write_text('{"messages": [1]}\n')
    assert read(tmp_path, f"target.model={moved}", f"data.path={other}").identity != before
    (moved / "model.safetensors").write_bytes(b"weighty")
    assert read(tmp_path, f"target.model={moved}", f"data.path={copied}").identity != before


def test_prompts_and_a_drafter_to_start_from_count_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "other"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "prompts.jsonl").write_text("{}\n" if name != "other" else "{} \n")
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights" if name != "other" else b"weighty")
    for setting, file in (("eval.prompts", "/prompts.jsonl"), ("drafter.init", ""), ("fanout.a.drafter.init", "")):
        one, two, other = (
            read(tmp_path, f"++{setting}={f'[{name}{file}]' if 'eval' in setting else name}")
            for name in ("one", "two", "other")
        )
        assert one.identity == two.identity != other.identity, setting
    assert other.spec["fanout"]["a"]["drafter"]["init"] == str(tmp_path / "other")
    assert read(tmp_path, "eval.prompts=[one/prompts.jsonl]").spec["eval"]["prompts"] == [
        str(tmp_path / "one" / "prompts.jsonl")
    ]


def test_prepared_data_counts_by_its_record(tmp_path: Path) -> None:
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text(json.dumps({"sha256": name == "other"}))
    one, two, other = (read(tmp_path, f"data.path={tmp_path / name}").identity for name in ("one", "two", "other"))
    assert one == two != other


def test_the_file_of_the_default_workload_has_every_setting() -> None:
    """What differs from the trainer's own default is chosen for the example input on two cores."""
    written = yaml.safe_load((CONF / "workload" / "smollm2.yaml").read_text())
    job = JobSettings(data=Data(), target=Target()).to_dict()
    sections = written["workload"]["sections"]
    assert sections == [name for name, value in job.items() if isinstance(value, dict)]
    assert {name: list(written[name]) for name in sections} == {name: list(job[name]) for name in sections}
    differs = {f"{s}.{n}" for s in sections for n, value in job[s].items() if written[s][n] != value}
    chosen = {"data.path", "target.model", "target.models_dir", "drafter.mask_token", "loss.chunk", "optim.lr"}
    assert differs == chosen | {"train.steps", "train.queue_mib"}


def test_another_wheel_and_other_code_are_other_runs(tmp_path: Path) -> None:
    run = read(tmp_path)
    for name in ("wheel", "code"):
        assert replace(run, facts=run.facts | {name: "x"}).identity != run.identity
    assert run.repeated(2).identity != run.identity
    assert run.repeated(2).cell_id == run.cell_id


def test_a_script_of_a_command_belongs_to_it_and_its_output_does_not(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "result.txt"
    script.write_text("print(1)")
    command = ["workload=command", f"workload.argv=['{{python}}','{script}','{output}']"]
    before = read(tmp_path, *command).identity
    output.write_text("done")
    spec._file_hash.cache_clear()
    assert read(tmp_path, *command).identity == before
    script.write_text("print(2)")
    spec._file_hash.cache_clear()
    assert read(tmp_path, *command).identity != before


def test_snapshots_are_shared_by_runs_of_the_same_graphs_only(tmp_path: Path) -> None:
    run = read(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    words = ["seed=5", "train.steps=9", "cache=warm", "repeat=3", "optim.lr=0.01", "train.save_every=5", "loss.alpha=1"]
    same = [read(tmp_path, one) for one in (*words, f"eval.prompts=[{prompts}]")]
    assert {one.snapshot_key() for one in same} == {run.snapshot_key()}
    other = ["compile=whole", "isolation=processes", "split=1t2d", "drafter.layers=3", "data.row_tokens=128"]
    keys = {read(tmp_path, one).snapshot_key() for one in other}
    assert len(keys) == len(other)
    assert run.snapshot_key() not in keys
    small, same_graph, large = (
        read(tmp_path, f"++fanout.a.{one}").snapshot_key()
        for one in ("optim.lr=0.1", "loss.gamma=3", "drafter.block=16")
    )
    assert len({small, large, run.snapshot_key()}) == 3
    assert same_graph != large


def test_a_priming_run_is_the_same_but_short_and_cold(tmp_path: Path) -> None:
    run = read(tmp_path, "cache=warm", "train.steps=50", "train.steady_after=4")
    prime = run.prime()
    assert prime.cell["cache"] == "cold"
    assert prime.spec["train"]["steps"] == 6
    assert run.spec["train"]["steps"] == 50, "the run itself is left alone"
    assert prime.snapshot_key() == run.snapshot_key()
    evaluated = read(tmp_path, f"eval.prompts=[{__file__}]", "eval.every=9", "train.save_every=9").prime().spec
    assert (evaluated["eval"]["prompts"], evaluated["eval"]["every"], evaluated["train"]["save_every"]) == ([], 0, 0)
    profiled = read(tmp_path, "cache=warm", "train.steps=50", "train.steady_after=4", "train.profile=2")
    assert profiled.identity != run.identity, "it is another measurement"
    assert profiled.prime().identity == prime.identity, "and starts from the same caches"
    assert profiled.snapshot_key() == run.snapshot_key()
    short = read(tmp_path, "train.steps=6", "train.steady_after=4")
    assert prime.identity not in (run.identity, short.identity)


def test_a_strategy_that_needs_a_gpu_is_skipped_not_refused(tmp_path: Path) -> None:
    assert read(tmp_path, "compile=triton", "device=cpu").skip == "needs CUDA"
    assert read(tmp_path, "compile=locked", "device=cpu").skip == ""


KEYS = st.from_regex(r"[a-z.]{1,12}", fullmatch=True)


@given(st.dictionaries(KEYS, st.text(max_size=200), max_size=5), st.integers(1, 9999))
def test_directory_names_are_safe_bounded_and_tell_runs_apart(extra: dict[str, str], repeat: int) -> None:
    cell = {"wheel": "current", "cache": "cold", "compile": "locked", "split": "1t2d", "isolation": "threads"}
    run = spec.Run(
        cell={**extra, **cell},
        spec={},
        workload=spec.Workload("command", ("a",)),
        wheel=wheels.Wheel("current", "python", "0", {}),
        facts={"settings": extra},
        repeat=repeat,
    )
    names = {run.slug(1), run.slug(2), run.repeated(repeat + 1).slug(1)}
    assert len(names) == 3
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.=_-]*", name)
        assert len(name) <= 120


def test_several_cells_are_told_apart_by_what_was_swept(tmp_path: Path) -> None:
    _resolvers(str(tmp_path))
    configs = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for layers in (2, 5):
            overrides = [f"store={tmp_path}", "train.steps=9", f"drafter.layers={layers}"]
            configs.append(compose("config", overrides, return_hydra_config=True))
    _, found = spec.read(list(map(plain, configs)))
    assert [run.cell["drafter.layers"] for run in found] == ["2", "5"]
    assert all("train.steps" not in run.cell for run in found)


def test_options_that_differ_between_cells_are_refused(tmp_path: Path) -> None:
    configs = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for grace in (1, 2):
            overrides = [f"store={tmp_path}", f"grace={grace}", "workload=command", "workload.argv=[a]"]
            configs.append(compose("config", overrides, return_hydra_config=True))
    with pytest.raises(SettingError, match=r"grace=1.0,2.0: must be the same in every cell"):
        spec.read(list(map(plain, configs)))


def test_the_wheel_is_known_by_what_it_computes_with() -> None:
    wheel = wheels.current()
    assert {"python", "torch", "transformers", "numpy", "safetensors"} <= set(wheel.versions)
    assert "pytest" not in wheel.versions
    assert "mlflow" not in wheel.versions
    wheels.current.cache_clear()
    assert wheels.current() == wheel
    assert json.loads(json.dumps(wheel.to_dict())) == wheel.to_dict()


@pytest.mark.parametrize(("word", "said"), [("data.path={}", "data.path="), ("eval.prompts=[{}]", "eval.prompts[0]=")])
def test_an_empty_file_is_refused_before_anything_starts(tmp_path: Path, word: str, said: str) -> None:
    (empty := tmp_path / "empty.jsonl").touch()
    with pytest.raises(SettingError, match=re.escape(f"{said}{empty}: must be a readable file")):
        read(tmp_path, word.format(empty))
