"""Attention with every score in memory: the reference, and what compiled attention is on CPU.

PyTorch's flex_attention has no backward on CPU, so there this is the function that gets compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Masked attention, scale d**-0.5, softmax in float32 or wider.

    q [R, Hq, Q, d]; k, v [R, Hkv, K, d] with Hkv dividing Hq; seen boolean [R, 1, Q, K]. Gives [R, Hq, Q, d].
    A query that sees nothing gives exactly zero and passes back a zero gradient. Memory is R*Hq*Q*K scores.
    """
    rows, heads, queries, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    # Query heads that share a key head become more queries of it: no copy of k and v per query head.
    scores = q.reshape(rows, key_heads, -1, width) @ k.transpose(-1, -2) * width**-0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).view(rows, heads, queries, keys)
    # The lowest finite number, not -inf: a row of -inf alone would make NaN, forward and backward.
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1) * seen.any(-1, keepdim=True)
    out = weights.to(v.dtype).view(rows, key_heads, -1, keys) @ v
    return out.view(rows, heads, queries, width)
