"""A drafter's folder: what servers look for in it, and that it comes back as it was saved."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_drafter import SHAPE, make

from dflash import checkpoint
from dflash.__main__ import main
from dflash.export import export_drafter, load_drafter
from dflash.geometry import to_config
from dflash.settings import SettingError

CPU = torch.device("cpu")
OFFICIAL = Path(__file__).parent.parent / ".oracle" / "dflash" / "model.py"


def test_the_saved_drafter_has_the_names_that_servers_look_for(tmp_path):
    """58 tensors for 5 layers: SGLang ignores a name it does not know, and drafts badly without a word."""
    export_drafter(make(block=8, layers=5).float(), SHAPE, 49, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")),
    }
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(5) for name in layer}
    assert set(tensors) == expected
    assert len(tensors) == 58
    assert tensors["fc.weight"].shape == (24, 72)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert config["dflash_config"]["mask_token_id"] == 49
    assert "auto_map" not in config  # SGLang would ask for remote code
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


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


@pytest.mark.skipif(
    not OFFICIAL.exists(), reason="needs z-lab's code: pip install --no-deps --target .oracle dflash==0.1.0"
)
@pytest.mark.parametrize(("window", "window_layers"), [(None, None), (8, None), (8, [0, 2])])
@pytest.mark.parametrize("block", [8, 32])
def test_official_code_computes_the_same_hidden_states(tmp_path, block, window, window_layers):
    """With a window no smaller than the block, as settings demand."""
    window = window and max(window, block)
    write(tmp_path, block=block, window=window, window_layers=window_layers)
    spec = importlib.util.spec_from_file_location("zlab_dflash_model", OFFICIAL)
    official = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(official)
    theirs = official.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours, mask_token, taps = load_drafter(tmp_path, CPU, torch.float32)
    assert (theirs.block_size, theirs.mask_token_id, theirs.target_layer_ids) == (block, mask_token, taps)
    torch.manual_seed(3)
    context = 50
    features, x = torch.randn(1, context, 72), torch.randn(1, block, 24)
    position = torch.arange(context + block)[None]
    with torch.no_grad():
        want = theirs(position_ids=position, noise_embedding=x, target_hidden=features)
        known = ours.context_kv(features, position[:, :context])
        got = ours.draft(x, position[:, context:], known, position[:, :context])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_target_that_scales_its_embedding_is_told_to_the_reader(tmp_path):
    export_drafter(make().float(), SimpleNamespace(**vars(SHAPE) | {"embedding_scale": 5.0}), 49, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dflash_config"]["input_embedding_scale"] == 5.0
    load_drafter(tmp_path, CPU, torch.float32)


FACTS = {
    "target": "maker/model",
    "data": "chats.jsonl",
    "documents": 1200,
    "steps": 300,
    "loss": 2.34567,
    "acceptance": [
        {
            "set": "humaneval",
            "n": 164,
            "temperature": 0.0,
            "block": 4,
            "max_new": 256,
            "dtype": "float32",
            "tau": 2.345,
            "tau_low": 2.2,
            "tau_high": 2.5,
            "tau_untrained": 1.004,
            "identical": 1.0,
            "distinct4": None,
        }
    ],
}


def test_the_card_tells_what_was_trained_and_measured(tmp_path):
    export_drafter(make(window=6, window_layers=[1]).float(), SHAPE, 49, tmp_path, FACTS)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\n")
    assert "base_model: maker/model" in card
    for line in (
        "# DFlash drafter for maker/model",
        "| block size | 4 (the last token and 3 drafted ones) |",
        "| taps | outputs of the target's decoder layers 1, 2, 3, counted from 0 |",
        "| window | 6 tokens, in layers 1 |",
        "| mask token | id 49 of the target's embedding |",
        "| data | chats.jsonl |",
        "| documents | 1,200 |",
        "| steps | 300 |",
        "| loss (mean of the last 10 steps) | 2.346 |",
        "| humaneval | 164 | 0 | 4 | 256 | float32 | 2.35 | 2.20 to 2.50 | 1.00 | 1.00 | - |",
    ):
        assert line in card.split("\n")
    assert "neither embedding nor head" in card


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    export_drafter(make().float(), SHAPE, 49, tmp_path, {"target": "/secret/place/model", "init": "/secret/other"})
    card = (tmp_path / "README.md").read_text()
    assert "secret" not in card
    assert "drafter for model" in card
    assert "Not measured." in card


def export(*words):
    return main(["export", *map(str, words)])


def test_a_trained_run_is_exported_whole(tmp_path, capfd):
    drafter = make().bfloat16().float()
    export_drafter(drafter, SHAPE, 49, tmp_path / "run" / "drafter", FACTS)
    assert export("--run", tmp_path / "run", "--to", tmp_path / "out") == 0
    assert "36 tensors" in capfd.readouterr().out
    for name in ("config.json", "facts.json", "README.md", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "run" / "drafter" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "facts.json",
        "model.safetensors",
    ]


def test_a_variant_of_a_fanout_is_exported_by_name(tmp_path, capfd):
    for name, block in (("small", 4), ("large", 8)):
        export_drafter(make(block).float(), SHAPE, 49, tmp_path / "drafter" / name)
    assert export("--run", tmp_path, "--to", tmp_path / "out") == 2
    assert "--variant=none: must be one of large, small" in capfd.readouterr().err
    assert export("--run", tmp_path, "--to", tmp_path / "out", "--variant", "large") == 0
    assert load_drafter(tmp_path / "out", CPU, torch.float32)[0].geometry.block == 8


def test_speculators_format_has_its_own_configuration_and_the_same_tensors(tmp_path):
    write(tmp_path / "a", block=8)
    words = ("--from", tmp_path / "a", "--to", tmp_path / "b", "--format", "speculators")
    assert export(*words) == 2  # it must name the verifier
    assert export(*words, "--verifier", "maker/model") == 0
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 4]  # speculators #705, vllm #42704: one more than z-lab's
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7  # #456: not 8
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "maker/model",
        "architectures": ["LlamaForCausalLM"],
    }
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (8, 49, 50)
    assert config["transformer_layer_config"]["num_hidden_layers"] == 3
    assert "dflash_config" not in config["transformer_layer_config"]
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_newest_checkpoint_can_be_exported(tmp_path, capfd):
    drafter = make().float()
    saved = {"facts": {"target": "maker/model", "steps": 900}, "config": to_config(drafter.geometry, SHAPE, 49)}
    assert export("--run", tmp_path, "--checkpoint", "--to", tmp_path / "out") == 2
    assert "has none that is whole" in capfd.readouterr().err
    checkpoint.save(tmp_path / "checkpoints", 40, {"drafter": drafter.state_dict()}, saved, keep=1)
    assert export("--run", tmp_path, "--checkpoint", "--to", tmp_path / "out") == 0
    again, mask_token, _ = load_drafter(tmp_path / "out", CPU, torch.bfloat16)
    assert mask_token == 49
    assert torch.equal(again.fc.weight, drafter.fc.weight.bfloat16())
    assert "| steps | 40 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--run", "no", "--to", "out"), "--run=no: has no trained drafter"),
        (("--from", "no", "--to", "out"), "--from=no: must hold a readable config.json"),
        (("--from", "no", "--to", "full"), "--to=full: must be a new or an empty folder"),
        (("--from", "no", "--to", "out", "--checkpoint"), "--from=no: goes with neither"),
    ],
)
def test_a_wrong_export_is_told_in_one_sentence(tmp_path, monkeypatch, capfd, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert export(*words) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"dflash: {sentence}")
    assert told.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(tmp_path, capfd):
    write(tmp_path / "a")
    (tmp_path / "file").touch()
    for place in ("/proc/nope", tmp_path / "file", tmp_path / "file" / "below", tmp_path):
        assert export("--from", tmp_path / "a", "--to", place) == 2
        told = capfd.readouterr().err
        assert told.startswith(f"dflash: --to={place}: must be a")
        assert len(told.splitlines()) == 1
