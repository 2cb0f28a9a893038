"""Attention by kernels made for the DFlash mask: neither the mask nor a block mask is ever written out.

Needs the package triton and CUDA (or Triton's interpreter). Dynamo has no part in it, so no race of its making can
reach it; inside a compiled forward both halves are opaque operators (torch.library), dflash::ranges and
dflash::attention. What a program computes is in dflash.attention.triton_kernels.

Every sum has one order: the same inputs give the same bits, forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash.attention import KERNEL_WIDTHS
from dflash.attention import triton_kernels as kernels
from dflash.attention.mask import DFlashMask, first_visible
from dflash.fused import launch

LARGEST_BLOCK = 128
NO_WINDOW = 1 << 30  # a window longer than any context


class Ranges(NamedTuple):
    """A DFlashMask as the kernels read it, shared by all layers of a step that have one window."""

    anchor: Tensor  # int32 [R, N], -1 for an empty block
    first: Tensor  # int32 [R, N], the first context token of the anchor's document
    tiles: Tensor  # int32 [R, key tiles, 4], the query tiles that see a key tile (key_tile_ranges)
    block: int
    window: int


@dataclass(frozen=True)
class Tiles:
    """Rows of queries, keys, warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# Chosen on an H200 for head dimensions 64 and 128 in 16 bits (docs/STRATEGIES.md). What they have in common: two
# programs fit on a multiprocessor, and while one does its exponentials the other has the tensor cores. Fixed, because
# trying out would cost more at the first step than it could win. Wider types get what fits.


def _forward_tiles(width: int, item: int) -> Tiles:
    return Tiles(128, 64, 4, 3 if width <= 64 else 2) if item == 2 else Tiles(64, 32, 4, 2)


def _context_tiles(width: int, item: int) -> Tiles:
    return Tiles(BACKWARD_QUERIES, BACKWARD_KEYS, 4, (3 if width <= 64 else 2) if item == 2 else 1)


def _query_tiles(width: int, item: int) -> Tiles:
    return Tiles(64, 64, 4, 3 if width <= 64 else 2) if item == 2 else Tiles(64, 32, 4, 1)


# Of context_backward; Ranges.tiles is counted in them.
BACKWARD_QUERIES, BACKWARD_KEYS = 64, 64
OWN_ROWS, OWN_WARPS = 32, 4

# Scores, in log2, that need no maximum: their exp2, the sum of a million of them and its inverse are all far from the
# ends of the type that holds the probabilities.
LARGEST_EXPONENT = {torch.float16: 8.0, torch.bfloat16: 60.0, torch.float32: 60.0}


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
    if q.shape[-1] not in KERNEL_WIDTHS:
        raise ValueError(
            f"drafter.head_dim={q.shape[-1]}: compile=triton takes one of {', '.join(map(str, KERNEL_WIDTHS))}"
        )
    return _attention(q, k, v, seen.anchor, seen.first, seen.tiles, seen.block, seen.window)[0]


@torch.library.custom_op("dflash::ranges", mutates_args=())
def _key_tiles(anchor: Tensor, first: Tensor, context: int, block: int, window: int) -> Tensor:
    rows, blocks = anchor.shape
    out = anchor.new_empty(rows, triton.cdiv(context, BACKWARD_KEYS), 4)
    with launch.on(anchor):
        kernels.key_tile_ranges[(out.shape[1], rows)](
            anchor, first, out, blocks, window, KEYS=BACKWARD_KEYS, M=BACKWARD_QUERIES, B=block
        )
    return out


