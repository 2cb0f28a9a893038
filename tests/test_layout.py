"""Who makes and who uses which batch."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dflash.pipeline.layout import Layout

layouts = st.builds(
    Layout,
    targets=st.integers(1, 5),
    variants=st.sampled_from([("",), ("a", "b"), ("a", "b", "c")]),
    ranks=st.integers(1, 4),
    accumulate=st.integers(1, 3),
)


def made_below(end: int, layout: Layout, target: int, done: int) -> list[int]:
    return list(itertools.takewhile(lambda batch: batch < end, layout.made_by(target, done)))


@given(layouts, st.integers(0, 4), st.integers(1, 4))
def test_every_batch_is_made_once_and_used_once_by_each_variant(layout: Layout, done: int, more: int) -> None:
    steps = done + more
    first, end = done * layout.batches_a_step, steps * layout.batches_a_step
    made = [made_below(end, layout, target, done) for target in range(layout.targets)]
    assert sorted(itertools.chain.from_iterable(made)) == list(range(first, end))
    assert all(layout.maker(batch) == target for target, batches in enumerate(made) for batch in batches)
    for variant, _ in enumerate(layout.variants):
        used: dict[int, int] = {}
        for rank in range(layout.ranks):
            for step in range(done + 1, steps + 1):
                for batch in layout.used_by(rank, step):
                    assert layout.step_of(batch) == step
                    assert layout.users(batch)[variant] == variant * layout.ranks + rank
                    assert batch not in used
                    used[batch] = rank
        assert sorted(used) == list(range(first, end))


@given(layouts, st.integers(1, 3))
def test_a_channel_is_filled_in_the_order_in_which_it_is_emptied(layout: Layout, steps: int) -> None:
    for target, worker in layout.pairs:
        put = [b for b in made_below(steps * layout.batches_a_step, layout, target, 0) if worker in layout.users(b)]
        seat = layout.seats[worker]
        got = [b for s in range(1, steps + 1) for b in layout.used_by(seat.rank, s) if layout.maker(b) == target]
        assert put == got


def test_seats_are_shared_evenly_and_in_order() -> None:
    seats = Layout(1, ("a", "b"), 2, 1).seats
    assert [(s.worker, s.variant, s.rank, s.leads) for s in seats] == [
        (0, "a", 0, True),
        (1, "a", 1, False),
        (2, "b", 0, False),
        (3, "b", 1, False),
    ]
