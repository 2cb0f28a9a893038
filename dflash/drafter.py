"""The drafter: Qwen3-style layers whose keys and values also come from the target's hidden states.

Section 3 and A.3 of the paper. Tensor names are those of z-lab's released drafters (fc, hidden_norm, norm,
layers.N.*), so a state dict written here is what SGLang and vLLM read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash import settings
from dflash.attention import DFlashMask
from dflash.settings import SettingError
from dflash.target import Target

# What a step's layers share, made from the row's mask; and one layer's attention with it
# (q [R, heads, Q, d], k and v [R, kv_heads, S + Q, d]) -> [R, heads, Q, d]. Strategies supply the pair.
Prepare = Callable[[DFlashMask], Any]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Geometry:
    """Every size of a drafter, settled against its target."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    num_taps: int
    block: int
    window: int | None
    rope_theta: float
    norm_eps: float

    @classmethod
    def settle(cls, wish: settings.Drafter, target: Target) -> Geometry:
        """Fill in from the target what the settings leave open; raises SettingError where they cannot agree."""
        if wish.hidden not in (None, target.hidden_size):
            raise SettingError(
                "drafter.hidden",
                wish.hidden,
                f"must equal the target's hidden size {target.hidden_size}, whose embedding and head it shares",
            )
        heads = wish.heads or target.num_attention_heads
        kv_heads = wish.kv_heads or (target.num_key_value_heads if wish.heads is None else heads)
        if heads % kv_heads:
            raise SettingError("drafter.heads", heads, f"must be a multiple of the {kv_heads} key/value heads")
        return cls(
            layers=wish.layers,
            hidden=target.hidden_size,
            intermediate=wish.intermediate or target.intermediate_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=wish.head_dim or target.head_dim,
            num_taps=len(target.taps),
            block=wish.block,
            window=wish.window,
            rope_theta=target.rope_theta,
            norm_eps=target.rms_norm_eps,
        )


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

    def forward(self, x: Tensor, context: Tensor, turn: Tensor, attend: Attend, seen: Any) -> Tensor:
        """x [R, Q, H], context [R, S, H]; turn: rotary cos and sin [2, R, S + Q, head_dim]."""
        rows, queries, _ = x.shape
        both = torch.cat([context, x], dim=1)

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, projected.shape[1], -1, self.head_dim)

        q = self.q_norm(heads(self.q_proj(x))).transpose(1, 2)
        k = self.k_norm(heads(self.k_proj(both))).transpose(1, 2)
        v = heads(self.v_proj(both)).transpose(1, 2)
        out = attend(_rotate(q, turn[:, :, -queries:]), _rotate(k, turn), v, seen)
        return self.o_proj(out.transpose(1, 2).reshape(rows, queries, -1))


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

    def forward(self, x: Tensor, context: Tensor, turn: Tensor, attend: Attend, seen: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turn, attend, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """All of it but embedding and head, which are the target's and frozen."""

    def __init__(self, geometry: Geometry, prepare: Prepare, attend: Attend) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.prepare, self.attend = prepare, attend
        self.fc = nn.Linear(g.num_taps * g.hidden, g.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(g.hidden, eps=g.norm_eps)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
        self.norm = nn.RMSNorm(g.hidden, eps=g.norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
                if name.endswith(("o_proj.weight", "down_proj.weight")):  # keeps the residual's size with depth
                    parameter.data.div_((2 * g.layers) ** 0.5)

    def forward(
        self, features: Tensor, context_position: Tensor, x: Tensor, block_position: Tensor, mask: DFlashMask
    ) -> Tensor:
        """Hidden states of every block slot, ready for the target's head.

        features [R, S, taps * H]; context_position [R, S]; x [R, Q, H], the embedded block inputs;
        block_position [R, Q]. Gives [R, Q, H].
        """
        seen = self.prepare(mask)
        context = self.hidden_norm(self.fc(features))
        turn = self._turn(torch.cat([context_position, block_position], dim=1)).to(x.dtype)
        for layer in self.layers:
            x = layer(x, context, turn, self.attend, seen)
        return self.norm(x)

    def _turn(self, position: Tensor) -> Tensor:
        """Rotary cos and sin, float32 [2, R, L, head_dim], of plain RoPE (half-split layout, as Qwen3)."""
        d = self.geometry.head_dim
        power = torch.arange(0, d, 2, device=position.device, dtype=torch.float32) / d
        angle = position[:, :, None].float() * self.geometry.rope_theta**-power
        angle = torch.cat([angle, angle], dim=-1)
        return torch.stack([angle.cos(), angle.sin()])


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn x [R, heads, L, d] by cos and sin [2, R, L, d]."""
    cos, sin = turn[0][:, None], turn[1][:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
