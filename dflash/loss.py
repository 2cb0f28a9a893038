"""Decayed cross-entropy over the frozen head, without ever holding a whole logits tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _HeadCrossEntropy(torch.autograd.Function):
    """sum_i w_i * CE(head @ h_i, label_i), with the gradient of h formed while the logits are at hand.

    The head is frozen, so backward needs d loss / d h alone; forming it in the forward saves recomputing the
    head's matrix product, for M x H floats kept until backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor, chunk: int) -> Any:
        gradient = torch.empty_like(hidden)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        predicted = torch.empty_like(labels)
        for start in range(0, len(hidden), chunk):
            at = slice(start, start + chunk)
            logits = (hidden[at] @ head.T).float()
            predicted[at] = logits.argmax(-1)
            log_norm = logits.logsumexp(-1, keepdim=True)
            label = labels[at, None]
            losses[at] = (log_norm - logits.gather(-1, label)).squeeze(-1)
            probability = logits.sub_(log_norm).exp_()
            probability.scatter_add_(-1, label, torch.full_like(log_norm, -1.0))
            probability.mul_(weight[at, None])
            gradient[at] = probability.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(predicted, losses)
        return (losses * weight).sum(), losses, predicted

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


def head_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy of M slots against a frozen head.

    `hidden` [M, H], `head` [V, H], `labels` int64 [M], `weight` float32 [M]; `chunk` slots share one logits
    tensor. Gives (weighted sum, a scalar that carries the gradient of `hidden`; cross-entropy [M] float32;
    predicted token [M]). The sum is not normalised: drafters add up sums and weights before they divide, so
    that averaging equals one drafter on the joint batch (Eq. 4 over all of it).
    """
    return _HeadCrossEntropy.apply(hidden, head, labels, weight, chunk)
