"""The command lines of `python -m dflash`: where settings may stand, and whose usage a stray word gets."""

from pathlib import Path

import pytest

from dflash.__main__ import COMMANDS, main

NEEDED = {
    "regenerate": ["--prompts", "p", "--out", "o"],
    "prepare": ["--data", "d", "--target", "t", "--out", "o"],
    "train": ["--out", "o"],
    "warm": ["--out", "o"],
    "eval": ["--drafter", "d", "--target", "t", "--prompts", "p", "--limit", "1"],
    "export": ["--run", "r", "--to", "t"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stray_word_gets_the_usage_of_its_own_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    for stray in (["--no-such", "a=1"], ["--no-such=1"]):
        with pytest.raises(SystemExit) as left:
            main([command, *NEEDED[command], *stray])
        told = capsys.readouterr().err
        assert left.value.code == 2
        assert told.startswith(f"usage: python -m dflash {command} ")
        assert f"unrecognized arguments: {stray[0]}" in told


@pytest.mark.parametrize("command", ["regenerate", "eval", "export"])
def test_a_command_without_settings_takes_no_word(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, *NEEDED[command], "b"])
    told = capsys.readouterr().err
    assert told.startswith(f"usage: python -m dflash {command} ")
    assert told.endswith(f"python -m dflash {command}: error: unrecognized arguments: b\n")


@pytest.mark.parametrize("command", ["prepare", "train", "warm"])
def test_settings_may_stand_before_and_after_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for word, said in (("data.no_such=1", "dflash: data.no_such=1: "), ("b", "dflash: b=: must be ")):
        assert main([command, "data.row_tokens=64", *NEEDED[command], word]) == 2
        assert capfd.readouterr().err.startswith(said)
    assert not any(tmp_path.iterdir())
