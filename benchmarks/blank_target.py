"""A target's folder without weights, for `target.made_up=true`: Qwen3's sizes, the small target's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parent.parent / "tests" / "target" / "qwen3-small"  # of 4,096 tokens

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
TINY = QWEN3_8B | {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}


def write(folder: Path, config: dict[str, Any]) -> None:
    """Make the folder, or what is missing of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER.iterdir():
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
