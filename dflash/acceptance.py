"""Acceptance length: how many tokens a round of real speculative decoding gives (docs/ACCEPTANCE.md).

As z-lab's benchmark counts it: 1 to B tokens a round, the target's own one included; the mean over responses of
each response's mean. The target first answers every prompt by plain decoding. That gives the earlier turns of a
conversation and the responses that speculation must repeat; drafters measured one after another are measured
against the same answers. No speed is measured: what a round costs is a matter of the server that will run it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dflash.attention import attend_dense, visible
from dflash.data import chat
from dflash.data.tokens import check_tokenizer
from dflash.drafter import Drafter
from dflash.regenerate.turns import Messages, turns
from dflash.settings import SettingError
from dflash.speculate import Response, Speculation, check_target, decode
from dflash.target import stop_tokens
from dflash.weights import copied, draw

UNTRAINED = 16  # responses that the untrained drafter is measured on, at most
_RESAMPLES = 2000
# Responses done and to be done in all.
Progress = Callable[[int, int], None]


@dataclass
class Acceptance:
    """What one drafter reached on one set of prompts, and under which conditions. None where nothing was to count."""

    set: str
    n: int  # prompts
    responses: int  # turns answered
    tokens: int  # generated, the first of each response included
    rounds: int
    tau: float | None  # mean over responses of the mean tokens of a response's rounds
    tau_low: float | None  # 95 % interval of tau: bootstrap over prompts; None for a single prompt
    tau_high: float | None
    tau_pooled: float | None  # mean tokens of all rounds; equals 1 + the sum of accept_at
    tau_untrained: float | None  # the same geometry with random weights, on the first responses of the set
    n_untrained: int  # responses that figure comes from
    accept_at: list[float]  # share of rounds that gave slot k's token and one more, from k = 1
    histogram: list[int]  # rounds that gave 1, 2, .. B tokens
    distinct4: float | None  # mean over responses of distinct 4-grams / 4-grams: a loop flatters tau
    identical: float | None  # share of responses equal to plain decoding's, token for token; None when sampled
    temperature: float
    block: int
    max_new: int
    batch: int
    dtype: str
    device: str
    thinking: bool
    seed: int
    seconds: float  # all of the measurement
    per_response: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self, per_response: bool = True) -> dict[str, Any]:
        """Plain values; the response by response figures can be left out."""
        values = dataclasses.asdict(self)
        if not per_response:
            del values["per_response"]
        return values


@dataclass
class _Asked:
    """One turn: the token ids that the target reads, and what it answered by plain decoding."""

    prompt: int  # index in the set
    turn: int
    ids: list[int]
    answer: list[int]


@dataclass
class Reference:
    """What the target says by plain decoding: `batches` of turns decoded together."""

    batches: list[list[_Asked]] = field(default_factory=list)

    @property
    def asked(self) -> list[_Asked]:
        return [turn for batch in self.batches for turn in batch]


@dataclass(frozen=True)
class Conditions:
    """How responses are made."""

    max_new: int
    temperature: float
    batch: int
    seed: int
    thinking: bool = True  # False: a chat template that knows `enable_thinking` is told so


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Messages],
    conditions: Conditions,
    name: str = "",
    progress: Progress | None = None,
) -> Reference:
    """The target's own responses by plain decoding; raises SettingError for a prompt that its template refuses."""
    check_tokenizer(tokenizer)
    due = [_turns(messages, number, name) for number, messages in enumerate(prompts, start=1)]
    total = sum(map(len, due))
    histories: list[Messages] = [[] for _ in prompts]
    stops = stop_tokens(model, tokenizer)
    reference = Reference()
    for turn in range(max(map(len, due), default=0)):
        waiting = [number for number, asks in enumerate(due) if turn < len(asks)]
        for number in waiting:
            histories[number] += due[number][turn]
        for first in range(0, len(waiting), conditions.batch):
            numbers = waiting[first : first + conditions.batch]
            ids = [_ids(tokenizer, histories[number], conditions.thinking, number + 1, name) for number in numbers]
            responses = _decode(model, ids, None, conditions, stops, len(reference.batches))
            reference.batches.append(
                [_Asked(n, turn, i, r.tokens) for n, i, r in zip(numbers, ids, responses, strict=True)]
            )
            for number, response in zip(numbers, responses, strict=True):
                said = response.tokens[:-1] if response.tokens[-1] in stops else response.tokens
                text = tokenizer.decode(said, skip_special_tokens=True)
                histories[number].append({"role": "assistant", "content": text})
            if progress:
                progress(len(reference.asked), total)
    return reference


