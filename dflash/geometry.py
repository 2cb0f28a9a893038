"""Every size of a drafter: settled from settings and target, written to and read from a released config.json.

The file is that of z-lab's drafters, which SGLang and vLLM read too (docs/TRAINER.md, "Checkpoint"). No torch
here, so a command tells of a folder that cannot serve before it loads anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dflash import settings
from dflash.settings import JobSettings, SettingError

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class Sizes(Protocol):
    """What a drafter takes from its target; dflash.target.Target has it."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    taps: list[int]
    num_layers: int
    vocab_size: int
    max_positions: int
    embedding_scale: float


@dataclass(frozen=True)
class Geometry:
    """Every size of a drafter. `windows` has an entry a layer: tokens of context it looks back over, None: all."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    num_taps: int
    block: int
    windows: tuple[int | None, ...]
    rope_theta: float
    norm_eps: float

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The one window of the layers that have any."""
        return next((w for w in self.windows if w is not None), None)

    @property
    def distinct_windows(self) -> list[int | None]:
        """Each window once, in the order of the layers: a mask is made for each."""
        return list(dict.fromkeys(self.windows))

    @classmethod
    def settle(cls, wish: settings.Drafter, target: Sizes) -> Geometry:
        """Fill in what the settings leave open, from `wish.init`'s drafter if it names one, else from the target.

        Raises SettingError where settings, target and that drafter cannot agree; the block alone may differ.
        """
        if wish.hidden not in (None, target.hidden_size):
            raise SettingError(
                "drafter.hidden",
                wish.hidden,
                f"must equal the target's hidden size {target.hidden_size}, whose embedding and head it shares",
            )
        if wish.init is not None:
            return _settle_released(wish, target, Released.read(wish.init))
        heads = wish.heads or target.num_attention_heads
        kv_heads = wish.kv_heads or target.num_key_value_heads
        if heads % kv_heads and wish.heads is None:
            raise SettingError(
                "drafter.kv_heads", kv_heads, f"must divide drafter.heads={heads}, the target's; set both"
            )
        if heads % kv_heads:
            whose = "" if wish.kv_heads else ", the target's; set both"
            raise SettingError("drafter.heads", heads, f"must be a multiple of drafter.kv_heads={kv_heads}{whose}")
        chosen = range(wish.layers) if wish.window_layers is None else wish.window_layers
        return cls(
            hidden=target.hidden_size,
            intermediate=wish.intermediate or target.intermediate_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=wish.head_dim or target.head_dim,
            num_taps=len(target.taps),
            block=wish.block,
            windows=tuple(wish.window if layer in chosen else None for layer in range(wish.layers)),
            rope_theta=target.rope_theta,
            norm_eps=target.rms_norm_eps,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, as z-lab names them: 3, and 11 a layer."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (wide, self.hidden),
            "self_attn.k_proj": (narrow, self.hidden),
            "self_attn.v_proj": (narrow, self.hidden),
            "self_attn.o_proj": (self.hidden, wide),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (self.hidden, self.num_taps * self.hidden),
            "hidden_norm.weight": (self.hidden,),
        }
        for number in range(self.layers):
            found |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        return found | {"norm.weight": (self.hidden,)}


@dataclass(frozen=True)
class Released:
    """What the config.json of a drafter in z-lab's format says."""

    folder: Path
    geometry: Geometry
    mask_token: int
    taps: list[int]

    @classmethod
    def read(cls, folder: str | Path, setting: str = "drafter.init") -> Released:
        """Read `folder`/config.json; raises SettingError, naming `setting`, when this trainer has no such drafter."""
        folder = Path(folder)
        config = read_config(folder, setting)
        try:
            return cls(folder, *_from_config(config))
        except _Unfit as why:
            raise SettingError(setting, folder, f"must hold a DFlash drafter in z-lab's format; {why}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingError(
                setting, folder, f"must hold a DFlash drafter in z-lab's format; {CONFIG_FILE} lacks or garbles {error}"
            ) from None


