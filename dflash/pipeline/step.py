"""One batch through one drafter: blocks, forward, loss, backward, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash.attention import DFlashMask
from dflash.blocks import Blocks, acceptance_lengths, coverage, gamma_for, make_blocks
from dflash.devices import sent
from dflash.drafter import Drafter
from dflash.loss import head_loss
from dflash.pipeline import sums
from dflash.pipeline.batch import Batch
from dflash.settings import DISTILLING, JobSettings

# Supervised slots are padded to a multiple, so that tensors come in few sizes and the allocator can reuse them.
PADDED_TO = {"cuda": 256}


@dataclass(frozen=True)
class FrozenEnds:
    """The target's embedding and head [V, H], which the drafter shares, and the mask token's id."""

    embedding: Tensor
    embedding_scale: float  # what the target multiplies embeddings by: 1, or Gemma's sqrt(H)
    head: Tensor
    mask_token: int


def gradient_step(
    job: JobSettings,
    drafter: Drafter,
    forward: Callable[..., Tensor],
    ends: FrozenEnds,
    batch: Batch,
    measured: bool,
    stop: bool,
) -> Tensor:
    """Leave the gradient of the weighted loss sum in the drafter's parameters; gives the sums (`sums.vector`).

    Can be run again from the start. `forward` is the drafter's, as its strategy wants it called. Nothing waits
    for the device.
    """
    for parameter in drafter.parameters():
        parameter.grad = None
    assert batch.features is not None
    assert batch.anchors is not None
    device, dtype, block = ends.head.device, ends.head.dtype, job.drafter.block
    blocks = make_blocks(
        batch.tokens,
        batch.loss_mask,
        batch.document,
        batch.position,
        batch.anchors,
        block=block,
        mask_token=ends.mask_token,
        gamma=job.loss.gamma or gamma_for(block),
    )
    features = batch.features.to(dtype)
    tapped = features[..., : drafter.geometry.num_taps * drafter.geometry.hidden]
    x = torch.nn.functional.embedding(sent(blocks.inputs, device), ends.embedding)
    if ends.embedding_scale != 1.0:
        x *= ends.embedding_scale
    mask = DFlashMask(sent(batch.document, device), sent(batch.anchors, device), block)
    hidden = forward(tapped, sent(batch.position, device), x, sent(blocks.position, device), mask, alike=True)

    # Which slots carry loss is known on the CPU: no head for the others, and no wait for the device.
    slots = _Supervised.of(blocks, block, PADDED_TO.get(device.type, 1))
    at, labels = sent(slots.at, device), sent(blocks.labels.flatten()[slots.at], device)
    weight = sent(blocks.weight.flatten()[slots.at], device)
    picked = _Pick.apply(hidden.flatten(0, 1), sent(slots.row, device))
    del x, hidden  # no backward needs them; they would stay for as long as it runs
    loss = head_loss(
        picked,
        ends.head,
        labels,
        weight,
        job.loss,
        block=sent(slots.block, device),
        teacher=_teacher(features, blocks, slots, drafter.geometry.hidden) if job.loss.kind in DISTILLING else None,
    )
    loss.total.backward()

    # What pads the slots stands at slot 0 of the first block, whose column and place no figure reads.
    right = ((loss.predicted == labels) & (weight > 0)).float()
    correct = torch.zeros(blocks.weight.numel(), device=device).index_copy_(0, at, right).view_as(blocks.weight)
    full = sent(blocks.anchors >= 0, device)
    accept = (acceptance_lengths(correct, block) * full).sum()
    by_slot = torch.zeros(3, block, device=device)
    by_slot.index_add_(1, sent(slots.slot, device), torch.stack([loss.losses, right, torch.ones_like(right)]))
    covered = [
        coverage(loss_mask.numpy(), document.numpy(), anchors.numpy(), block)
        for loss_mask, document, anchors in zip(batch.loss_mask, batch.document, batch.anchors, strict=True)
    ]
    counted: list[float] = [
        slots.count,
        int((blocks.anchors >= 0).sum()),
        batch.context_tokens,
        sum(of for of, _ in covered),
        sum(supervised for _, supervised in covered),
        measured,
        stop,
    ]
    return sums.vector([loss.total, loss.weight_sum, right.sum(), accept], counted, by_slot[:, 1:])


@dataclass(frozen=True)
class _Supervised:
    """The slots that carry loss, in block order, on the CPU; int64 [M] each. Any padding comes last."""

    at: Tensor  # index among the R * Q slots
    row: Tensor  # index among those of them that are no anchor's, of which the drafter gives hidden states
    block: Tensor  # number of its block among the R * N blocks
    slot: Tensor  # k, from 1; 0 of padding
    count: int  # without padding

    @classmethod
    def of(cls, blocks: Blocks, block: int, padded_to: int) -> _Supervised:
        """Padding is the first slot of all, an anchor's, which never carries loss: its weight and label are 0. Its row
        is the one behind the last.
        """
        found = blocks.weight.flatten().nonzero().squeeze(-1)
        padding = (0, -len(found) % padded_to)
        at = torch.nn.functional.pad(found, padding)
        row = torch.nn.functional.pad(found - found // block - 1, padding, value=blocks.anchors.numel() * (block - 1))
        return cls(at, row, at // block, at % block, len(found))


class _Pick(torch.autograd.Function):
    """Rows [M, H] of x [P, H]; for one behind the last, P, any. Indexing's own backward sorts the indices, in case one
    comes twice, which here only that one does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.rows = len(x)
        return x[at.clamp(max=len(x) - 1)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        return upstream.new_zeros(ctx.rows + 1, upstream.shape[1]).index_copy_(0, at, upstream)[:-1], None


def _teacher(features: Tensor, blocks: Blocks, slots: _Supervised, hidden: int) -> Tensor:
    """What the target's head read at the position before each label, [M, H]: the last H columns of features."""
    context = features.shape[1]
    anchor = blocks.anchors.flatten()[slots.block]
    row = slots.block // blocks.anchors.shape[1]
    before = row * context + anchor + slots.slot - 1
    return features[..., -hidden:].flatten(0, 1)[sent(before, features.device)]
