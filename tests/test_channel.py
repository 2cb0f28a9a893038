"""Channels and averaging: order, bounds, ends."""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dflash.pipeline.average import ThreadAverager
from dflash.pipeline.batch import Batch, batch_outline
from dflash.pipeline.channel import ProcessChannel, ThreadChannel
from dflash.strategies import Aborted

CPU = torch.device("cpu")


def batch(index: int, size: int = 4) -> Batch:
    small = torch.tensor([[index]])
    return Batch(
        index=index,
        tokens=small,
        loss_mask=small > 0,
        document=small,
        position=small,
        anchors=small,
        context_tokens=1,
        features=torch.full((1, size, 2), float(index)),
    )


def assert_aborted(wait: Callable[[], object], abort: Callable[[], None]) -> None:
    """Whoever waits in `wait` raises Aborted soon after `abort`."""
    raised = []

    def waiting() -> None:
        try:
            wait()
        except Aborted:
            raised.append(True)

    thread = threading.Thread(target=waiting)
    thread.start()
    abort()
    thread.join(5)
    assert raised == [True]


def channels():
    context = torch.multiprocessing.get_context("spawn")
    size = batch(0).bytes
    return [ThreadChannel(2 * size), ProcessChannel(2 * size, batch(0), context)]


@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "processes"])
def test_batches_come_out_in_order_and_never_more_than_the_bound_waits(kind):
    # Writer and reader of a process channel each hold an end of their own.
    channel = channels()[kind]
    reader = copy.copy(channel) if kind else channel
    size = batch(0).bytes
    sender = threading.Thread(target=lambda: [channel.put(batch(i)) for i in range(6)])
    sender.start()
    time.sleep(0.2)
    assert channel.stats().bytes == 2 * size
    for expected in range(6):
        got = reader.get(CPU)
        assert got.index == expected
        assert (got.features == expected).all()
        assert channel.stats().bytes <= 2 * size
    sender.join(5)
    assert channel.stats().bytes == 0
    assert channel.stats().target_waited > 0.1  # it waited for room while we slept


@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "processes"])
def test_a_channel_is_full_while_its_target_waits_for_room(kind):
    channel = channels()[kind]  # for two batches
    reader = copy.copy(channel) if kind else channel
    assert not reader.full
    for index in range(2):
        channel.put(batch(index))
        assert not reader.full
    sender = threading.Thread(target=lambda: channel.put(batch(2)))
    sender.start()
    deadline = time.monotonic() + 20
    while not reader.full:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reader.get(CPU)
    sender.join(20)
    assert not reader.full


def test_very_many_small_batches_may_wait_between_processes():
    context = torch.multiprocessing.get_context("spawn")
    channel = ProcessChannel(64 << 20, batch(0), context)  # a million slots
    reader = copy.copy(channel)
    for index in range(50):
        channel.put(batch(index))
    assert [reader.get(CPU).index for _ in range(50)] == list(range(50))


@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "processes"])
def test_all_of_a_batch_arrives(kind):
    made = torch.Generator().manual_seed(0)
    sent = Batch(
        index=(1 << 40) + 1,
        tokens=torch.randint(1 << 40, (2, 5), generator=made),
        loss_mask=torch.rand(2, 5, generator=made) > 0.5,
        document=torch.randint(-1, 9, (2, 5), generator=made),
        position=torch.randint(9, (2, 5), generator=made),
        context_tokens=7,
        features=torch.randn(2, 5, 3, generator=made).bfloat16(),
        made=time.time(),
        seconds=1 / 3,
        anchors=torch.randint(-1, 5, (2, 3), generator=made),
    )
    context = torch.multiprocessing.get_context("spawn")
    like = batch_outline(2, 5, 3, 3, torch.bfloat16)
    assert like.bytes == sent.bytes
    channel = ProcessChannel(1, like, context) if kind else ThreadChannel(1)
    channel.put(sent)
    got = channel.get(CPU)
    assert vars(got).keys() == vars(sent).keys()
    for name, value in vars(sent).items():
        told = getattr(got, name)
        assert type(told) is type(value), name
        if isinstance(value, torch.Tensor):
            assert told.dtype == value.dtype
            assert torch.equal(told, value), name
        else:
            assert told == value, name
    if kind:  # nothing of it lies where the next will
        channel.put(replace(sent, tokens=sent.tokens * 0, features=sent.features * 0))
        assert torch.equal(got.tokens, sent.tokens)
        assert torch.equal(got.features, sent.features)


