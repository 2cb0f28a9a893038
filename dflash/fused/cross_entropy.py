"""Cross-entropy of a chunk of logits: losses, likeliest token and gradient, the logits read twice and no more."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash.fused import launch

# The fastest on an H200 of 2048 to 16,384 columns and 4 to 32 warps, at 4,096 rows of 151,936.
_BLOCK = 2048
_WARPS = 16


@triton.jit
def _cross_entropy(logits, labels, losses, predicted, slope, width, stride, BLOCK: tl.constexpr):
    # One program a row, whose second reading of it mostly comes from L2.
    row = tl.program_id(0)
    begin = logits + row.to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    right = tl.load(begin + label).to(tl.float32)  # before any warp can write the gradient there
    # Each lane has a running maximum, where it was, and the sum of exponentials relative to it. The maximum begins
    # finite, so that -inf is worth 0 and only what is not a number, or +inf, makes a loss that is none either.
    high = tl.full([BLOCK], -1e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    where = at
    for start in range(0, width, BLOCK):
        value = tl.load(begin + start + at, mask=start + at < width, other=float("-inf")).to(tl.float32)
        above = value > high
        ratio = tl.exp(-tl.abs(value - high))  # one exponential, whichever of the two is larger
        total = tl.where(above, total * ratio + 1.0, total + ratio)
        where = tl.where(above, start + at, where)
        high = tl.where(above, value, high)
    top = tl.max(high, 0)
    whole = tl.sum(total * tl.exp(high - top), 0)
    likeliest = tl.min(tl.where(high == top, where, width), 0)  # the first of equals
    norm = top + tl.log(whole)
    tl.store(losses + row, norm - right)
    tl.store(predicted + row, tl.minimum(likeliest, width - 1).to(tl.int64))
    out = slope + row.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        inside = start + at < width
        value = tl.load(begin + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(value - norm) - tl.where(start + at == label, 1.0, 0.0)
        tl.store(out + start + at, gradient.to(slope.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, predicted: Tensor, slope: Tensor) -> None:
    """Fill `losses` float32 [M], `predicted` int64 [M] and `slope` [M, V], d losses / d logits.

    `logits` [M, V] of any float type, last dimension dense; `slope` may be the logits' own memory if types agree.
    """
    if len(logits):
        with launch.on(logits):
            _cross_entropy[(len(logits),)](
                logits, labels, losses, predicted, slope, logits.shape[1], logits.stride(0), _BLOCK, num_warps=_WARPS
            )
