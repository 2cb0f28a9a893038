"""SwiGLU of a gate and an up projection that lie side by side."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.fused import launch

_BLOCK = 2048


@triton.jit
def _swiglu_forward(gates, ups, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gates + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, d_out, d_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    pair, own = row * 2 * width + at, row * width + at
    gate = tl.load(gate_up + pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pair + width, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(d_out + own, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = upstream * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(d_gate_up + pair, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + pair + width, (upstream * silu).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_out + own, (silu * up).to(d_out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [M, I], of gate_up [M, 2 I], contiguous."""
    width = gate_up.shape[1] // 2
    return _forward(gate_up, gate_up[:, width:], gate_up.new_empty(len(gate_up), width))


def swiglu_in_place(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two contiguous tensors [..., I], in the place of `gate`."""
    _forward(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]), gate)
    return gate


def _forward(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    rows, width = len(gate), up.shape[1]
    if rows:
        with launch.on(gate):
            _swiglu_forward[(rows, triton.cdiv(width, _BLOCK))](gate, up, out, gate.stride(0), width, _BLOCK)
    return out


def swiglu_backward(gate_up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate_up, silu(gate) * up once more); the second takes the place of `d_out`."""
    rows, width = d_out.shape
    d_gate_up = torch.empty_like(gate_up)
    if rows:
        with launch.on(gate_up):
            _swiglu_backward[(rows, triton.cdiv(width, _BLOCK))](gate_up, d_out, d_gate_up, width, _BLOCK)
    return d_gate_up, d_out
