"""Environments are built once, of what was asked for and nothing else; one that cannot be had is a failed run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import url2pathname

import pytest
from fakes import packages
from fakes.command import runs, sweeper, until
from hypothesis import given
from hypothesis import strategies as st

from dflash.settings import SettingError
from sweeper import wheels
from sweeper.help import CONF
from sweeper.wheels import Pins, Sources, Wheel, __main__
from sweeper.wheels.build import BuildFailure, build

WHERE = ["workload=command", "workload.argv=['{python}','-c','import torch; print(torch.__version__)']"]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with package files, the only place that is looked in; uv's cache is the test's own."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    folder = tmp_path / "shelf"
    packages.rest(folder)
    packages.torch(folder, "2.90.0")
    packages.torch(folder, "2.91.0+cpu")
    return folder


@pytest.fixture
def sources(tmp_path: Path, shelf: Path) -> Sources:
    return Sources(str(tmp_path / "store" / "wheels"), [str(shelf)], [])


def words(sources: Sources) -> list[str]:
    """The same as words of a command line."""
    return [f"wheels.dir={sources.dir}", f"wheels.find_links={sources.find_links}", "wheels.index=[]"]


def pins(version: str, **more: object) -> Pins:
    found = wheels.read("mine", {"torch": version, **more})
    assert found
    return found


def made(version: str, sources: Sources) -> Wheel:
    wheel = build(pins(version), sources)
    assert wheel
    return wheel


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sweeper.wheels", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_environment_holds_its_pins_a_lock_and_a_record_of_both(sources: Sources) -> None:
    wheel = made("2.91.0", sources)
    assert wheel.versions["torch"] == "2.91.0+cpu"
    assert wheel.torch["version"] == "2.91.0+cpu"
    assert not wheel.computes_on_gpu
    folder = Path(wheel.python).parents[2]
    assert folder.parent == sources.folder
    assert folder.name == f"mine-{wheel.fingerprint[:12]}"
    lock = (folder / "lock.txt").read_text()
    assert set(re.findall(r"^(\w+)==", lock, re.MULTILINE)) == {"torch", *packages.REST}
    assert lock.count("--hash=sha256:") == len(packages.REST) + 1
    said = subprocess.run(
        [wheel.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    )
    assert said.stdout == "2.91.0+cpu\n"
    # Nothing of the harness's own environment is to be seen from it.
    assert subprocess.run([wheel.python, "-c", "import hydra"], capture_output=True).returncode


def test_what_is_there_is_found_without_looking_anywhere(sources: Sources, shelf: Path) -> None:
    first = made("2.90.0", sources)
    for path in shelf.iterdir():
        path.unlink()
    assert build(pins("2.90.0"), sources) == first
    with pytest.raises(BuildFailure):
        build(pins("2.91.0"), sources)


def test_equal_content_is_one_environment_however_it_is_asked_for(sources: Sources) -> None:
    wheel, same, other = (made(text, sources) for text in ("2.91.0", "2.91.0+cpu", "2.90.0"))
    assert (wheel.python, wheel.fingerprint) == (same.python, same.fingerprint)
    assert other.fingerprint != wheel.fingerprint
    assert len(list(wheels.whole(sources.folder))) == 2


def test_the_fingerprint_sees_a_local_build_of_the_same_version(sources: Sources, shelf: Path, tmp_path: Path) -> None:
    first = made("2.90.0", sources)
    packages.torch(shelf, "2.90.0", code="__version__ = '2.90.0'  # built here\n")
    second = made("2.90.0", Sources(str(tmp_path / "other"), sources.find_links, []))
    assert first.versions == second.versions
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("version", "code", "said"),
    [
        ("9.9.0", "", "there is no version of torch==9.9.0"),
        ("2.92.0", "__version__ = '2.80.0'\n", "wheel asked for torch==2.92.0, got torch 2.80.0"),
        (">=2.93", "__version__ = '2.94.0'\n", "wheel asked for torch 2.93.0, got torch 2.94.0 on import"),
        (
            "2.94.0",
            "import ctypes\nctypes.CDLL('libcudnn.so.999')\n",
            "libcudnn.so.999: cannot open shared object file",
        ),
    ],
    ids=["no such version", "another version inside", "not what its name says", "does not import"],
)
def test_what_is_not_what_was_asked_for_is_refused(
    sources: Sources, shelf: Path, version: str, code: str, said: str
) -> None:
    if code:
        packages.torch(shelf, version if version[0] != ">" else "2.93.0", code)
    with pytest.raises(BuildFailure) as caught:
        build(pins(version), sources)
    assert said in str(caught.value)
    assert said in wheels.brief(str(caught.value))
    assert not list(wheels.whole(sources.folder))
    assert not [path for path in sources.folder.iterdir() if path.is_dir()]


def test_a_sweep_goes_on_where_an_environment_cannot_be_had(sources: Sources, shelf: Path, tmp_path: Path) -> None:
    packages.torch(shelf, "2.94.0", "import ctypes\nctypes.CDLL('libcudnn.so.999')\n")
    store = tmp_path / "store"
    cells = ["-m", "wheel=pins", "wheel.torch=2.90.0,2.91.0,9.9.0,2.94.0", *WHERE, *words(sources)]
    plan = sweeper(store, *cells, "dry=true")
    for version in ("2.90.0", "2.91.0", "9.9.0", "2.94.0"):
        assert f"environment to build first: pins (torch=={version})" in plan.stdout
    assert not store.exists()
    done = sweeper(store, *cells)
    assert done.returncode == 0, done.stderr
    found = {}
    for name, verdict in runs(store).items():
        folder = store / "runs" / name
        run = json.loads((folder / "run.json").read_text())
        found[run["cell"]["wheel.torch"]] = (verdict, (folder / "child.log").read_text(), run)
    for version, imported in (("2.90.0", "2.90.0"), ("2.91.0", "2.91.0+cpu")):
        verdict, log, run = found[version]
        assert (verdict["verdict"], log) == ("ok", f"{imported}\n")
        assert run["wheel"]["versions"]["torch"] == imported
        assert run["env"]["PATH"].startswith(str(Path(run["wheel"]["python"]).parent))
    for version, cause, evidence in (
        ("9.9.0", "env.wheel_unavailable", "there is no version of torch==9.9.0"),
        ("2.94.0", "env.library_mismatch", "libcudnn.so.999"),
    ):
        verdict, log, run = found[version]
        assert verdict["verdict"] == "failed"
        assert verdict["signature"]["cause"] == cause
        assert evidence in verdict["reason"]
        assert evidence in log
        assert verdict["reason"].startswith("wheel pins could not be built: ")
        assert run["argv"] == []
    packages.torch(shelf, "9.9.0")
    mended = sweeper(store, *cells, "rerun=env.wheel_unavailable")
    assert "3 of 4 runs are done already" in mended.stderr
    assert re.findall(r"building (.*)", mended.stderr) == ["torch==9.9.0"]
    assert "9.9.0" in {(folder / "child.log").read_text().strip() for folder in (store / "runs").iterdir()}


def test_a_run_in_its_own_environment_is_shown_the_trainer_and_nothing_else(sources: Sources) -> None:
    folder = wheels.shown(sources)
    assert wheels.shown(sources) == folder
    wheel = made("2.90.0", sources)
    say = "import dflash.settings\nfrom importlib.util import find_spec\n"
    say += "print(*[bool(find_spec(name)) for name in ('dflash', 'sweeper', 'mlflow')])"
    done = subprocess.run(
        [wheel.python, "-c", say],
        env={**wheel.environment(), "PYTHONPATH": str(folder)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True False False\n", done.stderr


def test_of_two_that_ask_at_once_one_builds(sources: Sources, shelf: Path, tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    packages.torch(shelf, "2.95.0", f"__version__ = '2.95.0'\nprint('x', file=open({str(imports)!r}, 'a'))\n")
    both = [started("build", "pins", "wheel.torch=2.95.0", *words(sources)) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0].splitlines()[-1] == said[1][0].splitlines()[-1]
    assert imports.read_text() == "x\n"


def test_a_killed_build_leaves_nothing_that_counts(sources: Sources, shelf: Path, tmp_path: Path) -> None:
    gate, reached = tmp_path / "gate", tmp_path / "reached"
    gate.touch()
    waits = "import os, pathlib, time\n"
    waits += f"pathlib.Path({str(reached)!r}).touch()\nwhile os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
    packages.torch(shelf, "2.96.0", f"{waits}__version__ = '2.96.0'\n")
    process = started("build", "pins", "wheel.torch=2.96.0", *words(sources))
    until(reached.exists)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    (left,) = (path for path in sources.folder.iterdir() if path.is_dir())
    assert left.name.startswith(".")
    assert not list(wheels.whole(sources.folder))
    gate.unlink()
    made("2.96.0", sources)
    (folder,) = (path for path in sources.folder.iterdir() if path.is_dir())
    assert folder.name.startswith("mine-")


def test_a_level_is_a_file_of_a_few_lines_in_a_folder_of_ones_own(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "levels" / "wheel"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text("torch: 2.90.0\ntransformers: 5.1.0\n")
    own = ["--config-dir", str(folder.parent)]
    assert __main__.main(["list", *own, *words(sources)]) == 0
    assert "not built: ours (torch==2.90.0, transformers==5.1.0)" in capsys.readouterr().out
    assert __main__.main(["build", "ours", *own, *words(sources)]) == 0
    assert "ours: torch 2.90.0, " in capsys.readouterr().out
    store = tmp_path / "store"
    done = sweeper(store, *own, "wheel=ours", *WHERE, *words(sources))
    assert "building" not in done.stderr
    (verdict,) = runs(store).values()
    assert verdict["verdict"] == "ok", done.stderr


def test_what_is_built_is_listed_and_pruned_when_unused(
    sources: Sources, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for version in ("2.90.0", "2.91.0"):
        made(version, sources)
    (sources.folder / ".0123456789ab-1").mkdir()
    assert __main__.main(["list", "--json", *words(sources)]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["torch"] for one in sorted(told, key=lambda one: one["torch"])] == ["2.90.0", "2.91.0+cpu"]
    old, young = (Path(one["folder"]) for one in told)
    os.utime(old / wheels.RECORD, (0, 0))
    with subprocess.Popen([str(wheels.python(old)), "-c", "input()"], stdin=subprocess.PIPE) as at_work:
        assert __main__.main(["prune", "--unused-for", "30d", *words(sources)]) == 0
        assert f"kept {old.name}: a process runs in it" in capsys.readouterr().out
        at_work.communicate(b"\n")
    assert __main__.main(["prune", "--unused-for", "30d", *words(sources)]) == 0
    assert f"deleted {old.name}" in capsys.readouterr().out
    assert [path for path in sources.folder.iterdir() if path.is_dir()] == [young]


@pytest.mark.parametrize(
    ("level", "settings", "said"),
    [
        ("mine", {}, "wheel.torch=???: must be given for wheel=mine"),
        ("mine", {"torch": 2.13}, "wheel.torch=2.13: must be a version in full"),
        ("mine", {"torch": "new"}, "wheel.torch=new: must be a version in full"),
        ("mine", {"torch": "2.13.0", "trition": "3.6.0"}, "wheel.trition=3.6.0: unknown setting"),
        ("mine", {"torch": "2.13.0", "extra": "einops"}, "wheel.extra=einops: must be a list"),
        ("mine", {"torch": "2.13.0", "index": "pytorch"}, "wheel.index=pytorch: must be the address"),
        ("mine", {"torch": "2.13.0", "python": 3.12}, "wheel.python=3.12: must be a version in quotes"),
        ("mine", {"torch": "2.13.0", "python": "3.9"}, "wheel.python=3.9: must be"),
        ("current", {"torch": "2.13.0"}, "wheel.torch=2.13.0: wheel=current is the interpreter in use"),
    ],
)
def test_a_level_that_cannot_work_is_told_in_one_sentence(level: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError) as caught:
        wheels.read(level, settings)
    assert str(caught.value).startswith(said)


def test_a_password_in_an_address_is_refused_and_not_said_again() -> None:
    with pytest.raises(SettingError) as caught:
        wheels.read("mine", {"torch": "2.13.0", "index": "https://me:hush@example.org/simple"})
    assert "hush" not in str(caught.value)


def test_every_level_that_comes_with_the_project_can_be_read() -> None:
    import yaml

    for path in sorted((CONF / "wheel").glob("*.yaml")):
        settings = yaml.safe_load(path.read_text())
        assert settings["about"]
        if path.stem != "pins":
            assert (wheels.read(path.stem, settings) is None) == (path.stem == "current")


@given(st.permutations(["einops==0.8", "rich>=13", "numpy==2.4.0"]), st.text("abc", min_size=1))
def test_the_key_is_what_is_asked_for_and_not_what_it_is_called(extra: list[str], name: str) -> None:
    one, other = Pins("x", "==2.13.0", extra=tuple(sorted(extra))), Pins(name, "==2.13.0", extra=tuple(extra))
    assert one.key == other.key
    assert one.key != Pins("x", "==2.13.0", extra=tuple(extra[:2])).key


def local_packages() -> list[str]:
    """Folders of package files that pip's configuration names on this machine."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = []
    for key, value in re.findall(r"^\S*?(find-links|extra-index-url)='(.*)'$", said, re.MULTILINE):
        for place in value.split():
            path = url2pathname(place.removeprefix("file://"))
            found.append(path if key == "find-links" else str(Path(path).parent / "files"))
    return sorted({path for path in found if os.path.isdir(path)})


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder, with uv's cache in it, that is gone afterwards: gigabytes."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_two_real_versions_of_torch_train_in_one_sweep(scratch: Path) -> None:
    folders = local_packages()
    names = [path.name for folder in folders for path in Path(folder).glob("torch-2.1*.whl")]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for version in ("2.13.0", "2.14.1"):
        if not any(name.startswith(f"torch-{version}") and tag in name for name in names):
            pytest.skip(f"pip's configuration names no folder with torch {version} for {tag}")
    # What torch 2.14 asks for on Linux and no CPU needs.
    packages.package(scratch / "shelf", "cuda_bindings", "13.0.3")
    sources = Sources(str(scratch / "wheels"), [*folders, str(scratch / "shelf")], [])
    small = Path(__file__).parent / "target"
    done = sweeper(
        scratch / "store",
        *("-m", "wheel=pins", "wheel.torch=2.13.0,2.14.1", "device=cpu", "compile=eager", "train.steps=4"),
        *(f"target.model={small / 'qwen3-small'}", "drafter.layers=1", "drafter.mask_token=0"),
        *words(sources),
        seconds=900,
    )
    assert done.returncode == 0, done.stderr
    seen = {}
    for name, verdict in runs(scratch / "store").items():
        run = json.loads((scratch / "store" / "runs" / name / "run.json").read_text())
        assert verdict["verdict"] == "ok", (verdict, done.stderr)
        seen[run["wheel"]["torch"]["version"]] = run["wheel"]
    assert [version.partition("+")[0] for version in sorted(seen)] == ["2.13.0", "2.14.1"]
    assert all(len(wheel["torch"]["git_version"]) == 40 for wheel in seen.values())
    assert len({wheel["fingerprint"] for wheel in seen.values()}) == 2
