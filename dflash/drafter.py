"""The drafter: Qwen3-style layers whose keys and values also come from the target's hidden states.

Section 3 and A.3 of the paper. Tensor names are those of z-lab's released drafters (fc, hidden_norm, norm,
layers.N.*), so a state dict written here is what SGLang and vLLM read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash import fused
from dflash.attention import DFlashMask, attend_dense
from dflash.blocks import behind_anchors
from dflash.geometry import Geometry

__all__ = ["Drafter", "Geometry", "KeyValue"]

# What a step's layers share, made from the row's mask; and one layer's attention with it
# (q [R, heads, Q, d], k and v [R, kv_heads, S + Q, d]) -> [R, heads, Q, d]. Strategies supply the pair.
Prepare = Callable[[DFlashMask], Any]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# One layer's keys and values of some positions, each [R, kv_heads, T, head_dim], normed and rotated.
KeyValue = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Queries from the block; keys and values from context and block through the same projections."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.head_dim = g.head_dim
        self.q_proj = nn.Linear(g.hidden, g.heads * g.head_dim, bias=False)
        self.k_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim, bias=False)
        self.v_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim, bias=False)
        self.o_proj = nn.Linear(g.heads * g.head_dim, g.hidden, bias=False)
        self.q_norm = nn.RMSNorm(g.head_dim, eps=g.norm_eps)
        self.k_norm = nn.RMSNorm(g.head_dim, eps=g.norm_eps)

    def forward(self, x: Tensor, context: KeyValue, turn: Tensor, attend: Attend, seen: Any) -> Tensor:
        """x [R, Q, H]; context: keys and values of S tokens; turn: rotary cos and sin of x, [2, R, Q, head_dim]."""
        k, v = (torch.cat(pair, dim=2) for pair in zip(context, self.keys_values(x, turn), strict=True))
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        return self.o_proj(attend(_rotate(q, turn), k, v, seen).transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor, turn: Tensor) -> KeyValue:
        """Of x [R, L, H], a context's or a block's; turn [2, R, L, head_dim]."""
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return _rotate(k, turn), self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(g.hidden, g.intermediate, bias=False)
        self.up_proj = nn.Linear(g.hidden, g.intermediate, bias=False)
        self.down_proj = nn.Linear(g.intermediate, g.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm block; the context is not normalised again in each layer (A.3)."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(g.hidden, eps=g.norm_eps)
        self.self_attn = Attention(g)
        self.post_attention_layernorm = nn.RMSNorm(g.hidden, eps=g.norm_eps)
        self.mlp = MLP(g)

    def forward(self, x: Tensor, context: KeyValue, turn: Tensor, attend: Attend, seen: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turn, attend, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """All of it but embedding and head, which are the target's and frozen.

    `weights` are every tensor of `geometry.shapes()`, and become the drafter's own: it makes no copy. To train on a GPU
    they must lie as `dflash.weights.draw` and `copied` lay them out. `attend_alike`: attention of a layer whose slots
    at one token have one query (dflash.attention.alike), if there is one that knows how to use it.
    """

    def __init__(
        self,
        geometry: Geometry,
        prepare: Prepare,
        attend: Attend,
        weights: Mapping[str, Tensor],
        attend_alike: Attend | None = None,
    ) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.prepare, self.attend, self.attend_alike = prepare, attend, attend_alike or attend
        with torch.device("meta"):  # or modules would draw weights of their own first
            self.fc = nn.Linear(g.num_taps * g.hidden, g.hidden, bias=False)
            self.hidden_norm = nn.RMSNorm(g.hidden, eps=g.norm_eps)
            self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
            self.norm = nn.RMSNorm(g.hidden, eps=g.norm_eps)
        self.load_state_dict(weights, assign=True)

    def forward(
        self,
        features: Tensor,
        context_position: Tensor,
        x: Tensor,
        block_position: Tensor,
        mask: DFlashMask,
        alike: bool = False,
    ) -> Tensor:
        """Hidden states of every block slot behind an anchor, ready for the target's head.

        features [R, S, taps * H]; context_position [R, S]; x [R, Q, H], the embedded block inputs;
        block_position [R, Q]. Gives [R, N * (B - 1), H]. Each layer has its own window, whatever the mask's is.
        `alike`: past their anchors all blocks hold one token, the mask; it may save work and changes nothing.
        """
        if fused.usable(x):
            from dflash.fused import layer as passes  # here, because it needs Triton

            return passes.forward(self, features, context_position, x, block_position, mask, alike)
        context = self.context_kv(features, context_position)
        hidden = self._layers(x, block_position, context, self.attend, self.seen(mask))
        return behind_anchors(hidden.flatten(0, 1), mask.block).view(len(hidden), -1, hidden.shape[-1])

    def seen(self, mask: DFlashMask) -> dict[int | None, Any]:
        """What layers need of the mask, by their windows."""
        windows = self.geometry.distinct_windows
        return {w: self.prepare(DFlashMask(mask.document, mask.anchors, mask.block, w)) for w in windows}

    def context_kv(self, features: Tensor, position: Tensor) -> list[KeyValue]:
        """Every layer's keys and values of T tokens of context, for `draft`.

        features [R, T, taps * H], position [R, T]. Each depends on its own token alone, so what was made for
        accepted tokens stays, and what was made for rejected ones is cut off.
        """
        context = self.hidden_norm(self.fc(features))
        turn = self._turn(position).to(context.dtype)
        return [layer.self_attn.keys_values(context, turn) for layer in self.layers]

    def draft(self, x: Tensor, position: Tensor, context: Sequence[KeyValue], context_position: Tensor) -> Tensor:
        """Hidden states [R, B, H] of one block a row, as decoding asks for them.

        x [R, B, H], the embedded block inputs; position [R, B]; context: of every layer keys and values
        [R, kv_heads, C, head_dim] of the tokens before the block (`context_kv`), finite everywhere;
        context_position [R, C], -1 where a row is padded, which no slot sees. Dense attention.
        """
        seen = {w: _seen(position, context_position, w) for w in self.geometry.distinct_windows}
        return self._layers(x, position, context, attend_dense, seen)

    def _layers(
        self, x: Tensor, position: Tensor, context: Sequence[KeyValue], attend: Attend, seen: dict[int | None, Any]
    ) -> Tensor:
        """Hidden states of slots x [R, Q, H] at position [R, Q], by each layer's context and window."""
        turn = self._turn(position).to(x.dtype)
        for layer, known, window in zip(self.layers, context, self.geometry.windows, strict=True):
            x = layer(x, known, turn, attend, seen[window])
        return self.norm(x)

    def angles(self, position: Tensor) -> Tensor:
        """Of plain RoPE, float32 [R, L, head_dim / 2], for position [R, L]."""
        d = self.geometry.head_dim
        power = torch.arange(0, d, 2, device=position.device, dtype=torch.float32) / d
        return position[:, :, None].float() * self.geometry.rope_theta**-power

    def _turn(self, position: Tensor) -> Tensor:
        """Rotary cos and sin, float32 [2, R, L, head_dim] (half-split layout, as Qwen3)."""
        angle = self.angles(position)
        angle = torch.cat([angle, angle], dim=-1)
        return torch.stack([angle.cos(), angle.sin()])


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn x [R, heads, L, d] by cos and sin [2, R, L, d]."""
    cos, sin = turn[0][:, None], turn[1][:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _seen(position: Tensor, context_position: Tensor, window: int | None) -> Tensor:
    """Who sees whom in `draft`, boolean [R, 1, B, C + B]: the rule of dflash.attention.mask for one block a row."""
    there = (context_position >= 0)[:, None, :].expand(-1, position.shape[1], -1)
    if window is not None:
        there = there & (position[:, :, None] - context_position[:, None, :] < window)
    own = there.new_ones(*position.shape, position.shape[1])
    return torch.cat([there, own], dim=-1)[:, None]