def measure(
    target_model: Any,
    tokenizer: Any,
    drafter: Drafter,
    mask_token: int,
    taps: Sequence[int],
    prompts: Sequence[Messages],
    *,
    max_new: int,
    temperature: float,
    batch: int,
    seed: int,
    progress: Progress | None = None,
    name: str = "",
    thinking: bool = True,
    reference: Reference | None = None,
    untrained: tuple[float | None, int] | None = None,
) -> Acceptance:
    """Measure a drafter on a set of prompts, `name`, each a list of messages (docs/ACCEPTANCE.md says how).

    `target_model` is the whole causal LM; the drafter may be elsewhere and of another dtype, it is copied to the
    target's. What does not depend on the drafter's weights can be handed in when it is known: `reference`, of
    `answer` under the same conditions, and `untrained`, of `untrained_tau`. Raises SettingError when target,
    drafter and prompts do not fit together.
    """
    began = time.perf_counter()
    conditions = Conditions(max_new, temperature, batch, seed, thinking)
    check(drafter, target_model, mask_token, taps)
    speculation = Speculation(_twin(drafter, target_model), drafter.geometry.block, mask_token, taps)
    if reference is None:
        reference = answer(target_model, tokenizer, prompts, conditions, name, progress)
    if untrained is None:
        untrained = untrained_tau(target_model, tokenizer, drafter, mask_token, taps, reference, conditions)
    stops = stop_tokens(target_model, tokenizer)
    responses: list[Response] = []
    for number, turns_together in enumerate(reference.batches):
        ids = [turn.ids for turn in turns_together]
        responses += _decode(target_model, ids, speculation, conditions, stops, number)
        if progress:
            progress(len(responses), len(reference.asked))
    return _summary(
        responses,
        reference,
        conditions,
        set=name,
        n=len(prompts),
        tau_untrained=untrained[0],
        n_untrained=untrained[1],
        block=drafter.geometry.block,
        dtype=str(target_model.dtype).removeprefix("torch."),
        device=_device_name(target_model.device),
        began=began,
    )


def untrained_tau(
    model: Any,
    tokenizer: Any,
    drafter: Drafter,
    mask_token: int,
    taps: Sequence[int],
    reference: Reference,
    conditions: Conditions,
) -> tuple[float | None, int]:
    """tau of a drafter of the same geometry with random weights, and the number of responses it was measured on."""
    weights = draw(drafter.geometry, conditions.seed, model.device, model.dtype)
    random = Drafter(drafter.geometry, visible, attend_dense, weights).eval().requires_grad_(False)
    speculation = Speculation(random, drafter.geometry.block, mask_token, taps)
    ids = [turn.ids for turn in reference.batches[0][:UNTRAINED]]
    responses = _decode(model, ids, speculation, conditions, stop_tokens(model, tokenizer), 0)
    means = [float(np.mean(response.rounds)) for response in responses if response.rounds]
    return (float(np.mean(means)) if means else None), len(ids)


