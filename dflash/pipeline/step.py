"""One batch through one drafter: blocks, forward, loss, backward, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.attention import DFlashMask
from dflash.blocks import Blocks, acceptance_lengths, coverage, gamma_for, make_blocks
from dflash.drafter import Drafter
from dflash.loss import head_loss
from dflash.pipeline import sums
from dflash.pipeline.batch import Batch
from dflash.settings import DISTILLING, JobSettings


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
    fresh: bool,
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
    x = torch.nn.functional.embedding(_to(blocks.inputs, device), ends.embedding) * ends.embedding_scale
    mask = DFlashMask(_to(batch.document, device), _to(batch.anchors, device), block)
    hidden = forward(tapped, _to(batch.position, device), x, _to(blocks.position, device), mask)

    # Which slots carry loss is known on the CPU: no head for the others, and no wait for the device.
    slots = _Supervised.of(blocks, block)
    at, labels = _to(slots.at, device), _to(blocks.labels.flatten()[slots.at], device)
    loss = head_loss(
        hidden.flatten(0, 1)[at],
        ends.head,
        labels,
        _to(blocks.weight.flatten()[slots.at], device),
        job.loss,
        block=_to(slots.block, device),
        teacher=_teacher(features, blocks, slots, drafter.geometry.hidden) if job.loss.kind in DISTILLING else None,
    )
    loss.total.backward()

    right = (loss.predicted == labels).float()
    correct = torch.zeros(blocks.weight.numel(), device=device).index_copy_(0, at, right).view_as(blocks.weight)
    full = _to(blocks.anchors >= 0, device)
    accept = (acceptance_lengths(correct, block) * full).sum()
    by_slot = torch.zeros(3, block, device=device)
    by_slot.index_add_(1, _to(slots.slot, device), torch.stack([loss.losses, right, torch.ones_like(right)]))
    covered = [
        coverage(loss_mask.numpy(), document.numpy(), anchors.numpy(), block)
        for loss_mask, document, anchors in zip(batch.loss_mask, batch.document, batch.anchors, strict=True)
    ]
    counted: list[float] = [
        len(slots.at),
        int((blocks.anchors >= 0).sum()),
        batch.context_tokens,
        sum(of for of, _ in covered),
        sum(supervised for _, supervised in covered),
        fresh,
        stop,
    ]
    return sums.vector([loss.total, loss.weight_sum, right.sum(), accept], counted, by_slot[:, 1:])


@dataclass(frozen=True)
class _Supervised:
    """The M slots that carry loss, in block order, on the CPU; int64 [M] each."""

    at: Tensor  # index among the R * Q slots
    block: Tensor  # number of its block among the R * N blocks
    slot: Tensor  # k, from 1

    @classmethod
    def of(cls, blocks: Blocks, block: int) -> _Supervised:
        at = blocks.weight.flatten().nonzero().squeeze(-1)
        return cls(at, at // block, at % block)


def _teacher(features: Tensor, blocks: Blocks, slots: _Supervised, hidden: int) -> Tensor:
    """What the target's head read at the position before each label, [M, H]: the last H columns of features."""
    context = features.shape[1]
    anchor = blocks.anchors.flatten()[slots.block]
    row = slots.block // blocks.anchors.shape[1]
    before = row * context + anchor + slots.slot - 1
    return features[..., -hidden:].flatten(0, 1)[_to(before, features.device)]


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without waiting for what the device is at."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
