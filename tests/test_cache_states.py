"""What cold, warm, foreign and standalone runs start from, in whole runs of a made-up job that compiles."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.command import only, runs, started, sweeper, until, workload

from dflash.events import STAGES
from sweeper import run, spec, store
from sweeper.caches import snapshots
from sweeper.wheels import Wheel

COMPILER = str(Path(__file__).parent / "fakes" / "compiler.py")


class Quiet:
    """Display and tracking of nobody; keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def session(folder: Path) -> run.Session:
    options = spec.Options(store=str(folder), budget=dict.fromkeys(STAGES, 60.0))
    return run.Session(options, "sweep", Quiet(), Quiet(), lambda: 0)


def wheel(folder: Path, name: str) -> Wheel:
    """An environment of its own as far as a compile cache can tell: another interpreter, another fingerprint."""
    python = folder / f"python-{name}"
    if not python.exists():
        python.symlink_to(os.path.realpath(sys.executable))
    return Wheel(name, str(python), name * 64, {"torch": f"2.11.0+{name}"})


def job(wheel: Wheel, cache: str, source: Wheel | None = None, graphs: tuple[str, ...] = ("a", "b")) -> spec.Run:
    state = f"{cache}:{source.name}" if source else cache
    cell = {"wheel": wheel.name, "cache": state, "compile": "locked", "split": "1t1d", "isolation": "threads"}
    given = spec.Workload(
        "command", ("{python}", COMPILER, "{out}", *graphs), standalone=("{python}", COMPILER, "{out}", graphs[0])
    )
    facts = {"workload": "command", "argv": list(given.argv), "settings": {}, "wheel": wheel.fingerprint, "code": ""}
    return spec.Run(cell=cell, spec={}, workload=given, wheel=wheel, facts=facts, cache_wheel=source)


def done(one: spec.Run, during: run.Session) -> dict[str, Any]:
    """Do a run; returns its verdict."""
    folder = run.execute(one, during, 1)
    assert folder is not None
    verdict = store.attempt(folder).verdict
    assert verdict is not None
    return verdict


def test_foreign_starts_from_the_caches_of_another_wheel_and_finds_nothing_there(tmp_path: Path) -> None:
    during, ours, theirs = session(tmp_path / "store"), wheel(tmp_path, "cu130"), wheel(tmp_path, "cu128")
    told = done(job(ours, "foreign", theirs), during)
    assert told["verdict"] == "ok", "a foreign cache is no fault of the run"
    assert (told["cache"]["requested"], told["cache"]["proved"]) == ("foreign:cu128", "mixed")
    assert told["cache"]["layers"]["fxgraph"] | {"bytes_before": 0, "bytes_after": 0} == {
        **{"files_before": 2, "files_after": 4, "bytes_before": 0, "bytes_after": 0},
        **{"hits": 0, "misses": 2, "bypasses": 0, "guard_misses": 0},
    }
    assert "mixed, neither proved cold nor proved warm: 2 misses" in told["reason"]
    (made,) = snapshots.survey(during.folder)
    assert made.made_from["wheel"]["name"] == "cu128"
    assert made.made_from["device"]["torch"] == "2.0"
    assert made.used_by == (store.attempts(during.folder, job(ours, "foreign", theirs))[0].folder.name,)
    assert told["cache"]["made_by"] == made.made_from["run"]


def test_a_cold_run_of_the_other_wheel_donates_what_foreign_starts_from(tmp_path: Path) -> None:
    during, ours, theirs = session(tmp_path / "store"), wheel(tmp_path, "cu130"), wheel(tmp_path, "cu128")
    assert done(job(theirs, "cold"), during)["cache"]["proved"] == "cold"
    assert done(job(ours, "foreign", theirs), during)["cache"]["proved"] == "mixed"
    assert done(job(theirs, "warm"), during)["cache"]["proved"] == "warm"
    assert len(runs(during.folder)) == 3, "nothing had to be primed"