def table(found: Sequence[Acceptance]) -> str:
    """The figures as text, a line a set, with all conditions."""
    head = [
        "set",
        "prompts",
        "responses",
        "tokens",
        "T",
        "block",
        "tau",
        "95%",
        "untrained",
        "identical",
        "distinct-4",
    ]
    lines = [head]
    for a in found:
        lines.append(
            [
                a.set or "-",
                str(a.n),
                str(a.responses),
                str(a.tokens),
                f"{a.temperature:g}",
                str(a.block),
                _number(a.tau, 2),
                f"{_number(a.tau_low, 2)}..{_number(a.tau_high, 2)}",
                f"{_number(a.tau_untrained, 2)} ({a.n_untrained})",
                _number(a.identical, 3),
                _number(a.distinct4, 2),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.ljust(w) if at == 0 else cell.rjust(w) for at, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    if len(found) > 1 and all(a.tau is not None for a in found):
        text.append(f"mean of the sets' tau: {np.mean([a.tau for a in found]):.2f}")
    for a in found:
        shares = " ".join(f"{share:.2f}" for share in a.accept_at)
        text.append(f"{a.set or '-'}: accepted by slot from 1: {shares}; tokens / rounds {_number(a.tau_pooled, 2)}")
    conditions = {
        f"At most {a.max_new} tokens a response, {a.batch} prompts at a time, {a.dtype} on {a.device}, seed {a.seed}"
        f"{'' if a.thinking else ', no thinking'}; untrained: random weights, on the first responses (their number)."
        for a in found
    }
    return "\n".join(text + sorted(conditions))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _summary(
    responses: list[Response],
    reference: Reference,
    conditions: Conditions,
    *,
    n: int,
    block: int,
    began: float,
    **facts: Any,
) -> Acceptance:
    asked = reference.asked
    rounds = [tokens for response in responses for tokens in response.rounds]
    means = [float(np.mean(response.rounds)) if response.rounds else None for response in responses]
    by_prompt: list[list[float]] = [[] for _ in range(n)]
    for turn, mean in zip(asked, means, strict=True):
        if mean is not None:
            by_prompt[turn.prompt].append(mean)
    low, high = interval(by_prompt, conditions.seed)
    histogram = np.bincount(rounds, minlength=block + 1)[1:]
    greedy = conditions.temperature == 0
    same = [response.tokens == turn.answer for turn, response in zip(asked, responses, strict=True)]
    distinct = [distinct4(response.tokens) for response in responses]
    return Acceptance(
        n=n,
        responses=len(responses),
        tokens=sum(len(response.tokens) for response in responses),
        rounds=len(rounds),
        tau=_mean(means),
        tau_low=low,
        tau_high=high,
        tau_pooled=_mean(rounds),
        accept_at=[float(histogram[k:].sum() / len(rounds)) for k in range(1, block)] if rounds else [],
        histogram=histogram.tolist(),
        distinct4=_mean(distinct),
        identical=_mean(same) if greedy else None,
        temperature=conditions.temperature,
        block=block,
        max_new=conditions.max_new,
        batch=conditions.batch,
        thinking=conditions.thinking,
        seed=conditions.seed,
        per_response=[
            {
                "prompt": turn.prompt,
                "turn": turn.turn,
                "prompt_tokens": len(turn.ids),
                "tokens": len(response.tokens),
                "tau": mean,
                "rounds": response.rounds,
                "distinct4": variety,
                "identical": alike if greedy else None,
            }
            for turn, response, mean, variety, alike in zip(asked, responses, means, distinct, same, strict=True)
        ],
        seconds=time.perf_counter() - began,
        **facts,
    )


def interval(by_prompt: Sequence[Sequence[float]], seed: int = 0) -> tuple[float | None, float | None]:
    """95 % interval of the mean over responses: percentile bootstrap over prompts, whose responses stay together."""
    sums = np.array([sum(values) for values in by_prompt if values])
    counts = np.array([len(values) for values in by_prompt if values])
    if len(sums) < 2:
        return None, None
    drawn = np.random.default_rng(seed).integers(len(sums), size=(_RESAMPLES, len(sums)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)


def distinct4(tokens: Sequence[int]) -> float | None:
    """Share of a response's 4-grams that are distinct: 1 without any repetition; None for fewer than 4 tokens."""
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _decode(
    model: Any,
    ids: Sequence[Sequence[int]],
    speculation: Speculation | None,
    conditions: Conditions,
    stops: set[int],
    number: int,
) -> list[Response]:
    """`decode`, with the chances of batch `number`."""
    generator = None
    if conditions.temperature > 0:
        generator = torch.Generator(model.device)
        generator.manual_seed(conditions.seed * 1_000_003 + number)
    return decode(
        model,
        ids,
        speculation,
        max_new=conditions.max_new,
        stops=stops,
        temperature=conditions.temperature,
        generator=generator,
    )


def _twin(drafter: Drafter, model: Any) -> Drafter:
    """A copy for decoding, on the target's device and of its dtype."""
    weights = copied(drafter.state_dict(), model.device, model.dtype)
    return Drafter(drafter.geometry, visible, attend_dense, weights).eval().requires_grad_(False)


def check(drafter: Drafter, model: Any, mask_token: int, taps: Sequence[int]) -> None:
    """Raise SettingError unless the target can be measured with, and the drafter is of its size."""
    config, hidden = check_target(model), drafter.geometry.hidden
    rows = model.get_input_embeddings().weight.shape[0]
    if hidden != config.hidden_size:
        raise SettingError(
            "drafter.hidden", hidden, f"must equal the target's hidden size {config.hidden_size}: another drafter's?"
        )
    if not 0 <= mask_token < rows:
        raise SettingError("drafter.mask_token", mask_token, f"must be one of the target's {rows} embedding rows")
    if max(taps) >= config.num_hidden_layers:
        raise SettingError("target.taps", list(taps), f"must be below {config.num_hidden_layers}, the target's layers")


def _turns(messages: Messages, number: int, name: str) -> list[Messages]:
    try:
        return turns(messages)
    except chat.BadRow as bad:
        raise SettingError("eval.prompts", name, f"prompt {number} cannot be answered: {bad}") from None


def _ids(tokenizer: Any, messages: Messages, thinking: bool, number: int, name: str) -> list[int]:
    options = {} if thinking else {"enable_thinking": False}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # a template may raise whatever it likes; jinja2 is no dependency of ours
        raise SettingError(
            "eval.prompts", name, f"prompt {number} is refused by the target's chat template ({error})"
        ) from None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise SettingError("eval.prompts", name, f"prompt {number} has no token")
    return list(ids)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
