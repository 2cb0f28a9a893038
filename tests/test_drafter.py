"""The drafter on a packed row equals the drafter asked one block at a time, as decoding asks it."""

import pytest
import torch
from small_drafter import SHAPE, make

from dflash import settings
from dflash.attention import DFlashMask
from dflash.drafter import Geometry
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
    assert torch.isfinite(got).all()
    for i, a in enumerate(anchors):
        if a < 0:
            continue
        here, context = slice(i * block, (i + 1) * block), slice(a - int(packed["position"][0, a]), a)
        known = drafter.context_kv(packed["features"][:, context], packed["position"][:, context])
        alone = drafter.draft(x[:, here], block_position[:, here], known, packed["position"][:, context])
        torch.testing.assert_close(got[:, here], alone)


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
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=0)
    assert not torch.allclose(after[:, 4:], before[:, 4:])


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
        (settings.Drafter(heads=3, kv_heads=2), "drafter.heads=3"),
        (settings.Drafter(kv_heads=3), "drafter.heads=4"),
    ],
)
def test_a_geometry_that_does_not_fit_the_target_is_refused_by_name(wish, text):
    with pytest.raises(SettingError, match=text):
        Geometry.settle(wish, SHAPE)
