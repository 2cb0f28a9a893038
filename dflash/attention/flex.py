"""Attention through PyTorch's flex_attention, which skips the tiles of the mask that are empty.

Fast when compiled, on CUDA; called un-compiled it falls back to dense scores, which is why the strategies
count such calls. On CPU it has no backward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.attention.mask import DFlashMask, rule


def block_mask(mask: DFlashMask, create: Callable[..., BlockMask] = create_block_mask) -> BlockMask:
    """The mask as tiles, one for all heads, to be made once a step and shared by all layers.

    `create` is create_block_mask, or a compiled one: un-compiled it holds the whole mask in memory
    (pytorch issue 134756). Compiled, it serves every step of a geometry, because Dynamo guards the code of
    the rule and the shapes it closes over, not their values.
    """
    rows, context = mask.document.shape
    queries = mask.anchors.shape[1] * mask.block
    return create(rule(mask), rows, None, queries, context + queries, device=mask.document.device)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> Tensor:
    """As attend_dense, with `seen` from block_mask."""
    # Below 128 queries flex would choose its decoding kernel, which has no configuration for such blocks
    # (NoValidChoicesError on torch 2.11).
    main_kernel = {"BACKEND": "TRITON"} if q.is_cuda else {}
    grouped = q.shape[1] != k.shape[1]
    out = flex_attention(q, k, v, block_mask=seen, enable_gqa=grouped, kernel_options=main_kernel)
    assert isinstance(out, Tensor)
    return out
