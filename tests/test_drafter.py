"""The drafter on a packed row equals the drafter asked one block at a time, as decoding asks it."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dflash import settings
from dflash.attention import DFlashMask, attend_dense, visible
from dflash.drafter import Drafter, Geometry
from dflash.export import export_drafter
from dflash.settings import SettingError

SHAPE = SimpleNamespace(
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    taps=[1, 2, 3],
    num_layers=6,
    vocab_size=50,
    max_positions=128,
)


def make(block: int = 4, window: int | None = None) -> Drafter:
    torch.manual_seed(0)
    wish = settings.Drafter(layers=2, block=block, window=window)
    return Drafter(Geometry.settle(wish, SHAPE), written_out, attend_dense).double()


def written_out(mask: DFlashMask | torch.Tensor) -> torch.Tensor:
    """A mask that is given whole stands as it is."""
    return visible(mask) if isinstance(mask, DFlashMask) else mask


def row() -> dict[str, torch.Tensor]:
    """Three documents of 5, 7 and 4 tokens and two of padding."""
    lengths = [5, 7, 4]
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((2,), -1)])
    position = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(2, dtype=torch.int64)])
    torch.manual_seed(1)
    return {
        "document": document[None],
        "position": position[None],
        "features": torch.randn(1, 18, 3 * 24, dtype=torch.float64),
    }


@pytest.mark.parametrize("window", [None, 4])
def test_a_packed_row_equals_each_block_alone(window):
    block, anchors = 4, [2, 6, 9, 15, -1]
    drafter, packed = make(block, window), row()
    x = torch.randn(1, len(anchors) * block, 24, dtype=torch.float64)
    block_position = torch.cat([packed["position"][0, max(a, 0)] + torch.arange(block) for a in anchors])[None]
    mask = DFlashMask(packed["document"], torch.tensor([anchors]), block, window)
    got = drafter(packed["features"], packed["position"], x, block_position, visible(mask))
    assert torch.isfinite(got).all()
    for i, a in enumerate(anchors):
        if a < 0:
            continue
        first = a - int(packed["position"][0, a])
        here, context = slice(i * block, (i + 1) * block), slice(first, a)
        seen = torch.ones(block, a - first + block, dtype=torch.bool)
        for k in range(block):
            for t in range(first, a):
                seen[k, t - first] = window is None or a + k - t < window
        alone = drafter(
            packed["features"][:, context],
            packed["position"][:, context],
            x[:, here],
            block_position[:, here],
            seen[None, None],
        )
        torch.testing.assert_close(got[:, here], alone)


def test_other_documents_later_tokens_and_other_blocks_change_nothing():
    block, anchors = 4, [2, 8]
    drafter, packed = make(block), row()
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    position = torch.arange(8)[None]
    seen = visible(DFlashMask(packed["document"], torch.tensor([anchors]), block))
    before = drafter(packed["features"], packed["position"], x, position, seen)
    changed = packed["features"].clone()
    changed[:, 2] += 1  # the first anchor's own feature: not there yet at inference
    changed[:, 8:] += 1  # the second anchor's, and all that follows
    x2 = x.clone()
    after = drafter(changed, packed["position"], x2, position, seen)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    x2[:, 4:] += 1
    after = drafter(changed, packed["position"], x2, position, seen)
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=0)
    assert not torch.allclose(after[:, 4:], before[:, 4:])


def test_a_block_sees_later_slots_of_itself():
    drafter, packed = make(), row()
    x = torch.randn(1, 4, 24, dtype=torch.float64)
    seen = visible(DFlashMask(packed["document"], torch.tensor([[2]]), 4))
    before = drafter(packed["features"], packed["position"], x, torch.arange(4)[None], seen)
    x[:, 3] += 1
    after = drafter(packed["features"], packed["position"], x, torch.arange(4)[None], seen)
    assert not torch.allclose(after[:, 0], before[:, 0])  # SpecForge #415: causal blocks by mistake


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (settings.Drafter(hidden=32), "drafter.hidden=32: must equal the target's hidden size 24"),
        (settings.Drafter(heads=3, kv_heads=2), "drafter.heads=3"),
    ],
)
def test_a_geometry_that_does_not_fit_the_target_is_refused_by_name(wish, text):
    with pytest.raises(SettingError, match=text):
        Geometry.settle(wish, SHAPE)


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
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(tensors) == expected
    assert tensors["fc.weight"].shape == (24, 72)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert config["dflash_config"]["mask_token_id"] == 49
