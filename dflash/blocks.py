"""From a packed row to the drafter's questions: anchors, block inputs, positions, labels, weights.

Notation of the paper (arXiv 2602.06036): a block has B slots; slot 0 holds the anchor token, slots 1..B-1 the
mask token; slot k predicts the token at anchor + k. Every choice on which implementations disagree is made
here once, and docs/TRAINER.md gives the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.data.document import eligible_anchors


def sample_anchors(loss_mask: np.ndarray, document: np.ndarray, anchors: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draw a row's anchors: sorted, padded with -1.

    `loss_mask` bool [S], `document` int [S]; gives int64 [anchors]. The row's documents share its anchors as
    equally as their eligible positions allow: short ones get all they can, the others what is left. One draw
    over the whole row would starve short answers next to long ones, and one N a packed row left 85 % of the
    supervised tokens uncovered elsewhere (speculators #1071). Within a document the draw is uniform, without
    replacement. It depends on `seed` alone, so a row met again in another epoch gets other anchors (section
    4.2) and a resumed run gets the same ones. Sorted, because attention tiles are then nearly full (speculators
    #823); always `anchors` long, because a shape that changes recompiles (TorchSpec BUG34).
    """
    eligible = np.flatnonzero(eligible_anchors(loss_mask, document))
    rng = np.random.default_rng(seed)
    eligible = rng.permutation(eligible)
    _, owner, available = np.unique(document[eligible], return_inverse=True, return_counts=True)
    by_owner = np.argsort(owner, kind="stable")
    rank = np.empty_like(owner)  # place of a position in its document's own random order
    rank[by_owner] = np.arange(len(owner)) - np.repeat(np.cumsum(available) - available, available)
    chosen = eligible[rank < _shares(available, anchors, rng)[owner]]
    out = np.full(anchors, -1, dtype=np.int64)
    out[: len(chosen)] = np.sort(chosen)
    return out


def _shares(available: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """`total` split as equally as `available` [D] allows; a rest smaller than the number of takers goes by lot."""
    shares = np.zeros_like(available)
    while total and (open_ := np.flatnonzero(shares < available)).size:
        each = total // len(open_)
        if not each:
            shares[rng.permutation(open_)[:total]] += 1
            break
        more = np.minimum(available[open_] - shares[open_], each)
        shares[open_] += more
        total -= int(more.sum())
    return shares


def coverage(loss_mask: np.ndarray, document: np.ndarray, anchors: np.ndarray, block: int) -> tuple[int, int]:
    """How many supervised tokens of a row are some slot's label, and how many there are.

    `loss_mask` bool [S], `document` int [S], `anchors` int [N], -1 for an empty block.
    """
    start = anchors[anchors >= 0]
    slots = start[:, None] + np.arange(1, block)
    inside = slots < len(document)
    slots = np.where(inside, slots, 0)
    labelled = inside & loss_mask[slots] & (document[slots] == document[start][:, None])
    return len(np.unique(slots[labelled])), int(loss_mask.sum())


def gamma_for(block: int) -> float:
    """The decay the paper gives for a block size (A.1: 7 for 16, 5 for 10, 4 for 8), in proportion elsewhere."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block, block * 7 / 16)


@dataclass(frozen=True)
class Blocks:
    """One drafter call's questions, Q = N * B slots in block order; all on one device.

    inputs int64 [R, Q] token ids; position int64 [R, Q]; labels int64 [R, Q], 0 where weight is 0;
    weight float32 [R, Q]; anchors int64 [R, N], -1 for an empty block.
    """

    inputs: Tensor
    position: Tensor
    labels: Tensor
    weight: Tensor
    anchors: Tensor


def make_blocks(
    tokens: Tensor,
    loss_mask: Tensor,
    document: Tensor,
    position: Tensor,
    anchors: Tensor,
    *,
    block: int,
    mask_token: int,
    gamma: float,
) -> Blocks:
    """Lay out the blocks of R rows of S tokens ([R, S] each; anchors [R, N], -1 for an empty block).

    weight = [k >= 1] * [anchor + k inside the row and the anchor's document] * loss_mask * exp(-(k-1)/gamma)
    (Eq. 4). A block may reach past its document's end, there it has no labels. Empty blocks are all mask
    tokens at position 0 without weight.
    """
    rows, length = tokens.shape
    slots = torch.arange(block, device=tokens.device)
    full = anchors >= 0
    start = anchors.clamp(min=0)
    where = start[:, :, None] + slots  # [R, N, B], may leave the row
    inside = (where < length) & full[:, :, None]
    where = where.clamp(max=length - 1).view(rows, -1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, where).view(rows, -1, block)

    labelled = inside & (at(document) == document.gather(1, start)[:, :, None]) & at(loss_mask) & (slots >= 1)
    decay = torch.exp(-(slots - 1).clamp(min=0) / gamma)
    inputs = torch.full_like(labelled, mask_token, dtype=torch.int64)
    inputs[:, :, 0] = torch.where(full, tokens.gather(1, start), mask_token)
    block_position = position.gather(1, start)[:, :, None] + slots
    return Blocks(
        inputs=inputs.view(rows, -1),
        position=torch.where(full[:, :, None], block_position, 0).view(rows, -1),
        labels=torch.where(labelled, at(tokens), 0).view(rows, -1),
        weight=(labelled * decay).view(rows, -1),
        anchors=anchors,
    )


def behind_anchors(x: Tensor, block: int) -> Tensor:
    """Of slots [N * B, ...] those that are no anchor's, [N * (B - 1), ...]."""
    return x.unflatten(0, (-1, block))[:, 1:].flatten(0, 1)


def acceptance_lengths(correct: Tensor, block: int) -> Tensor:
    """Teacher-forced acceptance length of each block: 1 + the run of right predictions from slot 1.

    `correct` float [R, Q], 1 where a slot with a label predicts it and 0 elsewhere; gives float [R, N]. The bonus
    token is counted, as vLLM and z-lab's script do (facts in docs/TRAINER.md); a slot without label ends the run.
    It is an upper estimate of what decoding accepts only in so far as the data is the target's own.
    """
    return 1.0 + correct.unflatten(-1, (-1, block))[..., 1:].cumprod(-1).sum(-1)
