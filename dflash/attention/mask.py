"""Who sees whom in a DFlash drafter (arXiv 2602.06036, section 4.2).

Queries are block slots: slot k of block i has index i*B + k, so Q = N*B. Keys are the S context tokens of the
row, then the same Q block slots. Slot k of block i, whose anchor is context token a, sees

- context token t when t < a, strictly, and both are of one document, which lies in one piece; with a window W
  also a + k - t < W. The anchor's own feature stays hidden: at inference the anchor is the token just sampled,
  which the target has not read yet.
- every slot of its own block, earlier and later, and none of another's.

An empty block (anchor -1) sees nothing and its output is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class DFlashMask(NamedTuple):
    """The mask of R packed rows. Tensors and constants only, so compiled code takes it as an argument."""

    document: Tensor  # [R, S] integer: the document of each context token, -1 for padding
    anchors: Tensor  # [R, N] integer: context index of each block's anchor, -1 for an empty block
    block: int  # B, slots a block, the anchor's included
    window: int | None = None  # W, tokens of context a slot looks back over; None: all of its document


def first_visible(mask: DFlashMask) -> Tensor:
    """Index of the first context token in each anchor's document, int64 [R, N]; what a window hides apart.

    Documents lie in a row one after the other, so what a slot sees of the context is one range of tokens.
    """
    document, anchors = mask.document, mask.anchors
    place = torch.arange(document.shape[1], device=document.device)
    begins = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    start = torch.where(begins, place, 0).cummax(dim=1).values
    return start.gather(1, anchors.clamp(min=0))


def rule(mask: DFlashMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of indices (row, head, query, key), as flex_attention's `mask_mod` wants it.

    The index tensors may have any shapes that broadcast; the answer is boolean in the shape they broadcast to.
    """
    document, anchors, block, window = mask
    context = document.shape[1]
    first = first_visible(mask)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i = query // block
        anchor = anchors[row, i]
        before = (first[row, i] <= key) & (key < anchor)  # an anchor lies in the context, and so does all before it
        if window is not None:
            before = before & (anchor + query % block - key < window)
        own = (key >= context) & ((key - context) // block == i) & (anchor >= 0)
        return before | own

    return sees


def visible(mask: DFlashMask) -> Tensor:
    """The mask written out: boolean [R, 1, Q, S + Q], true where the query sees the key."""
    rows, context = mask.document.shape
    queries = mask.anchors.shape[1] * mask.block
    device = mask.document.device
    row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    query = torch.arange(queries, device=device).view(1, 1, -1, 1)
    key = torch.arange(context + queries, device=device).view(1, 1, 1, -1)
    return rule(mask)(row, torch.zeros_like(row), query, key)
