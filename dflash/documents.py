"""A target's attention over packed documents, one after another and without a mask.

transformers keeps packed documents apart by a mask of S x S entries a row, and with a mask no kernel skips anything:
40,000 tokens of 2,000 each cost twenty times the pairs that see each other, more than all of an 8B target's matrix
products. Here each document is a causal call of its own, which needs neither mask nor memory for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "documents_apart"  # transformers takes a name with "flash" in it for one of its own


class _Here(threading.local):
    bounds: list[tuple[int, int, int]] | None = None  # row, first token, token behind the last


_here = _Here()


def use(body: Any) -> None:
    """Make a decoder of transformers attend so, where that is what its own attention computes: the plain causal one
    in every layer. Others keep theirs.
    """
    from transformers import AttentionInterface

    config = body.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = kinds == {"full_attention"} and getattr(config, "attn_logit_softcapping", None) is None
    windowed = getattr(config, "sliding_window", None) is not None and not getattr(config, "layer_types", None)
    if config._attn_implementation == "sdpa" and plain and not windowed:
        AttentionInterface.register(NAME, attend)
        body.set_attn_implementation(NAME)


@contextmanager
def apart(position: Tensor) -> Iterator[None]:
    """While the calling thread runs a decoder on rows with these positions [R, S], which restart in each document.

    Read here and now, so they should lie on the CPU: on a GPU this would wait for all it has to do.
    """
    rows, starts = (position == 0).nonzero(as_tuple=True)
    begins = [*zip(rows.tolist(), starts.tolist(), strict=True), (-1, 0)]
    _here.bounds = [
        (row, start, end if row == after else position.shape[1]) for (row, start), (after, end) in pairwise(begins)
    ]
    try:
        yield
    finally:
        _here.bounds = None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: from [R, heads, S, D] to [R, S, heads, D]."""
    rows, heads, length, _width = query.shape
    bounds = _here.bounds or [(row, 0, length) for row in range(rows)]
    out = query.new_empty(rows, length, heads, value.shape[-1])
    for row, start, end in bounds:
        q, k, v = (x[row : row + 1, :, start:end] for x in (query, key, value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        out[row, start:end] = attended[0].transpose(0, 1)
    return out, None
