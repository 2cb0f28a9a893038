"""The weights that a drafter begins with."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_drafter
import torch
from small_drafter import SHAPE

from dflash import settings, strategies, weights
from dflash.export import export_drafter
from dflash.geometry import WEIGHTS_FILE, Geometry
from dflash.plan import Variant, make_drafter
from dflash.settings import JobSettings
from dflash.weights import copied, draw

WIDE = Geometry.settle(
    settings.Drafter(layers=2, block=4), SimpleNamespace(**vars(SHAPE) | {"hidden_size": 192, "intermediate_size": 256})
)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_matrices_are_normal_and_norms_are_ones():
    found = draw(WIDE, seed=0)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == WIDE.shapes()
    for name, tensor in found.items():
        if tensor.ndim == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
            continue
        std = 0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02  # 0.02 / sqrt(2 * 2 layers)
        assert tensor.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(tensor.mean().item()) < 5 * std / tensor.numel() ** 0.5, name
        assert (tensor.abs() < std).float().mean().item() == pytest.approx(0.683, abs=0.03), name


def test_no_two_matrices_of_a_shape_are_alike():
    found = draw(replace(WIDE, windows=(None,)), seed=0)
    for one, other in (("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        both = torch.stack([found[f"layers.0.{name}.weight"].flatten() for name in (one, other)])
        assert abs(torch.corrcoef(both)[0, 1].item()) < 0.1


def test_a_seed_gives_the_same_bits_with_any_number_of_threads(monkeypatch):
    alone = draw(WIDE, seed=3)
    torch.manual_seed(5)  # of the whole process, in which others draw too
    before = torch.get_rng_state()
    for cores in (1, 2, 7):
        monkeypatch.setattr(weights, "cores", lambda cores=cores: cores)
        assert equal(draw(WIDE, seed=3), alone)
    assert torch.equal(torch.get_rng_state(), before)
    assert not equal(draw(WIDE, seed=4), alone)


def test_in_bfloat16_they_are_those_of_float32_rounded():
    rounded = {name: tensor.bfloat16() for name, tensor in draw(WIDE, seed=0).items()}
    assert equal(draw(WIDE, seed=0, dtype=torch.bfloat16), rounded)


def test_drafters_of_other_layers_and_taps_share_what_has_the_same_shape():
    """A comparison of geometries is then one of geometries, not of luck."""
    one, other = draw(WIDE, seed=0), draw(replace(WIDE, windows=(None,) * 3, num_taps=1), seed=0)
    assert torch.equal(one["layers.1.mlp.up_proj.weight"], other["layers.1.mlp.up_proj.weight"])
    torch.testing.assert_close(  # but for the scale that follows from the number of layers
        one["layers.0.mlp.down_proj.weight"] * 2**0.5, other["layers.0.mlp.down_proj.weight"] * 3**0.5
    )


def test_a_copy_leaves_the_original_alone():
    original = draw(WIDE, seed=0)
    copy = copied(original, "cpu", torch.float32)
    copy["norm.weight"].zero_()
    assert equal(original, draw(WIDE, seed=0))


def variant_of(target, **drafter):
    values = {"data": {"path": "-"}, "target": {"model": "-"}, "drafter": {"layers": 3, "block": 4} | drafter}
    job = JobSettings.from_dict(values)
    return Variant("", job, Geometry.settle(job.drafter, target), 49, target.taps, Path(), Path(), {})


def target_with(head):
    return SimpleNamespace(**vars(SHAPE), head=head, embedding=head)


@pytest.mark.parametrize(("size", "first"), [(0.001, 1.0), (2.0, 1 / (2.0 * 24**0.5))])
def test_first_logits_have_a_spread_of_at_most_one_whatever_the_threads(size, first, probe):
    target = target_with(size * torch.randn(9000, 24, generator=torch.Generator().manual_seed(0)))
    strategy, threads, found = strategies.make("eager", "cpu", probe), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            drafter, _ = make_drafter(variant_of(target), target, strategy, torch.device("cpu"))
            found.append(drafter.state_dict())
    finally:
        torch.set_num_threads(threads)
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    torch.testing.assert_close(found[0]["norm.weight"], torch.full((24,), first), rtol=0.01, atol=0)
    assert all(p.requires_grad for p in drafter.parameters())


def test_a_drafter_begun_from_another_has_its_weights_even_when_that_is_gone(tmp_path, probe):
    before = small_drafter.make()
    export_drafter(before, SHAPE, 49, tmp_path)
    target = target_with(torch.ones(50, 24))
    strategy = strategies.make("eager", "cpu", probe)
    drafter, _ = make_drafter(variant_of(target, init=str(tmp_path)), target, strategy, torch.device("cpu"))
    (tmp_path / WEIGHTS_FILE).write_bytes(b"")
    assert equal(drafter.state_dict(), copied(copied(before.state_dict(), "cpu", torch.bfloat16), "cpu", torch.float32))
    assert all(p.requires_grad for p in drafter.parameters())
