"""Losses over the frozen head, without ever holding a whole logits tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash import fused
from dflash.settings import DISTILLING, Loss


class SlotLosses(NamedTuple):
    """What `head_loss` gives for M supervised slots."""

    total: Tensor  # weighted sum of the losses, 0-d float32; carries the gradient of `hidden`
    weight_sum: Tensor  # sum of the weights, 0-d float32
    losses: Tensor  # each slot's own loss before weighting, float32 [M]
    predicted: Tensor  # the drafter's likeliest token, int64 [M]


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weight: Tensor,
    loss: Loss,
    *,
    block: Tensor,
    teacher: Tensor | None = None,
) -> SlotLosses:
    """Weighted loss of M supervised slots against a frozen head; `loss.kind` says which (docs/TRAINER.md, "Losses").

    `hidden` [M, H], `head` [V, H], `labels` int64 [M], `weight` float32 [M], `block` int64 [M]: the block of each
    slot, equal for neighbours of one block, whose slots come in rising order. `teacher` [M, H]: for kl and tv, the
    target's last hidden state, after its final norm, at the position before each label. At most `loss.chunk` slots
    share one logits tensor. Nothing waits for the device.

    Neither sum is divided by the other: drafters add up both before they divide, so that averaging equals one
    drafter on the joint batch (arXiv 2602.06036, Eq. 4, over all of it).
    """
    assert (teacher is not None) == (loss.kind in DISTILLING), loss.kind
    return SlotLosses(*_HeadLoss.apply(hidden, head, labels, weight, loss, block, teacher))


class _HeadLoss(torch.autograd.Function):
    """The gradient of `hidden` is formed while the logits are at hand.

    The head is frozen, so backward needs that gradient alone; forming it in the forward saves recomputing the
    head's matrix product, for M x H numbers kept until backward. Rows are weighted last, because D-PACE knows the
    weights only when it has seen the whole block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weight: Tensor,
        loss: Loss,
        block: Tensor,
        teacher: Tensor | None,
    ) -> Any:
        gradient = torch.empty_like(hidden)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        predicted = torch.empty_like(labels)
        in_one_pass = teacher is None and fused.usable(hidden)
        unscaled = torch.empty(2, len(hidden), device=hidden.device) if in_one_pass else None
        for start in range(0, len(hidden), loss.chunk):
            at = slice(start, start + loss.chunk)
            if unscaled is not None:
                slope = _exponentials(hidden[at], head, labels[at], losses[at], predicted[at], unscaled[:, at])
            else:
                logits = _logits(hidden[at], head)
                predicted[at] = logits.argmax(-1)
                log_q = logits.log_softmax(-1)
                del logits
                if teacher is None:
                    losses[at], slope = _cross_entropy(log_q, labels[at])
                else:
                    log_p = _logits(teacher[at], head).log_softmax(-1)
                    losses[at], slope = _TOWARDS[loss.kind](log_q, log_p)
                    del log_p
                del log_q
            torch.mm(slope.to(head.dtype), head, out=gradient[at])
            del slope  # before the next chunk's logits are made
        if loss.kind == "dpace":
            weight = _dpace_weights(losses.neg().exp(), weight > 0, block, loss.alpha)
        ctx.save_for_backward(gradient, weight, *(() if unscaled is None else (head, labels, unscaled)))
        total, weight_sum = (losses * weight).sum(), weight.sum()
        ctx.mark_non_differentiable(weight_sum, losses, predicted)
        return total, weight_sum, losses, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:
        gradient, weight, *rest = ctx.saved_tensors
        weight = weight * upstream[0]
        if rest:
            head, labels, unscaled = rest
            weighted = _completed(gradient, head, labels, unscaled, weight)
        else:
            weighted = torch.mul(gradient, weight[:, None], out=torch.empty_like(gradient))
        return weighted, None, None, None, None, None, None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """float32 [M, V], rounded to bfloat16 on the way only where the device's product cannot give float32."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return (hidden @ head.T).float()


# On a GPU cross-entropy reads the logits once; what has to be divided by their sum is one of the two below.


def _exponentials(
    hidden: Tensor, head: Tensor, labels: Tensor, losses: Tensor, predicted: Tensor, unscaled: Tensor
) -> Tensor:
    """Fills the last three; gives exponentials [M, V] in the head's type.

    In that type are the logits too, as servers have them, but for the labels': half the memory to write and to read
    of float32 ones. Of a bfloat16 logit of 20 the rounding is 0.06 at most, which leaves 0.2 to 1 % in the gradient
    (docs/LOG.md).
    """
    from dflash.fused import cross_entropy as passes  # here, because it needs Triton

    logits = hidden @ head.T
    out = torch.empty_like(logits)
    rights = passes.label_logits(hidden, head, labels)
    passes.cross_entropy(logits, rights, labels, losses, predicted, out, passes.Unscaled(*unscaled))
    return out


def _completed(products: Tensor, head: Tensor, labels: Tensor, unscaled: Tensor, weight: Tensor) -> Tensor:
    from dflash.fused import cross_entropy as passes

    return passes.complete(products, head, labels, passes.Unscaled(*unscaled), weight)


# Each of these gives (losses [M], d loss / d logits [M, V]) and uses up its arguments' memory.


def _cross_entropy(log_q: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(label)."""
    label = labels[:, None]
    losses = -log_q.gather(-1, label)
    slope = log_q.exp_().scatter_add_(-1, label, torch.full_like(losses, -1.0))
    return losses.squeeze(-1), slope


def _divergence(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) of the target's p and the drafter's q."""
    p = log_p.exp()
    losses = log_p.sub_(log_q).mul_(p).sum(-1)
    return losses, log_q.exp_().sub_(p)


def _total_variation(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Half the sum of |p - q|: the probability that speculative sampling rejects the drafter's token."""
    q = log_q.exp_()
    difference = q - log_p.exp_()
    losses = difference.abs().sum(-1) * 0.5
    slope = difference.sign_().mul_(0.5).mul_(q)
    return losses, slope.sub_(q.mul_(slope.sum(-1, keepdim=True)))


_TOWARDS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {"kl": _divergence, "tv": _total_variation}


def _dpace_weights(p: Tensor, labelled: Tensor, block: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights float32 [M] of slots whose labels the drafter gives the probability `p` [M].

    With s_j = (1 - alpha) p_j + alpha and P_k = prod_{j <= k} s_j, slot k weighs sum_{j >= k} P_j, over the labelled
    slots of its block (arXiv 2605.18810, Eq. 7 and 8). A slot without label counts as if it were not there.
    """
    reached = _scan(torch.where(labelled, p * (1 - alpha) + alpha, 1.0), block, torch.mul) * labelled
    return _scan(reached.flip(0), block.flip(0), torch.add).flip(0) * labelled


def _scan(values: Tensor, block: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Running product or sum [M] that starts anew with each block.

    In log2(M) rounds, each combining a value with the one twice as far back: no block's place or length has to be
    known on the CPU.
    """
    step = 1
    while step < len(values):
        same = block[step:] == block[:-step]
        later = torch.where(same, combine(values[step:], values[:-step]), values[step:])
        values = torch.cat([values[:step], later])
        step *= 2
    return values
