"""The kernels' launches: tiles, grids and arguments, one function a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash.attention import triton_kernels as kernels
from dflash.fused import launch


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
OWN_ROWS, OWN_WARPS = 16, 2

# Scores, in log2, that need no maximum: their exp2, the sum of a million of them and its inverse are all far from the
# ends of the type that holds the probabilities.
LARGEST_EXPONENT = {torch.float16: 8.0, torch.bfloat16: 60.0, torch.float32: 60.0}


def new_tile_ranges(anchor: Tensor, context: int) -> Tensor:
    return anchor.new_empty(len(anchor), -(-context // BACKWARD_KEYS), 4)


def key_tile_ranges(anchor: Tensor, first: Tensor, context: int, block: int, window: int) -> Tensor:
    """`Ranges.tiles` of its other members."""
    out = new_tile_ranges(anchor, context)
    with launch.on(anchor):
        kernels.key_tile_ranges[(out.shape[1], len(anchor))](
            anchor, first, out, anchor.shape[1], window, KEYS=BACKWARD_KEYS, M=BACKWARD_QUERIES, B=block
        )
    return out


# On tensors as `aligned` leaves them: queries [R, Hq, Q, d], keys and values [R, Hkv, S + Q, d].


def longest_keys(k: Tensor) -> Tensor:
    """The square of the longest key's norm, float32 [R, Hkv]."""
    rows, key_heads, keys, width = k.shape
    longest = k.new_zeros(rows, key_heads, dtype=torch.float32)
    if keys:
        with launch.on(k):
            kernels.longest_keys[(min(64, triton.cdiv(keys, 128)), key_heads, rows)](
                _tiled(k, 128), longest, keys, KEYS=128, D=width
            )
    return longest


