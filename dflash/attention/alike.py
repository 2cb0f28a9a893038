"""Attention where slots at one token ask one question: a drafter's first layer (`Drafter.forward`, `alike`).

Past their anchors all blocks hold the mask token. In the first layer a slot's query is therefore the mask token's,
turned to the slot's position, and blocks whose anchors lie close share it: slot k of block i and slot k - 1 of a
block whose anchor is one token further ask the same of nearly the same context. At 512 blocks of 16 over 3,072 tokens
7,680 slots ask 2,800 questions, at 1,024 blocks of 32 over 40,000 tokens 31,744 ask 22,000.

All slots at token p see the context before p - B + 1, as far as their document and window let them. This part is
computed once for each p ("lines"; an anchor, whose query is its own, has a line to itself), and each slot goes on from
it with what it alone sees: fewer than B tokens more, and its block. Scores of the shared part are equal, so its
backward is one pass as well, over the sum of the slots' gradients, each times exp(lse of the line - lse of the slot):
softmax weights are exp(score - lse), and everything behind them is linear in the gradient. Exact, but for roundings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dflash.attention.triton import NO_WINDOW, attend_triton, check_width
from dflash.attention.triton_launch import (
    Begun,
    Ranges,
    aligned,
    context_backward,
    forward,
    gather_alike,
    key_tile_ranges,
    longest_keys,
    new_out,
    own_backward,
    query_backward,
)

# More than any block is long: two blocks that share no query.
_FAR = 1 << 20


class Lines(NamedTuple):
    """One line for each question of a row, in the order of what they see; L = Q, since there are never more."""

    seen: Ranges  # what lines see: blocks of one slot, -1 behind the last line
    rest: Ranges  # what slots see besides
    source: Tensor  # int32 [R, L], the slot whose query a line has
    place: Tensor  # int32 [R, Q], the line of a slot
    gap: Tensor  # int32 [R, N + 1], tokens from the anchor before to a block's, _FAR where they share nothing


def attend_alike(q: Tensor, k: Tensor, v: Tensor, seen: Ranges) -> Tensor:
    """As attend_triton, where all slots at one token of a document have one query, anchors apart.

    Where not all have, the result is wrong without a word. The gradient of `q` is right in its sums over slots that
    share a query, of which one has what the shared context gives to all.
    """
    check_width(q)
    if seen.window <= seen.block:  # nothing is shared
        return attend_triton(q, k, v, seen)
    out: Tensor = _Alike.apply(q, k, v, seen)
    return out


def lines(seen: Ranges, context: int) -> Lines:
    """Made on the device without waiting for it. Anchors may come in any order; only neighbours share."""
    anchor, first, block, window = seen.anchor, seen.first, seen.block, seen.window
    rows, blocks = anchor.shape
    slots, full = blocks * block, anchor >= 0
    step = anchor[:, 1:] - anchor[:, :-1]
    near = full[:, 1:] & full[:, :-1] & (first[:, 1:] == first[:, :-1]) & (step >= 0) & (step < block - 1)
    gap = torch.nn.functional.pad(torch.where(near, step, _FAR), (1, 1), value=_FAR)

    # The first block to reach a token has its line: its last slots, as many as it lies behind the block before.
    fresh_slots = torch.where(full, gap[:, :-1].clamp(max=block - 1), 0)
    k = torch.arange(block, device=anchor.device, dtype=torch.int32)
    is_anchor = (full[..., None] & (k == 0)).flatten(1)
    fresh = ((k > 0) & (k >= block - fresh_slots[..., None])).flatten(1)
    bound = torch.maximum(anchor[..., None] + (k - block + 1), first[..., None]).flatten(1)
    nobody = torch.iinfo(torch.int32).max
    bound, source = torch.where(is_anchor | fresh, bound, nobody).sort(dim=1, stable=True)
    bound = torch.where(bound == nobody, -1, bound)

    # Counted over blocks, tokens with a slot are numbered; slot k of block i is at the number that its block ends
    # with, less what is left of the block.
    number = (fresh_slots.cumsum(1)[..., None] + (k - block)).clamp(min=0).flatten(1)
    slot = torch.arange(slots, device=anchor.device).expand(rows, -1)
    first_slot = slot.new_zeros(rows, slots + 1).scatter(1, torch.where(fresh, number, slots), slot)
    line = torch.empty_like(slot).scatter(1, source, slot)
    place = line.gather(1, torch.where(is_anchor, slot, first_slot.gather(1, number)))

    line_first = first.long().gather(1, source // block).int()
    line_window = window if window == NO_WINDOW else window - block + 1
    rest_window = min(window, block)
    return Lines(
        Ranges(bound, line_first, key_tile_ranges(bound, line_first, context, 1, line_window), 1, line_window),
        Ranges(anchor, first, key_tile_ranges(anchor, first, context, block, rest_window), block, rest_window),
        source.int(),
        place.int(),
        gap.contiguous(),
    )


class _Alike(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Ranges) -> Tensor:
        q, k, v = aligned(q), aligned(k), aligned(v)
        made = lines(seen, k.shape[2] - q.shape[2])
        longest = longest_keys(k)
        shared, shared_lse = forward(q, k, v, longest, made.seen, source=made.source)
        out, lse = forward(q, k, v, longest, made.rest, begun=Begun(shared, shared_lse, made.place))
        ctx.save_for_backward(q, k, v, out, lse, shared_lse)
        ctx.lines = made
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, shared_lse = ctx.saved_tensors
        made: Lines = ctx.lines
        grad = aligned(grad)
        dq, dk, dv = new_out(q), new_out(k), new_out(v)
        delta = own_backward(q, k, v, out, grad, lse, made.rest, dk, dv)
        context_backward(q, k, v, grad, lse, delta, made.rest, dk, dv)
        query_backward(q, k, v, grad, lse, delta, made.rest, dq)
        q, grad, delta = gather_alike(
            q, grad, lse, delta, shared_lse, made.seen.anchor, made.source, made.gap, made.rest.block
        )
        context_backward(q, k, v, grad, shared_lse, delta, made.seen, dk, dv, add=True)
        query_backward(q, k, v, grad, shared_lse, delta, made.seen, dq, source=made.source)
        return dq, dk, dv, None
