"""A trained drafter as a folder that z-lab's code, SGLang and vLLM load (docs/TRAINER.md, "Checkpoint")."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash.drafter import Drafter
from dflash.target import Target


def export_drafter(drafter: Drafter, target: Target, mask_token: int, folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16; no embedding, no head: they are the target's)."""
    g = drafter.geometry
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": g.block,
        # Newer releases read the block size here, older ones above.
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": list(target.taps),
            "block_size": g.block,
        },
        "num_target_layers": target.num_layers,
        "num_hidden_layers": g.layers,
        "hidden_size": g.hidden,
        "intermediate_size": g.intermediate,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": g.norm_eps,
        "attention_bias": False,
        "rope_theta": g.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": g.rope_theta},
        "max_position_embeddings": target.max_positions,
        "layer_types": ["sliding_attention" if g.window else "full_attention"] * g.layers,
        "sliding_window": g.window,
        "use_sliding_window": g.window is not None,
        "is_causal": False,  # inside a block every slot sees every other, also under a window
        "max_window_layers": g.layers,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
