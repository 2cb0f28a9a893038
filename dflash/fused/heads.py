"""From projections to queries, keys and values: the norm of each head, its rotary turn, and its place.

Keys and values of context and block go into one buffer each, [R, S + Q, kv_heads, d], so nothing joins them later.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.fused import launch

_ROWS = 16  # tokens a program: their cosines and sines stay in registers for all heads


class Part(NamedTuple):
    """Some tokens of each of R packed rows, context or block, and what their projections hold, side by side."""

    length: int  # tokens a packed row
    offset: int  # place of the first one in the buffers of keys and values
    heads: int  # query heads, which come first; 0 for context
    kv_heads: int  # key heads, then as many of values
    head_dim: int

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@triton.jit
def _tile(rows, length, all_length, offset, ROWS: tl.constexpr):
    """Of a program's tokens: number, whether there, packed row, place in it, place among all rows' keys."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (token // length).to(tl.int64)
    place = (token % length).to(tl.int64) + offset
    return token.to(tl.int64), token < rows, row, place, row * all_length + place


@triton.jit
def _turn_heads_forward(
    source, source_stride, q, k, v, q_scale, k_scale, cos, sin, rows, length, all_length, offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token, there, _, _, key = _tile(rows, length, all_length, offset, ROWS)
    at = tl.arange(0, BLOCK)
    wide = at < HALF
    inside = there[:, None] & wide[None, :]
    c = tl.load(cos + key[:, None] * HALF + at[None, :], mask=inside, other=0.0)
    s = tl.load(sin + key[:, None] * HALF + at[None, :], mask=inside, other=0.0)
    begin = source + token[:, None] * source_stride + at[None, :]
    for kind in tl.static_range(2):  # queries, then keys
        heads = HEADS if kind == 0 else KV_HEADS
        goal = q + token[:, None] * HEADS * 2 * HALF if kind == 0 else k + key[:, None] * KV_HEADS * 2 * HALF
        scale = q_scale if kind == 0 else k_scale
        w_a = tl.load(scale + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        w_b = tl.load(scale + HALF + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        for head in range(heads):
            here = begin + (kind * HEADS + head) * 2 * HALF
            a = tl.load(here, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(here + HALF, mask=inside, other=0.0).to(tl.float32)
            factor = (1.0 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps))[:, None]
            a, b = a * factor * w_a, b * factor * w_b
            out = goal + head * 2 * HALF + at[None, :]
            tl.store(out, (a * c - b * s).to(q.dtype.element_ty), mask=inside)
            tl.store(out + HALF, (b * c + a * s).to(q.dtype.element_ty), mask=inside)
    for head in range(KV_HEADS):
        here = begin + (HEADS + KV_HEADS + head) * 2 * HALF
        out = v + (key * KV_HEADS + head)[:, None] * 2 * HALF + at[None, :]
        tl.store(out, tl.load(here, mask=inside, other=0.0), mask=inside)
        tl.store(out + HALF, tl.load(here + HALF, mask=inside, other=0.0), mask=inside)


@triton.jit
def _turn_heads_backward(
    source, source_stride, d_q, d_k, d_v, q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place,
    q_scale, k_scale, cos, sin, d_source, d_scales, rows, length, all_length, offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token, there, row, place, key = _tile(rows, length, all_length, offset, ROWS)
    at = tl.arange(0, BLOCK)
    wide = at < HALF
    inside = there[:, None] & wide[None, :]
    c = tl.load(cos + key[:, None] * HALF + at[None, :], mask=inside, other=0.0)
    s = tl.load(sin + key[:, None] * HALF + at[None, :], mask=inside, other=0.0)
    begin = source + token[:, None] * source_stride + at[None, :]
    out = d_source + token[:, None] * (HEADS + 2 * KV_HEADS) * 2 * HALF + at[None, :]
    for kind in tl.static_range(2):  # queries, then keys
        heads = HEADS if kind == 0 else KV_HEADS
        head_stride = q_head if kind == 0 else k_head
        upstream = (
            d_q + (row * q_row + (place - offset) * q_place)[:, None] + at[None, :]
            if kind == 0
            else d_k + (row * k_row + place * k_place)[:, None] + at[None, :]
        )
        scale = q_scale if kind == 0 else k_scale
        w_a = tl.load(scale + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        w_b = tl.load(scale + HALF + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        sum_a = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        sum_b = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for head in range(heads):
            g_a = tl.load(upstream + head * head_stride, mask=inside, other=0.0).to(tl.float32)
            g_b = tl.load(upstream + head * head_stride + HALF, mask=inside, other=0.0).to(tl.float32)
            t_a, t_b = g_a * c + g_b * s, g_b * c - g_a * s  # turned back
            column = (kind * HEADS + head) * 2 * HALF
            a = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(begin + column + HALF, mask=inside, other=0.0).to(tl.float32)
            factor = (1.0 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps))[:, None]
            a, b = a * factor, b * factor
            sum_a += t_a * a
            sum_b += t_b * b
            t_a, t_b = t_a * w_a, t_b * w_b
            mean = ((tl.sum(t_a * a, 1) + tl.sum(t_b * b, 1)) / (2 * HALF))[:, None]
            tl.store(out + column, (factor * (t_a - a * mean)).to(d_source.dtype.element_ty), mask=inside)
            tl.store(out + column + HALF, (factor * (t_b - b * mean)).to(d_source.dtype.element_ty), mask=inside)
        sums = d_scales + (tl.program_id(0) * 2 + kind) * 2 * HALF + at
        tl.store(sums, tl.sum(sum_a, 0), mask=wide)
        tl.store(sums + HALF, tl.sum(sum_b, 0), mask=wide)
    for head in range(KV_HEADS):
        upstream = d_v + (row * v_row + place * v_place)[:, None] + head * v_head + at[None, :]
        column = (HEADS + KV_HEADS + head) * 2 * HALF
        tl.store(out + column, tl.load(upstream, mask=inside, other=0.0), mask=inside)
        tl.store(out + column + HALF, tl.load(upstream + HALF, mask=inside, other=0.0), mask=inside)


def turn_heads(
    source: Tensor, part: Part, scales: tuple[Tensor, Tensor], turn: Tensor, eps: float, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Fill `q` [R, length, heads, d] and the part's places of `k` and `v` [R, all tokens, kv_heads, d].

    `source` [R * length, part.width], last dimension dense; `scales`: weights [d] of the norms of queries and keys;
    `turn` float32 [2, R, all tokens, d / 2]: cosines and sines.
    """
    if len(source):
        with launch.on(source):
            _turn_heads_forward[_grid(source)](
                source, source.stride(0), q, k, v, *scales, turn[0], turn[1], len(source), part.length, turn.shape[2],
                part.offset, eps, *_sizes(part),
            )  # fmt: skip


def turn_heads_backward(
    source: Tensor,
    part: Part,
    scales: tuple[Tensor, Tensor],
    turn: Tensor,
    eps: float,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
) -> tuple[Tensor, Tensor]:
    """(gradient of `source`, contiguous; of both scales, float32 [2, d]).

    d_q [R, heads, length, d] and d_k, d_v [R, kv_heads, all tokens, d], as attention has them, in any strides whose
    last dimension is dense.
    """
    d_source = source.new_empty(len(source), part.width)
    (programs,) = _grid(source)
    d_scales = torch.zeros(programs, 2, part.head_dim, dtype=torch.float32, device=source.device)
    if len(source):
        with launch.on(source):
            _turn_heads_backward[(programs,)](
                source, source.stride(0), d_q, d_k, d_v, *d_q.stride()[:3], *d_k.stride()[:3], *d_v.stride()[:3],
                *scales, turn[0], turn[1], d_source, d_scales, len(source), part.length, turn.shape[2], part.offset,
                eps, *_sizes(part),
            )  # fmt: skip
    return d_source, d_scales.sum(0)


@triton.jit
def _turn_in_place(
    x, scale, cos, sin, turn_stride, tokens, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, BLOCK)
    wide = at < HALF
    inside = (token < tokens)[:, None] & wide[None, :]
    c = tl.load(cos + token[:, None] * turn_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * turn_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
    begin = x + token[:, None] * HEADS * 2 * HALF + at[None, :]
    for head in range(HEADS):
        here = begin + head * 2 * HALF
        a = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(here + HALF, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            factor = (1.0 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps))[:, None]
            a *= factor * tl.load(scale + at, mask=wide, other=0.0).to(tl.float32)[None, :]
            b *= factor * tl.load(scale + HALF + at, mask=wide, other=0.0).to(tl.float32)[None, :]
        tl.store(here, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
        tl.store(here + HALF, (b * c + a * s).to(x.dtype.element_ty), mask=inside)


def turn_in_place(x: Tensor, scale: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> None:
    """Norm of each head times `scale` [d], where there is one, and rotary turn of `x` [R, S, heads, d], contiguous.

    `cos` and `sin` [R, S, d] as transformers makes them: both halves alike.
    """
    rows, length, heads, width = x.shape
    assert cos.shape == sin.shape == (rows, length, width), cos.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    block = triton.next_power_of_2(width // 2)
    if x.numel():
        with launch.on(x):
            _turn_in_place[(triton.cdiv(rows * length, _ROWS),)](
                x, scale, cos, sin, width, rows * length, eps, heads, width // 2, block, _ROWS, scale is not None
            )


def _grid(source: Tensor) -> tuple[int]:
    return (triton.cdiv(len(source), _ROWS),)


def _sizes(part: Part) -> tuple[Any, ...]:
    half = part.head_dim // 2
    return part.heads, part.kv_heads, half, triton.next_power_of_2(half), _ROWS
