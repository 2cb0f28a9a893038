"""z-lab's own inference code (package dflash 0.1.0) loads what we export and decodes the same with it."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers as tf

from dflash import settings
from dflash.attention import attend_dense, visible
from dflash.drafter import Drafter, Geometry
from dflash.export import export_drafter, load_drafter
from dflash.speculate import Speculation, decode
from dflash.target import Target
from dflash.weights import draw

OFFICIAL = Path(__file__).parent.parent / ".oracle" / "dflash" / "model.py"
VOCAB, MASK, BLOCK, TAPS = 6, 5, 4, [1, 3]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}

pytestmark = [
    pytest.mark.skipif(
        not OFFICIAL.exists(), reason="needs z-lab's code: pip install --no-deps --target .oracle dflash==0.1.0"
    ),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),  # theirs
]


@pytest.fixture(scope="module")
def official() -> ModuleType:
    """z-lab's model.py under another name than ours."""
    spec = importlib.util.spec_from_file_location("zlab_dflash_model", OFFICIAL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._cuda_time = time.perf_counter  # it synchronises a GPU
    return module


def make(tmp_path: Path, seed: int, window: int | None):
    """A random target and an exported drafter, wild enough to depend on everything they read."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(tf.Qwen3Config(**SIZES)).eval()
    model.get_output_embeddings().weight.data /= 4
    twin = tf.AutoModelForCausalLM.from_config(tf.Qwen3Config(**SIZES))
    target = Target.from_model(twin, TAPS, [torch.device("cpu")])
    wish = settings.Drafter(layers=2, block=BLOCK, window=window, window_layers=[1] if window else None)
    geometry = Geometry.settle(wish, target)
    drafter = Drafter(geometry, visible, attend_dense, draw(geometry, seed))
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10
    export_drafter(drafter, target, MASK, tmp_path / "drafter")
    return model, tmp_path / "drafter"


def load(official: ModuleType, folder: Path):
    """The exported drafter as we and as they load it."""
    drafter, mask_token, taps = load_drafter(folder, torch.device("cpu"), torch.float32)
    theirs = official.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return Speculation(drafter, BLOCK, mask_token, taps), theirs


@pytest.mark.parametrize("window", [None, 8])
def test_official_code_gives_the_same_tokens_and_the_same_acceptance_lengths(official, tmp_path, window):
    seen = set()
    for seed, length in enumerate((1, 20, 7, 12)):
        model, folder = make(tmp_path, seed, window)
        ours, theirs = load(official, folder)
        prompt = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
        # Both asked for more than is compared: towards its end z-lab's code drafts with a shorter block.
        more = 60 + BLOCK
        want = official.dflash_generate(theirs, model, prompt, more, None, return_stats=True)
        (got,) = decode(model, prompt.tolist(), ours, max_new=more, stops=())
        assert got.tokens == want.output_ids[0, length:].tolist()
        assert compared(got.rounds) == compared(want.acceptance_lengths)
        seen |= set(got.rounds)
    assert len(seen) > 2


def compared(rounds: list[int]) -> list[int]:
    """The rounds that begin within the first 60 tokens."""
    return [tokens for at, tokens in enumerate(rounds) if 1 + sum(rounds[:at]) <= 60]


def test_a_round_that_a_stop_token_ends_counts_as_in_the_official_code(official, tmp_path):
    model, folder = make(tmp_path, 1, None)
    ours, theirs = load(official, folder)
    ended = 0
    for stop in range(VOCAB):
        prompt = torch.tensor([[1, 4, stop]])
        want = official.dflash_generate(theirs, model, prompt, 80, [stop], return_stats=True)
        (got,) = decode(model, prompt.tolist(), ours, max_new=80, stops=[stop])
        assert got.tokens == want.output_ids[0, 3:].tolist()
        if got.tokens[-1] == stop:
            assert got.rounds == want.acceptance_lengths
            ended += bool(got.rounds)
    assert ended > 1