def test_states_and_sources_are_different_cells(tmp_path: Path) -> None:
    ours, one, two = (wheel(tmp_path, name) for name in ("cu130", "cu128", "t213"))
    cells = [job(ours, "cold"), job(ours, "warm"), job(ours, "standalone")]
    cells += [job(ours, "foreign", one), job(ours, "foreign", two), job(one, "foreign", ours)]
    assert len({cell.cell_id for cell in cells}) == len(cells)
    donors = [cell.donor() for cell in cells]
    assert donors[0] is None
    keys = [donor.snapshot_key() for donor in donors if donor]
    assert keys[0] == job(ours, "cold").snapshot_key()
    assert keys[2] == job(one, "cold").snapshot_key()
    assert len(set(keys)) == 4, "the last is our own wheel's, which warm starts from too"


def test_standalone_starts_from_what_the_warm_up_command_compiled(tmp_path: Path) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    told = done(job(ours, "standalone"), during)
    assert told["verdict"] == "ok"
    assert (told["cache"]["proved"], told["cache"]["why"]) == ("mixed", "1 hits, 1 misses")
    assert done(job(ours, "standalone", graphs=("a",)), during)["cache"]["proved"] == "warm"


def test_a_priming_run_that_fails_is_named_and_the_run_goes_on_cold(tmp_path: Path) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    broken = Wheel("cu128", str(tmp_path / "no-python"), "f" * 64, {})
    told = done(job(ours, "foreign", broken), during)
    assert (told["verdict"], told["signature"]["cause"]) == ("degraded", "cache.warm_missed")
    assert "no snapshot: the priming run" in told["reason"]
    assert told["cache"]["layers"]["fxgraph"]["files_before"] == 0


def damage(during: run.Session) -> None:
    (graph,) = during.folder.glob("snapshots/*/files/inductor/fxgraph/a-*")
    graph.write_text("compilex")


def lose_the_manifest(during: run.Session) -> None:
    (manifest,) = during.folder.glob("snapshots/*/manifest.json")
    manifest.unlink()


def damaged(folder: Path, how: Callable[[run.Session], None] = damage) -> tuple[run.Session, Wheel]:
    """A session with one snapshot, which something happened to, and the wheel that it is of."""
    during, ours = session(folder / "store"), wheel(folder, "cu130")
    done(job(ours, "cold"), during)
    how(during)
    return during, ours


@pytest.mark.parametrize("damage", [damage, lose_the_manifest])
def test_a_damaged_snapshot_is_made_again_and_the_run_says_so(
    tmp_path: Path, damage: Callable[[run.Session], None]
) -> None:
    during, ours = damaged(tmp_path, damage)
    told = done(job(ours, "warm"), during)
    assert (told["verdict"], told["cache"]["proved"]) == ("ok", "warm")
    assert "cache.corrupt: the snapshot was damaged" in told["reason"]


def test_a_damaged_snapshot_on_a_read_only_disk_costs_the_warmth_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during, ours = damaged(tmp_path)
    monkeypatch.setattr(snapshots, "_set_aside", lambda source: "could not be set aside (Read-only file system)")
    told = done(job(ours, "warm"), during)
    assert (told["verdict"], told["signature"]["cause"]) == ("degraded", "cache.corrupt")
    assert (told["cache"]["proved"], told["cache"]["layers"]["fxgraph"]["misses"]) == ("mixed", 2)
    assert told["reason"].count("could not be set aside") == 1


def test_a_damaged_snapshot_that_cannot_be_made_again_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during, ours = damaged(tmp_path)
    monkeypatch.setattr(snapshots, "_store", no_room)
    told = done(job(ours, "warm"), during)
    assert (told["verdict"], told["signature"]["cause"]) == ("degraded", "host.disk_full")
    for words in ("proved mixed: no room", "cache.corrupt: the snapshot was damaged", "is set aside as"):
        assert words in told["reason"]


def no_room(*of: Any) -> bool:
    raise snapshots.Fault("no room", "host.disk_full")


