"""The chunked losses against plain autograd on the naive formula in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.loss import head_loss
from dflash.settings import DISTILLING, LOSSES, Loss


def _case(lengths, vocabulary, seed, width=5):
    """Slots of blocks with the given numbers of labels: all that a loss takes, in float64."""
    torch.manual_seed(seed)
    slots = sum(lengths)
    return {
        "hidden": torch.randn(slots, width, dtype=torch.float64),
        "head": torch.randn(vocabulary, width, dtype=torch.float64),
        "labels": torch.randint(vocabulary, (slots,)),
        "weight": torch.rand(slots) + 0.01,
        "block": torch.repeat_interleave(3 * torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        "teacher": torch.randn(slots, width, dtype=torch.float64),
    }


def _reference(case, kind, alpha=0.5):
    """(losses [M], weights [M]) by the formulas, float64, with autograd."""
    log_q = (case["hidden"] @ case["head"].T).log_softmax(-1)
    log_p = (case["teacher"] @ case["head"].T).log_softmax(-1)
    weights = case["weight"].double()
    if kind == "kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1), weights
    if kind == "tv":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1), weights
    losses = torch.nn.functional.nll_loss(log_q, case["labels"], reduction="none")
    if kind == "dpace":
        weights = torch.zeros_like(weights)
        for block in case["block"].unique():
            (at,) = ((case["block"] == block) & (case["weight"] > 0)).nonzero(as_tuple=True)
            reached, product = [], 1.0
            for i in at:
                product *= (1 - alpha) * math.exp(-losses[i].item()) + alpha
                reached.append(product)
            for number, i in enumerate(at):
                weights[i] = sum(reached[number:])
    return losses, weights


def _ours(case, loss, dtype=torch.float32):
    """(SlotLosses, gradient of hidden) of what is under test; upstream multiplies the sum by 3."""
    low = {name: value.to(dtype) if value.is_floating_point() else value for name, value in case.items()}
    hidden = low["hidden"].requires_grad_()
    teacher = low["teacher"] if loss.kind in DISTILLING else None
    got = head_loss(
        hidden, low["head"], low["labels"], case["weight"].float(), loss, block=low["block"], teacher=teacher
    )
    (gradient,) = torch.autograd.grad(got.total * 3.0, hidden)
    return got, gradient


@pytest.mark.parametrize("kind", LOSSES)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=5),
    vocabulary=st.integers(2, 13),
    chunk=st.integers(1, 11),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_values_and_gradient_equal_the_float64_reference(kind, lengths, vocabulary, chunk, seed):
    case = _case(lengths, vocabulary, seed)
    case["hidden"].requires_grad_()
    losses, weights = _reference(case, kind)
    total = (losses * weights).sum()
    (expected,) = torch.autograd.grad(total, case["hidden"])

    got, gradient = _ours(case, Loss(kind=kind, chunk=chunk))
    assert torch.allclose(got.losses.double(), losses, rtol=1e-4, atol=1e-5)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-4, abs=1e-5)
    assert got.weight_sum.item() == pytest.approx(weights.sum().item(), rel=1e-4, abs=1e-6)
    assert torch.allclose(gradient.double(), 3.0 * expected, rtol=1e-4, atol=3e-5)
    assert torch.equal(got.predicted, (case["hidden"] @ case["head"].T).argmax(-1))


@pytest.mark.parametrize("kind", LOSSES)
def test_no_slot_gives_zero_and_a_gradient(kind):
    got, gradient = _ours(_case([], 6, 0), Loss(kind=kind))
    assert got.total.item() == 0.0 == got.weight_sum.item()
    assert gradient.shape == (0, 5)
    assert got.losses.shape == got.predicted.shape == (0,)


@pytest.mark.parametrize("kind", LOSSES)
def test_bfloat16_stays_close_to_float64(kind):
    case = _case([7] * 20, 50, 3, width=32)
    case["head"] *= 0.3
    case = {n: v.bfloat16().double() if v.dtype == torch.float64 else v for n, v in case.items()}
    case["hidden"].requires_grad_()
    losses, weights = _reference(case, kind)
    (expected,) = torch.autograd.grad((losses * weights).sum(), case["hidden"])
    got, gradient = _ours(case, Loss(kind=kind, chunk=64), torch.bfloat16)
    assert gradient.dtype == torch.bfloat16
    assert got.total.dtype == got.losses.dtype == torch.float32
    assert torch.allclose(got.losses.double(), losses, rtol=0.05, atol=0.03)
    # Total variation has a jump where p = q, so rounded logits turn the sign of some terms.
    assert (gradient.double() / 3 - expected).norm() < (0.08 if kind == "tv" else 0.03) * expected.norm()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_holds_more_than_one_chunk_of_logits(kind, dtype):
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (997,):
                    Largest.numbers = max(Largest.numbers, tensor.numel())
            return out

    with Largest():
        _ours(_case([5] * 10, 997, 0), Loss(kind=kind, chunk=8), dtype)
    assert Largest.numbers == 8 * 997


@pytest.mark.parametrize("kind", LOSSES)
def test_the_chunk_changes_nothing_but_memory(kind):
    case = _case([3, 5, 1, 4], 11, 5)
    whole, gradient = _ours(case, Loss(kind=kind, chunk=100))
    for chunk in (1, 4, 13):
        got, other = _ours(case, Loss(kind=kind, chunk=chunk))
        assert got.total.item() == pytest.approx(whole.total.item(), rel=1e-6)
        assert torch.allclose(other, gradient, atol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_two_drafters_add_up_to_one_on_the_joint_batch(kind):
    case = _case([3, 4, 2, 5], 11, 7)
    joint, gradient = _ours(case, Loss(kind=kind))
    parts = []
    for at in (slice(0, 7), slice(7, None)):  # two blocks each
        parts.append(_ours({n: v if n == "head" else v[at] for n, v in case.items()}, Loss(kind=kind)))
    assert sum(p.total.item() for p, _ in parts) == pytest.approx(joint.total.item(), rel=1e-5)
    assert sum(p.weight_sum.item() for p, _ in parts) == pytest.approx(joint.weight_sum.item(), rel=1e-5)
    assert torch.allclose(torch.cat([g for _, g in parts]), gradient, rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=5),
    st.floats(0, 1),
    st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_dpace_takes_labelled_slots_alone(present, alpha, seed):
    """A slot of weight 0 in the middle of a block counts as if it were not there, and the decay does not count."""
    case = _case([len(block) for block in present], 9, seed)
    keep = torch.tensor([slot for block in present for slot in block])
    case["weight"] *= keep
    losses, weights = _reference(case, "dpace", alpha)
    got, gradient = _ours(case, Loss(kind="dpace", alpha=alpha))
    assert got.weight_sum.item() == pytest.approx(weights.sum().item(), rel=1e-4, abs=1e-6)
    assert got.total.item() == pytest.approx((losses * weights).sum().item(), rel=1e-4, abs=1e-5)
    assert not gradient[~keep].any()

    fewer = {n: v if n == "head" else v[keep] for n, v in case.items()}
    fewer["weight"] = torch.ones(int(keep.sum()))
    without, other = _ours(fewer, Loss(kind="dpace", alpha=alpha))
    assert without.total.item() == pytest.approx(got.total.item(), rel=1e-5, abs=1e-6)
    assert torch.allclose(other, gradient[keep], rtol=1e-5, atol=1e-6)


def test_dpace_weights_of_a_worked_example():
    # Two tokens, so p is known: 1/2 in every slot. s = 3/4; P = 0.75, 0.5625; weights 1.3125 and 0.5625.
    case = _case([2], 2, 0)
    case["hidden"].zero_()
    got, _ = _ours(case, Loss(kind="dpace", alpha=0.5))
    assert got.weight_sum.item() == pytest.approx(1.875)
    assert got.losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert got.total.item() == pytest.approx(1.875 * math.log(2))


def test_dpace_with_alpha_one_weighs_slots_by_how_many_follow():
    got, _ = _ours(_case([4], 7, 2), Loss(kind="dpace", alpha=1.0))
    assert got.total.item() == pytest.approx((got.losses * torch.tensor([4.0, 3.0, 2.0, 1.0])).sum().item(), rel=1e-6)


@pytest.mark.parametrize("kind", DISTILLING)
def test_a_drafter_equal_to_its_target_has_nothing_to_learn(kind):
    case = _case([4, 4], 9, 1)
    case["teacher"] = case["hidden"].clone()
    got, gradient = _ours(case, Loss(kind=kind))
    assert torch.allclose(got.losses, torch.zeros(8), atol=1e-6)
    assert torch.allclose(gradient, torch.zeros(8, 5), atol=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_logits_far_apart_stay_finite(kind):
    """A tied head is large: probabilities underflow to 0, and 0 * log 0 must not become NaN."""
    case = _case([3, 3], 9, 4)
    case["head"] *= 300
    got, gradient = _ours(case, Loss(kind=kind, alpha=0.0))
    assert all(torch.isfinite(t).all() for t in (got.total, got.weight_sum, got.losses, gradient))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", LOSSES)
def test_on_a_gpu_nothing_waits_for_the_device_and_little_is_rounded(kind):
    """Of cross-entropy the logits are bfloat16 but for the label's, of the others float32."""
    case = _case([7] * 20, 500, 3, width=64)
    case["head"] *= 0.3
    case = {n: v.bfloat16().double() if v.dtype == torch.float64 else v for n, v in case.items()}
    case = {n: v.cuda() for n, v in case.items()}
    case["hidden"].requires_grad_()
    losses, weights = _reference(case, kind)
    (expected,) = torch.autograd.grad((losses * weights).sum(), case["hidden"])
    _ours(case, Loss(kind=kind, chunk=64), torch.bfloat16)  # libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, gradient = _ours(case, Loss(kind=kind, chunk=64), torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    largest = 2e-3 if kind in ("ce", "dpace") else 1e-4
    assert torch.allclose(got.losses.double(), losses, rtol=largest, atol=largest)
    assert (gradient.double() / 3 - expected).norm() < 0.01 * expected.norm()
