"""The format of vllm-project/speculators, from z-lab's: another config.json, the same tensors.

As of speculators 0.9 (`convert/dflash/converter.py`, `models/dflash/config.py` there): a drafter with the whole
vocabulary is stored without embedding and head, which its loader takes from the verifier that the configuration
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Entries of z-lab's file that say nothing about the transformer layers.
_BESIDE_LAYERS = {"architectures", "block_size", "dflash_config", "num_target_layers"}


def speculators_config(config: Mapping[str, Any], verifier: str, architectures: list[str]) -> dict[str, Any]:
    """The config.json that speculators reads, of a drafter with z-lab's `config`.

    `verifier` is the name or folder of the target, `architectures` its class in transformers. A tap that z-lab
    counts l is l + 1 there, as the embedding is counted (vllm #42704, TorchSpec #87: bitten by the difference).
    """
    special = config["dflash_config"]
    block = special["block_size"]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                # Of the block's slots the first is the token that the target has chosen already.
                {"proposal_type": "greedy", "speculative_tokens": block - 1, "verifier_accept_k": 1}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "block_size": block,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in special["target_layer_ids"]],
        "mask_token_id": special["mask_token_id"],
        "draft_vocab_size": config["vocab_size"],
        "sliding_window_non_causal": config["sliding_window"] is not None,
        "sample_from_anchor": False,
        "transformer_layer_config": {key: value for key, value in config.items() if key not in _BESIDE_LAYERS},
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
    }
