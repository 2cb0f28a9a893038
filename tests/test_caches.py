"""Every compile cache of a run is its own, is counted by layer, and cold and warm are proved, not believed."""

from pathlib import Path

import pytest
from fakes.cached import fill
from hypothesis import given
from hypothesis import strategies as st

from sweeper import caches
from sweeper.caches import Count

NONE = dict.fromkeys(caches.LAYERS, Count())


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
    for name in (
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "CUDA_CACHE_PATH",
        "PYTORCH_KERNEL_CACHE_PATH",
    ):
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


def test_the_totals_of_several_processes_add_up() -> None:
    """Each worker process tells its own; the one that ends last does not speak for the others."""
    hit = {**counters(fxgraph={"hits": 2, "misses": 0})[0], "pid": 1}
    missed = {**counters(fxgraph={"hits": 0, "misses": 3})[0], "pid": 2}
    for events in ([hit, missed], [missed, hit]):
        told = caches.proof("warm", TWO, TWO, events)
        assert (told["proved"], told["why"]) == ("mixed", "2 hits, 3 misses")
    end = {"event": "end", "t": 2.0, "pid": 3, "caches": {"fxgraph": {"hits": 5}}}
    assert caches.proof("warm", TWO, TWO, [hit, missed, end])["layers"]["fxgraph"]["hits"] == 5


@pytest.mark.parametrize("requested", ["foreign", "standalone"])
def test_any_other_start_is_proved_warm_or_it_is_mixed(requested: str) -> None:
    start = caches.Start(made_by="r1")
    warm = caches.proof(requested, TWO, TWO, counters(fxgraph={"hits": 2}), start)
    assert (warm["proved"], warm["made_by"]) == ("warm", "r1")
    mixed = caches.proof(requested, TWO, THREE, counters(fxgraph={"hits": 1, "misses": 1}), start)
    assert (mixed["proved"], mixed["why"]) == ("mixed", "1 hits, 1 misses")


def test_a_run_whose_snapshot_could_not_be_had_is_mixed_and_says_why() -> None:
    start = caches.Start(missed="the disk was full", cause="host.disk_full")
    told = caches.proof("warm", NONE, TWO, counters(fxgraph={"misses": 2}), start)
    assert (told["proved"], told["why"], told["cause"]) == ("mixed", "the disk was full", "host.disk_full")
