"""Speculative decoding gives the target's own tokens, whatever the drafter proposes and whoever shares the batch."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dflash import settings
from dflash.attention import attend_dense, visible
from dflash.drafter import Drafter, Geometry
from dflash.settings import SettingError
from dflash.speculate import Response, Speculation, decode
from dflash.weights import draw

VOCAB, HIDDEN, LAYERS, MASK = 24, 32, 4, 23
TAPS = [0, 2]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.5,  # so that what it says depends on the whole context, and does not settle into a loop
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SLIDING = {"sliding_window": 5}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**SIZES, **GROUPED),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, **GROUPED, tie_word_embeddings=True),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**SIZES),
    "mistral-sliding": lambda: tf.MistralConfig(**SIZES, **GROUPED, **SLIDING),
    "qwen2-sliding": lambda: tf.Qwen2Config(
        **SIZES, num_key_value_heads=2, **SLIDING, use_sliding_window=True, max_window_layers=2
    ),
    "gemma2-sliding": lambda: tf.Gemma2Config(**SIZES, **GROUPED, **SLIDING, query_pre_attn_scalar=8),
    "gemma3-sliding": lambda: tf.Gemma3TextConfig(**SIZES, **GROUPED, **SLIDING, query_pre_attn_scalar=8),
}


def make(name="llama", dtype=torch.float32, seed=0, **changes):
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.update(changes)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if not config.tie_word_embeddings:  # a head of full size would make the target certain of everything
        model.get_output_embeddings().weight.data /= 4
    return model


def prompts(*lengths, seed=1):
    """Random prompts; each begins with a token of its own, which tells rows apart."""
    generator = torch.Generator().manual_seed(seed)
    return [[at, *torch.randint(0, VOCAB - 1, (n - 1,), generator=generator).tolist()] for at, n in enumerate(lengths)]


def greedy(model, prompt, max_new, stops=()):
    """The target's own greedy tokens, every one from a fresh reading of the whole text."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new:
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Oracle:
    """A drafter that knows what the target will say and is right in as many slots as told.

    Its keys are the features that it was given, so at every call it can compare its context with what the target
    says of the same text read at once.
    """

    def __init__(self, model, prompts, answers, right, check=True):
        self.texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        self.prompts, self.right, self.check = prompts, itertools.cycle(right), check
        self.slots = torch.linalg.pinv(model.get_output_embeddings().weight.detach())  # [H, V]
        with torch.no_grad():
            self.features = [self._features(model, text) for text in self.texts]
        self.accepted = []

    @staticmethod
    def _features(model, text):
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)

    def context_kv(self, features, position):
        return [(features[:, None], position[:, None, :, None].to(features.dtype))]

    def draft(self, x, position, context, context_position):
        (keys, places), block = context[0], x.shape[1]
        proposed = []
        for row in range(len(x)):
            length = int(position[row, 0])
            assert position[row].tolist() == list(range(length, length + block))
            assert context_position[row].tolist() == [t if t < length else -1 for t in range(keys.shape[2])]
            assert places[row, 0, :length, 0].tolist() == list(range(length))
            first = keys[row, 0, 0]
            mine = (
                0
                if len(self.texts) == 1
                else min(range(len(self.texts)), key=lambda at: float((self.features[at][0] - first).abs().max()))
            )
            text = self.texts[mine]
            if self.check:
                torch.testing.assert_close(keys[row, 0, :length], self.features[mine][:length], rtol=1e-3, atol=1e-4)
            truth = [*text[length + 1 :], *[0] * block][: block - 1]
            right = next(self.right)
            self.accepted.append(min(right, block - 1))
            proposed.append([t if k < right else (t + 1) % VOCAB for k, t in enumerate(truth)])
        chosen = self.slots[:, torch.tensor(proposed)].movedim(0, -1)  # [R, B - 1, H]
        return torch.cat([torch.zeros_like(x[:, :1]), chosen], dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_the_targets_own_at_every_acceptance_count(name):
    model, asked, block = make(name), prompts(3, 9, 1, 6), 5
    answers = [greedy(model, prompt, 40) for prompt in asked]
    assert len(set(map(tuple, answers))) == len(asked)
    oracle = Oracle(model, asked, answers, [0, 4, 1, 3, 2, 4, 4, 0, 2, 1, 3])
    got = decode(model, asked, Speculation(oracle, block, MASK, TAPS), max_new=40, stops=())
    assert [response.tokens for response in got] == answers
    assert set(oracle.accepted) == set(range(block))
    for response in got:
        assert 1 + sum(response.rounds) == 40
        assert all(1 <= tokens <= block for tokens in response.rounds)
    assert sum(len(response.rounds) for response in got) == len(oracle.accepted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_plain_decoding_equals_that_of_transformers(attention):
    model = make()
    model.set_attn_implementation(attention)
    asked = prompts(2, 7, 4)
    got = decode(model, asked, None, max_new=12, stops=())
    for prompt, response in zip(asked, got, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert response.tokens == want[0, len(prompt) :].tolist()
        assert response.rounds == [1] * 11


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    right=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    block=st.integers(2, 6),
    max_new=st.integers(1, 10),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=4),
)
@hypothesis_settings(max_examples=15, deadline=None)
def test_stop_tokens_and_the_length_limit_hold_exactly(lengths, right, block, max_new, stops):
    model, asked = make(), prompts(*lengths)
    answers = [greedy(model, prompt, max_new + block) for prompt in asked]
    oracle = Oracle(model, asked, answers, right, check=False)
    got = decode(model, asked, Speculation(oracle, block, MASK, TAPS), max_new=max_new, stops=stops)
    for answer, response in zip(answers, got, strict=True):
        stop = next((at + 1 for at, token in enumerate(answer) if token in stops), max_new)
        assert response.tokens == answer[: min(stop, max_new)]
        assert sum(response.rounds) == len(response.tokens) - 1


SHAPE = SimpleNamespace(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    taps=TAPS,
)


def drafter_for(model, block, window=None, layers=2, seed=2):
    wish = settings.Drafter(layers=layers, block=block, window=window)
    geometry = Geometry.settle(wish, SHAPE)
    drafter = Drafter(geometry, visible, attend_dense, draw(geometry, seed, dtype=model.dtype))
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10  # so that what it drafts depends on the whole context
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("window", [None, 6])
def test_a_response_and_its_rounds_do_not_depend_on_who_shares_the_batch(window):
    model = make(dtype=torch.float64, vocab_size=6, seed=1)
    asked = [[t % 6 for t in prompt] for prompt in prompts(3, 12, 1, 8, 5, 2, 7, 4)]
    speculation = Speculation(drafter_for(model, 4, window), 4, 5, TAPS)
    together = decode(model, asked, speculation, max_new=30, stops={0})
    alone = [decode(model, [prompt], speculation, max_new=30, stops={0})[0] for prompt in asked]
    assert together == alone
    assert len({tokens for response in alone for tokens in response.rounds}) > 1
    assert len({len(response.tokens) for response in alone}) > 1  # some left the batch before others


def test_each_round_drafts_what_the_drafter_says_of_the_whole_text_so_far():
    """The kept context equals one built anew: the training layout on the accepted tokens."""
    model, block = make(dtype=torch.float64, vocab_size=6), 4
    drafter = drafter_for(model, block)
    prompt = [1, 2, 3]
    got = decode(model, [prompt], Speculation(drafter, block, 5, TAPS), max_new=24, stops=())
    text, rounds = prompt + got[0].tokens, []
    read = len(prompt)
    while read + 1 < len(text):
        features = Oracle._features(model, text[:read])[None]
        position = torch.arange(read)[None]
        inputs = torch.tensor([[text[read], 5, 5, 5]])
        hidden = drafter.draft(
            model.get_input_embeddings()(inputs),
            torch.arange(read, read + block)[None],
            drafter.context_kv(features, position),
            position,
        )
        drafts = (hidden @ model.get_output_embeddings().weight.T).argmax(-1)[0, 1:].tolist()
        right = next((k for k, t in enumerate(drafts) if [t] != text[read + 1 + k :][:1]), block - 1)
        rounds.append(min(right + 1, len(text) - read - 1))
        read += right + 1
    assert got[0].rounds == rounds


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_responses_follow_the_targets_distribution(temperature):
    """All 64 continuations of three tokens, 2500 draws each with a right, a wrong and no drafter."""
    vocab, draws = 4, 2500
    model = make(vocab_size=vocab, initializer_range=0.1)
    prompt = [1, 0]
    chances = {}
    for text in itertools.product(range(vocab), repeat=3):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, 1:4]
        odds = (logits / temperature).softmax(-1)
        chances[text] = math.prod(float(odds[at, token]) for at, token in enumerate(text))
    likeliest = greedy(model, prompt, 6)
    unlikely = [(t + 1) % vocab for t in likeliest]
    for seed, answer in enumerate((likeliest, unlikely, None)):
        speculation = None
        if answer:
            oracle = Oracle(model, [prompt], [answer], [2], check=False)
            speculation = Speculation(oracle, 3, 3, TAPS)
        got = decode(
            model,
            [prompt] * draws,
            speculation,
            max_new=3,
            stops=(),
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed),
        )
        counts = Counter(tuple(response.tokens) for response in got)
        chi2 = sum((counts[text] - draws * p) ** 2 / (draws * p) for text, p in chances.items())
        assert chi2 < 63 + 4 * math.sqrt(2 * 63)  # four standard deviations of 63 degrees of freedom
    assert len(counts) > 30


def test_a_response_of_one_token_has_no_round():
    model = make()
    speculation = Speculation(drafter_for(model, 4), 4, MASK, TAPS)
    first = greedy(model, [1], 1)
    assert decode(model, [[1]], speculation, max_new=1, stops=()) == [Response(first, [])]
    assert decode(model, [[1]], speculation, max_new=9, stops=set(first)) == [Response(first, [])]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            lambda: tf.Qwen3Config(**SIZES, **GROUPED, layer_types=["chunked_attention"] * LAYERS),
            "full or sliding attention in every layer, not chunked_attention",
        ),
        (lambda: tf.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1), "rotary positions"),
    ],
)
def test_a_target_that_cannot_be_cropped_or_placed_is_refused(config, text):
    model = tf.AutoModelForCausalLM.from_config(config())
    with pytest.raises(SettingError, match=text):
        decode(model, [[1]], None, max_new=2, stops=())
