"""The drafter's forward with everything between matrix products in single passes.

What `Drafter.forward` says module by module, with the same weights. Two things differ. A layer hands on its
residual stream and what is still to be added to it, so that each sum is made by the norm that reads it. And what
costs one pass to make again is not kept: normed inputs, and SwiGLU's product. A layer thus keeps 13 numbers a
block slot and hidden dimension (for a Qwen3-8B), the modules keep 20. Weights that take one input are one product,
as they lie in memory (dflash.weights.room).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dflash.blocks import behind_anchors
from dflash.fused.heads import Part, turn_heads, turn_heads_backward
from dflash.fused.norm import add_norm, add_norm_backward
from dflash.fused.swiglu import swiglu, swiglu_backward
from dflash.weights import side_by_side

if TYPE_CHECKING:
    from dflash.attention import DFlashMask
    from dflash.drafter import Drafter

# Several weights [out, H] -> the one tensor of all their rows.
Join = Callable[[Sequence[Tensor]], Tensor]


def forward(
    drafter: Drafter,
    features: Tensor,
    context_position: Tensor,
    x: Tensor,
    block_position: Tensor,
    mask: DFlashMask,
    alike: bool = False,
) -> Tensor:
    """As Drafter.forward; ValueError when the drafter's weights do not lie as dflash.weights lays them out."""
    g = drafter.geometry
    (rows, length, _), context_length = x.shape, features.shape[1]
    seen = drafter.seen(mask)
    turn = drafter.angles(torch.cat([context_position, block_position], dim=1))
    turn = torch.stack([turn.cos(), turn.sin()])
    sizes = {"kv_heads": g.kv_heads, "head_dim": g.head_dim}
    context_part = Part(length=context_length, offset=0, heads=0, **sizes)
    block_part = Part(length=length, offset=context_length, heads=g.heads, **sizes)
    attentions = [layer.self_attn for layer in drafter.layers]
    # One product for the keys and values of all layers, since the context is the same for all. Their weights lie with
    # their own layer's queries, so they are joined here.
    _, context = _norm_linear(
        drafter.fc(features).flatten(0, 1),
        None,
        drafter.hidden_norm,
        [projection.weight for a in attentions for projection in (a.k_proj, a.v_proj)],
        torch.cat,
    )
    stream, rest = x.reshape(-1, g.hidden), None
    for layer, own, window in zip(
        drafter.layers, context.split(context_part.width, dim=1), drafter.geometry.windows, strict=True
    ):
        a = layer.self_attn
        weights = [a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]
        attend = drafter.attend
        if rest is None and alike:
            attend = drafter.attend_alike
            # In the first layer a block differs from the next in its anchor alone, so the products are made of
            # the anchors and of one mask token.
            few = torch.cat([stream[:: mask.block], stream[1:2]])
            projected = _Spread.apply(_norm_linear(few, None, layer.input_layernorm, weights)[1], mask.block)
        else:
            stream, projected = _norm_linear(stream, rest, layer.input_layernorm, weights)
        q, k, v = _TurnHeads.apply(
            projected, own, a.q_norm.weight, a.k_norm.weight, turn, a.q_norm.eps, block_part, context_part
        )
        attended = attend(q, k, v, seen[window]).transpose(1, 2).reshape(rows * length, -1)
        if layer is drafter.layers[-1]:  # nobody reads more of an anchor's slot
            stream, attended = (behind_anchors(x, mask.block) for x in (stream, attended))
        rest = a.o_proj(attended)
        stream, gate_up = _norm_linear(
            stream, rest, layer.post_attention_layernorm, [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
        )
        rest = _SwigluLinear.apply(gate_up, layer.mlp.down_proj.weight)
    _, hidden = _norm_linear(stream, rest, drafter.norm, [])
    return hidden.view(rows, -1, g.hidden)


def _norm_linear(
    x: Tensor, delta: Tensor | None, norm: nn.RMSNorm, weights: Sequence[Tensor], join: Join = side_by_side
) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm times each of `weights` [out, H], side by side); the norm itself if there are none."""
    out = _NormLinear.apply(x, delta, norm.weight, norm.eps, join, *weights)
    return (x, out) if delta is None else out


class _NormLinear(Function):
    """Keeps the sum alone and makes the normed tensor again for the weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, scale: Tensor, eps: float, join: Join, *weights: Tensor
    ) -> Any:
        total, y, rstd = add_norm(x, delta, scale, eps)
        ctx.save_for_backward(total, rstd, scale, *weights)
        ctx.set_materialize_grads(False)
        ctx.join = join
        out = y @ join(weights).t() if weights else y
        return out if delta is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        total, rstd, scale, *weights = ctx.saved_tensors
        *beside, d_out = upstream
        assert d_out is not None
        d_out = d_out.contiguous()
        d_y = d_out @ ctx.join(weights) if weights else d_out
        d_x, d_scale, y = add_norm_backward(d_y, beside[0] if beside else None, total, rstd, scale)
        del d_y
        parts = d_out.split([len(w) for w in weights], dim=1) if weights else ()
        return d_x, d_x if beside else None, d_scale, None, None, *(part.t() @ y for part in parts)


class _Spread(Function):
    """Rows of N anchors and one mask token [N + 1, W] -> those of all blocks' slots [N * B, W]."""

    @staticmethod
    def forward(ctx: Any, few: Tensor, block: int) -> Tensor:
        ctx.block = block
        out = few.new_empty(len(few) - 1, block, few.shape[1])
        out[:, 0] = few[:-1]
        out[:, 1:] = few[-1]
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        by_block = upstream.unflatten(0, (-1, ctx.block))
        masks = by_block.sum(0, dtype=torch.float32)[1:].sum(0, keepdim=True)
        return torch.cat([by_block[:, 0], masks.to(upstream.dtype)]), None


class _TurnHeads(Function):
    """Projections of block and context -> q, k, v as attention wants them: [R, heads, tokens, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        block: Tensor,
        context: Tensor,
        q_scale: Tensor,
        k_scale: Tensor,
        turn: Tensor,
        eps: float,
        block_part: Part,
        context_part: Part,
    ) -> Any:
        rows, tokens = turn.shape[1:3]
        q = block.new_empty(rows, block_part.length, block_part.heads, block_part.head_dim)
        k, v = (block.new_empty(rows, tokens, block_part.kv_heads, block_part.head_dim) for _ in range(2))
        for source, part in ((block, block_part), (context, context_part)):
            turn_heads(source, part, (q_scale, k_scale), turn, eps, q, k, v)
        ctx.save_for_backward(block, context, q_scale, k_scale, turn)
        ctx.eps, ctx.parts = eps, (block_part, context_part)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Any:
        block, context, q_scale, k_scale, turn = ctx.saved_tensors
        gradients, scales = [], torch.zeros(2, q_scale.numel(), dtype=torch.float32, device=q_scale.device)
        for source, part in zip((block, context), ctx.parts, strict=True):
            gradient, summed = turn_heads_backward(
                source, part, (q_scale, k_scale), turn, ctx.eps, _dense(d_q), _dense(d_k), _dense(d_v)
            )
            gradients.append(gradient)
            scales += summed
        return *gradients, scales[0].to(q_scale.dtype), scales[1].to(k_scale.dtype), None, None, None, None


class _SwigluLinear(Function):
    """Keeps gate and up and makes their product again for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return swiglu(gate_up) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        gate_up, weight = ctx.saved_tensors
        d_gate_up, product = swiglu_backward(gate_up, d_out @ weight)
        return d_gate_up, d_out.t() @ product


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()
