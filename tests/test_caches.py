"""Cold is proved cold, warm is proved warm, and a damaged snapshot never breaks a run."""

import json
from pathlib import Path

import pytest
from fakes.command import only, runs, sweeper, workload
from hypothesis import given
from hypothesis import strategies as st

from sweeper import caches
from sweeper.caches import Count

NONE = dict.fromkeys(caches.LAYERS, Count())
KEY = "a" * 64


def fill(root: Path) -> dict[str, str]:
    """One file per layer, where PyTorch, Triton and CUDA put it."""
    where = {
        "aotautograd": "inductor/aotautograd/akw/deb",
        "fxgraph": "inductor/fxgraph/3i/f3i/2ai",
        "code": "inductor/24/c24.cpp",
        "triton": "triton/0/kernel.cubin",
        "autotune": "inductor/5m/c5m.best_config",
        "pgo": "inductor/dynamo/code_state.pkl",
        "extensions": "extensions/ext/ext.so",
        "cuda": "cuda/index",
    }
    for number, name in enumerate(where.values(), start=1):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * number)
    return where


def counters(**caches_: dict[str, int]) -> list[dict[str, object]]:
    return [{"event": "counters", "t": 1.0, "at": "end", "caches": caches_}]


def test_every_layer_is_counted_apart(tmp_path: Path) -> None:
    caches.layout(tmp_path / "c")
    assert caches.count(tmp_path / "c") == NONE
    where = fill(tmp_path / "c")
    found = caches.count(tmp_path / "c")
    assert found == {layer: Count(1, number) for number, layer in enumerate(where, start=1)}


def test_every_cache_of_a_child_lies_in_directories_of_its_own(tmp_path: Path) -> None:
    environment = caches.environment(tmp_path / "c")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH"):
        assert Path(environment[name]).is_relative_to(tmp_path / "c")
    assert environment["TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE"] == "0"
    caches.layout(tmp_path / "c")
    with pytest.raises(FileExistsError):
        caches.layout(tmp_path / "c")


TWO = NONE | {"fxgraph": Count(2, 20)}
THREE = NONE | {"fxgraph": Count(3, 30)}


@pytest.mark.parametrize(
    ("requested", "before", "after", "events", "proved", "why"),
    [
        ("cold", NONE, TWO, counters(fxgraph={"misses": 2}), "cold", "2 misses"),
        ("cold", NONE, TWO, counters(fxgraph={"hits": 1, "misses": 2}), "cold", "1 hits"),
        ("cold", TWO, TWO, counters(fxgraph={"hits": 2}), "mixed", "2 files were there"),
        ("warm", TWO, TWO, counters(fxgraph={"hits": 2, "misses": 0}), "warm", "none new"),
        ("warm", TWO, TWO, counters(fxgraph={"hits": 2, "misses": 1}), "mixed", "1 misses"),
        ("warm", TWO, TWO, counters(fxgraph={"hits": 2}, aotautograd={"bypasses": 1}), "mixed", "1 bypasses"),
        ("warm", TWO, TWO, counters(aotautograd={"hits": 2, "guard_misses": 1}), "mixed", "1 guard misses"),
        ("warm", TWO, THREE, counters(fxgraph={"hits": 2}), "mixed", "1 new files"),
        ("warm", TWO, TWO, counters(fxgraph={"hits": 0}), "mixed", "no hit"),
        ("warm", TWO, TWO, [], "mixed", "no cache lookups"),
        ("warm", NONE, TWO, counters(fxgraph={"hits": 1}), "mixed", "no file before"),
        ("warm", NONE, NONE, counters(fxgraph={"hits": 0}), "warm", "nothing is compiled"),
        ("warm", TWO, TWO, counters(fxgraph="rubbish"), "mixed", "no cache lookups"),
    ],
)
def test_proof(requested, before, after, events, proved, why) -> None:
    told = caches.proof(requested, before, after, events)
    assert (told["requested"], told["proved"]) == (requested, proved)
    assert why in told["why"]
    assert told["layers"]["fxgraph"]["files_before"] == before["fxgraph"].files


@given(
    hits=st.integers(0, 3),
    bad=st.fixed_dictionaries({name: st.integers(0, 2) for name in ("misses", "bypasses", "guard_misses")}),
    before=st.integers(0, 3),
    new=st.integers(0, 2),
)
def test_warm_needs_every_condition_at_once(hits: int, bad: dict[str, int], before: int, new: int) -> None:
    there = NONE | {"fxgraph": Count(before, before)}
    later = NONE | {"fxgraph": Count(before + new, before + new)}
    told = caches.proof("warm", there, later, counters(fxgraph={"hits": hits, **bad}))
    full = before > 0 and hits > 0 and not any(bad.values()) and not new
    nothing = not before and not new and not hits and not any(bad.values())
    assert (told["proved"] == "warm") == (full or nothing)


