"""A forked command (forked.py) is what a started one is."""

import os
import signal
import subprocess
import sys

import pytest
from forked import Forked, run


@pytest.mark.parametrize("words", [["--help"], ["compile=fast", "store=here"], ["--nosuch"]])
def test_it_says_the_same_and_ends_alike(tmp_path, words):
    command = [sys.executable, "-m", "sweeper", *words]
    started = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    forked = run("sweeper", *words, cwd=tmp_path, timeout=60)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_it_is_a_process_of_its_own_with_the_environment_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    one, other = (Forked("sweeper.analysis", "--help", cwd=tmp_path) for _ in range(2))
    assert one.pid != other.pid
    assert one.communicate(60) == other.communicate(60)
    assert max(map(len, one.communicate(60)[0].splitlines())) <= 60
    assert one.wait() == 0


def test_a_signal_is_its_status(tmp_path):
    os.mkfifo(tmp_path / "log")  # reading it waits for a writer, who never comes
    one = Forked("sweeper.signatures", "explain", "log", cwd=tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.3)
    assert one.poll() is None
    one.kill()
    assert one.wait(60) == -signal.SIGKILL
