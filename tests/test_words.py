"""Every command that reads a store takes it as `python -m sweeper` does, and as an option."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import write_plan, write_run

from sweeper import status, sync
from sweeper.analysis.__main__ import main as analysis
from sweeper.caches.__main__ import main as caches
from sweeper.report.__main__ import main as report
from sweeper.words import leave


@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        (status.main, [], []),
        (status.main, ["sweep0123"], []),
        (status.main, [], ["sweep0123"]),
        (report, [], []),
        (sync.main, [], ["--rebuild"]),
        (caches, ["list"], []),
        (caches, ["prune"], ["--dry"]),
    ],
)
def test_store_is_taken_as_a_setting_and_as_an_option(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[list[str]], int],
    before: list[str],
    after: list[str],
) -> None:
    store = tmp_path / "store"
    write_plan([write_run(store, {"compile": "whole"})], conclusion="Nothing failed.\n")
    monkeypatch.chdir(tmp_path)  # where ./runs, the default, is no store
    told = []
    for words in (["--store", str(store)], [f"store={store}"], ["store=store"]):
        assert command([*before, *words, *after]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != ""
    assert command([*before, "store=none", *after]) == 2
    assert "store=none: must be " in capsys.readouterr().err


def test_the_analysis_of_a_store_takes_it_as_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan([write_run(tmp_path, {"compile": "whole"})], conclusion="Nothing failed.\n")
    assert analysis([str(tmp_path)]) == analysis([f"store={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert said == 2 * said[: len(said) // 2] != ""


@pytest.mark.parametrize(
    "words",
    [
        ["sweeper", "--help"],
        ["sweeper", "--cfg", "job"],
        ["sweeper", "dry=true"],
        ["sweeper.bisect", "--help"],
        ["sweeper.signatures", "document"],
        ["sweeper.status", "--help"],
        ["dflash", "--help"],
    ],
    ids=" ".join,
)
def test_a_reader_that_has_gone_ends_a_command_quietly(tmp_path: Path, words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", *words], stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_only_a_reader_that_has_gone_is_passed_over() -> None:
    def broken() -> int:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        leave(broken)