def test_a_full_disk_costs_the_warmth_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    done(job(ours, "cold"), during)

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    told = done(job(ours, "warm"), during)
    assert (told["verdict"], told["signature"]["cause"]) == ("degraded", "host.disk_full")
    assert told["cache"]["layers"]["fxgraph"]["misses"] == 2


def test_a_disk_too_full_for_a_snapshot_is_the_reason_of_the_runs_that_wanted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    rename = os.rename

    def full(source: Any, target: Any) -> None:
        if "snapshots" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    for _ in range(2):
        told = done(job(ours, "warm"), during)
        assert (told["verdict"], told["signature"]["cause"]) == ("degraded", "host.disk_full")
        assert "no snapshot could be made (No space left on device)" in told["reason"]
    assert len([name for name in runs(during.folder) if name.startswith("prime")]) == 1, "it is not tried each time"


GROWING = ("a", "second:b")


def lying(during: run.Session) -> dict[str, bytes]:
    """Everything in the store's snapshots."""
    folder = during.folder / "snapshots"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_warm_run_missed_the_next_one_finds(tmp_path: Path) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    cold, warm = job(ours, "cold", graphs=GROWING), job(ours, "warm", graphs=GROWING)
    assert done(cold, during)["verdict"] == "ok"
    missed, found = done(warm, during), done(warm.repeated(2), during)
    assert (missed["verdict"], missed["signature"]["cause"]) == ("degraded", "cache.warm_missed")
    assert (missed["cache"]["proved"], missed["cache"]["why"]) == ("mixed", "1 hits, 1 misses")
    assert (found["verdict"], found["cache"]["proved"]) == ("ok", "warm")
    assert found["cache"]["why"] == "2 files before, none new; 2 hits"
    first, second, third = (store.attempts(during.folder, one)[0].folder.name for one in (cold, warm, warm.repeated(2)))
    assert (missed["cache"]["made_by"], found["cache"]["made_by"]) == (first, second)
    (grown,) = snapshots.survey(during.folder)
    assert (grown.made_from["run"], grown.made_from["grown_from"]) == (second, [first])
    assert grown.used_by == (third,), "the run that grew it started from the one before"


def spoil(during: run.Session, patch: pytest.MonkeyPatch) -> None:
    """Let no snapshot be copied: the run starts cold, and compiles another selection."""

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    patch.setattr(Path, "write_bytes", full)


@pytest.mark.parametrize(
    ("state", "more", "spoilt", "verdict", "cause"),
    [
        ("warm", "fails", None, "failed", "unknown"),
        ("warm", "recompiles", None, "degraded", "compile.recompiled"),
        ("warm", "second:c", spoil, "degraded", "cache.warm_missed"),
        ("foreign", "second:c", None, "ok", None),
        ("standalone", "second:c", None, "ok", None),
    ],
)
def test_only_what_started_from_its_own_snapshot_and_did_nothing_wrong_but_miss_hands_on_its_caches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    more: str,
    spoilt: Callable[[run.Session, pytest.MonkeyPatch], None] | None,
    verdict: str,
    cause: str | None,
) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    source = wheel(tmp_path, "cu128") if state == "foreign" else None
    one = job(ours, state, source, graphs=(*GROWING, more))
    donor = one.donor()
    assert donor is not None
    filled = job(donor.wheel, "cold", graphs=("a",))  # as a cold run that went well would have left them
    left = run.execute(filled, during, 1)
    assert left is not None
    (made,) = during.folder.glob("snapshots/*")
    manifest = made / "manifest.json"
    manifest.write_text(manifest.read_text().replace(filled.snapshot_key(), donor.snapshot_key()))
    made.rename(snapshots.place(during.folder, donor.snapshot_key()))
    before = lying(during)
    if spoilt:
        spoilt(during, monkeypatch)
    told = done(one, during)
    assert (told["verdict"], (told["signature"] or {}).get("cause")) == (verdict, cause)
    assert told["cache"]["proved"] == "mixed"
    assert told["cache"]["layers"]["fxgraph"]["misses"] > 0
    assert lying(during) == before


