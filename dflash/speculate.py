"""Speculative decoding of a batch: the drafter proposes a block, the target reads it in one pass and decides.

Section 3 of the paper (arXiv 2602.06036). Caches never move. A token's keys and values stand in the column of
its position, in the target's cache and in the drafter's context alike, so that a token sees exactly the columns
up to its own, a row is cropped by counting less of it, and what was rejected is overwritten by the next block.
Rows of different length and different acceptance need no alignment; padding of the prompts is written to a last
column that no token ever sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers.cache_utils import Cache, DynamicLayer

from dflash.settings import SettingError
from dflash.target import decoder_layers

KeysValues = tuple[Tensor, Tensor]


class Drafts(Protocol):
    """What decoding asks of a drafter; `dflash.drafter.Drafter` has it."""

    def context_kv(self, features: Tensor, position: Tensor) -> list[KeysValues]:
        """Keys and values of each layer, [R, kv_heads, T, d] each, from features [R, T, taps * H]."""

    def draft(self, x: Tensor, position: Tensor, context: list[KeysValues], context_position: Tensor) -> Tensor:
        """Hidden states [R, B, H] of embedded blocks x; `context_position` [R, C] is -1 where nothing stands."""


@dataclass(frozen=True)
class Speculation:
    """A drafter and how its blocks are made."""

    drafter: Drafts
    block: int  # B: slots a block, the last token's included
    mask_token: int
    taps: Sequence[int]  # 0-based decoder layers of the target


@dataclass
class Response:
    """What the target said: `tokens` with the stop token, if it came to one; `rounds` has the tokens of each round.

    A round gives 1 to B tokens: the accepted ones and the target's own next one. The first token comes with the
    reading of the prompt and belongs to no round. A round that a stop token or the length limit cut short counts
    what was kept of it, as in z-lab's code.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation | None,
    *,
    max_new: int,
    stops: Collection[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Response]:
    """Answer `prompts` (token ids, none empty), all at once.

    `model` is a causal LM of transformers; without a speculation it decodes token by token, the same way. A response
    ends with the first of `stops` or after `max_new` tokens. At temperature 0 every token is the target's likeliest,
    so responses are those of plain decoding wherever arithmetic does not depend on how many tokens are read at a
    time. Else the drafter still proposes its likeliest token, and it is accepted if the target draws the same one:
    what comes out follows the target's distribution exactly. Raises SettingError for a target whose cache cannot
    be cropped.
    """
    block = speculation.block if speculation else 1
    longest = max(map(len, prompts))
    # One column more than the last block of the longest row can reach: the one that padding is written to.
    reader = _Reader(model, longest + max_new + block + 1, speculation)
    device = reader.device
    responses = [Response() for _ in prompts]

    tokens, position = _padded_left(prompts, device)
    with reader.tapping():
        logits = reader.read(tokens, position, used=longest, last_only=True)
        last = _choose(logits[:, -1:], temperature, generator)[:, 0]
        rows = list(range(len(prompts)))  # the response that each row of the batch belongs to
        length = torch.tensor([len(prompt) for prompt in prompts], device=device)  # tokens that the target has read
        going = _extend(responses, rows, last[:, None].tolist(), max_new, stops)
        while any(going):
            if not all(going):
                keep = torch.tensor([at for at, goes in enumerate(going) if goes], device=device)
                rows = [rows[at] for at in keep.tolist()]
                last, length = last[keep], length[keep]
                reader.keep(keep)
            reach = max(len(prompts[row]) + len(responses[row].tokens) - 1 for row in rows)  # the largest length
            position = length[:, None] + torch.arange(block, device=device)
            tokens = last[:, None]
            if speculation:
                tokens = torch.cat([tokens, reader.propose(speculation, last, position, length, reach)], dim=1)
            logits = reader.read(tokens, position, used=reach + block)
            chosen = _choose(logits, temperature, generator)
            accepted = (tokens[:, 1:] == chosen[:, :-1]).cumprod(dim=1).sum(dim=1)
            # What was accepted is what the target chose, and its choice after that is the bonus token.
            last = chosen.gather(1, accepted[:, None])[:, 0]
            length = length + accepted + 1
            told = torch.cat([accepted[:, None], chosen], dim=1).tolist()  # the one wait for the device in a round
            going = _extend(responses, rows, [row[1 : row[0] + 2] for row in told], max_new, stops, rounds=True)
        return responses


def _extend(
    responses: list[Response],
    rows: list[int],
    new: list[list[int]],
    max_new: int,
    stops: Collection[int],
    rounds: bool = False,
) -> list[bool]:
    """Add each row's new tokens to its response, up to a stop token or the limit; whether it goes on."""
    going = []
    for row, tokens in zip(rows, new, strict=True):
        response = responses[row]
        kept = tokens[: max_new - len(response.tokens)]
        stop = next((at for at, token in enumerate(kept) if token in stops), None)
        kept = kept if stop is None else kept[: stop + 1]
        response.tokens += kept
        if rounds:
            response.rounds.append(len(kept))
        going.append(stop is None and len(response.tokens) < max_new)
    return going


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The likeliest token, or one drawn at a temperature above 0: logits [R, T, V] give int64 [R, T]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    chances = (logits.float() / temperature).softmax(dim=-1)
    return torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(logits.shape[:2])


def _padded_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and positions [R, T] with each prompt at the right end; padding is token 0 at a position below 0."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    before = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device) - before[:, None]


