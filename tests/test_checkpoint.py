"""Checkpoints: what was saved comes back, and a kill at any moment leaves a whole one.

The killed savers are real processes. They are forked by one helper process that has loaded torch, this file run as
a program, because loading it anew for each would take minutes.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dflash.checkpoint import latest, save

FACTS = {"data": {"row": 17}, "lr": 0.1 + 0.2}


def _tensors(step, size=64):
    return {
        "drafter": {"master": torch.full((size,), float(step)), "step": torch.tensor(float(step))},
        "second": {"master": torch.full((size // 2,), -float(step), dtype=torch.bfloat16)},
    }


def _save(folder, step, keep=2):
    return save(folder, step, _tensors(step), FACTS | {"step": step}, keep)


def _check(folder):
    """The latest step, after its tensors and facts were found to be that step's; 0 if there is none."""
    checkpoint, _ = latest(folder)
    if checkpoint is None:
        return 0
    assert checkpoint.facts["step"] == checkpoint.step
    for name, group in _tensors(checkpoint.step).items():
        got = checkpoint.tensors(name)
        assert set(got) == set(group)
        assert all(torch.equal(got[key], group[key]) and got[key].dtype == group[key].dtype for key in group)
    return checkpoint.step


def test_what_was_saved_comes_back(tmp_path):
    place = _save(tmp_path / "new" / "folder", 1234)
    assert place.name == "step-00001234"
    checkpoint, skipped = latest(tmp_path / "new" / "folder")
    assert (checkpoint.step, checkpoint.folder, checkpoint.names) == (1234, place, ("drafter", "second"))
    assert checkpoint.facts == FACTS | {"step": 1234}
    assert skipped == []
    assert _check(tmp_path / "new" / "folder") == 1234
    with pytest.raises(KeyError):
        checkpoint.tensors("third")


def test_no_checkpoint_is_no_error(tmp_path):
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "missing") == (None, [])


def test_facts_that_are_no_json_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path, 1, _tensors(1), {"bad": object()}, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    for step in (5, 10, 15, 20, 25):
        _save(tmp_path, step, keep)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", *(f"step-{step:08d}" for step in (5, 10, 15, 20, 25)[-keep:])]
    assert _check(tmp_path) == 25


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _another_number(path):
    """Still JSON, no longer what was saved."""
    manifest = json.loads(path.read_text())
    manifest["facts"]["data"]["row"] += 1
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("drafter.safetensors", _truncate, "drafter.safetensors is not what was saved"),
        ("second.safetensors", _flip_a_bit, "second.safetensors is not what was saved"),
        ("second.safetensors", Path.unlink, "second.safetensors cannot be read: No such file or directory"),
        ("checkpoint.json", _truncate, "checkpoint.json is not what was saved"),
        ("checkpoint.json", _another_number, "checkpoint.json is not what was saved"),
        ("checkpoint.json", lambda path: path.write_text("[]"), "checkpoint.json is not what was saved"),
        ("checkpoint.json", Path.unlink, "checkpoint.json cannot be read: No such file or directory"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path, file, damage, reason):
    for step in (1, 2, 3):
        _save(tmp_path, step, keep=3)
    damage(tmp_path / "step-00000003" / file)
    assert _check(tmp_path) == 2
    assert latest(tmp_path)[1] == [f"{tmp_path / 'step-00000003'} is damaged: {reason}"]


@pytest.mark.parametrize("content", ["", "../elsewhere", "step-00000009", "\0\xff"])
def test_a_damaged_pointer_is_passed_over(tmp_path, content):
    for step in (1, 2):
        _save(tmp_path, step)
    (tmp_path / "latest").write_text(content)
    assert _check(tmp_path) == 2
    assert latest(tmp_path)[1] == [f"{tmp_path / 'latest'} names no checkpoint"]
    (tmp_path / "latest").unlink()
    assert _check(tmp_path) == 2


def test_nothing_whole_gives_none_and_all_reasons(tmp_path):
    for step in (1, 2):
        _truncate(_save(tmp_path, step) / "drafter.safetensors")
    checkpoint, skipped = latest(tmp_path)
    assert checkpoint is None
    assert [Path(reason.split()[0]).name for reason in skipped] == ["step-00000002", "step-00000001"]