def test_the_last_totals_count_not_their_sum() -> None:
    events = [*counters(fxgraph={"misses": 5}), *counters(fxgraph={"hits": 2, "misses": 0})]
    assert caches.proof("warm", TWO, TWO, events)["proved"] == "warm"


def test_a_snapshot_gives_back_what_was_donated(tmp_path: Path) -> None:
    caches.layout(tmp_path / "run")
    fill(tmp_path / "run")
    before = caches.count(tmp_path / "run")
    assert not caches.has_snapshot(tmp_path, KEY)
    assert caches.donate(tmp_path, KEY, tmp_path / "run", {"run": "r1"})
    assert not (tmp_path / "run").exists()
    for name in ("one", "two"):
        caches.layout(tmp_path / name)
        caches.take(tmp_path, KEY, tmp_path / name)
        assert caches.count(tmp_path / name) == before
    manifest = json.loads(next(tmp_path.glob("snapshots/*/manifest.json")).read_text())
    assert manifest["from"] == {"run": "r1"}
    assert len(manifest["files"]) == 8


def test_a_snapshot_is_never_changed_in_place(tmp_path: Path) -> None:
    for name, content in (("first", b"1"), ("second", b"2")):
        caches.layout(tmp_path / name)
        (tmp_path / name / "inductor" / "file").write_bytes(content)
    assert caches.donate(tmp_path, KEY, tmp_path / "first", {})
    assert not caches.donate(tmp_path, KEY, tmp_path / "second", {})
    caches.layout(tmp_path / "run")
    caches.take(tmp_path, KEY, tmp_path / "run")
    (tmp_path / "run" / "inductor" / "file").write_bytes(b"changed by a run")
    caches.layout(tmp_path / "later")
    caches.take(tmp_path, KEY, tmp_path / "later")
    assert (tmp_path / "later" / "inductor" / "file").read_bytes() == b"1"


def cut(snapshot: Path) -> None:
    path = snapshot / "files" / "inductor" / "24" / "c24.cpp"
    path.write_bytes(path.read_bytes()[:-1])


def flip(snapshot: Path) -> None:
    (snapshot / "files" / "inductor" / "24" / "c24.cpp").write_bytes(b"yyy")


def lose(snapshot: Path) -> None:
    (snapshot / "files" / "cuda" / "index").unlink()


def add(snapshot: Path) -> None:
    (snapshot / "files" / "cuda" / "more").write_bytes(b"")


def cut_manifest(snapshot: Path) -> None:
    path = snapshot / "manifest.json"
    path.write_text(path.read_text()[:-20])


def odd_manifest(snapshot: Path) -> None:
    (snapshot / "manifest.json").write_text('{"files": [1]}')


def no_manifest(snapshot: Path) -> None:
    (snapshot / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [cut, flip, lose, add, cut_manifest, odd_manifest, no_manifest])
def test_a_damaged_snapshot_is_set_aside_and_leaves_no_trace_in_the_run(tmp_path: Path, damage) -> None:
    caches.layout(tmp_path / "donor")
    fill(tmp_path / "donor")
    caches.donate(tmp_path, KEY, tmp_path / "donor", {})
    (snapshot,) = (tmp_path / "snapshots").iterdir()
    damage(snapshot)
    caches.layout(tmp_path / "run")
    with pytest.raises(caches.SnapshotFault):
        caches.take(tmp_path, KEY, tmp_path / "run")
    assert caches.count(tmp_path / "run") == NONE
    assert not caches.has_snapshot(tmp_path, KEY)
    (aside,) = (tmp_path / "snapshots").iterdir()
    assert "damaged" in aside.name


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


def test_a_damaged_snapshot_is_primed_again_within_the_sweep(tmp_path: Path) -> None:
    store = tmp_path / "store"
    sweeper(store, *workload("ok"), "cache=warm")
    (graph,) = store.glob("snapshots/*/files/inductor/fxgraph/ab/graph")
    graph.write_text("compil")
    done = sweeper(store, *workload("ok"), "cache=warm", "rerun=all")
    assert "set aside" in done.stderr
    assert only(store, "-warm-1t1d-threads-" + _identity(store) + "-r1.a2")["cache"]["proved"] == "warm"
    assert len([name for name in runs(store) if name.startswith("prime")]) == 2


def _identity(store: Path) -> str:
    (identity,) = {name.rpartition("-r1.a")[0][-12:] for name in runs(store) if "-warm-" in name}
    return identity
