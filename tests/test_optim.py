"""The rate's schedules, and AdamW on a flat float32 master."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.optim import Master, learning_rate
from dflash.settings import Optim


def test_warm_up_rises_to_the_rate_and_the_cosine_ends_at_its_floor():
    optim = Optim(lr=1e-3, warmup=0.1, min_lr=0.2)
    rates = [learning_rate(step, 100, optim) for step in range(1, 101)]
    assert rates[0] == 1e-4
    assert rates[9] == 1e-3 == max(rates)
    assert rates == rates[:10] + sorted(rates[10:], reverse=True)
    assert math.isclose(rates[-1], 2e-4)
    assert math.isclose(rates[54], 1e-3 * (0.2 + 0.8 * 0.5))  # half-way down


def test_wsd_stays_at_the_rate_until_its_decay_which_ends_at_the_floor():
    optim = Optim(lr=1e-3, warmup=0.1, schedule="wsd", decay=0.2, min_lr=0.1)
    rates = [learning_rate(step, 100, optim) for step in range(1, 101)]
    assert rates[4] == pytest.approx(5e-4)
    assert rates[9:80] == pytest.approx([1e-3] * 71)
    assert rates[89] == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))  # half-way down
    assert rates[-1] == pytest.approx(1e-4)


@given(
    steps=st.integers(1, 400),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    min_lr=st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_every_schedule_rises_once_and_never_leaves_its_range(steps, schedule, warmup, decay, min_lr):
    optim = Optim(lr=0.5, warmup=warmup, decay=decay, min_lr=min_lr, schedule=schedule)
    rates = [learning_rate(step, steps, optim) for step in range(1, steps + 1)]
    top = rates.index(max(rates))
    assert all(0 <= rate <= 0.5 * (1 + 1e-12) for rate in rates)
    assert rates[:top] == sorted(rates[:top])
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(rates[top:], rates[top + 1 :], strict=False))


def test_one_step_trains_at_the_full_rate():
    assert learning_rate(1, 1, Optim(lr=0.5)) == 0.5


def _parameters(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = [(3, 5), (7,), (2, 2, 2), ()]
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def _grow(parameters, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def test_steps_equal_clipped_adamw_on_each_parameter():
    optim = Optim(weight_decay=0.1, clip=2.0)
    mine, theirs = _parameters(), _parameters()
    master = Master(mine, optim)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    for step in range(6):
        scale = 0.01 if step % 2 else 10.0  # below the clip, and above it
        _grow(mine, step, scale)
        _grow(theirs, step, scale)
        norm = master.step(master.gradient(), 1e-2)
        assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 2.0).item(), rel=1e-5)
        reference.step()
        for p, q in zip(mine, theirs, strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zeros_changes_nothing_and_is_no_division_by_zero():
    parameters = _parameters()
    before = [p.detach().clone() for p in parameters]
    master = Master(parameters, Optim())
    norm = master.step(master.gradient(), 1e-2)
    assert norm.item() == 0.0
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


def test_the_gradient_is_flat_in_order_float32_and_taken_once():
    parameters = _parameters(torch.bfloat16)
    _grow(parameters, 1)
    parameters[1].grad = None
    expected = torch.cat([torch.zeros(7) if p.grad is None else p.grad.float().flatten() for p in parameters])
    master = Master(parameters, Optim())
    got = master.gradient()
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    assert all(p.grad is None for p in parameters)
    assert not master.gradient().any()


def test_updates_too_small_for_bfloat16_add_up():
    # Near 1 bfloat16 has steps of 1/128. Adam on the bfloat16 weight itself would round each update of 1e-4 away.
    weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    lost = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    master, plain = Master([weight], Optim(clip=1e9)), torch.optim.AdamW([lost], lr=1e-4, weight_decay=0.0)
    for _ in range(500):
        weight.grad, lost.grad = torch.ones_like(weight), torch.ones_like(lost)
        master.step(master.gradient(), 1e-4)
        plain.step()
    assert (lost == 1).all()
    assert torch.allclose(weight.float(), torch.tensor(1 - 500 * 1e-4), atol=1 / 256)
    assert torch.allclose(master.state()["master"], torch.tensor(1 - 500 * 1e-4), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 3])
def test_a_loaded_state_continues_bit_for_bit(dtype, done):
    def run(master, parameters, steps):
        for step in steps:
            _grow(parameters, step)
            master.step(master.gradient(), 1e-3)

    straight = _parameters(dtype)
    run(Master(straight, Optim()), straight, range(7))

    first = _parameters(dtype)
    master = Master(first, Optim())
    run(master, first, range(done))
    saved = {name: value.clone() for name, value in master.state().items()}
    assert set(saved) == {"master", "exp_avg", "exp_avg_sq", "step"}

    second = _parameters(dtype, seed=9)
    master = Master(second, Optim())
    master.load(saved)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    run(master, second, range(done, 7))
    assert all(torch.equal(p, q) for p, q in zip(straight, second, strict=True))


def test_a_state_of_another_drafter_is_refused():
    master = Master(_parameters(), Optim())
    with pytest.raises(ValueError, match="with 31 weights"):
        master.load(Master(_parameters()[:2], Optim()).state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_waits_for_the_device_and_steps_are_those_of_the_cpu():
    here = _parameters(torch.bfloat16)
    there = [torch.nn.Parameter(p.detach().cuda()) for p in here]
    mine, theirs = Master(here, Optim()), Master(there, Optim())
    for step in range(6):
        _grow(here, step)
        for p, q in zip(here, there, strict=True):
            q.grad = p.grad.cuda()
        mine.step(mine.gradient(), 1e-3)
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # in the first one libraries load
        try:
            theirs.step(theirs.gradient(), 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(theirs.state()["master"].cpu(), mine.state()["master"], rtol=1e-5, atol=1e-6)
    assert theirs.state()["step"].item() == 6

    again = Master([torch.nn.Parameter(torch.zeros_like(p)) for p in there], Optim())
    again.load({name: value.cpu() for name, value in theirs.state().items()})  # as read from a file
    assert all(torch.equal(again.state()[name], value) for name, value in theirs.state().items())