def test_a_disk_too_full_for_what_a_warm_run_missed_leaves_the_snapshot_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during, ours = session(tmp_path / "store"), wheel(tmp_path, "cu130")
    warm = job(ours, "warm", graphs=GROWING)
    done(job(ours, "cold", graphs=GROWING), during)
    before, rename = lying(during), os.rename

    def full(source: Any, target: Any) -> None:
        if "snapshots" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    for repeat in (1, 2):
        told = done(warm.repeated(repeat), during)
        assert told["signature"]["cause"] == "cache.warm_missed"
        assert "1 hits, 1 misses" in told["reason"]
    assert lying(during) == before
    assert "no snapshot could be made (No space left on device)" in during.display.notes[-1]
    monkeypatch.undo()
    damage(during)  # and it can still be made again
    again, found = done(warm.repeated(3), during), done(warm.repeated(4), during)
    assert (again["signature"]["cause"], again["cache"]["why"]) == ("cache.warm_missed", "1 hits, 1 misses")
    assert "cache.corrupt: the snapshot was damaged" in again["cache"]["note"]
    assert again["reason"] == f"asked for a warm cache, proved mixed: 1 hits, 1 misses; {again['cache']['note']}"
    assert (found["verdict"], found["cache"]["proved"]) == ("ok", "warm")


def test_a_sweep_whose_warm_run_compiles_more_has_warm_runs_from_the_second_repeat_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cells = ["-m", *compiling(*GROWING)[:-1], "cache=cold,warm", "repeat=3"]

    def warm() -> dict[str, tuple[str, str]]:
        """Verdict and proof, by repeat and attempt."""
        found = {name.rpartition("-")[2]: verdict for name, verdict in runs(store).items() if "-warm-" in name}
        return {name: (verdict["verdict"], verdict["cache"]["proved"]) for name, verdict in found.items()}

    once = sweeper(store, *cells)
    assert once.returncode == 0, once.stderr
    missed, found = ("degraded", "mixed"), ("ok", "warm")
    assert warm() == {"r1.a1": missed, "r2.a1": found, "r3.a1": found}
    assert {one["cache"]["proved"] for name, one in runs(store).items() if "-cold-" in name} == {"cold"}
    again = sweeper(store, *cells)
    assert "6 of 6 runs are done already" in again.stderr
    assert len(runs(store)) == 6
    sweeper(store, *cells, "rerun=cache.warm_missed")
    assert warm() == {"r1.a1": missed, "r1.a2": found, "r2.a1": found, "r3.a1": found}


