"""The elementwise work of a training step in few passes over memory, as Triton kernels for an eager forward.

Around the matrix products of a layer lie norms, rotary turns, SwiGLU and residual sums. Written as modules each
is several passes over tensors of hundreds of megabytes, and each keeps what it read for the backward. Here each
is one pass a direction, and what is cheap to make again is made again. Under torch.compile the plain modules in
dflash.drafter are traced instead, as Inductor fuses them as well; on CPU they run as they are. Both are one
model: tests hold one against the other.

layer.py      the drafter's forward in these terms (read this first)
norm.py       residual sum and RMSNorm
heads.py      queries, keys and values from their projections: norm of each head, rotary turn, place
swiglu.py     SwiGLU
target.py     norms and SwiGLU of a frozen target of transformers
cross_entropy.py   losses, likeliest token and gradient of a chunk of logits

Why not a library: Liger (0.8.5) has norm with residual sum, SwiGLU and cross-entropy, but no norm of heads with rotary
turn and no one buffer of keys; its cross-entropy writes the gradient in the logits' type, which for float32 logits is
twice the memory; and it brings Triton (190 MB) to machines without a GPU. Cut-cross-entropy makes the logits again in
the backward, half as much work once more where the head is a quarter of a step.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

__all__ = ["usable"]

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def usable(x: Tensor) -> bool:
    """Whether these kernels can work on `x` here and now."""
    return x.is_cuda and x.dtype in _TYPES and not torch.compiler.is_compiling() and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
