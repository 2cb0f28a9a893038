"""Weights that one product takes lie side by side, and nobody else sees a difference."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_drafter import SHAPE, make

from dflash import settings
from dflash.attention import DFlashMask, attend_dense, visible
from dflash.drafter import Drafter
from dflash.export import export_drafter, load_drafter
from dflash.optim import Master
from dflash.pipeline import state
from dflash.weights import copied, draw, room, side_by_side

CPU = torch.device("cpu")


def drafter_of(weights):
    return Drafter(make().geometry, visible, attend_dense, weights)


def groups(drafter):
    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        yield [mlp.gate_proj.weight, mlp.up_proj.weight]


def lies_side_by_side(drafter):
    """Whether each group is one tensor whose numbers are those of its members, in their memory."""
    for weights in groups(drafter):
        joint = side_by_side(weights)
        if joint.data_ptr() != weights[0].data_ptr() or not torch.equal(joint, torch.cat(weights)):
            return False
    return True


def train_a_step(drafter, master):
    """Forward, backward and optimiser on random hidden states."""
    dtype, hidden = drafter.norm.weight.dtype, drafter.geometry.hidden
    document, place = torch.zeros(1, 9, dtype=torch.int64), torch.arange(9)[None]
    x, features = torch.randn(1, 8, hidden, dtype=dtype), torch.randn(1, 9, 3 * hidden, dtype=dtype)
    slots = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])
    out = drafter(features, place, x, slots, DFlashMask(document, torch.tensor([[2, 6]]), 4))
    out.square().sum().backward()
    master.step(master.gradient(), 1e-2)


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_drawn_and_copied_weights_lie_side_by_side_in_no_more_memory_than_they_need(dtype):
    drawn = draw(make().geometry, 0, dtype=dtype)
    for weights in (drawn, copied(drawn, "cpu", torch.float32), copied(dict(sorted(drawn.items())), "cpu", dtype)):
        drafter = drafter_of(weights)
        assert lies_side_by_side(drafter)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in drafter.parameters()}
        assert sum(storages.values()) == sum(p.nbytes for p in drafter.parameters())
        assert {name: tuple(p.shape) for name, p in drafter.named_parameters()} == drafter.geometry.shapes()
        assert all(p.is_leaf and p.requires_grad for p in drafter.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_stay_so_through_steps_a_checkpoint_and_an_export(dtype, tmp_path):
    torch.manual_seed(0)
    drafter = drafter_of(draw(make().geometry, 0, dtype=dtype))
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    master = Master(list(drafter.parameters()), settings.Optim())
    for _ in range(2):
        train_a_step(drafter, master)
    assert lies_side_by_side(drafter)
    assert not any(torch.equal(p, before[name]) for name, p in drafter.named_parameters())

    state.save(tmp_path / "checkpoints", 2, drafter, master, {}, {"a": 1}, keep=1)
    resumed = drafter_of(draw(make().geometry, 1, dtype=dtype))
    continued = Master(list(resumed.parameters()), settings.Optim())
    found, _ = state.find(tmp_path / "checkpoints", {"a": 1}, "")
    state.restore(found, resumed, continued)
    assert lies_side_by_side(resumed)
    for one in (drafter, resumed):
        torch.manual_seed(1)
        train_a_step(one, master if one is drafter else continued)
    assert equal(resumed.state_dict(), drafter.state_dict())

    export_drafter(drafter, SHAPE, 49, tmp_path / "drafter")
    loaded, _, _ = load_drafter(tmp_path / "drafter", CPU, torch.bfloat16)
    assert lies_side_by_side(loaded)
    assert equal(loaded.state_dict(), {name: t.bfloat16() for name, t in drafter.state_dict().items()})


def test_a_state_dict_is_saved_and_loaded_like_any_other(tmp_path):
    drafter = drafter_of(draw(make().geometry, 0))
    save_file(drafter.state_dict(), tmp_path / "it.safetensors")
    loaded = load_file(tmp_path / "it.safetensors")
    assert equal(loaded, drafter.state_dict())
    assert (tmp_path / "it.safetensors").stat().st_size < 1.1 * sum(p.nbytes for p in drafter.parameters())
    other = drafter_of(draw(make().geometry, 1))
    other.load_state_dict(loaded)
    assert equal(other.state_dict(), drafter.state_dict())
    assert lies_side_by_side(other)


def test_each_projection_has_a_gradient_of_its_own():
    drafter = drafter_of(draw(make().geometry, 0))
    apart = drafter_of({name: t.clone() for name, t in drafter.state_dict().items()})
    for one in (drafter, apart):
        torch.manual_seed(0)
        train_a_step(one, SimpleNamespace(step=lambda *_: None, gradient=lambda: None))
    gradients = ({name: p.grad for name, p in one.named_parameters()} for one in (drafter, apart))
    assert equal(*gradients)


def test_what_does_not_lie_side_by_side_is_refused():
    shapes = {f"{name}_proj.weight": (rows, 3) for name, rows in (("q", 4), ("k", 2), ("v", 2))}
    q, k, v = room(shapes, "cpu", torch.float32).values()
    assert side_by_side([q, k, v]).shape == (8, 3)
    for apart in ([q, v, k], [q, k.clone(), v], [q.clone(), k, v], [q, v], [q, k, k], [q[:, :2], k[:, :2], v[:, :2]]):
        with pytest.raises(ValueError, match="lie apart"):
            side_by_side(apart)
