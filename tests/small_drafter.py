"""A small target's sizes and a drafter for it, in float64, for tests."""

from types import SimpleNamespace

import torch

from dflash import settings
from dflash.attention import attend_dense, visible
from dflash.drafter import Drafter, Geometry
from dflash.weights import draw

SHAPE = SimpleNamespace(
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    taps=[1, 2, 3],
    num_layers=6,
    vocab_size=50,
    max_positions=128,
    embedding_scale=1.0,
    architectures=["LlamaForCausalLM"],
)


def make(block: int = 4, window: int | None = None, window_layers: list[int] | None = None, layers: int = 3) -> Drafter:
    wish = settings.Drafter(layers=layers, block=block, window=window, window_layers=window_layers)
    geometry = Geometry.settle(wish, SHAPE)
    return Drafter(geometry, visible, attend_dense, draw(geometry, 0, dtype=torch.float64))
