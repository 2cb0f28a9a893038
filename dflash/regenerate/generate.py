"""Plain generation with the target itself, made for throughput: many prompts at once, and those that ended leave.

Prompts are padded on the left and hidden by the attention mask, so that any causal LM and any cache of
transformers will do. Whether responses have ended is looked at every few tokens only: looking is what makes a GPU
wait for the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from dflash.settings import SettingError, Target
from dflash.target import load_tokenizer, pretrained, stop_tokens

_LOOK = 8  # tokens between two looks at what has ended
_FULL = 0.75  # the batch is made smaller once so few of its rows go on


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else drawn from the `top_p` most likely mass."""

    max_new: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass
class Model:
    """A causal LM of transformers with its tokenizer; `stops` are the tokens that end a response."""

    lm: Any
    tokenizer: Any
    stops: list[int]

    @classmethod
    def load(cls, model: str, models_dir: str, device: torch.device) -> Model:
        """Load all of a target: float32 on CPU, bfloat16 on a GPU; raises SettingError."""
        target = Target(model=model, models_dir=models_dir)
        return cls.of(pretrained(target, device).to(device), load_tokenizer(target))

    @classmethod
    def of(cls, lm: Any, tokenizer: Any) -> Model:
        if not tokenizer.chat_template:
            raise SettingError("--target", tokenizer.name_or_path, "its tokenizer must have a chat template")
        return cls(lm.eval(), tokenizer, sorted(stop_tokens(lm, tokenizer)))

    @property
    def longest(self) -> int:
        """Tokens that the model has positions for."""
        return getattr(self.lm.config.get_text_config(), "max_position_embeddings", None) or 1 << 40

    def cache_bytes(self) -> int:
        """Bytes of keys and values that one token leaves in the cache, at most."""
        config = self.lm.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * width * self.lm.dtype.itemsize


def draws(seed: int, line: int, turn: int, number: int) -> np.ndarray:
    """`number` uniform numbers, float64: what chance has in store for one response, whatever is generated beside it."""
    return np.random.default_rng([seed, line, turn]).random(number)


@torch.inference_mode()
def generate(model: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, chance: np.ndarray) -> list[list[int]]:
    """Token ids of each response, its stop token included when it came to one within `max_new` tokens.

    `chance` [R, max_new] decides what is drawn, a number a token; at temperature 0 it is not looked at.
    """
    device = model.lm.device
    tokens, mask = _padded(prompts, sampling.max_new, device)
    width = tokens.shape[1]
    position = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    cache = _growing_cache(model.lm.config)
    forward = _forward(model.lm)
    stops = torch.tensor(model.stops, device=device)
    lots = torch.from_numpy(chance).to(device, torch.float32) if sampling.temperature > 0 else None
    made = torch.zeros(len(prompts), sampling.max_new, dtype=torch.long, device=device)
    rows = torch.arange(len(prompts), device=device)  # the response that each row of the batch belongs to
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(sampling.max_new):
        logits = forward(tokens, mask[:, : width + step], position, cache)
        token = logits.argmax(-1) if lots is None else _draw(logits, sampling, lots[rows, step])
        made[rows, step] = token
        ended |= (token[:, None] == stops).any(1)
        tokens, position = token[:, None], position[:, -1:] + 1
        if step % _LOOK == _LOOK - 1:
            going = (~ended).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) <= _FULL * len(rows):
                rows, ended, tokens, position, mask = (x[going] for x in (rows, ended, tokens, position, mask))
                cache.batch_select_indices(going)
    return [_up_to_stop(response, model.stops) for response in made[:, : step + 1].tolist()]


def _padded(prompts: Sequence[Sequence[int]], room: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [R, W] with each prompt at the right end, and the mask [R, W + room] that hides what is before it."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    before = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    mask = torch.arange(width + room, device=device) >= before[:, None]
    return tokens, mask.long()


def _forward(lm: Any) -> Any:
    """A call of `lm` that gives the last position's logits [R, V]; the names of its arguments depend on the model."""
    known = inspect.signature(lm.forward).parameters
    cache_name = "cache" if "cache" in known else "past_key_values"  # renamed by transformers 5.24
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def forward(tokens: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        output = lm(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **{cache_name: cache},
            **last_only,
        )
        return output.logits[:, -1]

    return forward


def _draw(logits: Tensor, sampling: Sampling, lot: Tensor) -> Tensor:
    """The token at which the cumulated chance passes `lot` [R], likeliest first: logits [R, V] give int64 [R]."""
    chances, order = (logits.float() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    passed = chances.cumsum(-1)
    # A token belongs to the nucleus if what is likelier than it falls short of top_p.
    nucleus = torch.where(passed - chances < sampling.top_p, chances, 0).cumsum(-1)
    at = (nucleus < lot[:, None] * nucleus[:, -1:]).sum(-1, keepdim=True)
    return order.gather(-1, at)[:, 0]


def _up_to_stop(response: list[int], stops: list[int]) -> list[int]:
    end = next((at for at, token in enumerate(response) if token in stops), len(response) - 1)
    return response[: end + 1]


class _Growing(DynamicLayer):
    """Keys and values of one layer [R, heads, length, d] in memory that grows by steps, not with every token."""

    step = 64

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room: list[Tensor] = [key_states[:, :, :0], value_states[:, :, :0]]
            self.length = 0
        end = self.length + key_states.shape[2]
        for at, new in enumerate((key_states, value_states)):
            if end > self.room[at].shape[2]:
                rows, heads, _, width = new.shape
                wider = new.new_empty(rows, heads, -(-end // self.step) * self.step, width)
                wider[:, :, : self.length] = self.room[at][:, :, : self.length]
                self.room[at] = wider
            self.room[at][:, :, self.length : end] = new
        self.length = end
        return self._show()

    def batch_select_indices(self, indices: Tensor) -> None:
        self.room = [room[indices] for room in self.room]
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[:, :, : self.length] for room in self.room)
        return self.keys, self.values


def _growing_cache(config: Any) -> DynamicCache:
    """The cache that transformers makes for this model, its full-attention layers replaced by `_Growing`."""
    cache = DynamicCache(config=config)
    cache.layers = [_Growing() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
