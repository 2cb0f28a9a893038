"""A snapshot gives back what was put into it or says that it cannot; nothing that happens to it reaches a run."""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.cached import WHERE, fill
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper import caches
from sweeper.caches import Count, snapshots
from sweeper.caches.__main__ import main

NONE = dict.fromkeys(caches.LAYERS, Count())
KEY, OTHER = "a" * 64, "b" * 64


def donor(store: Path, key: str = KEY, name: str = "donor", run: str = "r1") -> Path:
    """Make a snapshot; returns its folder."""
    caches.layout(store / name)
    fill(store / name)
    assert snapshots.donate(store, key, store / name, {"run": run})
    return snapshots.place(store, key)


def taken(store: Path, name: str = "run", key: str = KEY) -> dict[str, bytes]:
    """What a run that takes the snapshot finds in its caches. Raises snapshots.Fault."""
    caches.layout(store / name)
    snapshots.take(store, key, store / name)
    return content(store / name)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in caches.files_below(folder)}


WHOLE = {name: b"x" * number for number, name in enumerate(WHERE.values(), start=1)}


def test_a_snapshot_gives_back_what_was_donated(tmp_path: Path) -> None:
    assert not snapshots.exists(tmp_path, KEY)
    folder = donor(tmp_path)
    assert not (tmp_path / "donor").exists()
    assert taken(tmp_path, "one") == taken(tmp_path, "two") == WHOLE
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["from"] == {"run": "r1"}
    assert set(manifest["files"]) == set(WHOLE)


def test_who_made_it_and_when_a_file_was_made_come_with_it(tmp_path: Path) -> None:
    folder = donor(tmp_path)
    path = folder / "files" / WHERE["extensions"]
    path.chmod(0o755)
    os.utime(path, (1e9, 1e9))  # a build tool would otherwise build again what it finds younger than its source
    caches.layout(tmp_path / "run")
    assert snapshots.take(tmp_path, KEY, tmp_path / "run") == "r1"
    copy = (tmp_path / "run" / WHERE["extensions"]).stat()
    assert (copy.st_mode & 0o777, copy.st_mtime) == (0o755, 1e9)


def test_tritons_notes_name_the_files_of_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold absolute paths, so a kernel whose first run's caches are gone would be compiled anew."""
    cache = pytest.importorskip("triton.runtime.cache")

    def kernels(name: str):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        return cache.FileCacheManager("kernel")

    caches.layout(tmp_path / "donor")
    made = kernels("donor")
    parts = {part: made.put(b"made", part) for part in ("k.json", "k.ptx", "k.cubin")}
    made.put_group("k.json", parts)
    assert snapshots.donate(tmp_path, KEY, tmp_path / "donor", {})
    for name in ("one", "two"):
        taken(tmp_path, name)
        group = kernels(name).get_group("k.json")
        assert group == {part: str(tmp_path / name / "triton" / "kernel" / part) for part in parts}


@pytest.mark.parametrize("content", [b"", b"no json", b"[1]", b'{"child_paths": 3}', b'{"child_paths": {"a": null}}'])
def test_a_note_that_is_none_of_tritons_is_copied_as_it_is(tmp_path: Path, content: bytes) -> None:
    caches.layout(tmp_path / "donor")
    (tmp_path / "donor" / "triton" / "__grp__x.json").write_bytes(content)
    assert snapshots.donate(tmp_path, KEY, tmp_path / "donor", {})
    assert taken(tmp_path) == {"triton/__grp__x.json": content}


def test_a_snapshot_is_never_changed_in_place(tmp_path: Path) -> None:
    donor(tmp_path)
    caches.layout(tmp_path / "second")
    (tmp_path / "second" / "inductor" / "file").write_bytes(b"2")
    assert not snapshots.donate(tmp_path, KEY, tmp_path / "second", {})
    taken(tmp_path, "run")
    (tmp_path / "run" / WHERE["code"]).write_bytes(b"changed by a run")
    assert taken(tmp_path, "later") == WHOLE


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(snapshots.Fault, match="there is no snapshot"):
        taken(tmp_path)
    assert caches.count(tmp_path / "run") == NONE


