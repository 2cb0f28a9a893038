"""A frozen target's norms and SwiGLU in single passes.

As transformers writes them, a norm is six passes over the hidden states, most of them in float32, and a SwiGLU two:
together more than a fifth of the time an 8B target takes for its features. Whatever a module is called, it is
replaced only after one of its kind has been seen to compute the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dflash import fused

# Largest difference, as a share of the outputs' root mean square, that rounding explains (float32).
ROUNDING = 1e-4


def use(body: nn.Module) -> None:
    """Replace what can be in a decoder of transformers that stands where it will run.

    On a GPU, and for SwiGLU where Triton is installed. Modules keep their weights, names and places.
    """
    alike: dict[Any, bool] = {}
    for module in list(body.modules()):
        for looks, lean in _LEAN:
            if not looks(module):
                continue
            kind = (type(module), lean)
            if kind not in alike:
                alike[kind] = _computes_the_same(module, lean)
            if alike[kind]:
                module.__class__ = lean
                break


class _Norm(nn.Module):
    """RMSNorm, by torch's own kernel."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class _Swiglu(nn.Module):
    """A gated MLP."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        from dflash.fused.swiglu import swiglu_in_place  # here, because it needs Triton

        out: Tensor = self.down_proj(swiglu_in_place(self.gate_proj(x), self.up_proj(x)))
        return out


def _is_norm(module: nn.Module) -> bool:
    weight, held = getattr(module, "weight", None), [name for name, _ in module.named_parameters()]
    return isinstance(weight, Tensor) and held == ["weight"] and hasattr(module, "variance_epsilon")


def _is_swiglu(module: nn.Module) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    linear = all(type(getattr(module, name, None)) is nn.Linear for name in names)
    return linear and fused.usable(module.down_proj.weight)


_LEAN: tuple[tuple[Callable[[nn.Module], bool], type[nn.Module]], ...] = ((_is_norm, _Norm), (_is_swiglu, _Swiglu))


@torch.no_grad()
def _computes_the_same(module: nn.Module, lean: type[nn.Module]) -> bool:
    """Whether `lean` gives what the module does, for numbers and weights made up, in float32."""
    made = torch.Generator(next(module.parameters()).device).manual_seed(0)
    tried = copy.deepcopy(module).float()
    for parameter in tried.parameters():  # real ones may be zeros or ones, which hide what is done with them
        parameter.normal_(generator=made)
        parameter /= max(1.0, parameter.shape[-1] ** 0.5) if parameter.ndim > 1 else 1.0
    weight = next(tried.parameters())
    x = torch.randn(4, weight.shape[-1], generator=made, device=weight.device)
    try:
        wanted = tried(x)
        tried.__class__ = lean
        found = tried(x)
    except Exception:  # a module that wants other arguments is none of these
        return False
    return bool((found - wanted).abs().max() <= ROUNDING * wanted.square().mean().sqrt())