class _Columns(DynamicLayer):
    """Keys and values of one layer, [R, heads, capacity, d]; new ones go to the columns that `place` names."""

    is_initialized: bool

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self.place = place

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        if not self.is_initialized:
            # Zeros, since a hidden column has weight 0 and 0 times what lies in fresh memory may be NaN.
            self.keys = key_states.new_zeros(*key_states.shape[:2], self.place.capacity, key_states.shape[3])
            self.values = value_states.new_zeros(*value_states.shape[:2], self.place.capacity, value_states.shape[3])
            self.is_initialized = True
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept.scatter_(2, self.place.column[:, None, :, None].to(new.device).expand(new.shape), new)
        return self.so_far(self.place.used)

    def so_far(self, used: int) -> KeysValues:
        return self.keys[:, :, :used], self.values[:, :, :used]

    def keep(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]


@dataclass
class _Place:
    """Where the tokens of the current pass stand."""

    capacity: int
    column: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [R, T]
    used: int = 0  # columns that any row has written to, the current pass included


class _Reader:
    """The target at work on one batch, with its cache and the drafter's context."""

    def __init__(self, model: Any, capacity: int, speculation: Speculation | None) -> None:
        self.model, self.config = model, check_target(model)
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        self.speculation = speculation
        self.place = _Place(capacity)
        self.cache = Cache(layers=[_Columns(self.place) for _ in range(self.config.num_hidden_layers)])
        # transformers renamed the argument (5.24).
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.context: list[_Columns] = []
        self.tapped: dict[int, Tensor] = {}

    @contextmanager
    def tapping(self) -> Iterator[None]:
        """Keep the taps' outputs of every pass, as training does: a tap is a decoder layer's output."""
        _, layers = decoder_layers(self.model.get_decoder(), self.config.num_hidden_layers)
        handles = []
        for tap in self.speculation.taps if self.speculation else ():

            def keep(module: nn.Module, args: Any, output: Any, tap: int = tap) -> None:
                self.tapped[tap] = output[0] if isinstance(output, tuple) else output

            handles.append(layers[tap].register_forward_hook(keep))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self, tokens: Tensor, position: Tensor, used: int, last_only: bool = False) -> Tensor:
        """Logits [R, T, V] (or [R, 1, V]) of the target after tokens [R, T], which enter cache and context."""
        self.place.column = torch.where(position < 0, self.place.capacity - 1, position)
        self.place.used = used
        position = position.clamp(min=0)
        output = self.model(
            input_ids=tokens,
            position_ids=position,
            attention_mask=self._masks(position, used),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self.cache_name: self.cache},
        )
        if self.speculation:
            features = torch.cat([self.tapped[tap].to(self.device) for tap in self.speculation.taps], dim=-1)
            layers = self.speculation.drafter.context_kv(features, position)
            self.context = self.context or [_Columns(self.place) for _ in layers]
            for columns, (keys, values) in zip(self.context, layers, strict=True):
                columns.update(keys, values)
        return output.logits

    def propose(self, speculation: Speculation, last: Tensor, position: Tensor, length: Tensor, reach: int) -> Tensor:
        """The drafter's likeliest tokens [R, B - 1] after `last`; it sees the `length` tokens before, of each row."""
        blocks = torch.full_like(position, speculation.mask_token)
        blocks[:, 0] = last
        column = torch.arange(reach, device=self.device)
        context_position = torch.where(column < length[:, None], column, -1)
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        # As in training: Gemma's embedding multiplies by a factor of its own.
        x = embedding(blocks, ends[0].weight) * getattr(ends[0], "scalar_embed_scale", 1.0)
        context = [columns.so_far(reach) for columns in self.context]
        hidden = speculation.drafter.draft(x, position, context, context_position)
        return linear(hidden[:, 1:], ends[1].weight).argmax(dim=-1)

    def keep(self, rows: Tensor) -> None:
        for columns in (*self.cache.layers, *self.context):
            columns.keep(rows)

    def _masks(self, position: Tensor, used: int) -> Any:
        """The attention mask [R, 1, T, used] as transformers takes it ready-made: one, or one for each kind of layer.

        Added to the scores, not boolean: an eager implementation would add a boolean one as 0 and 1
        (speculators #691).
        """
        column = torch.arange(used, device=self.device)
        seen = column <= position[:, :, None]
        window = getattr(self.config, "sliding_window", None)
        near = seen & (column > position[:, :, None] - window) if window else seen

        def added(visible: Tensor) -> Tensor:
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
            return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]

        kinds = getattr(self.config, "layer_types", None)
        if not kinds:
            return added(near)
        return {kind: added(near if kind == "sliding_attention" else seen) for kind in set(kinds)}


def check_target(model: Any) -> Any:
    """The text configuration of a causal LM; raises SettingError unless `decode` can run it."""
    config = model.config.get_text_config()
    name = model.config.name_or_path or type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(config, "attention_chunk_size", None):
        kind = ", ".join(sorted(kinds)) or "chunked_attention"
        raise SettingError("target.model", name, f"must have full or sliding attention in every layer, not {kind}")
    if not getattr(config, "rope_parameters", None):
        raise SettingError("target.model", name, "must have rotary positions")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise SettingError(
            "target.model", name, f"must be loaded with attention sdpa or eager, not {config._attn_implementation}"
        )
    return config