def read_config(folder: Path, setting: str) -> dict[str, Any]:
    """What `folder`/config.json holds; raises SettingError, naming `setting`, when it is not there or no JSON."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise SettingError(setting, folder, f"must hold a readable {CONFIG_FILE} ({error})") from None
    if not isinstance(config, dict):
        raise SettingError(setting, folder, f"{CONFIG_FILE} must hold one JSON object")
    return config


def to_config(geometry: Geometry, target: Sizes, mask_token: int) -> dict[str, Any]:
    """The config.json of a drafter; what both older and newer readers look for is written in both their places."""
    g = geometry
    special: dict[str, Any] = {
        "mask_token_id": mask_token,
        "target_layer_ids": list(target.taps),
        "block_size": g.block,
    }
    if target.embedding_scale != 1:
        special["input_embedding_scale"] = target.embedding_scale
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": g.block,
        "dflash_config": special,
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


def starting_taps(job: JobSettings) -> list[int] | None:
    """The taps that a job asks for: its own, else those of the drafters it starts from, else None (the default)."""
    if job.target.taps is not None:
        return job.target.taps
    starts = [variant.drafter.init for variant in job.variants().values() if variant.drafter.init is not None]
    return Released.read(starts[0]).taps if starts else None


def starting_mask_token(wish: settings.Drafter) -> int | None:
    """The mask token that a drafter asks for: its own, else that of the drafter it starts from, else None."""
    if wish.mask_token is not None or wish.init is None:
        return wish.mask_token
    return Released.read(wish.init).mask_token


def _settle_released(wish: settings.Drafter, target: Sizes, released: Released) -> Geometry:
    g = released.geometry
    if g.hidden != target.hidden_size:
        raise SettingError(
            "drafter.init", wish.init, f"has hidden size {g.hidden}, the target has {target.hidden_size}"
        )
    if released.taps != list(target.taps):
        raise SettingError("target.taps", target.taps, f"must be {released.taps}, the taps of drafter.init={wish.init}")
    sliding = [layer for layer, window in enumerate(g.windows) if window is not None]
    for name, have in {
        "layers": g.layers,
        "intermediate": g.intermediate,
        "heads": g.heads,
        "kv_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "window": g.window,
        "window_layers": sliding,
    }.items():
        wished = getattr(wish, name)
        if wished not in (None, have):
            raise SettingError(f"drafter.{name}", wished, f"must be {have}, as in drafter.init={wish.init}")
    if g.window is not None and g.window < wish.block:
        raise SettingError("drafter.block", wish.block, f"must not exceed {g.window}, the window of the drafter.init")
    return replace(g, block=wish.block)


class _Unfit(Exception):
    """Why a config.json describes no drafter of this trainer."""


def _from_config(config: Mapping[str, Any]) -> tuple[Geometry, int, list[int]]:
    special = config["dflash_config"]
    # Newer releases keep the block size in dflash_config, older ones beside it.
    block = special.get("block_size", config.get("block_size"))
    if block is None:
        raise _Unfit("it names no block_size")
    known = {"mask_token_id", "target_layer_ids", "block_size", "causal", "input_embedding_scale"}
    if foreign := sorted(special.keys() - known):
        raise _Unfit(f"dflash_config.{foreign[0]} is of another kind of drafter")
    _plain(config)
    layers, taps = config["num_hidden_layers"], [int(tap) for tap in special["target_layer_ids"]]
    types = config.get("layer_types") or ["full_attention"] * layers
    heads = config["num_attention_heads"]
    geometry = Geometry(
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=int(heads),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        num_taps=len(taps),
        block=int(block),
        windows=_windows(types, layers, config.get("sliding_window")),
        rope_theta=_rope_theta(config),
        norm_eps=float(config["rms_norm_eps"]),
    )
    if any(window is not None for window in geometry.windows):
        # Without a word on it the inference codes read a sliding layer as causal inside the block.
        causal = config.get("is_causal", special.get("causal", True))
    else:
        causal = config.get("is_causal") or special.get("causal") or False
    if causal:
        raise _Unfit("its blocks are causal, here every slot of a block sees every other")
    return geometry, int(special["mask_token_id"]), taps


def _plain(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise _Unfit(f"hidden_act is {config['hidden_act']}, only silu is known")
    if config.get("attention_bias"):
        raise _Unfit("it has an attention bias")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise _Unfit(f"its rotary positions are scaled or partial ({kind}), only plain ones are known")


def _windows(types: Sequence[str], layers: int, window: int | None) -> tuple[int | None, ...]:
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise _Unfit(f"layer_types must name full_attention or sliding_attention for each of {layers} layers")
    if "sliding_attention" in types and not window:
        raise _Unfit("it has sliding layers and no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Where transformers 5 keeps the base of rotary positions, else where versions before kept it."""
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config["rope_theta"])