def cut(folder: Path) -> None:
    path = folder / "files" / WHERE["code"]
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    (folder / "files" / WHERE["code"]).write_bytes(b"yyy")


def lose(folder: Path) -> None:
    (folder / "files" / WHERE["cuda"]).unlink()


def lose_all(folder: Path) -> None:
    shutil.rmtree(folder / "files")


def add(folder: Path) -> None:
    (folder / "files" / "cuda" / "more").write_bytes(b"")


def link(folder: Path) -> None:
    lose(folder)
    (folder / "files" / WHERE["cuda"]).symlink_to("/etc/hostname")


def cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-20])


def rubbish_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\xff\x00" * 100)


def odd_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": [1]}')


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def anothers_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(KEY, OTHER))


def later_layout(folder: Path) -> None:
    path = folder / "manifest.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"layout": snapshots.LAYOUT + 1}))


def escaping_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    told = json.loads(path.read_text())
    told["files"]["../../../escaped"] = {"bytes": 0, "sha256": ""}
    path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "damage",
    [
        *(cut, flip, lose, lose_all, add, link),
        *(
            cut_manifest,
            rubbish_manifest,
            odd_manifest,
            no_manifest,
            anothers_manifest,
            later_layout,
            escaping_manifest,
        ),
    ],
)
def test_a_damaged_snapshot_is_set_aside_and_leaves_no_trace_in_the_run(tmp_path: Path, damage) -> None:
    other = donor(tmp_path, OTHER, "other")
    damage(donor(tmp_path))
    with pytest.raises(snapshots.Fault, match="set aside") as fault:
        taken(tmp_path)
    assert fault.value.cause == "cache.corrupt"
    assert caches.count(tmp_path / "run") == NONE
    assert not snapshots.exists(tmp_path, KEY)
    assert sorted(one.state for one in snapshots.survey(tmp_path)) == ["damaged", "whole"]
    assert other.is_dir()
    donor(tmp_path, name="again")
    assert taken(tmp_path, "later") == WHOLE


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["manifest.json", *(f"files/{name}" for name in WHERE.values())]),
    where=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    is_cut=st.booleans(),
)
def test_a_run_gets_what_was_donated_or_nothing(tmp_path_factory, name, where, byte, is_cut) -> None:
    """Whatever single byte of a snapshot changes or wherever a file of it is cut."""
    store = tmp_path_factory.mktemp("store")
    path = donor(store) / name
    old = path.read_bytes()
    at = int(where * len(old))
    path.write_bytes(old[:at] if is_cut else old[:at] + bytes([byte]) + old[at + 1 :])
    try:
        found = taken(store)
    except snapshots.Fault as fault:
        found, cause = content(store / "run"), fault.cause
    else:
        cause = ""
    assert (found, cause) in [(WHOLE, ""), ({}, "cache.corrupt")]
    shutil.rmtree(store)


@pytest.mark.parametrize(
    ("number", "cause"),
    [(errno.ENOSPC, "host.disk_full"), (errno.EDQUOT, "host.disk_full"), (errno.EROFS, "cache.warm_missed")],
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_disk_that_takes_no_copy_leaves_the_snapshot_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cause: str, after: int
) -> None:
    donor(tmp_path)
    write, written = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        if len(written) == after:
            raise OSError(number, os.strerror(number))
        written.append(path)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(snapshots.Fault, match=os.strerror(number)) as fault:
        taken(tmp_path)
    assert fault.value.cause == cause
    assert caches.count(tmp_path / "run") == NONE
    monkeypatch.undo()
    assert taken(tmp_path, "later") == WHOLE


