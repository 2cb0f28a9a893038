"""Attention through PyTorch's flex_attention, which skips the tiles of the mask that are empty.

Fast when compiled, on CUDA; called un-compiled it falls back to dense scores, which is why the strategies
count such calls. On CPU it has no backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.attention.mask import DFlashMask, first_visible, rule

TILE = 128  # queries and keys a tile; flex's kernels want a multiple of their own tiles


def block_mask(mask: DFlashMask) -> BlockMask:
    """The mask as tiles, one for all heads, to be made once a step and shared by all layers.

    Counted from ranges, since a slot sees one range of the context and one of the block slots: memory and time
    go with queries times key *tiles*. PyTorch's create_block_mask asks the rule of every query and key; run as
    it is, it holds the whole mask (pytorch issue 134756), and compiled, its kernel took ptxas more than two
    minutes at 8,192 queries (docs/LOG.md).
    """
    rows, context = mask.document.shape
    block, device = mask.block, mask.document.device
    queries = mask.anchors.shape[1] * block
    query = torch.arange(queries, device=device)
    anchor = mask.anchors.repeat_interleave(block, dim=1)  # [R, Q]
    full = anchor >= 0
    low, high = first_visible(mask).repeat_interleave(block, dim=1), torch.where(full, anchor, 0)
    if mask.window is not None:
        low = torch.maximum(low, anchor + query % block - mask.window + 1)
    own_low = torch.where(full, context + query // block * block, 0)
    own_high = torch.where(full, own_low + block, 0)

    tiles = _tiles(context + queries)
    begin = torch.arange(tiles, device=device) * TILE
    end = begin + TILE

    def meets(low: Tensor, high: Tensor) -> Tensor:  # [R, Q, K tiles]
        return (low < high)[..., None] & (low[..., None] < end) & (high[..., None] > begin)

    def holds(low: Tensor, high: Tensor) -> Tensor:
        return (low[..., None] <= begin) & (high[..., None] >= end)

    def by_query_tile(each: Tensor) -> Tensor:  # [R, Q tiles, TILE, K tiles]; queries past the last see nothing
        padded = torch.nn.functional.pad(each, (0, 0, 0, _tiles(queries) * TILE - queries))
        return padded.view(rows, -1, TILE, tiles)

    some = by_query_tile(meets(low, high) | meets(own_low, own_high)).any(2)[:, None]
    all_ = by_query_tile(holds(low, high) | holds(own_low, own_high)).all(2)[:, None]
    partial = some & ~all_
    # Both directions are listed here: from_kv_blocks would sort, and one compiled sort of a tile list kept Triton's
    # first stages busy for two minutes (docs/LOG.md).
    return BlockMask(
        (queries, context + queries),
        *_listed(partial),
        *_listed(all_),
        *_listed(partial.mT.contiguous()),
        *_listed(all_.mT.contiguous()),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=rule(mask),
    )


def attend_flex(q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> Tensor:
    """As attend_dense, with `seen` from block_mask."""
    # Below 128 queries flex would choose its decoding kernel, which has no configuration for such blocks
    # (NoValidChoicesError on torch 2.11).
    main_kernel = {"BACKEND": "TRITON"} if q.is_cuda else {}
    grouped = q.shape[1] != k.shape[1]
    out = flex_attention(q, k, v, block_mask=seen, enable_gqa=grouped, kernel_options=main_kernel)
    assert isinstance(out, Tensor)
    return out


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Boolean [R, 1, I, J] as flex wants it: how many of the J tiles each row has, and their numbers first.

    How many come before a tile is a product with a triangle of ones, exact in float32, and no running sum: Inductor of
    torch 2.11 fails on that one at 1024 blocks of 32 over 40,000 tokens (TypeError in get_block_shape).
    """
    count = tiles.sum(-1, dtype=torch.int32)
    number = torch.arange(tiles.shape[-1], device=tiles.device, dtype=torch.int32)
    before = (tiles.float() @ (number[:, None] < number).float()).int()
    place = torch.where(tiles, before, count[..., None] + number - before)
    return count, torch.empty_like(place).scatter_(-1, place.long(), number.expand_as(place))
