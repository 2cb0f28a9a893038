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

from dflash.data.rows import eligible_anchors


def sample_anchors(loss_mask: np.ndarray, document: np.ndarray, anchors: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draw a row's anchors: uniform without replacement from the eligible positions, sorted, padded with -1.

    `loss_mask` bool [S], `document` int [S]; gives int64 [anchors]. The draw depends on `seed` alone, so a row
    met again in another epoch gets other anchors (section 4.2) and a resumed run gets the same ones. Sorted,
    because attention tiles are then nearly full (speculators #823); always `anchors` long, because a shape that
    changes recompiles (TorchSpec BUG34).
    """
    eligible = np.flatnonzero(eligible_anchors(loss_mask, document))
    count = min(anchors, len(eligible))
    chosen = np.random.default_rng(seed).choice(eligible, size=count, replace=False)
    out = np.full(anchors, -1, dtype=np.int64)
    out[:count] = np.sort(chosen)
    return out


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


def acceptance_lengths(correct: Tensor, weight: Tensor, anchors: Tensor, block: int) -> Tensor:
    """Teacher-forced acceptance length of each full block: 1 + the run of right predictions from slot 1.

    `correct` bool and `weight` [R, Q]; gives float32 [number of full blocks]. The bonus token is counted, as
    vLLM and z-lab's script do (facts in docs/TRAINER.md); a slot without label ends the run. It is an upper
    estimate of what decoding accepts only in so far as the data is the target's own.
    """
    right = (correct & (weight > 0)).view(*anchors.shape, block)[:, :, 1:]
    run = right.to(torch.float32).cumprod(-1).sum(-1)
    return 1.0 + run[anchors >= 0]