def test_a_snapshot_that_may_not_be_read_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    donor(tmp_path)

    def forbidden(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(snapshots.Fault, match="could not be read"):
        taken(tmp_path)
    monkeypatch.undo()
    assert taken(tmp_path, "later") == WHOLE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync"])
def test_a_disk_that_takes_no_snapshot_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    caches.layout(tmp_path / "donor")
    fill(tmp_path / "donor")

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path if call == "mkdir" else os, call, full)
    with pytest.raises(snapshots.Fault, match=os.strerror(number)) as fault:
        snapshots.donate(tmp_path, KEY, tmp_path / "donor", {})
    monkeypatch.undo()
    assert fault.value.cause == ("host.disk_full" if number == errno.ENOSPC else "cache.warm_missed")
    assert not snapshots.exists(tmp_path, KEY)
    assert not list((tmp_path / "snapshots").glob("*"))


def test_one_that_cannot_be_set_aside_is_still_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that became read-only."""
    flip(donor(tmp_path))

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", read_only)
    for name in ("one", "two"):
        with pytest.raises(snapshots.Fault, match="could not be set aside") as fault:
            taken(tmp_path, name)
        assert fault.value.cause == "cache.corrupt"
        assert caches.count(tmp_path / name) == NONE


def test_the_damage_of_a_snapshot_is_not_laid_at_the_next_ones_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another harness set it aside and made it again while this one was reading."""
    folder = donor(tmp_path)
    flip(folder)
    copy = snapshots._copy

    def overtaken(*given: object) -> str:
        try:
            return copy(*given)  # type: ignore[arg-type]
        finally:
            folder.rename(folder.with_name("elsewhere"))
            donor(tmp_path, name="again")

    monkeypatch.setattr(snapshots, "_copy", overtaken)
    with pytest.raises(snapshots.Fault, match="removed while it was copied"):
        taken(tmp_path)
    monkeypatch.undo()
    assert taken(tmp_path, "later") == WHOLE


DONATES = """
import sys
from pathlib import Path
from fakes.cached import fill
from sweeper import caches
from sweeper.caches import snapshots

store = Path(sys.argv[1])
for number in range(100_000):
    caches.layout(store / f"donor{number}")
    fill(store / f"donor{number}")
    snapshots.donate(store, f"{number:064}"[::-1], store / f"donor{number}", {"run": str(number)})
    print(number, flush=True)
"""


def test_whoever_is_killed_while_making_a_snapshot_leaves_nothing_that_reads_as_whole(tmp_path: Path) -> None:
    for trial in range(3):
        store = tmp_path / str(trial)
        store.mkdir()
        tests = str(Path(__file__).parent)
        with subprocess.Popen(
            [sys.executable, "-c", DONATES, str(store)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": tests}
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0.0, 0.05))
            process.kill()
            made = [line for line in process.stdout.read().split() if line]
        assert process.returncode == -signal.SIGKILL
        states = [one.state for one in snapshots.survey(store)]
        assert set(states) <= {"whole", "unfinished"}
        assert states.count("unfinished") <= 1
        assert states.count("whole") >= len(made)
        for number in range(states.count("whole")):
            assert taken(store, f"run{number}", f"{number:064}"[::-1]) == WHOLE


def warm(store: Path, run: str, *more: str, key: str = KEY) -> str:
    """Fill a run's caches from the snapshot and add files; gives who made it."""
    caches.layout(store / run)
    made_by = snapshots.take(store, key, store / run)
    for name in more:
        (store / run / name).write_bytes(run.encode())
    return made_by


def grown(store: Path, run: str, of: str, key: str = KEY) -> bool:
    """Whether the snapshot grew by the caches of a run that started from the one made by `of`."""
    return snapshots.grow(store, key, store / run, {"run": run}, of)


def names(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "snapshots").iterdir())


def whole(store: Path) -> dict[str, bytes]:
    """All that lies in a store's snapshots."""
    return {name: data for name, data in content(store).items() if name.startswith("snapshots/")}


