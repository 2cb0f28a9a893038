"""The chunked loss against plain autograd in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.loss import head_cross_entropy


@given(st.integers(1, 9), st.integers(2, 13), st.integers(1, 11), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_sum_and_gradient_equal_the_float64_reference(slots, vocabulary, chunk, seed):
    torch.manual_seed(seed)
    hidden = torch.randn(slots, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(vocabulary, 5, dtype=torch.float64)
    labels = torch.randint(vocabulary, (slots,))
    weight = torch.rand(slots)
    logits = hidden @ head.T
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    reference = (each * weight).sum()
    (expected,) = torch.autograd.grad(reference, hidden)

    low = hidden.detach().float().requires_grad_()
    total, losses, predicted = head_cross_entropy(low, head.float(), labels, weight, chunk)
    (got,) = torch.autograd.grad(total * 3.0, low)

    assert total.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-5)
    assert torch.allclose(losses.double(), each, rtol=1e-4, atol=1e-5)
    assert torch.allclose(got.double(), 3.0 * expected, rtol=1e-4, atol=1e-5)
    assert (predicted == logits.argmax(-1)).all()


def test_no_slot_gives_zero_and_a_gradient():
    hidden = torch.zeros(0, 4, requires_grad=True)
    total, _, _ = head_cross_entropy(hidden, torch.randn(6, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0), 8)
    total.backward()
    assert total.item() == 0.0
