"""Attention by kernels made for the DFlash mask: neither the mask nor a block mask is ever written out.

Needs the package triton and CUDA (or Triton's interpreter). Dynamo has no part in it, so no race of its making can
reach it; inside a compiled forward both halves are opaque operators (torch.library), dflash::ranges and
dflash::attention. What a program computes is in dflash.attention.triton_kernels, how it is started in triton_launch.

Every sum has one order: the same inputs give the same bits, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash.attention import KERNEL_WIDTHS
from dflash.attention.mask import DFlashMask, first_visible
from dflash.attention.triton_launch import (
    Ranges,
    aligned,
    context_backward,
    forward,
    key_tile_ranges,
    longest_keys,
    new_lse,
    new_out,
    new_tile_ranges,
    own_backward,
    query_backward,
)

LARGEST_BLOCK = 128
NO_WINDOW = 1 << 30  # a window longer than any context


def prepare_ranges(mask: DFlashMask) -> Ranges:
    """What the layers share, made on the mask's device without waiting for it.

    Right for anchors in any order; fast when each row's are sorted. Raises ValueError on blocks of more than 128.
    """
    if mask.block > LARGEST_BLOCK:
        raise ValueError(f"drafter.block={mask.block}: compile=triton takes blocks of at most {LARGEST_BLOCK} slots")
    window = NO_WINDOW if mask.window is None else mask.window
    anchor, first = mask.anchors.to(torch.int32).contiguous(), first_visible(mask).to(torch.int32)
    tiles = _key_tiles(anchor, first, mask.document.shape[1], mask.block, window)
    return Ranges(anchor, first, tiles, mask.block, window)


def attend_triton(q: Tensor, k: Tensor, v: Tensor, seen: Ranges) -> Tensor:
    """As attend_dense, with `seen` from prepare_ranges; any strides, if only the last dimension's is 1.

    Gives a [R, Hq, Q, d] view of a [R, Q, Hq, d] tensor, as the next projection wants it. Raises ValueError where
    the kernels have no tiles for the head dimension.
    """
    check_width(q)
    return _attention(q, k, v, seen.anchor, seen.first, seen.tiles, seen.block, seen.window)[0]


def check_width(q: Tensor) -> None:
    """Raises ValueError where the kernels have no tiles for the head dimension."""
    if q.shape[-1] not in KERNEL_WIDTHS:
        raise ValueError(
            f"drafter.head_dim={q.shape[-1]}: compile=triton takes one of {', '.join(map(str, KERNEL_WIDTHS))}"
        )


@torch.library.custom_op("dflash::ranges", mutates_args=())
def _key_tiles(anchor: Tensor, first: Tensor, context: int, block: int, window: int) -> Tensor:
    return key_tile_ranges(anchor, first, context, block, window)


@_key_tiles.register_fake
def _(anchor: Tensor, first: Tensor, context: int, block: int, window: int) -> Tensor:
    return new_tile_ranges(anchor, context)


@torch.library.custom_op("dflash::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, anchor: Tensor, first: Tensor, tiles: Tensor, block: int, window: int
) -> tuple[Tensor, Tensor]:
    q, k, v = aligned(q), aligned(k), aligned(v)
    return forward(q, k, v, longest_keys(k), Ranges(anchor, first, tiles, block, window))


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, anchor: Tensor, first: Tensor, tiles: Tensor, block: int, window: int
) -> tuple[Tensor, Tensor]:
    return new_out(q), new_lse(q)


@torch.library.custom_op("dflash::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, anchor: Tensor, first: Tensor,
    tiles: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad = aligned(q), aligned(k), aligned(v), aligned(grad)
    seen = Ranges(anchor, first, tiles, block, window)
    dq, dk, dv = new_out(q), new_out(k), new_out(v)
    delta = own_backward(q, k, v, out, grad, lse, seen, dk, dv)
    context_backward(q, k, v, grad, lse, delta, seen, dk, dv)
    query_backward(q, k, v, grad, lse, delta, seen, dq)
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, anchor: Tensor, first: Tensor,
    tiles: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return new_out(q), new_out(k), new_out(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, anchor, first, tiles, ctx.block, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, anchor, first, tiles)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attention_backward(grad, *ctx.saved_tensors, ctx.block, ctx.window)
    return *gradients, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_keep)