MORE = "triton/more"
GROWN = WHOLE | {MORE: b"r2"}


def test_a_snapshot_grows_by_what_a_run_that_started_from_it_compiled_besides(tmp_path: Path, capsys) -> None:
    donor(tmp_path)
    assert warm(tmp_path, "r2", MORE) == "r1"
    assert grown(tmp_path, "r2", "r1")
    assert not (tmp_path / "r2").exists()
    assert warm(tmp_path, "r3", "cuda/more") == "r2"
    assert content(tmp_path / "r3") == GROWN | {"cuda/more": b"r3"}
    assert grown(tmp_path, "r3", "r2")
    recorded(tmp_path, KEY, "r2", over=True, started=1.0, made_by="r1")
    recorded(tmp_path, KEY, "r4", over=True, started=2.0, made_by="r3")
    (one,) = told(capsys, "list", "--store", str(tmp_path))["snapshots"]
    assert (one["state"], one["made_from"]) == ("whole", {"run": "r3", "grown_from": ["r1", "r2"]})
    assert one["used_by"] == ["r4"]
    assert main(["list", "--store", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "by r3\n" in said
    assert "grown    from r1, r2\n" in said
    assert "1 run: r4\n" in said


def test_it_does_not_grow_by_nothing_nor_lose_a_file(tmp_path: Path) -> None:
    """What ran is left as it is, too: its caches are not moved."""
    donor(tmp_path)
    before = whole(tmp_path)
    warm(tmp_path, "same", WHERE["code"])
    warm(tmp_path, "less", MORE)
    (tmp_path / "less" / WHERE["cuda"]).unlink()
    for run in ("same", "less"):
        assert not grown(tmp_path, run, "r1")
        assert content(tmp_path / run)
    assert whole(tmp_path) == before


def test_of_two_that_start_from_one_snapshot_it_grows_by_the_first_that_ends(tmp_path: Path) -> None:
    donor(tmp_path)
    assert warm(tmp_path, "r2", MORE) == warm(tmp_path, "r3", "cuda/more") == "r1"
    assert grown(tmp_path, "r2", "r1")
    assert not grown(tmp_path, "r3", "r1")
    assert taken(tmp_path, "later") == GROWN


def test_of_two_that_store_at_once_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    donor(tmp_path)
    warm(tmp_path, "r2", MORE), warm(tmp_path, "r3", "cuda/more")
    rename, overtaken = os.rename, []

    def slow(source: Path, target: Path) -> None:
        if "+1" in target.name and not overtaken:
            overtaken.append(True)
            assert grown(tmp_path, "r2", "r1")
        rename(source, target)

    monkeypatch.setattr(os, "rename", slow)
    assert not grown(tmp_path, "r3", "r1")
    monkeypatch.undo()
    assert overtaken
    assert names(tmp_path) == [snapshots.place(tmp_path, KEY).name]
    assert taken(tmp_path, "later") == GROWN


def prune_all(store: Path) -> None:
    snapshots.prune(store, older_than=-1.0)


def set_aside(store: Path) -> None:
    flip(snapshots.place(store, KEY))
    with pytest.raises(snapshots.Fault, match="set aside"):
        taken(store, "finder")


def prime_again(store: Path) -> None:
    prune_all(store)
    donor(store, name="again", run="another")


@pytest.mark.parametrize("meanwhile", [prune_all, set_aside, prime_again])
def test_what_was_removed_while_a_run_worked_does_not_come_back_by_it(tmp_path: Path, meanwhile) -> None:
    donor(tmp_path)
    warm(tmp_path, "r2", MORE)
    meanwhile(tmp_path)
    before = whole(tmp_path)
    assert not grown(tmp_path, "r2", "r1")
    assert whole(tmp_path) == before


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    """However much is compiled anew in every run."""
    donor(tmp_path, run="start")
    done = []
    for number in range(snapshots.GROWTHS + 2):
        run = f"r{number}"
        done.append(grown(tmp_path, run, warm(tmp_path, run, f"cuda/{run}")))
    assert done == [True] * snapshots.GROWTHS + [False] * 2
    assert len(taken(tmp_path, "later")) == len(WHOLE) + snapshots.GROWTHS
    assert len(names(tmp_path)) == 1


def test_a_run_that_copies_it_while_it_grows_gets_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    donor(tmp_path)
    warm(tmp_path, "r2", MORE)
    write, grew = Path.write_bytes, []

    def write_slowly(path: Path, data: bytes) -> int:
        if not grew and path.name == "index":  # one of the files
            grew.append(grown(tmp_path, "r2", "r1"))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_slowly)
    assert taken(tmp_path, "slow") == WHOLE
    monkeypatch.undo()
    assert grew == [True]
    assert taken(tmp_path, "later") == GROWN
    assert sorted(one.state for one in snapshots.survey(tmp_path)) == ["outgrown", "whole"]
    removed = told(capsys, "prune", "--store", str(tmp_path))["removed"]
    assert [one["state"] for one in removed] == ["outgrown"]
    assert taken(tmp_path, "last") == GROWN


@pytest.mark.parametrize("opened", [False, True])
def test_a_run_whose_snapshot_grew_before_it_was_held_gets_the_grown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """Between its look-up and its opening, or between that and its lock."""
    donor(tmp_path)
    warm(tmp_path, "r2", MORE)
    module, call = (fcntl, "flock") if opened else (os, "open")
    original, grew = getattr(module, call), []

    def late(*given: object, **named: object) -> object:
        if not grew:
            grew.append(True)
            assert grown(tmp_path, "r2", "r1")
            assert len(names(tmp_path)) == 1
        return original(*given, **named)

    monkeypatch.setattr(module, call, late)
    assert taken(tmp_path, "run") == GROWN
    assert grew


def test_a_grown_snapshot_that_is_damaged_is_set_aside_and_one_is_made_anew(tmp_path: Path) -> None:
    donor(tmp_path)
    warm(tmp_path, "r2", MORE)
    assert grown(tmp_path, "r2", "r1")
    flip(snapshots.place(tmp_path, KEY))
    with pytest.raises(snapshots.Fault, match="set aside") as fault:
        taken(tmp_path)
    assert fault.value.cause == "cache.corrupt"
    assert not snapshots.exists(tmp_path, KEY)
    donor(tmp_path, name="again", run="r3")
    assert warm(tmp_path, "r4", MORE) == "r3"
    assert grown(tmp_path, "r4", "r3")
    assert taken(tmp_path, "later") == WHOLE | {MORE: b"r4"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync"])
def test_a_disk_that_takes_no_larger_one_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    donor(tmp_path)
    warm(tmp_path, "r2", MORE)
    before = whole(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path if call == "mkdir" else os, call, full)
    with pytest.raises(snapshots.Fault, match=os.strerror(number)):
        grown(tmp_path, "r2", "r1")
    monkeypatch.undo()
    assert whole(tmp_path) == before
    assert len(names(tmp_path)) == 1
    assert taken(tmp_path, "later") == WHOLE


def test_one_before_that_cannot_be_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks."""
    donor(tmp_path)
    warm(tmp_path, "r2", MORE)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert grown(tmp_path, "r2", "r1")
    assert len(names(tmp_path)) == 2
    assert taken(tmp_path, "later") == GROWN
    monkeypatch.undo()
    assert warm(tmp_path, "r3", "cuda/more") == "r2"
    assert grown(tmp_path, "r3", "r2")
    assert len(names(tmp_path)) == 1


GROWS = """
import sys
from pathlib import Path
from fakes.cached import fill
from sweeper import caches
from sweeper.caches import snapshots

store, me, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
number = 0
for key in range(last):
    key = f"{key:064}"[::-1]
    while True:
        run = f"{me}-{number}"
        number += 1
        caches.layout(store / run)
        if not snapshots.exists(store, key):
            fill(store / run)
            snapshots.donate(store, key, store / run, {"run": run})
            continue
        made_by = snapshots.take(store, key, store / run)
        there = sorted(path.name for path in (store / run / "cuda").iterdir())
        assert len(there) <= snapshots.GROWTHS + 1 and (len(there) == 1 or made_by in there), (made_by, there)
        if len(there) > snapshots.GROWTHS:
            break
        (store / run / "cuda" / run).write_bytes(made_by.encode())
        print(snapshots.grow(store, key, store / run, {"run": run}, made_by), flush=True)
"""


@contextmanager
def growing(store: Path, name: str, keys: int) -> Iterator[subprocess.Popen[str]]:
    """A process that lets the snapshots of so many keys grow, one after another, as far as they do."""
    told = [sys.executable, "-c", GROWS, str(store), name, str(keys)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        yield process
        process.kill()


def chain(store: Path, key: str, name: str) -> list[str]:
    """Who made the snapshot, and of which it was grown from, each wrote its file into it: {file: the one before}."""
    caches.layout(store / name)
    made_by, found = snapshots.take(store, key, store / name), []
    while (file := store / name / "cuda" / made_by).exists():
        found.append(made_by)
        made_by = file.read_text()
    assert len(found) + len(WHOLE) == len(content(store / name))
    return found


def test_whoever_is_killed_while_a_snapshot_grows_leaves_a_whole_one(tmp_path: Path) -> None:
    for trial in range(3):
        store = tmp_path / str(trial)
        store.mkdir()
        with growing(store, "r", 10_000) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0.0, 0.05))
            process.kill()
            process.wait()
            grew = 1 + process.stdout.read().count("True\n")
        assert process.returncode == -signal.SIGKILL
        states = [one.state for one in snapshots.survey(store)]
        assert set(states) <= {"whole", "outgrown", "unfinished"}
        assert states.count("unfinished") + states.count("outgrown") <= 2
        chains = [chain(store, f"{key:064}"[::-1], f"copy{key}") for key in range(states.count("whole"))]
        assert all(len(one) == snapshots.GROWTHS for one in chains[:-1])
        assert grew <= sum(map(len, chains)) <= grew + 1


def test_several_that_let_one_store_grow_at_a_time_lose_and_mix_nothing(tmp_path: Path) -> None:
    """Each copy is of one snapshot, none fails, and no growth takes another's away."""
    keys = 12
    with growing(tmp_path, "a", keys) as first, growing(tmp_path, "b", keys) as second:
        said = [process.communicate(timeout=60) for process in (first, second)]
    assert [error for _, error in said] == ["", ""]
    assert 0 < sum(out.count("True\n") for out, _ in said) <= keys * snapshots.GROWTHS
    for key in range(keys):
        assert len(chain(tmp_path, f"{key:064}"[::-1], f"copy{key}")) == snapshots.GROWTHS
    assert not list((tmp_path / "snapshots").glob("*.*"))


def recorded(store: Path, key: str, name: str, over: bool, started: float, made_by: str = "") -> None:
    """The record of a run that started from a snapshot."""
    from sweeper.store import who_am_i

    folder = store / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"snapshot": key, "started": started, **who_am_i()}))
    if over:
        (folder / "verdict.json").write_text(json.dumps({"verdict": "ok", "cache": {"made_by": made_by}}))