@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "processes"])
def test_as_many_batches_of_long_rows_wait_as_the_bound_allows(kind):
    """64 KiB, what a pipe holds, are 2,600 tokens of a row."""
    like = batch_outline(1, 40_000, 16, 8, torch.float32)
    context = torch.multiprocessing.get_context("spawn")
    channel = ProcessChannel(3 * like.bytes, like, context) if kind else ThreadChannel(3 * like.bytes)
    long = Batch(0, context_tokens=0, **{name: torch.zeros_like(x, device="cpu") for name, x in like.tensors.items()})
    for _ in range(3):
        channel.put(long)
    assert channel.stats().bytes == 3 * like.bytes


@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "processes"])
def test_a_target_does_not_wait_for_a_drafter_that_has_left(kind):
    """Of two variants that are asked to stop one may leave while the other still needs a batch of their target."""
    channel = channels()[kind]
    reader = copy.copy(channel) if kind else channel
    sender = threading.Thread(target=lambda: [channel.put(batch(0)) for _ in range(9)], daemon=True)
    sender.start()
    time.sleep(0.2)
    assert sender.is_alive()
    reader.leave()
    sender.join(5)
    assert not sender.is_alive()


def test_a_batch_larger_than_the_bound_still_passes():
    channel = ThreadChannel(1)
    channel.put(batch(0))
    assert channel.get(CPU).index == 0


@pytest.mark.parametrize("side", ["put", "get"])
def test_abort_wakes_whoever_waits(side):
    channel = ThreadChannel(1)
    if side == "put":
        channel.put(batch(0))
    assert_aborted(lambda: channel.put(batch(1)) if side == "put" else channel.get(CPU), channel.abort)


@pytest.mark.parametrize("drafters", [1, 2, 3, 5])
def test_all_drafters_get_the_same_bits_round_after_round(drafters):
    averager = ThreadAverager(drafters)
    torch.manual_seed(0)
    vectors = torch.randn(4, drafters, 17)
    totals = [[] for _ in range(drafters)]

    def work(rank: int) -> None:
        for round_ in vectors:
            totals[rank].append(averager.total(rank, round_[rank].clone()).clone())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(drafters)]
    [t.start() for t in threads]
    [t.join(10) for t in threads]
    for number, round_ in enumerate(vectors):
        for rank in range(drafters):
            assert torch.equal(totals[rank][number], totals[0][number])
        assert torch.allclose(totals[0][number], round_.sum(0), atol=1e-6)


def test_a_drafter_that_died_does_not_keep_the_others_waiting():
    averager = ThreadAverager(2)
    assert_aborted(lambda: averager.total(0, torch.ones(3)), averager.abort)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "processes"])
def test_features_arrive_whole_while_both_gpus_are_at_work(kind):
    """The memory that features leave is used again at once, and the reader's device is busy when they come."""
    source, drain = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    shape = (1, 4096, 2048)
    context = torch.multiprocessing.get_context("spawn")
    like = replace(batch(0), features=torch.empty(shape))
    channel = ProcessChannel(2 * like.bytes, like, context) if kind else ThreadChannel(2 * like.bytes)
    reader = copy.copy(channel) if kind else channel
    busy = torch.randn(4096, 4096, device=drain)
    sums = []
    for index in range(8):
        features = torch.full(shape, float(index + 1), device=source)
        torch.cuda.synchronize(source)
        channel.put(replace(batch(index), features=features))
        del features
        for _ in range(8):
            busy = busy @ busy / 64
        got = reader.get(drain)
        again = torch.full(shape, -1.0, device=source)
        sums.append((got.features.min(), got.features.max()))
        del got, again
    assert [(low.item(), high.item()) for low, high in sums] == [(n, n) for n in range(1, 9)]
