"""A frozen target's norms, rotary turns and SwiGLU in single passes.

As transformers writes them, a norm is six passes over the hidden states, most of them in float32, a rotary turn nine
over queries and keys, a SwiGLU two: together a third of the time that an 8B target takes for its features. Whatever a
module is called, it is replaced only after one of its kind has been seen to compute the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dflash import documents, fused

# Largest difference, as a share of the outputs' root mean square, that rounding explains (float32).
ROUNDING = 1e-4


def use(body: nn.Module) -> None:
    """Replace what can be in a decoder of transformers that stands where it will run.

    All but norms needs a GPU and Triton. Modules keep their weights, names and places.
    """
    alike: dict[Any, bool] = {}
    for module in list(body.modules()):
        for lean in (Norm, Swiglu, Attention):
            if not lean.looks_like(module):
                continue
            kind = (type(module), lean)
            if kind not in alike:
                alike[kind] = _computes_the_same(module, lean)
            if alike[kind]:
                module.__class__ = lean
            break


class Norm(nn.Module):
    """RMSNorm, by torch's own kernel."""

    weight: Tensor
    variance_epsilon: float

    @staticmethod
    def looks_like(module: nn.Module) -> bool:
        held = [name for name, _ in module.named_parameters()]
        return held == ["weight"] and hasattr(module, "variance_epsilon")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class Swiglu(nn.Module):
    """A gated MLP."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    @staticmethod
    def looks_like(module: nn.Module) -> bool:
        return _has_linear(module, "gate_proj", "up_proj", "down_proj") and fused.usable(module.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        from dflash.fused.swiglu import swiglu_in_place  # here, because it needs Triton

        out: Tensor = self.down_proj(swiglu_in_place(self.gate_proj(x), self.up_proj(x)))
        return out


class Attention(nn.Module):
    """Attention of each document by itself; norms of heads, if there are any, and rotary turn are one pass."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    head_dim: int
    scaling: float

    @staticmethod
    def looks_like(module: nn.Module) -> bool:
        attends = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if attends != documents.NAME or not _has_linear(module, "q_proj", "k_proj", "v_proj", "o_proj"):
            return False
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        plain = all(norm is None or hasattr(norm, "variance_epsilon") for norm in norms)
        return plain and fused.usable(module.o_proj.weight)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], use_cache: bool = False, **_: Any
    ) -> Any:
        assert not use_cache
        from dflash.fused.heads import turn_in_place  # here, because it needs Triton

        rows, length, _width = hidden_states.shape
        q, k, v = (
            projection(hidden_states).view(rows, length, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        for x, norm in ((q, getattr(self, "q_norm", None)), (k, getattr(self, "k_norm", None))):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
            turn_in_place(x, scale, eps, *position_embeddings)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _none = documents.attend(self, q, k, v, None, self.scaling)
        return self.o_proj(out.flatten(2)), None


def _has_linear(module: nn.Module, *names: str) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


@torch.no_grad()
def _computes_the_same(module: nn.Module, lean: type[nn.Module]) -> bool:
    """Whether `lean` gives what the module does, for numbers and weights made up, in float32."""
    first = next(module.parameters())
    made = torch.Generator(first.device).manual_seed(0)
    tried = copy.deepcopy(module).float()
    for parameter in tried.parameters():  # real ones may be zeros or ones, which hide what is done with them
        parameter.normal_(generator=made)
        if parameter.ndim > 1:
            parameter /= parameter.shape[-1] ** 0.5
    x = torch.randn(1, 5, first.shape[-1], generator=made, device=first.device)
    more: dict[str, Any] = {}
    if lean is Attention:
        angle = torch.arange(5, device=x.device)[:, None] * torch.rand(
            tried.head_dim // 2, generator=made, device=x.device
        )
        angle = torch.cat([angle, angle], dim=-1)[None]
        more = {"position_embeddings": (angle.cos(), angle.sin()), "attention_mask": None}
    try:
        wanted = _first(tried(x, **more))
        tried.__class__ = lean
        found = _first(tried(x, **more))
    except Exception:  # a module that wants other arguments or holds other shapes is none of these
        return False
    return bool((found - wanted).abs().max() <= ROUNDING * wanted.square().mean().sqrt())


def _first(out: Any) -> Tensor:
    one: Tensor = out[0] if isinstance(out, tuple) else out
    return one
