"""The command lines of `python -m dflash`: where settings may stand, whose usage a stray word gets, where to write."""

import json
from pathlib import Path

import pytest

from dflash.__main__ import COMMANDS, main

TARGET = str(Path(__file__).parent / "target" / "qwen3-small")

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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["drafter.anchors=256"], "drafter.anchors=256: must be less than data.row_tokens=256"),
        (["data.row_tokens=32"], "drafter.anchors=32: must be less than data.row_tokens=32"),
        (['fanout={"a": {}, "b": {"drafter": {"anchors": 999}}}', "split=1t2d"], "drafter.anchors=999: must be less"),
        (["target.gpus=2", "device=cpu"], "target.gpus=2: must be 1 with device=cpu"),
        (["seed=-1"], "seed=-1: must be from 0"),
        (["optim.lr=0"], "optim.lr=0.0: must be more than 0 and at most 10"),
        (["optim.lr=NaN"], "optim.lr=nan: must be more than 0 and at most 10"),
        (["optim.lr=nan"], "optim.lr=nan: must be a number"),
        (["drafter.window=x"], "drafter.window=x: must be a whole number or null"),
        (["target.taps=3"], "target.taps=3: must be a list or null"),
        (["data.path=3"], "data.path=3: must be text"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    out = tmp_path / "out"
    assert main(["train", "--out", str(out), "data.path=d", "target.model=t", *words]) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"dflash: {sentence}")
    assert len(told.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("command", ["train", "warm", "prepare", "regenerate", "eval"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you there"}]
    chats.write_text(json.dumps({"messages": said}) + "\n")
    words = {
        "train": [f"data.path={chats}", f"target.model={TARGET}"],
        "warm": [f"data.path={chats}", f"target.model={TARGET}"],
        "prepare": ["--data", chats, "--target", TARGET],
        "regenerate": ["--prompts", chats, "--target", TARGET],
        "eval": ["--prompts", chats, "--target", TARGET, "--drafter", TARGET],
    }[command]
    option = "--json" if command == "eval" else "--out"
    places = [Path("/proc/nope"), chats / "below"]
    places.append(tmp_path if command in ("eval", "regenerate") else chats)
    for place in places:
        assert main([command, option, str(place), *map(str, words)]) == 2
        told = capfd.readouterr().err
        assert told.startswith(f"dflash: {option}={place}: ")
        assert len(told.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [chats]


def test_eval_leaves_no_file_of_figures_when_it_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for figures in (tmp_path / "new.json", tmp_path / "old.json"):
        if figures.name == "old.json":
            figures.write_text("{}")
        words = ["--drafter", "nowhere", "--target", TARGET, "--prompts", "nowhere", "--json", str(figures)]
        assert main(["eval", *words]) == 2
        assert capfd.readouterr().err.startswith("dflash: --drafter=nowhere: ")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert figures.read_text() == "{}"