@_key_tiles.register_fake
def _(anchor: Tensor, first: Tensor, context: int, block: int, window: int) -> Tensor:
    return anchor.new_empty(anchor.shape[0], -(-context // BACKWARD_KEYS), 4)


@torch.library.custom_op("dflash::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, anchor: Tensor, first: Tensor, tiles: Tensor, block: int, window: int
) -> tuple[Tensor, Tensor]:
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    (rows, heads, slots, width), key_heads = q.shape, k.shape[1]
    out, lse = _new_out(q), _new_lse(q)
    sizes = _forward_tiles(width, q.itemsize)
    pack = _pack(heads // key_heads, sizes.queries)
    if slots:
        longest_key = q.new_zeros(rows, key_heads, dtype=torch.float32)
        grid = (triton.cdiv(slots, sizes.queries // pack), heads // pack, rows)
        with launch.on(q):
            kernels.longest_keys[(min(64, triton.cdiv(k.shape[2], 128)), key_heads, rows)](
                _tiled(k, 128), longest_key, k.shape[2], KEYS=128, D=width
            )
            kernels.forward[grid](
                q, _tiled(k, sizes.keys), _tiled(v, sizes.keys), out, lse, anchor, first, longest_key,
                *q.stride()[:3], *out.stride()[:3],
                heads // key_heads, k.shape[2] - slots, slots, lse.shape[2], slots // block, window,
                _log2_scale(width), LARGEST_EXPONENT[q.dtype],
                M=sizes.queries, KEYS=sizes.keys, D=width, B=block, PACK=pack, PRECISION=_precision(q),
                num_warps=sizes.warps, num_stages=sizes.stages,
            )  # fmt: skip
    return out, lse


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, anchor: Tensor, first: Tensor, tiles: Tensor, block: int, window: int
) -> tuple[Tensor, Tensor]:
    return _new_out(q), _new_lse(q)


@torch.library.custom_op("dflash::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, anchor: Tensor, first: Tensor,
    tiles: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad = _aligned(q), _aligned(k), _aligned(v), _aligned(grad)
    (rows, heads, slots, width), key_heads = q.shape, k.shape[1]
    group, context, blocks = heads // key_heads, k.shape[2] - slots, slots // block
    dq, dk, dv = _new_out(q), _new_out(k), _new_out(v)
    if not slots:
        return dq, dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    scale, softmax_scale, precision = _log2_scale(width), width**-0.5, _precision(q)
    with launch.on(q):
        per = max(1, OWN_ROWS // block)
        kernels.own_backward[(triton.cdiv(blocks, per), key_heads, rows)](
            q, k, v, out, grad, lse, anchor, delta, dk, dv,
            *(stride for x in (q, k, v, out, grad, dk, dv) for stride in x.stride()[:3]),
            group, context, slots, lse.shape[2], blocks, scale, softmax_scale,
            P=max(16, triton.next_power_of_2(per * block)), PER=per, D=width, B=block, PRECISION=precision,
            num_warps=OWN_WARPS, num_stages=1,
        )  # fmt: skip
        sizes = _context_tiles(width, q.itemsize)
        kernels.context_backward[(tiles.shape[1], key_heads, rows)](
            _tiled(q, sizes.queries), _tiled(k, sizes.keys), _tiled(v, sizes.keys), _tiled(grad, sizes.queries),
            _lines(lse, sizes.queries), _lines(delta, sizes.queries), anchor, first, tiles, dk, dv,
            *dk.stride()[:3], *dv.stride()[:3],
            group, context, blocks, window, scale, softmax_scale,
            M=sizes.queries, KEYS=sizes.keys, D=width, B=block, PRECISION=precision,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
        sizes = _query_tiles(width, q.itemsize)
        pack = _pack(group, sizes.queries)
        kernels.query_backward[(triton.cdiv(slots, sizes.queries // pack), heads // pack, rows)](
            q, _tiled(k, sizes.keys), _tiled(v, sizes.keys), grad, lse, delta, anchor, first, dq,
            *(stride for x in (q, grad, dq) for stride in x.stride()[:3]),
            group, context, slots, lse.shape[2], blocks, window, scale, softmax_scale,
            M=sizes.queries, KEYS=sizes.keys, D=width, B=block, PACK=pack, PRECISION=precision,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, anchor: Tensor, first: Tensor,
    tiles: Tensor, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _new_out(q), _new_out(k), _new_out(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, anchor, first, tiles, ctx.block, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, anchor, first, tiles)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attention_backward(grad, *ctx.saved_tensors, ctx.block, ctx.window)
    return *gradients, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_keep)


def _new_out(like: Tensor) -> Tensor:
    """Empty, of the shape [R, H, L, d] of `like`, heads next to each other in memory as projections have them."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width).transpose(1, 2)


def _new_lse(q: Tensor) -> Tensor:
    """Float32 [R, H, L or a little more]: descriptors want a multiple of four."""
    rows, heads, length, _ = q.shape
    return q.new_empty(rows, heads, -(-length // 16) * 16, dtype=torch.float32)


def _aligned(x: Tensor) -> Tensor:
    """As descriptors want it: rows of d next to each other, everything else at multiples of 16 bytes."""
    good = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s * x.itemsize % 16 == 0 for s in x.stride()[:3])
    return x if good else x.contiguous()


def _tiled(x: Tensor, length: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [1, 1, length, x.shape[3]])


def _lines(x: Tensor, length: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [1, 1, length])


def _pack(group: int, queries: int) -> int:
    """Query heads of one key head in a tile: the largest power of two that divides `group` and leaves 16 slots."""
    return min(group & -group, queries // 16)


def _log2_scale(width: int) -> float:
    return width**-0.5 * math.log2(math.e)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"  # says something of float32 alone
