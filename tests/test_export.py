"""A drafter's folder: what servers look for in it, and that it comes back as it was saved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_drafter import SHAPE, make

from dflash.export import export_drafter, load_drafter
from dflash.settings import SettingError

CPU = torch.device("cpu")


def test_the_saved_drafter_has_the_names_that_servers_look_for(tmp_path):
    drafter = make(block=8).float()
    export_drafter(drafter, SHAPE, 49, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")),
    }
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(3) for name in layer}
    assert set(tensors) == expected
    assert tensors["fc.weight"].shape == (24, 72)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert config["dflash_config"]["mask_token_id"] == 49


def write(folder, **how):
    """Export a small drafter whose weights bfloat16 holds exactly."""
    drafter = make(**how).bfloat16().float()
    export_drafter(drafter, SHAPE, 49, folder)
    return drafter


@pytest.mark.parametrize(("window", "window_layers"), [(None, None), (6, None), (6, [0, 2])])
def test_a_saved_drafter_comes_back(tmp_path, window, window_layers):
    drafter = write(tmp_path, window=window, window_layers=window_layers)
    again, mask_token, taps = load_drafter(tmp_path, CPU, torch.float32)
    assert again.geometry == drafter.geometry
    assert (mask_token, taps) == (49, [1, 2, 3])
    weights = again.state_dict()
    assert weights.keys() == drafter.state_dict().keys()
    assert all(torch.equal(weights[name], t) for name, t in drafter.state_dict().items())
    assert not any(p.requires_grad for p in again.parameters())


def change(folder, **entries):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return config


def test_older_and_newer_ways_to_write_the_same_are_read(tmp_path):
    want = write(tmp_path).geometry
    special = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    change(tmp_path, rope_theta=...)
    assert load_drafter(tmp_path, CPU, torch.float32)[0].geometry == want
    change(tmp_path, rope_theta=10000.0, rope_parameters=..., block_size=...)
    assert load_drafter(tmp_path, CPU, torch.float32)[0].geometry == want
    del special["block_size"]
    change(tmp_path, dflash_config=special, block_size=4, layer_types=..., is_causal=..., head_dim=6)
    assert load_drafter(tmp_path, CPU, torch.float32)[0].geometry == want


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"dflash_config": ...}, "lacks or garbles 'dflash_config'"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]}, "block_size": ...}, "names no block_size"),
        ({"dflash_config": {"selector_rank": 8}, "block_size": 4}, "selector_rank is of another kind"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "scaled or partial"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": ...}, "scaled or partial"),
        ({"is_causal": True}, "blocks are causal"),
        ({"layer_types": ["full_attention"] * 2}, "each of 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "is_causal": ...}, "blocks are causal"),
        ({"attention_bias": True}, "attention bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"intermediate_size": 33}, r"layers.0.mlp.down_proj.weight is \[24, 32\]|config.json calls for"),
        ({"num_hidden_layers": 4, "layer_types": ...}, "lacks layers.3."),
        ({"num_hidden_layers": 2, "layer_types": ...}, "unknown tensor layers.2"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_in_one_sentence(tmp_path, entries, why):
    write(tmp_path)
    change(tmp_path, **entries)
    with pytest.raises(SettingError, match=why) as caught:
        load_drafter(tmp_path, CPU, torch.float32)
    assert str(caught.value).startswith("drafter=")
    assert "\n" not in str(caught.value)


def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(SettingError, match=r"readable config\.json"):
        load_drafter(tmp_path / "none", CPU, torch.float32)
    write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["layers.0.self_attn.q_norm.weights"] = weights.pop("layers.0.self_attn.q_norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(SettingError, match=r"lacks layers\.0\.self_attn\.q_norm\.weight \(1 in all\)"):
        load_drafter(tmp_path, CPU, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"PK")
    with pytest.raises(SettingError, match=r"readable model\.safetensors"):
        load_drafter(tmp_path, CPU, torch.float32)