class Begun(NamedTuple):
    """What slots have gathered already: `forward`'s two results, and each slot's line in them, int32 [R, Q]."""

    out: Tensor
    lse: Tensor
    place: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    longest: Tensor,
    seen: Ranges,
    source: Tensor | None = None,
    begun: Begun | None = None,
) -> tuple[Tensor, Tensor]:
    """(attention, [R, Hq, Q, d]; log2 of the sum of exponentials, float32 [R, Hq, Q or a little more]).

    With `source` the context alone, for the queries of these slots, int32 [R, Q]: lines of `seen` at -1 stay unwritten.
    """
    (rows, heads, slots, width), key_heads = q.shape, k.shape[1]
    out, lse = new_out(q), new_lse(q)
    sizes = _forward_tiles(width, q.itemsize)
    pack = _pack(heads // key_heads, sizes.queries)
    if slots:
        with launch.on(q):
            kernels.forward[(triton.cdiv(slots, sizes.queries // pack), heads // pack, rows)](
                q, _tiled(k, sizes.keys), _tiled(v, sizes.keys), out, lse, seen.anchor, seen.first, longest,
                source, *(begun or (None, None, None)),
                *q.stride()[:3], *out.stride()[:3], *(begun.out if begun else out).stride()[:3],
                heads // key_heads, k.shape[2] - slots, slots, lse.shape[2], slots // seen.block, seen.window,
                _log2_scale(width), LARGEST_EXPONENT[q.dtype],
                M=sizes.queries, KEYS=sizes.keys, D=width, B=seen.block, PACK=pack, PRECISION=_precision(q),
                num_warps=sizes.warps, num_stages=sizes.stages,
            )  # fmt: skip
    return out, lse


def own_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, seen: Ranges, dk: Tensor, dv: Tensor
) -> Tensor:
    """Fills `dk` and `dv` of the block slots; gives sum(out * grad), shaped as `lse`."""
    (rows, heads, slots, width), key_heads = q.shape, k.shape[1]
    delta, per, blocks = torch.empty_like(lse), max(1, OWN_ROWS // seen.block), slots // seen.block
    if slots:
        with launch.on(q):
            kernels.own_backward[(triton.cdiv(blocks, per), key_heads, rows)](
                q, k, v, out, grad, lse, seen.anchor, delta, dk, dv,
                *(stride for x in (q, k, v, out, grad, dk, dv) for stride in x.stride()[:3]),
                heads // key_heads, k.shape[2] - slots, slots, lse.shape[2], blocks, _log2_scale(width), width**-0.5,
                P=max(16, triton.next_power_of_2(per * seen.block)), PER=per, D=width, B=seen.block,
                PRECISION=_precision(q), num_warps=OWN_WARPS, num_stages=1,
            )  # fmt: skip
    return delta


def context_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    seen: Ranges,
    dk: Tensor,
    dv: Tensor,
    add: bool = False,
) -> None:
    """Fills `dk` and `dv` of the context, or adds to them."""
    (rows, heads, slots, width), key_heads = q.shape, k.shape[1]
    context = k.shape[2] - slots
    if not slots:
        if not add:
            dk.zero_()
            dv.zero_()
        return
    sizes = _context_tiles(width, q.itemsize)
    with launch.on(q):
        kernels.context_backward[(seen.tiles.shape[1], key_heads, rows)](
            _tiled(q, sizes.queries), _tiled(k, sizes.keys), _tiled(v, sizes.keys), _tiled(grad, sizes.queries),
            _lines(lse, sizes.queries), _lines(delta, sizes.queries), seen.anchor, seen.first, seen.tiles, dk, dv,
            *dk.stride()[:3], *dv.stride()[:3],
            heads // key_heads, context, slots // seen.block, seen.window, _log2_scale(width), width**-0.5,
            M=sizes.queries, KEYS=sizes.keys, D=width, B=seen.block, PRECISION=_precision(q), ADD=add,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip


def query_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    seen: Ranges,
    dq: Tensor,
    source: Tensor | None = None,
) -> None:
    """Fills `dq`; with `source` int32 [R, Q] adds the context's part to `dq` of these slots."""
    (rows, heads, slots, width), key_heads = q.shape, k.shape[1]
    sizes = _query_tiles(width, q.itemsize)
    pack = _pack(heads // key_heads, sizes.queries)
    if slots:
        with launch.on(q):
            kernels.query_backward[(triton.cdiv(slots, sizes.queries // pack), heads // pack, rows)](
                q, _tiled(k, sizes.keys), _tiled(v, sizes.keys), grad, lse, delta, seen.anchor, seen.first, dq, source,
                *(stride for x in (q, grad, dq) for stride in x.stride()[:3]),
                heads // key_heads, k.shape[2] - slots, slots, lse.shape[2], slots // seen.block, seen.window,
                _log2_scale(width), width**-0.5,
                M=sizes.queries, KEYS=sizes.keys, D=width, B=seen.block, PACK=pack, PRECISION=_precision(q),
                num_warps=sizes.warps, num_stages=sizes.stages,
            )  # fmt: skip


def gather_alike(
    q: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, begun_lse: Tensor, bound: Tensor, source: Tensor, gap: Tensor,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, gradients and deltas that stand for all slots of one query (the kernel says how)."""
    rows, heads, slots, width = q.shape
    one_q, one_grad, one_delta = new_out(q), new_out(grad), torch.empty_like(delta)
    if slots:
        with launch.on(q):
            kernels.gather_alike[(slots, rows)](
                q, grad, lse, delta, begun_lse, bound, source, gap, one_q, one_grad, one_delta,
                *(stride for x in (q, grad, one_q) for stride in x.stride()[:3]),
                heads, slots, lse.shape[2], slots // block,
                HEADS=triton.next_power_of_2(heads), D=width, B=block, M=BACKWARD_QUERIES,
            )  # fmt: skip
    return one_q, one_grad, one_delta


def new_out(like: Tensor) -> Tensor:
    """Empty, of the shape [R, H, L, d] of `like`, heads next to each other in memory as projections have them."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width).transpose(1, 2)


def new_lse(q: Tensor) -> Tensor:
    """Float32 [R, H, L or a little more]: descriptors want a multiple of four."""
    rows, heads, length, _ = q.shape
    return q.new_empty(rows, heads, -(-length // 16) * 16, dtype=torch.float32)


def aligned(x: Tensor) -> Tensor:
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