def aged(folder: Path, days: float) -> None:
    """Make a snapshot look that old."""
    then = time.time() - days * 86400
    manifest = folder / "manifest.json"
    if manifest.exists():
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"made": then}))
    os.utime(folder, (then, then))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_says_what_each_is_made_from_its_size_and_its_use(tmp_path: Path, capsys) -> None:
    donor(tmp_path)
    donor(tmp_path, OTHER, "other")
    recorded(tmp_path, KEY, "warm-r1.a1", over=True, started=time.time() + 10)
    found = told(capsys, "list", "--store", str(tmp_path))["snapshots"]
    first, second = found
    assert (first["used_by"], second["used_by"]) == (["warm-r1.a1"], [])
    assert first["made_from"]["run"] == "r1"
    assert first["files"] == len(WHOLE) + 1
    assert first["bytes"] > sum(map(len, WHOLE.values()))
    assert first["last_used"] > second["last_used"] == second["made"]
    assert main(["list", "--store", str(tmp_path)]) == 0
    assert "1 run: warm-r1.a1" in capsys.readouterr().out


def test_prune_removes_remnants_alone_unless_told_more(tmp_path: Path, capsys) -> None:
    donor(tmp_path)
    flip(donor(tmp_path, OTHER, "other"))
    with pytest.raises(snapshots.Fault):
        taken(tmp_path, key=OTHER)
    old = tmp_path / "snapshots" / "aaaabbbb"  # as a version before this one named them
    old.mkdir()
    dead, young = (tmp_path / "snapshots" / f"v2-cccc.tmp-1-{n}" for n in (1, 2))
    dead.mkdir(), young.mkdir()
    aged(dead, 1)
    dry = told(capsys, "prune", "--dry", "--store", str(tmp_path))
    removed = told(capsys, "prune", "--store", str(tmp_path))
    assert [one["name"] for one in dry["removed"]] == [one["name"] for one in removed["removed"]]
    assert {one["state"] for one in removed["removed"]} == {"damaged", "unfinished", "other layout"}
    assert removed["in_use"] == [{"name": young.name, "why": "may be in the making"}]
    assert {one.name for one in snapshots.survey(tmp_path)} == {snapshots.place(tmp_path, KEY).name, young.name}