def test_a_warm_cell_is_primed_once_and_proved_warm(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sweeper(store, "-m", *workload("ok"), "cache=warm", "repeat=2")
    assert done.returncode == 0
    assert done.stderr.count("priming first") == 1
    found = runs(store)
    assert [verdict["cache"]["proved"] for name, verdict in found.items() if "-warm-" in name] == ["warm"] * 2
    assert only(store, "prime")["cache"]["proved"] == "cold"
    assert not list(store.glob("runs/*/caches")), "caches are not kept in run directories"
    assert "prime" not in done.stdout


@pytest.mark.parametrize("order", ["order=random", "order=given cache=cold,warm"])
def test_a_cold_run_donates_and_spares_the_priming_run(tmp_path: Path, order: str) -> None:
    store = tmp_path / "store"
    levels = ["cache=warm,cold", *order.split()]
    done = sweeper(store, "-m", *workload("ok"), *levels)
    assert done.returncode == 0
    assert len(runs(store)) == 2
    assert "priming first" not in done.stderr
    assert only(store, "-warm-")["cache"]["proved"] == "warm"
    assert "2 hits" in only(store, "-warm-")["cache"]["why"]


def test_a_failed_priming_run_is_the_reason_of_what_it_could_not_prime(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = sweeper(store, *workload("exit3"), "cache=warm", "repeat=2")
    assert done.returncode == 0
    assert done.stderr.count("priming first") == 1, "priming is not tried again for each repeat"
    for name, verdict in runs(store).items():
        assert verdict["verdict"] == "failed"
        if "-warm-" in name:
            assert verdict["cache"]["proved"] == "mixed"
            assert "prime-locked-cold" in verdict["cache"]["why"]


def test_priming_happens_once_however_many_ask(tmp_path: Path) -> None:
    """Three harnesses at once on one store; the seed makes other runs of them, and no other graphs."""
    store = tmp_path / "store"
    cells = ["-m", *workload("ok"), "cache=warm"]
    with (
        started(store, *cells, "seed=1") as first,
        started(store, *cells, "seed=2") as second,
        started(store, *cells, "seed=3") as third,
    ):
        for process in (first, second, third):
            process.communicate(timeout=120)
            assert process.returncode == 0
    found = runs(store)
    assert len([name for name in found if name.startswith("prime")]) == 1
    assert [verdict["cache"]["proved"] for name, verdict in found.items() if "-warm-" in name] == ["warm"] * 3


def compiling(*graphs: str) -> list[str]:
    """Overrides that make a job that compiles these graphs the workload, started from a warm cache."""
    words = ",".join(f"'{word}'" for word in ("{python}", COMPILER, "{out}", *graphs))
    return ["workload=command", f"workload.argv=[{words}]", "cache=warm"]


def left(store: Path) -> list[psutil.Process]:
    """Processes that work for a store, and whose harness need not live any more."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(store) in word for word in told):
            found.append(process)
    return found


def primed_again(store: Path, cells: list[str], times: int) -> None:
    """The next start after a kill primes so many times, and its run is warm by a snapshot that is whole."""
    done = sweeper(store, *cells)
    assert done.returncode == 0, done.stderr
    found = runs(store)
    killed, *primed = (verdict for name, verdict in found.items() if name.startswith("prime"))
    assert (killed["verdict"], killed["signature"]["cause"]) == ("killed", "sweep.harness_died")
    assert [one["verdict"] for one in primed] == ["ok"] * times
    warm = found[max(name for name in found if "-warm-" in name)]
    assert (warm["verdict"], warm["cache"]["proved"]) == ("ok", "warm")
    assert "2 hits" in warm["cache"]["why"]
    assert [one.files for one in snapshots.survey(store) if one.state == "whole"] == [3], "two graphs and a manifest"
    assert not list(store.glob("runs/*/caches"))
    assert not left(store)


def test_a_harness_killed_while_it_primes_leaves_nothing_and_the_next_one_primes(tmp_path: Path) -> None:
    store, hold = tmp_path / "store", tmp_path / "b"
    cells = compiling("a", str(hold))
    hold.touch()
    with started(store, *cells, "grace=0.5") as harness:
        until(lambda: list(store.glob("runs/prime-*/caches/inductor/fxgraph/a-*")))
        assert len(left(store)) >= 2, "a leash and its child"
        harness.kill()
    until(lambda: not left(store))
    assert not snapshots.survey(store)
    hold.unlink()
    primed_again(store, cells, 1)


# The command, killed by itself at the first call of the system (as Python's audit events name it) on such a path,
# which is the argument of that number.
KILLED_AT = """
import os, signal, sys
from sweeper.__main__ import command

called, place, part = sys.argv[1:4]
sys.addaudithook(
    lambda event, given: event == called and part in str(given[int(place)]) and os.kill(os.getpid(), signal.SIGKILL)
)
command(sys.argv[4:])
"""


@pytest.mark.parametrize(
    ("called", "part", "states", "times"),
    [
        ("open", "/files/inductor/fxgraph/b", ["unfinished"], 1),  # not all checksums are taken
        ("os.rename", ".tmp-", ["unfinished"], 1),  # all is written but has not its name
        ("open", "/.verdict.json", ["whole"], 0),  # it has its name, and the run that made it no verdict
    ],
)
def test_a_harness_killed_while_it_stores_a_snapshot_leaves_a_whole_one_or_none(
    tmp_path: Path, called: str, part: str, states: list[str], times: int
) -> None:
    store, cells = tmp_path / "store", compiling("a", "b")
    words = [*cells, f"store={store}", "tracking=none"]
    killed_at(store, called, 0, part, *words)
    assert [one.state for one in snapshots.survey(store)] == states
    primed_again(store, cells, times)


def killed_at(store: Path, *words: object) -> None:
    """Give the command, which kills itself, and wait until its child has gone, too."""
    told = [sys.executable, "-c", KILLED_AT, *map(str, words)]
    killed = subprocess.run(told, cwd=store.parent, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    until(lambda: not left(store))


@pytest.mark.parametrize(
    ("called", "place", "part", "states", "first"),
    [
        ("open", 0, "/files/inductor/fxgraph/b", ["unfinished", "whole"], "degraded"),  # not all checksums are taken
        ("os.rename", 0, ".tmp-", ["unfinished", "whole"], "degraded"),  # all is written but has not its name
        ("os.rename", 1, ".pruned-", ["outgrown", "whole"], "ok"),  # it has, and the one before is still there
        ("shutil.rmtree", 0, ".pruned-", ["unfinished", "whole"], "ok"),  # that one has lost its name alone
        ("open", 0, "/.verdict.json", ["whole"], "ok"),  # it is alone, and the run that made it has no verdict
    ],
)
def test_a_harness_killed_while_a_snapshot_grows_leaves_the_one_before_or_the_grown_one(
    tmp_path: Path, called: str, place: int, part: str, states: list[str], first: str
) -> None:
    store, cells = tmp_path / "store", compiling(*GROWING)
    assert sweeper(store, *cells, "cache=cold").returncode == 0
    killed_at(store, called, place, part, *cells, f"store={store}", "tracking=none")
    assert sorted(one.state for one in snapshots.survey(store)) == states
    assert sweeper(store, *cells, "repeat=2").returncode == 0
    warm = {name.rpartition("-")[2]: verdict for name, verdict in runs(store).items() if "-warm-" in name}
    killed, second, third = (warm[attempt] for attempt in ("r1.a1", "r1.a2", "r2.a1"))
    assert killed["signature"]["cause"] == "sweep.harness_died"
    assert (second["verdict"], third["verdict"], third["cache"]["proved"]) == (first, "ok", "warm")
    assert "2 hits" in third["cache"]["why"]
    assert not [name for name in runs(store) if name.startswith("prime")]
    (whole,) = (one for one in snapshots.survey(store) if one.state == "whole")
    assert whole.files == 3, "two graphs and a manifest"


def test_a_warm_up_command_of_ones_own(tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = [
        f"workload.{name}=['{{python}}','{COMPILER}','{{out}}',{graphs}]"
        for name, graphs in (("argv", "a,b"), ("standalone", "a"))
    ]
    done = sweeper(store, "-m", "workload=command", *words, "cache=standalone,cold")
    assert done.returncode == 0
    assert only(store, "locked-standalone")["cache"]["why"] == "1 hits, 1 misses"
    assert "mixed" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cache=foreign"], "cache_from=null: cache=foreign needs the wheel level"),
        (["cache=foreign:nosuch"], "cache_from=nosuch: unknown level; known: "),
        (["cache=standalone"], "workload.standalone=[]: cache=standalone needs a command"),
    ],
)
def test_a_start_that_cannot_be_had_is_one_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    done = sweeper(tmp_path / "store", *workload("ok"), *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["cache=cold,foreign:current"], ["cache=cold,foreign", "cache_from=current"]])
def test_where_foreign_comes_from_is_a_level_of_the_one_factor(tmp_path: Path, words: list[str]) -> None:
    """And the run's own wheel is no foreign one."""
    store = tmp_path / "store"
    done = sweeper(store, "-m", *workload("ok"), *words)
    assert done.returncode == 0
    assert only(store, "-foreign-current-")["reason"] == "foreign:current is the run's own wheel; that is cache=warm"
    cells = [json.loads(path.read_text())["cell"] for path in store.glob("runs/*/run.json")]
    assert sorted(cell["cache"] for cell in cells) == ["cold", "foreign:current"]
    assert cells[0].keys() == cells[1].keys()
