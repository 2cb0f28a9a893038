"""The drafter on a packed row equals the drafter asked one block at a time, as decoding asks it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_drafter import SHAPE, make

from dflash import settings
from dflash.attention import DFlashMask
from dflash.drafter import Geometry
from dflash.export import export_drafter
from dflash.geometry import starting_mask_token, starting_taps
from dflash.settings import SettingError


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


@pytest.mark.parametrize(("window", "window_layers"), [(None, None), (4, None), (5, [1])])
def test_a_packed_row_equals_each_block_drafted_alone(window, window_layers):
    block, anchors = 4, [2, 6, 9, 15, -1]
    drafter, packed = make(block, window, window_layers), row()
    x = torch.randn(1, len(anchors) * block, 24, dtype=torch.float64)
    block_position = torch.cat([packed["position"][0, max(a, 0)] + torch.arange(block) for a in anchors])[None]
    mask = DFlashMask(packed["document"], torch.tensor([anchors]), block)
    got = drafter(packed["features"], packed["position"], x, block_position, mask)
    assert got.shape == (1, len(anchors) * (block - 1), 24)
    assert torch.isfinite(got).all()
    for i, a in enumerate(anchors):
        if a < 0:
            continue
        here, context = slice(i * block, (i + 1) * block), slice(a - int(packed["position"][0, a]), a)
        known = drafter.context_kv(packed["features"][:, context], packed["position"][:, context])
        alone = drafter.draft(x[:, here], block_position[:, here], known, packed["position"][:, context])
        torch.testing.assert_close(got[:, i * (block - 1) : (i + 1) * (block - 1)], alone[:, 1:])


def test_decoding_a_batch_of_uneven_contexts_equals_each_alone():
    """Rows padded on the left, context kept from round to round and cut back after a rejection."""
    block, lengths = 4, [9, 1, 0, 6]
    drafter = make(block, 5, [0, 2])
    features = torch.randn(4, 9, 3 * 24, dtype=torch.float64)
    position = torch.stack([torch.cat([torch.full((9 - n,), -1), torch.arange(n)]) for n in lengths])
    x = torch.randn(4, block, 24, dtype=torch.float64)
    block_position = torch.tensor(lengths)[:, None] + torch.arange(block)
    early, late = (drafter.context_kv(features[:, part], position[:, part]) for part in (slice(6), slice(6, 9)))
    rejected = drafter.context_kv(torch.full_like(features[:, :2], 7.0), position[:, :2])
    known = [
        tuple(torch.cat(parts, dim=2)[:, :, :9] for parts in zip(*layer, strict=True))
        for layer in zip(early, late, rejected, strict=True)
    ]
    got = drafter.draft(x, block_position, known, position)
    for r, n in enumerate(lengths):
        own, where = features[r : r + 1, 9 - n :], position[r : r + 1, 9 - n :]
        alone = drafter.draft(x[r : r + 1], block_position[r : r + 1], drafter.context_kv(own, where), where)
        torch.testing.assert_close(got[r : r + 1], alone)


def test_other_documents_later_tokens_and_other_blocks_change_nothing():
    block, anchors = 4, [2, 8]
    drafter, packed = make(block), row()
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    position = torch.arange(8)[None]
    mask = DFlashMask(packed["document"], torch.tensor([anchors]), block)
    before = drafter(packed["features"], packed["position"], x, position, mask)
    changed = packed["features"].clone()
    changed[:, 2] += 1  # the first anchor's own feature: not there yet at inference
    changed[:, 8:] += 1  # the second anchor's, and all that follows
    x2 = x.clone()
    after = drafter(changed, packed["position"], x2, position, mask)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    x2[:, 4:] += 1  # SpecForge #470: blocks that leak into each other
    after = drafter(changed, packed["position"], x2, position, mask)
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=0)
    assert not torch.allclose(after[:, 3:], before[:, 3:])


@pytest.mark.parametrize("window", [None, 4])
def test_a_block_sees_later_slots_of_itself(window):
    drafter, packed = make(window=window), row()
    x = torch.randn(1, 4, 24, dtype=torch.float64)
    mask = DFlashMask(packed["document"], torch.tensor([[2]]), 4)
    before = drafter(packed["features"], packed["position"], x, torch.arange(4)[None], mask)
    x[:, 3] += 1
    after = drafter(packed["features"], packed["position"], x, torch.arange(4)[None], mask)
    assert not torch.allclose(after[:, 0], before[:, 0])  # SpecForge #415: causal blocks by mistake


def test_only_the_chosen_layers_have_the_window():
    """One layer sees beyond the window exactly when it is not among the chosen."""
    packed = row()
    x = torch.randn(1, 4, 24, dtype=torch.float64)
    far = packed["features"].clone()
    far[:, 5] += 1  # seven tokens before the anchor's last slot
    mask = DFlashMask(packed["document"], torch.tensor([[9]]), 4)
    for window_layers, same in (([0, 1, 2], True), ([0, 2], False), (None, True)):
        drafter = make(4, 4, window_layers)
        one, other = (
            drafter(f, packed["position"], x, torch.arange(4, 8)[None], mask) for f in (packed["features"], far)
        )
        assert torch.equal(one, other) == same


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (settings.Drafter(hidden=32), "drafter.hidden=32: must equal the target's hidden size 24"),
        (settings.Drafter(heads=3, kv_heads=2), "drafter.heads=3: must be a multiple of drafter.kv_heads=2$"),
        (
            settings.Drafter(heads=5),
            "drafter.heads=5: must be a multiple of drafter.kv_heads=2, the target's; set both",
        ),
        (settings.Drafter(kv_heads=3), "drafter.kv_heads=3: must divide drafter.heads=4, the target's; set both"),
    ],
)
def test_a_geometry_that_does_not_fit_the_target_is_refused_by_name(wish, text):
    with pytest.raises(SettingError, match=text):
        Geometry.settle(wish, SHAPE)


@pytest.mark.parametrize("heads", [2, 6])
def test_key_value_heads_that_are_not_set_are_the_targets(heads):
    settled = Geometry.settle(settings.Drafter(heads=heads), SHAPE)
    assert (settled.heads, settled.kv_heads) == (heads, 2)


@pytest.fixture
def released(tmp_path):
    """The folder of a drafter to start from."""
    export_drafter(make(4, 6, [0, 2]).float(), SHAPE, 49, tmp_path)
    return str(tmp_path)


def job(**drafter):
    return settings.JobSettings(
        data=settings.Data(path="x"), target=settings.Target(model="m"), drafter=settings.Drafter(**drafter)
    )


def test_a_drafter_started_from_another_has_its_geometry_taps_and_mask_token(released):
    wish = settings.Drafter(layers=3, block=6, init=released)
    wish.check()
    target = SimpleNamespace(**{**vars(SHAPE), "rope_theta": 500.0, "rms_norm_eps": 1e-3, "num_attention_heads": 2})
    assert Geometry.settle(wish, target) == replace(make(4, 6, [0, 2]).geometry, block=6)
    assert starting_taps(job(init=released)) == [1, 2, 3]
    assert starting_mask_token(wish) == 49
    assert starting_mask_token(replace(wish, mask_token=7)) == 7
    assert (starting_taps(job()), starting_mask_token(settings.Drafter())) == (None, None)
    variants = job()
    variants.fanout = {"new": {}, "old": {"drafter": {"layers": 3, "init": released}}}
    assert starting_taps(variants) == [1, 2, 3]


@pytest.mark.parametrize(
    ("wish", "target", "text"),
    [
        ({"layers": 2}, {}, "drafter.layers=2: must be 3, as in drafter.init="),
        ({"heads": 2}, {}, "drafter.heads=2: must be 4"),
        ({"window": 9}, {}, "drafter.window=9: must be 6"),
        ({"window": 6, "window_layers": [1]}, {}, r"drafter.window_layers=\[1\]: must be \[0, 2\]"),
        ({"block": 7}, {}, "drafter.block=7: must not exceed 6"),
        ({}, {"taps": [0, 2, 3]}, r"target.taps=\[0, 2, 3\]: must be \[1, 2, 3\]"),
        ({}, {"hidden_size": 32}, "drafter.init=.*: has hidden size 24, the target has 32"),
    ],
)
def test_settings_that_contradict_the_drafter_to_start_from_are_refused(released, wish, target, text):
    with pytest.raises(SettingError, match=text):
        Geometry.settle(
            settings.Drafter(**{"layers": 3, "init": released} | wish), SimpleNamespace(**vars(SHAPE) | target)
        )


def test_a_folder_without_a_drafter_is_refused_before_any_work(tmp_path):
    with pytest.raises(SettingError, match=r"drafter\.init=.*has no config\.json"):
        settings.Drafter(init=str(tmp_path)).check()
