"""The target in this process, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dflash.data.chat import BadRow, Conversation
from dflash.regenerate.generate import Model, Sampling, draws, generate
from dflash.regenerate.turns import Answered, Messages, turns

_WINDOW = 4  # batches that are sorted by length together, and written together
_MOST = 2048  # rows of a batch; with more, a small model gains nothing on a large GPU
_SHARE = 0.5  # of the free memory that keys and values may take


class LocalEngine:
    """Answers `batch` conversations at a time; None: as many as memory holds.

    `fit` is the longest conversation kept, in tokens; None: any. The n-th responses of a window of conversations are
    made together, sorted by the length of what comes before them. `thinking=False` tells templates that know
    `enable_thinking`.
    """

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        *,
        batch: int | None = None,
        fit: int | None = None,
        seed: int = 0,
        thinking: bool = True,
    ) -> None:
        self.model, self.sampling, self.fit, self.seed = model, sampling, fit, seed
        self.template = {} if thinking else {"enable_thinking": False}
        self.room = _cache_tokens(model)
        self.batch = batch or _MOST
        if self.room:
            self.batch = max(1, min(self.batch, self.room // (sampling.max_new + 256)))
        elif not batch:
            self.batch = 16

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Answered]:
        """The conversations with responses, in the order given, a window at a time."""
        size = self.batch * _WINDOW
        for first in range(0, len(conversations), size):
            yield from self._window(conversations[first : first + size])

    def _window(self, conversations: Sequence[Conversation]) -> list[Answered]:
        answered = [Answered(conversation.line) for conversation in conversations]
        waiting: list[tuple[Answered, list[Messages]]] = []
        for one, conversation in zip(answered, conversations, strict=True):
            try:
                waiting.append((one, turns(conversation.messages)))
            except BadRow as bad:
                one.left_out = bad.reason
        turn = 0
        while waiting:
            for one, said in waiting:
                one.messages += said[turn]
            self._respond([one for one, _ in waiting], turn)
            turn += 1
            waiting = [(one, said) for one, said in waiting if len(said) > turn and not one.left_out]
        for one in answered:
            if self.fit and not one.left_out and len(self._tokens(one.messages)) > self.fit:
                one.left_out = f"longer than {self.fit} tokens"
        return answered

    def _respond(self, answered: list[Answered], turn: int) -> None:
        """Add the next response to each of these."""
        prompts = []
        for one in answered:
            try:
                tokens = self._tokens(one.messages, add_generation_prompt=True, **self.template)
            except Exception:  # a template may raise whatever it likes; jinja2 is no dependency of ours
                one.left_out = "the chat template or the tokenizer refuses it"
                continue
            if self.fit and len(tokens) >= self.fit:
                one.left_out = f"longer than {self.fit} tokens"
            elif len(tokens) + self.sampling.max_new > self.model.longest:
                one.left_out = f"leaves no room for a response in the target's {self.model.longest} positions"
            else:
                prompts.append((one, tokens))
        prompts.sort(key=lambda entry: len(entry[1]))
        while prompts:
            fitting = self.room // (len(prompts[-1][1]) + self.sampling.max_new) if self.room else self.batch
            number = max(1, min(fitting, self.batch, len(prompts)))
            self._batch(prompts[-number:], turn)
            del prompts[-number:]

    def _batch(self, prompts: list[tuple[Answered, list[int]]], turn: int) -> None:
        try:
            chance = np.stack([draws(self.seed, one.line, turn, self.sampling.max_new) for one, _ in prompts])
            responses = generate(self.model, [tokens for _, tokens in prompts], self.sampling, chance)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise
            responses = None
        if responses is None:  # outside of the handler, which keeps the failed batch's tensors alive
            middle = len(prompts) // 2
            self._batch(prompts[:middle], turn)
            self._batch(prompts[middle:], turn)
            return
        for (one, _), response in zip(prompts, responses, strict=True):
            cut = response[-1] not in self.model.stops
            text = self.model.tokenizer.decode(response if cut else response[:-1], skip_special_tokens=True)
            if cut:
                text = text.rstrip("\ufffd")  # a character of several tokens, cut in the middle
            one.messages.append({"role": "assistant", "content": text} | ({"cut": True} if cut else {}))
            one.tokens += len(response)

    def _tokens(self, messages: Messages, **options: Any) -> list[int]:
        text = self.model.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self.model.tokenizer(text, add_special_tokens=False)["input_ids"]


def _cache_tokens(model: Model) -> int | None:
    """Tokens whose keys and values fit beside the model; None where free memory is not known."""
    if model.lm.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(model.lm.device)
    return int(free * _SHARE) // model.cache_bytes()
