"""A target's attention over packed documents, each by itself and without a mask.

transformers keeps packed documents apart by a mask of S x S entries a row, and with a mask no kernel skips anything:
40,000 tokens of 2,000 each cost twenty times the pairs that see each other, more than all of an 8B target's matrix
products. Here each document is causal by itself, which needs neither mask nor memory for it.

Short documents go in one call of torch's `varlen_attn`, where that has been seen to compute the same: the launches of
all targets that are threads of a process stand in line for Python's lock. Long ones get a call each, for then cuDNN
does it, which is faster: 20 documents of 2,000 take 1.85 ms one by one and 2.29 in one call, and 0.91 against 0.12 ms
of Python; five of 1,000 to 8,000 take 3.2 and 5.5 ms (a layer of Qwen3-8B on an H200). cuDNN plans 35 ms for each
length it has not seen, so lengths are rounded up there.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dflash.devices import sent

NAME = "documents_apart"  # transformers takes a name with "flash" in it for one of its own

# Largest norm of the difference, as a share of the outputs', that rounding to 16 bits explains. Of the numbers tried
# bfloat16 makes 0.003 of it, a window of 128 tokens 0.06, tokens that see the next or another document 0.4.
ROUNDING = 0.01


# Tokens that a token's document has, on average over tokens, up to which documents count as short.
SHORT = 2500
ROUNDED_TO = 256


@dataclass
class _Documents:
    """Where the documents of a batch lie in its rows, which they fill."""

    bounds: list[tuple[int, int, int]]  # row, first token, token behind the last
    ends: Tensor  # int32 [documents + 1], on the CPU: the bounds in the rows laid end to end, from 0
    longest: int
    short: bool
    _there: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, position: Tensor) -> _Documents:
        rows, starts = (position == 0).nonzero(as_tuple=True)
        begins = [*zip(rows.tolist(), starts.tolist(), strict=True), (-1, 0)]
        length = position.shape[1]
        bounds = [(row, start, end if row == after else length) for (row, start), (after, end) in pairwise(begins)]
        ends = [0, *(row * length + end for row, _start, end in bounds)]
        lengths = [end - start for _row, start, end in bounds]
        short = sum(n * n for n in lengths) <= SHORT * sum(lengths)
        return cls(bounds, torch.tensor(ends, dtype=torch.int32), max(lengths), short)

    def ends_on(self, device: torch.device) -> Tensor:
        """The ends on a device, sent there for the first layer that asks."""
        if device not in self._there:
            self._there[device] = sent(self.ends, device)
        return self._there[device]


class _Here(threading.local):
    documents: _Documents | None = None


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
    _here.documents = _Documents.of(position)
    try:
        yield
    finally:
        _here.documents = None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: from [R, heads, S, D] to [R, S, heads, D]; outside `apart` a row is one
    document.
    """
    documents = _here.documents
    if documents is not None and documents.short and _takes(query, key, value):
        together = _together(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        if together is not None:
            return together(query, key, value, documents, scaling), None
    bounds = documents.bounds if documents else [(row, 0, query.shape[2]) for row in range(query.shape[0])]
    return _one_by_one(query, key, value, bounds, scaling, ROUNDED_TO if query.is_cuda else 1), None


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: list[tuple[int, int, int]],
    scaling: float | None,
    rounded_to: int = 1,
) -> Tensor:
    """Documents that do not fill their row as if they were longer: what comes behind them nobody sees."""
    rows, heads, length, _width = query.shape
    out = query.new_empty(rows, length, heads, value.shape[-1])
    for row, start, end in bounds:
        tokens = end - start
        planned = tokens if tokens == length else -(-tokens // rounded_to) * rounded_to
        missing = max(0, start + planned - length)
        q, k, v = (pad(x[row : row + 1, :, start : start + planned], (0, 0, 0, missing)) for x in (query, key, value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        out[row, start:end] = attended[0, :, :tokens].transpose(0, 1)
    return out


def _takes(*tensors: Tensor) -> bool:
    """Whether `varlen_attn` is made for such tensors; what else it asks for, the trial shows."""
    return all(x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.stride(-1) == 1 for x in tensors)


@functools.cache
def _together(device: torch.device, dtype: torch.dtype, *shape: int) -> Callable[..., Tensor] | None:
    """All documents in one call, if for numbers made up it gives what one after another give in float32.

    `shape` is heads, heads of keys, and the widths of queries and values. None too where torch has no `varlen_attn`
    or one that refuses, for then a call each is right all the same.
    """
    heads, grouped, width, width_of_values = shape
    made = torch.Generator(device).manual_seed(0)
    documents = _Documents.of(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((1, 150, 9), (160,))]))
    query, key, value = (
        torch.randn(2, 160, *sizes, generator=made, device=device).to(dtype).transpose(1, 2)
        for sizes in ((heads, width), (grouped, width), (grouped, width_of_values))
    )
    try:
        together = functools.partial(_call, _varlen())
        found = together(query, key, value, documents, None).float()
    except torch.OutOfMemoryError:  # says nothing about the function
        raise
    except Exception:  # an open list: no such function, other arguments, shapes or devices it is not made for
        return None
    wanted = _one_by_one(query.float(), key.float(), value.float(), documents.bounds, None)
    return together if bool((found - wanted).norm() <= ROUNDING * wanted.norm()) else None


def _varlen() -> Callable[..., Tensor]:
    """torch's attention of documents of any length, told that queries may share keys; ImportError without."""
    from torch.nn.attention.varlen import varlen_attn

    told = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 allows it unasked
    return functools.partial(varlen_attn, enable_gqa=True) if told else varlen_attn


def _call(
    varlen: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, documents: _Documents, scale: float | None
) -> Tensor:
    rows, _heads, length, _width = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # views of what projections give
    ends, longest = documents.ends_on(query.device), documents.longest
    # Causal is the window of all before and none behind.
    out = varlen(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))
    return out.unflatten(0, (rows, length))
