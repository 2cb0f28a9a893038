"""A prepared folder: whole or not there, the same rows as from the file, refused when it fits nothing."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_tokenizer import CHATML, small_tokenizer

from dflash.__main__ import main
from dflash.data import dataset, prepare, store
from dflash.settings import Data, SettingError

ROWS = 512


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A model folder as far as preparing looks at it."""
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": ROWS}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def write(path, turns=12, answer="an answer of some words"):
    rows = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"{answer} {n}"}]}
        for n in range(turns)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def make(data, tokenizer, out, replace=False, **options):
    settings = Data(path=str(data), **options)
    return prepare.prepare(settings, tokenizer, out, embedding_rows=ROWS, replace=replace)


def load(path, tokenizer, cache=Path("/nowhere"), seed=3, embedding_rows=ROWS, **options):
    data = Data(path=str(path), **{"row_tokens": 64} | options)
    return dataset.load(data, tokenizer, embedding_rows=embedding_rows, seed=seed, cache=cache)


def command(capfd, *words):
    """Exit status, standard output and standard error of `python -m dflash prepare`, in this process."""
    code = main(["prepare", *map(str, words)])
    out, errors = capfd.readouterr()
    return code, out, errors


def test_a_prepared_folder_gives_the_rows_that_its_file_gives_at_every_index(tokenizer, tmp_path):
    file = write(tmp_path / "c.jsonl")
    make(file, tokenizer, tmp_path / "prepared")
    direct = load(file, tokenizer, cache=tmp_path / "cache")
    again = load(tmp_path / "prepared", tokenizer)
    assert again.summary == direct.summary
    for at in range(3 * len(direct.rows)):
        one, other = direct.rows.row(at), again.rows.row(at)
        for name in ("tokens", "loss_mask", "document", "position"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_several_processes_make_the_same_folder_as_one(tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path / "c.jsonl", turns=700)
    file.write_text(file.read_text() + "\n" + json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
    one = make(file, tokenizer, tmp_path / "one", bad_rows="skip")
    monkeypatch.setattr(prepare, "_BYTES_A_WORKER", file.stat().st_size // 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    several = make(file, tokenizer, tmp_path / "several", bad_rows="skip")
    assert several == one
    assert one.skipped == {"begins with an assistant turn": 1}
    assert one.documents == 700


def test_one_folder_serves_rows_of_any_length(tokenizer, tmp_path):
    file, out = write(tmp_path / "c.jsonl", answer="word " * 30), tmp_path / "prepared"
    make(file, tokenizer, out)
    for row_tokens, too_long in ((512, "skip"), (100, "split"), (100, "cut")):
        options = {"row_tokens": row_tokens, "too_long": too_long}
        direct = load(file, tokenizer, cache=tmp_path / f"{row_tokens}-{too_long}", **options)
        again = load(out, tokenizer, cache=tmp_path / "unused", **options)
        assert again.summary == direct.summary
        assert again.rows.row(1).tokens.shape == (row_tokens,)
    assert not (tmp_path / "unused").exists()


def test_training_uses_its_own_folder_again_while_nothing_has_changed(tokenizer, tmp_path):
    file, cache = write(tmp_path / "c.jsonl"), tmp_path / "run" / "data"
    load(file, tokenizer, cache=cache)
    made = (cache / "tokens.bin").stat().st_ino
    load(file, tokenizer, cache=cache, too_long="cut")
    assert (cache / "tokens.bin").stat().st_ino == made
    changed = [
        lambda: load(file, tokenizer, cache=cache, reasoning="drop"),
        lambda: load(file, small_tokenizer(CHATML), cache=cache),
        lambda: load(write(file, turns=9), tokenizer, cache=cache),
        lambda: (cache / "tokens.bin").write_bytes(b"x") and load(file, tokenizer, cache=cache),
        lambda: (cache / "meta.json").write_bytes(b"{") and load(file, tokenizer, cache=cache),
    ]
    for change in changed:
        change()
        meta = store.read_meta(cache)
        assert not store.fault(cache, meta)
        assert meta.source.sha256 == store.sha256(file)
    assert sorted(p.name for p in cache.parent.iterdir() if not p.name.startswith(".")) == ["data"]


def test_what_is_no_prepared_folder_is_never_replaced(tokenizer, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for replace in (False, True):
        with pytest.raises(SettingError, match="exists and was not made by `dflash prepare`"):
            make(write(tmp_path / "c.jsonl"), tokenizer, mine, replace=replace)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_folder_that_fits_something_else_is_one_sentence(tokenizer, tmp_path):
    out = tmp_path / "prepared"
    make(write(tmp_path / "c.jsonl"), tokenizer, out)
    for call, said in [
        (lambda: load(out, small_tokenizer(CHATML)), "was prepared with another tokenizer or chat template"),
        (lambda: load(out, tokenizer, reasoning="drop"), "data.reasoning=drop: contradicts .* prepared with keep"),
        (lambda: load(out, tokenizer, format="sharegpt"), "data.format=sharegpt: contradicts .* read as messages"),
        (lambda: load(out, tokenizer, embedding_rows=256), "the target's embedding has 256 rows"),
        (lambda: load(tmp_path, tokenizer), "is a folder that `dflash prepare` did not make or finish"),
    ]:
        with pytest.raises(SettingError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert load(out, tokenizer, format="messages").summary["documents"] == 12


def test_a_folder_prepared_otherwise_is_kept_and_says_how_it_was(tokenizer, tmp_path):
    out, file = tmp_path / "prepared", write(tmp_path / "c.jsonl")
    made = make(file, tokenizer, out)
    other = write(tmp_path / "other.jsonl", turns=9)
    for call, said in [
        (lambda: make(file, tokenizer, out, reasoning="drop"), "was prepared with data.reasoning=keep, not drop;"),
        (lambda: make(file, tokenizer, out, bad_rows="skip"), "was prepared with data.bad_rows=error, not skip;"),
        (lambda: make(file, small_tokenizer(CHATML), out), "was prepared with another tokenizer or chat template"),
        (lambda: make(other, tokenizer, out), "was prepared from c.jsonl with other content than other.jsonl;"),
    ]:
        with pytest.raises(SettingError) as caught:
            call()
        assert str(caught.value).startswith(f"--out={out}: {said}")
    assert make(file, tokenizer, out) == made


def test_a_damaged_folder_is_one_sentence_whatever_is_damaged(tokenizer, tmp_path):
    out = tmp_path / "prepared"
    make(write(tmp_path / "c.jsonl"), tokenizer, out)
    for name in ("tokens.bin", "loss_mask.bin", "documents.bin", "meta.json"):
        whole = (out / name).read_bytes()
        flipped = bytes([whole[0] ^ 1]) + whole[1:]
        for content in (whole[:-1], flipped, b"", None):
            if content is None:
                (out / name).unlink()
            else:
                (out / name).write_bytes(content)
            if name == "meta.json" and content == whole[:-1]:
                continue  # only its last line break is gone
            with pytest.raises(SettingError, match=r"prepare it again|did not make or finish") as caught:
                load(out, tokenizer)
            assert "\n" not in str(caught.value)
        (out / name).write_bytes(whole)
    meta = json.loads((out / "meta.json").read_text())
    for odd in ([], {}, meta | {"layout": "dflash-data-0"}, meta | {"files": {}}, meta | {"more": 1}):
        (out / "meta.json").write_text(json.dumps(odd))
        with pytest.raises(SettingError, match=r"data\.path"):
            load(out, tokenizer)


def test_a_bad_row_leaves_no_folder_behind(tokenizer, tmp_path):
    file = write(tmp_path / "c.jsonl")
    file.write_text(file.read_text() + "\n{")
    with pytest.raises(SettingError, match="line 13: broken JSON"):
        make(file, tokenizer, tmp_path / "prepared")
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    assert make(file, tokenizer, tmp_path / "prepared", bad_rows="skip").skipped == {"broken JSON": 1}


def test_a_folder_that_cannot_be_written_is_one_sentence(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"--out=.*cannot be written \(File exists\)"):
        make(write(tmp_path / "c.jsonl"), tokenizer, tmp_path / "file" / "prepared")


KILLED = """
import os, sys, time
from pathlib import Path
from dflash.data import store
from dflash.data.document import Document
import numpy as np
out = Path(sys.argv[1])
with store.making(out) as part:
    writer = store.Writer(part, 100)
    print("begun", flush=True)
    for n in range(400):
        writer.add(n, Document(np.full(50, n % 100), np.ones(50, dtype=bool)))
        time.sleep(0.0005)
    writer.finish(store.Source("x", "0", "0", {}), "tokens", {})
    print("finished", flush=True)
print("there", flush=True)
"""


def test_a_prepare_that_is_killed_leaves_nothing_that_reads_as_whole(tmp_path):
    out = tmp_path / "prepared"
    for n in range(8):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.02 * n)
        child.send_signal(signal.SIGKILL)
        child.wait()
        if out.exists():  # the last ones may have got there
            assert not store.fault(out, store.read_meta(out))
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=True, stdout=subprocess.DEVNULL)
    meta = store.read_meta(out)
    assert (meta.documents, store.fault(out, meta)) == (400, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".prepared.lock", "prepared"]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prepares_tells_a_summary_and_does_nothing_twice(model, tmp_path, capfd):
    file, out = write(tmp_path / "c.jsonl", turns=40), tmp_path / "prepared"
    words = ["--data", file, "--target", model, "--out", out, "--block", "8", "--anchors", "4", "data.row_tokens=64"]
    done = subprocess.run([sys.executable, "-m", "dflash", "prepare", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    meta = store.read_meta(out)
    assert f"{meta.documents} documents, {meta.tokens} tokens" in done.stdout
    assert "% supervised (format messages)" in done.stdout
    assert "4 anchors a row and blocks of 8" in done.stdout
    assert "100 % of" in done.stderr
    made = (out / "tokens.bin").stat().st_ino
    assert command(capfd, *words)[:2] == (0, done.stdout)
    assert (out / "tokens.bin").stat().st_ino == made


def test_a_folder_is_made_even_if_its_documents_do_not_fit_the_rows_asked_about(model, tmp_path, capfd):
    file, out = write(tmp_path / "c.jsonl", answer="word " * 40), tmp_path / "prepared"
    words = ["--data", file, "--target", model, "--out", out, "data.row_tokens=16"]
    code, said, _ = command(capfd, *words)
    assert code == 0
    assert "in rows of 16 (data.too_long=skip): holds nothing to train on" in said
    assert not store.fault(out, store.read_meta(out))


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        ({"--data": "none.jsonl"}, [], "--data=none.jsonl: must be a readable data file"),
        ({"--data": "."}, [], "--data=.: must be a file, this is a folder"),
        ({"--target": "."}, [], "--target=.: the folder must hold a config.json"),
        ({"--out": "."}, [], "exists and was not made by `dflash prepare`"),
        ({}, ["train.steps=3"], "train.steps=3: must be a setting of the data"),
        ({}, ["data.path=x"], "--data=x: must be given so, as an option"),
        ({}, ["data.format=xml"], "data.format=xml: must be one of auto"),
        ({}, ["--block", "8"], "must be given together"),
    ],
)
def test_the_command_refuses_in_one_sentence(model, tmp_path, capfd, monkeypatch, changes, more, said):
    monkeypatch.chdir(tmp_path)
    good = {"--data": write(tmp_path / "c.jsonl"), "--target": model, "--out": "prepared"}
    code, _, errors = command(capfd, *itertools.chain(*(good | changes).items()), *more)
    assert code == 2
    (sentence,) = [line for line in errors.splitlines() if line.startswith("dflash: ")]
    assert said in sentence
    assert not Path("prepared").exists()
