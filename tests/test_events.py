"""What a job reports, on a disk that is full for a while."""

from __future__ import annotations

import errno
import os

import pytest

import dflash.events
from dflash.events import EventReader, EventWriter
from dflash.failure import report_failure
from dflash.probe import Probe


class Disk:
    """A disk with room for so many bytes more; a write that does not fit is cut, as Linux does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self._write = os.write
        monkeypatch.setattr(dflash.events.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.room])
        self.room -= written
        return written


def test_what_a_full_disk_cut_costs_no_later_event(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    events = EventWriter(tmp_path / "events.jsonl")
    assert events.emit("progress", what="first", done=1, total=9)
    disk.room = 20
    assert not events.emit("progress", what="cut", done=2, total=9)
    assert not events.emit("progress", what="lost", done=3, total=9)
    disk.room = 1 << 30
    assert events.emit("progress", what="after", done=4, total=9)
    assert events.emit("end", status="ok")
    reader = EventReader(tmp_path / "events.jsonl")
    assert [one.get("what") for one in reader.poll()] == ["first", "after", None]
    assert reader.bad == 1


@pytest.mark.parametrize("room", [0, 200, 1 << 30])
def test_a_failure_without_room_among_the_events_is_printed(tmp_path, monkeypatch, capsys, room):
    disk = Disk(monkeypatch)
    events = EventWriter(tmp_path / "events.jsonl")
    disk.room = room
    report_failure(events, Probe(events), "drafter0", OSError(errno.ENOSPC, "No space left on device"))
    told = [one for one in EventReader(tmp_path / "events.jsonl").poll() if one["event"] == "failure"]
    assert len(told) == (room > 200)
    printed = capsys.readouterr().err
    assert printed == "" if told else printed.endswith("No space left on device\n")