def test_going_on_from_before_a_damaged_one_keeps_the_whole_ones(tmp_path):
    for step in (10, 20):
        _save(tmp_path, step)
    _truncate(tmp_path / "step-00000020" / "drafter.safetensors")
    assert _check(tmp_path) == 10
    _save(tmp_path, 15)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000010", "step-00000015"]
    _save(tmp_path, 20)
    assert _check(tmp_path) == 20


def test_a_step_can_be_saved_again(tmp_path):
    _save(tmp_path, 4)
    save(tmp_path, 4, _tensors(4), {"step": 4, "again": True}, 2)
    assert latest(tmp_path)[0].facts == {"step": 4, "again": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]


# --- kills and full disks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """What came of all trials: by kind."""
    folder = tmp_path_factory.mktemp("trials")
    done = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_at_a_random_moment_loses_no_saved_checkpoint(trials):
    assert len(trials["random"]) == 30
    assert all(found >= reported for reported, found in trials["random"])
    assert trials["random"][-1][0] >= 15  # every second saver was left alone until it had saved once


@pytest.mark.parametrize("step", ["2", "3"])
def test_a_kill_before_any_call_of_the_system_loses_no_saved_checkpoint(trials, step):
    """Steps 1 and 2 are saved; 3 is the next one, 2 is saved again. After the kill, saving goes on with 5."""
    assert len(trials[step]) > 15
    for found, later, leftovers in trials[step]:
        assert found in (2, int(step))
        assert later == 5
        assert leftovers == []
    assert trials[step][-1][0] == int(step)  # the last trial was not killed


def test_a_full_disk_is_an_os_error_and_leaves_what_was_there(trials):
    assert trials["full"] == {
        "errors": [errno.EFBIG, errno.EFBIG],
        "found": 2,
        "left": ["latest", "step-00000001", "step-00000002"],
    }


def _fork(work):
    """A child that does the work; gives its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _killed_at_random(folder):
    """(newest step that a saver reported as saved, step found after its kill) by trial."""
    trials, reported = [], 0
    for trial in range(30):
        receive, send = os.pipe()

        def work(first=reported + 1, send=send):
            for step in range(first, first + 1000):
                _save(folder, step)
                os.write(send, step.to_bytes(4, "big"))

        child = _fork(work)
        os.close(send)
        with open(receive, "rb") as pipe:
            told = pipe.read(4) if trial % 2 else b""
            time.sleep(random.Random(trial).uniform(0.0, 0.04))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told += pipe.read()
        reported = int.from_bytes(told[-4:], "big") if told else reported
        trials.append((reported, _check(folder)))
        reported = max(trials[-1])
    return trials


CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")  # of os


def _killed_before_each_call(folder, step):
    """(step found, step found after 5 was saved, leftovers then) by trial; in the n-th the n-th call kills."""
    trials = []
    for before in (1, 2):
        _save(folder / "start", before)
    for number in range(1, 1000):
        place = folder / str(number)
        shutil.copytree(folder / "start", place)

        def work(number=number, place=place):
            left = number

            def counted(call):
                def killed(*args, **kwargs):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return killed

            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            _save(place, step)

        _, status = os.waitpid(_fork(work), 0)
        found = _check(place)
        _save(place, 5)
        leftovers = [path.name for path in place.iterdir() if path.name.startswith(".")]
        trials.append((found, _check(place), leftovers))
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return trials
    raise AssertionError("the saver never came to its end")


def _full_disk(folder):
    for step in (1, 2):
        _save(folder, step)
    errors = []
    manifest = (folder / "step-00000002" / "checkpoint.json").stat().st_size
    for size, limit in ((1 << 16, 1 << 12), (8, manifest - 1)):  # a file of tensors, the manifest
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            save(folder, 3, _tensors(3, size), FACTS | {"step": 3}, 2)
        except OSError as error:
            errors.append(error.errno)
    return {"errors": errors, "found": _check(folder), "left": sorted(path.name for path in folder.iterdir())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    result = {
        "random": _killed_at_random(folder / "random"),
        "2": _killed_before_each_call(folder / "again", 2),
        "3": _killed_before_each_call(folder / "next", 3),
        "full": _full_disk(folder / "full"),
    }
    print(json.dumps(result))