def test_prune_by_age_use_and_size(tmp_path: Path, capsys) -> None:
    store = ["--store", str(tmp_path)]
    keys = [letter * 64 for letter in "abc"]
    for days, key in enumerate(keys):
        aged(donor(tmp_path, key, key), days)
    recorded(tmp_path, keys[2], "recent", over=True, started=time.time())
    names = [snapshots.place(tmp_path, key).name for key in keys]

    def gone(*words: str) -> list[str]:
        return [one["name"] for one in told(capsys, "prune", "--dry", *words, *store)["removed"]]

    assert gone() == []
    assert gone("--older-than", "12h") == [names[1], names[2]] or gone("--older-than", "12h") == [names[2], names[1]]
    assert gone("--unused-for", "12h") == [names[1]]
    assert gone("--down-to", "0B") == [names[1], names[0], names[2]]
    size = snapshots.survey(tmp_path)[0].bytes
    assert gone("--down-to", f"{2 * size + 50}B") == [names[1]]


def test_prune_leaves_what_is_in_use(tmp_path: Path, capsys) -> None:
    running, copied = donor(tmp_path), donor(tmp_path, OTHER, "other")
    recorded(tmp_path, KEY, "at-work", over=False, started=0.0)
    descriptor = os.open(copied, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as a run does while it copies
    done = told(capsys, "prune", "--down-to", "0B", "--store", str(tmp_path))
    assert (done["removed"], running.is_dir(), copied.is_dir()) == ([], True, True)
    os.close(descriptor)
    done = told(capsys, "prune", "--older-than", "0s", "--store", str(tmp_path))
    assert [one["name"] for one in done["removed"]] == [copied.name]
    assert [one["why"] for one in done["in_use"]] == ["at-work starts from it"]
    assert running.is_dir()


@pytest.mark.parametrize(
    "words", [["--older-than", "soon"], ["--unused-for", "3"], ["--down-to", "10"], ["--store", "/no/such/folder"]]
)
def test_a_bad_option_is_one_sentence(tmp_path: Path, capsys, words: list[str]) -> None:
    assert main(["prune", "--store", str(tmp_path), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"caches: {words[0]}={words[1]}: must be")
    assert said.count("\n") == 1
