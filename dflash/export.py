"""A trained drafter as a folder that z-lab's code, SGLang and vLLM load (docs/TRAINER.md, "Checkpoint")."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash.attention import attend_dense, visible
from dflash.drafter import Drafter
from dflash.geometry import CONFIG_FILE, WEIGHTS_FILE, Geometry, Released
from dflash.settings import SettingError
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
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in g.windows],
        "sliding_window": g.window,
        "use_sliding_window": g.window is not None,
        "is_causal": False,  # inside a block every slot sees every other, also under a window
        "max_window_layers": g.layers,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_drafter(
    folder: Path, device: torch.device, dtype: torch.dtype, setting: str = "drafter"
) -> tuple[Drafter, int, list[int]]:
    """A drafter in z-lab's format, for decoding (dense attention); with its mask token and its taps.

    Raises SettingError, naming `setting`, when the folder is damaged or holds another kind of drafter.
    """
    released = Released.read(folder, setting)
    drafter = Drafter(released.geometry, visible, attend_dense).to(device=device, dtype=dtype)
    drafter.load_state_dict(read_weights(folder, released.geometry, setting))
    return drafter.eval().requires_grad_(False), released.mask_token, released.taps


def read_weights(folder: Path | str, geometry: Geometry, setting: str) -> dict[str, torch.Tensor]:
    """The weights of a folder in z-lab's format, on the CPU as they were saved.

    Raises SettingError, naming `setting`, unless exactly the tensors of `geometry` are there: servers ignore a
    name that they do not know, and a drafter with random weights in its place only drafts badly.
    """
    path, wanted = Path(folder) / WEIGHTS_FILE, geometry.shapes()
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for wrong, what in (
                (sorted(wanted.keys() - found.keys()), "lacks"),
                (sorted(found.keys() - wanted.keys()), "has an unknown tensor"),
            ):
                if wrong:
                    raise SettingError(setting, folder, f"{WEIGHTS_FILE} {what} {wrong[0]} ({len(wrong)} in all)")
            for name, shape in wanted.items():
                if found[name] != shape:
                    raise SettingError(
                        setting, folder, f"{name} is {list(found[name])}, {CONFIG_FILE} calls for {list(shape)}"
                    )
            return {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise SettingError(setting, folder, f"must hold a readable {WEIGHTS_FILE} ({error})") from None
