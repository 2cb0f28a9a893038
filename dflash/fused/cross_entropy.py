"""Cross-entropy of a chunk of logits, which are read once, and the gradient behind the head.

A softmax divides by a sum that is known only at a row's end. What is written on the way are exponentials not yet
divided; they are multiplied with the head as they are, and each row of the product is divided afterwards, when
it is H numbers wide and no longer V. The label's own part is added then too, in full precision: rounded among the
others, 1 - p(label) would be lost where the drafter is sure. For the same reason its logit is not read among the
others but computed anew.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.fused import launch

# The fastest on an H200 of 2048 to 8192 columns and 4 to 16 warps, at 2,048 rows of 151,936.
_BLOCK = 2048
_WARPS = 16

# Exponents that neither a type's own range nor a sum of a million of them minds.
_LARGEST = {torch.float16: 4.0, torch.bfloat16: 60.0, torch.float32: 60.0}


class Unscaled(NamedTuple):
    """What divides and completes the products of a chunk's exponentials with the head: float32 [M] each."""

    scale: Tensor  # one over the row's sum
    own: Tensor  # the label's part: its probability less one


@triton.jit
def _exponentials(logits, out, label, reference, largest, width, BLOCK: tl.constexpr):
    # Writes exp(logit - reference), 0 for the label; gives their sum, the highest logit of the others, and where it is.
    at = tl.arange(0, BLOCK)
    others = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.full([BLOCK], -1e38, dtype=tl.float32)  # finite, so that a row of -inf has a place for its likeliest
    where = at
    for start in range(0, width, BLOCK):
        place = start + at
        inside = place < width
        value = tl.load(logits + place, mask=inside & (place != label), other=float("-inf")).to(tl.float32)
        above = value > high
        high = tl.where(above, value, high)
        where = tl.where(above, place, where)
        # Not tl.minimum, which would lose what is not a number.
        shifted = value - reference
        power = tl.exp(tl.where(shifted > largest, largest, shifted))
        others += power
        tl.store(out + place, power.to(out.dtype.element_ty), mask=inside)
    top = tl.max(high, 0)
    return tl.sum(others, 0), top, tl.min(tl.where(high == top, where, width), 0)  # the first of equals


@triton.jit
def _cross_entropy(
    logits, rights, labels, losses, predicted, out, scale, own, width, stride, largest, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    begin, end = logits + row.to(tl.int64) * stride, out + row.to(tl.int64) * width
    label, right = tl.load(labels + row), tl.load(rights + row)
    # Any reference will do that is no further below the highest than `largest`: some logits of the row nearly always
    # are.
    at = tl.arange(0, BLOCK)
    some = tl.load(begin + at, mask=(at < width) & (at != label), other=float("-inf")).to(tl.float32)
    reference = tl.maximum(tl.maximum(tl.max(some, 0), right), -1e38)
    others, top, likeliest = _exponentials(begin, end, label, reference, largest, width, BLOCK)
    if top - reference > largest:
        reference = top
        others, top, likeliest = _exponentials(begin, end, label, reference, largest, width, BLOCK)
    total = others + tl.exp(right - reference)
    tl.store(losses + row, reference + tl.log(total) - right)
    likeliest = tl.minimum(likeliest, width - 1).to(tl.int64)
    first = tl.where(right == top, tl.minimum(likeliest, label), likeliest)
    tl.store(predicted + row, tl.where(right > top, label, first))
    tl.store(scale + row, 1.0 / total)
    tl.store(own + row, -others / total)


@triton.jit
def _label_logits(hidden, head, labels, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    token = tl.load(labels + row) * width
    one = tl.load(hidden + row.to(tl.int64) * width + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(head + token + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(one * other, 0))


@triton.jit
def _complete(products, head, labels, scale, own, weight, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    begin, token = row.to(tl.int64) * width, tl.load(labels + row) * width
    product = tl.load(products + begin + at, mask=inside, other=0.0).to(tl.float32)
    towards = tl.load(head + token + at, mask=inside, other=0.0).to(tl.float32)
    gradient = (product * tl.load(scale + row) + towards * tl.load(own + row)) * tl.load(weight + row)
    tl.store(out + begin + at, gradient.to(out.dtype.element_ty), mask=inside)


def label_logits(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Each row's logit of its label, float32 [M], never rounded; hidden [M, H], head [V, H], labels int64 [M]."""
    logits = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    block = triton.next_power_of_2(hidden.shape[1])
    if len(hidden):
        with launch.on(hidden):
            _label_logits[(len(hidden),)](hidden, head, labels, logits, hidden.shape[1], block)
    return logits


def cross_entropy(
    logits: Tensor,
    rights: Tensor,
    labels: Tensor,
    losses: Tensor,
    predicted: Tensor,
    out: Tensor,
    unscaled: Unscaled,
) -> None:
    """Fill `losses` float32 [M], `predicted` int64 [M], `out` [M, V] and `unscaled`.

    d losses / d logits is out * unscaled.scale[:, None], with unscaled.own at each row's label, where `out` is zero.
    `logits` [M, V] of any float type, last dimension dense; the labels' own are `rights` float32 [M] instead.
    """
    if len(logits):
        with launch.on(logits):
            _cross_entropy[(len(logits),)](
                logits, rights, labels, losses, predicted, out, unscaled.scale, unscaled.own, logits.shape[1],
                logits.stride(0), _LARGEST[out.dtype], _BLOCK, num_warps=_WARPS,
            )  # fmt: skip


def complete(products: Tensor, head: Tensor, labels: Tensor, unscaled: Unscaled, weight: Tensor) -> Tensor:
    """The gradient of the hidden states [M, H], each row times its `weight` float32 [M].

    `products` [M, H] is `out` of `cross_entropy` times `head` [V, H].
    """
    gradient = torch.empty_like(products)
    block = triton.next_power_of_2(products.shape[1])
    if len(products):
        with launch.on(products):
            _complete[(len(products),)](
                products, head, labels, unscaled.scale, unscaled.own, weight, gradient, products.shape[1], block,
                num_warps=min(8, max(1, block // 512)),
            )  # fmt: skip
    return gradient
