"""Residual sum and RMSNorm in one pass, forward and backward."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.fused import launch


@triton.jit
def _add_norm_forward(x, delta, scale, total, y, rstd, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + start + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + start + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what is normed is what the next layer adds to
    factor = 1.0 / tl.sqrt_rn(tl.sum(value * value) / width + eps)
    weight = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(rstd + row, factor)
    tl.store(y + start + at, (value * factor * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    d_y, d_total, total, rstd, scale, d_x, y, d_scale, rows, width, HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    stride = width.to(tl.int64)  # rows times width can pass 2**31
    for row in range(program, rows, programs):
        place = row * stride + at
        factor = tl.load(rstd + row)
        normed = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * factor
        upstream = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
        summed += upstream * normed
        tl.store(y + place, (normed * weight).to(y.dtype.element_ty), mask=inside)
        upstream *= weight
        gradient = factor * (upstream - normed * (tl.sum(upstream * normed) / width))
        if HAS_TOTAL:
            gradient += tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + place, gradient.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_scale + program * width + at, summed, mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its RMSNorm times `scale`, 1 / root mean square float32 [M]) of x, delta [M, H], contiguous."""
    rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if rows:
        with launch.on(x):
            _add_norm_forward[(rows,)](
                x, delta, scale, total, y, rstd, width, eps, delta is not None, block, num_warps=_warps(block)
            )
    return total, y, rstd


def add_norm_backward(
    d_y: Tensor, d_total: Tensor | None, total: Tensor, rstd: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x and of delta, which is one; gradient of `scale`; the normed tensor once more).

    `d_total` is what reached the sum past the norm. Deterministic: each program sums rows of its own.
    """
    rows, width = total.shape
    programs = max(1, min(rows, launch.programs(total, 3)))
    d_x, y = torch.empty_like(total), torch.empty_like(total)
    d_scale = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    with launch.on(total):
        _add_norm_backward[(programs,)](
            d_y, d_total, total, rstd, scale, d_x, y, d_scale, rows, width, d_total is not None, block,
            num_warps=_warps(block),
        )  # fmt: skip
    return d_x, d_scale.sum(0).to(scale.dtype), y


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
