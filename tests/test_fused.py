"""The fused passes equal the drafter's modules: one model, two ways through memory.

On a GPU as they run there. Elsewhere this file runs itself again in Triton's interpreter, in a process of its own,
because the interpreter must be chosen before triton is imported.
"""

import copy
import importlib.util
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from small_drafter import SHAPE

from dflash import documents, fused, settings
from dflash.attention import DFlashMask, attend_dense, visible
from dflash.drafter import Drafter, Geometry
from dflash.weights import copied, draw

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's bfloat16 rounds wrongly
RUNS_HERE = INTERPRETED or torch.cuda.is_available()
kernels = pytest.mark.skipif(not RUNS_HERE, reason="run in Triton's interpreter, by the test of that name")

if RUNS_HERE:
    from dflash.fused import cross_entropy, layer, target


@pytest.mark.slow
@pytest.mark.skipif(RUNS_HERE, reason="the kernels' tests run here")
def test_the_passes_hold_in_the_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if "only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip("the interpreter of triton 3.6 does not work with numpy 2.4")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def _drafter(**shape):
    torch.manual_seed(0)
    wish = settings.Drafter(layers=2, block=4, window=5, window_layers=[1])
    geometry = Geometry.settle(wish, SimpleNamespace(**vars(SHAPE) | shape))
    drafter = Drafter(geometry, visible, attend_dense, draw(geometry, 0, DEVICE))
    for parameter in drafter.parameters():
        if parameter.ndim == 1:  # norms begin as ones, which would hide a scale left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            parameter.data.mul_(8.0)
    return drafter


def _inputs(drafter, rows=2, context=18, anchors=((2, 9, -1), (6, 15, 16))):
    g = drafter.geometry
    document = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4 + [-1] * 2] * rows)
    position = torch.cat([torch.arange(n) for n in (5, 7, 4, 2)]).repeat(rows, 1)
    anchors = torch.tensor(anchors)[:rows]
    slots = torch.arange(4).repeat(anchors.shape[1])
    x = torch.randn(rows, anchors.shape[1] * 4, g.hidden)
    block_position = position.gather(1, anchors.clamp(min=0)).repeat_interleave(4, dim=1) + slots
    features = torch.randn(rows, context, g.num_taps * g.hidden)
    moved = [t.to(DEVICE) for t in (features, position, x, block_position, document, anchors)]
    return *moved[:4], DFlashMask(moved[4], moved[5], 4)


def _both(drafter, inputs, dtype, **more):
    """Outputs and gradients of the modules in float64 and of the fused passes in `dtype`, by name."""
    exact = _one(Drafter.forward, drafter, inputs, torch.float64, **more)
    return exact, _one(layer.forward, drafter, inputs, dtype, **more)


def _one(forward, drafter, inputs, dtype, attention=(visible, attend_dense, None), **more):
    features, place, x, block_place, mask = inputs
    weights = copied(drafter.state_dict(), DEVICE, dtype)
    prepare, attend, attend_alike = attention
    model = Drafter(drafter.geometry, prepare, attend, weights, attend_alike)
    x = x.to(dtype).requires_grad_()
    hidden = forward(model, features.to(dtype), place, x, block_place, mask, **more)
    torch.manual_seed(1)
    wanted = dict(model.named_parameters())
    towards = torch.randn(hidden.shape).to(hidden)
    gradients = torch.autograd.grad((hidden * towards).sum(), [x, *wanted.values()])
    return {"hidden": hidden, "x": gradients[0]} | dict(zip(wanted, gradients[1:], strict=True))


@kernels
@pytest.mark.parametrize(
    "shape",
    [
        {},  # widths that are no powers of two, 3 queries a key
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 40},
    ],
)
def test_outputs_and_every_gradient_are_those_of_the_modules(shape):
    drafter = _drafter(**shape)
    exact, low = _both(drafter, _inputs(drafter), torch.float32)
    for name, value in exact.items():
        assert (low[name].double() - value).norm() <= 2e-5 * value.norm(), name


@kernels
def test_blocks_that_differ_in_their_anchors_alone_give_the_same():
    drafter = _drafter()
    features, place, x, block_place, mask = _inputs(drafter)
    blocks = x.unflatten(1, (-1, 4))
    blocks[:, :, 1:] = blocks[0, 0, 1].clone()
    exact, low = _both(drafter, (features, place, x, block_place, mask), torch.float32, alike=True)
    del exact["x"], low["x"]  # the embedding is frozen; what flows to it is that of the few rows
    for name, value in exact.items():
        assert (low[name].double() - value).norm() <= 2e-5 * value.norm(), name


@kernels
def test_blocks_that_share_questions_share_attention():
    """Three of the anchors stand so close that their blocks' slots meet at tokens; the kernels' own attention."""
    from dflash.attention.alike import attend_alike
    from dflash.attention.triton import attend_triton, prepare_ranges

    called = []

    def counted(q, k, v, seen):
        called.append(q.shape)
        return attend_alike(q, k, v, seen)

    drafter = _drafter(num_attention_heads=3, num_key_value_heads=3, head_dim=16, hidden_size=40)
    features, place, x, block_place, mask = _inputs(drafter, anchors=((7, 8, 10, -1), (4, 6, 8, 9)))
    x.unflatten(1, (-1, 4))[:, :, 1:] = x[0, 1].clone()
    inputs = features, place, x, block_place, mask
    exact = _one(Drafter.forward, drafter, inputs, torch.float64, alike=True)
    kernels = prepare_ranges, attend_triton, counted
    # A GPU's kernels of float32 products take minutes to compile.
    dtype, largest = (torch.float32, 2e-5) if INTERPRETED else (HALF, 13 * torch.finfo(HALF).eps)
    low = _one(layer.forward, drafter, inputs, dtype, kernels, alike=True)
    assert len(called) == 1  # in the first layer
    del exact["x"], low["x"]
    for name, value in exact.items():
        assert (low[name].double() - value).norm() <= largest * value.norm(), name


@kernels
def test_sixteen_bits_stray_no_further_than_their_rounding():
    drafter = _drafter()
    exact, low = _both(drafter, _inputs(drafter), HALF)
    assert {value.dtype for value in low.values()} == {HALF}
    for name, value in exact.items():
        assert (low[name].double() - value).norm() <= 13 * torch.finfo(HALF).eps * value.norm(), name


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_weights_that_lie_side_by_side_give_the_bits_of_joined_ones(dtype, monkeypatch):
    drafter = _drafter()
    inputs = _inputs(drafter)
    as_they_lie = _one(layer.forward, drafter, inputs, dtype)
    norm_linear = layer._norm_linear
    monkeypatch.setattr(layer, "_norm_linear", lambda *given: norm_linear(*given[:4], torch.cat))
    joined = _one(layer.forward, drafter, inputs, dtype)
    assert all(torch.equal(as_they_lie[name], joined[name]) for name in joined)


@kernels
def test_a_drafter_whose_weights_lie_apart_is_refused_rather_than_slow():
    drafter = _drafter()
    with pytest.raises(ValueError, match="lie apart"):
        layer.forward(drafter.half().float(), *_inputs(drafter))


@kernels
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_targets_gated_mlp_is_replaced_only_where_it_is_swiglu(activation, monkeypatch):
    monkeypatch.setattr(fused, "usable", lambda x: True)  # in the interpreter too
    config = tf.Qwen3Config(hidden_size=40, intermediate_size=2500, num_hidden_layers=1, hidden_act=activation)
    torch.manual_seed(3)
    own = tf.models.qwen3.modeling_qwen3.Qwen3MLP(config).to(DEVICE).requires_grad_(False)
    lean = copy.deepcopy(own)
    target.use(lean)
    assert (type(lean) is not type(own)) == (activation == "silu")
    x = torch.randn(2, 3, 40, device=DEVICE)
    torch.testing.assert_close(lean(x), own(x), rtol=1e-5, atol=1e-6)


@kernels
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen2"])
def test_a_targets_heads_are_normed_and_turned_in_one_pass(kind, monkeypatch):
    monkeypatch.setattr(fused, "usable", lambda x: True)
    sizes = {"hidden_size": 40, "intermediate_size": 60, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2} | ({"head_dim": 24} if kind == "Qwen3" else {})
    heads |= {} if kind == "Qwen3" else {"hidden_size": 6 * 24}
    torch.manual_seed(4)
    own = getattr(tf, f"{kind}Model")(getattr(tf, f"{kind}Config")(**sizes | heads)).to(DEVICE).requires_grad_(False)
    documents.use(own)
    lean = copy.deepcopy(own)
    target.use(lean)
    assert {type(layer.self_attn) for layer in lean.layers} == {target.Attention}
    tokens = torch.randint(50, (2, 30), device=DEVICE)
    position = torch.cat([torch.arange(n) for n in (17, 13)]).expand(2, -1).to(DEVICE)
    with documents.apart(position):
        one, other = (
            m(input_ids=tokens, position_ids=position, use_cache=False).last_hidden_state for m in (own, lean)
        )
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_cross_entropy_of_a_chunk_equals_float64(dtype):
    torch.manual_seed(2)
    for width in (5, 8192, 20011):
        logits = (torch.randn(4, width) * 4).to(dtype).to(DEVICE)
        logits[1, : width // 2] = -1e4  # probabilities that vanish
        logits[2, 3] = logits[2, 1] = 40.0  # equals: the first is the likeliest
        logits[3, width - 1] = 400.0  # far above all that is seen first
        labels = torch.tensor([0, width - 1, 1, 2], device=DEVICE)
        exact = logits.double().requires_grad_()
        losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), exact)
        got = torch.empty(4, device=DEVICE), torch.empty_like(labels)
        out = torch.empty_like(logits)
        unscaled = cross_entropy.Unscaled(*torch.empty(2, 4, device=DEVICE))
        rights = logits.gather(1, labels[:, None]).squeeze(1).float()
        beside = logits.scatter(1, labels[:, None], 1e4)  # a label's own logit comes from elsewhere
        cross_entropy.cross_entropy(beside, rights, labels, *got, out, unscaled)
        torch.testing.assert_close(got[0].double(), losses.detach(), rtol=1e-5, atol=1e-5)
        assert got[1].tolist() == [int(row.argmax()) for row in logits[:2]] + [1, width - 1]
        nearly = torch.empty(4, device=DEVICE), torch.empty_like(labels)
        highest = logits.float().scatter(1, labels[:, None], -torch.inf).max(1).values
        for share, likeliest in ((1.0001, True), (0.9999, False)):  # of logits above zero
            rights_nearly = highest * share
            cross_entropy.cross_entropy(beside, rights_nearly, labels, *nearly, torch.empty_like(logits), unscaled)
            assert ((nearly[1] == labels) == likeliest).all()
        cross_entropy.cross_entropy(beside, rights, labels, *got, out, unscaled)
        found = out.double() * unscaled.scale[:, None]
        assert (found.gather(1, labels[:, None]) == 0).all()
        found.scatter_(1, labels[:, None], unscaled.own.double()[:, None])
        torch.testing.assert_close(found, slope, rtol=0.01 if dtype == HALF else 1e-5, atol=1e-6)
        head, weight = torch.randn(width, 24, device=DEVICE).to(dtype), torch.rand(4, device=DEVICE)
        gradient = cross_entropy.complete(out @ head, head, labels, unscaled, weight)
        wanted = slope @ head.double() * weight.double()[:, None]
        assert (gradient.double() - wanted).norm() <= (0.01 if dtype == HALF else 1e-5) * wanted.norm()


@kernels
def test_a_label_that_is_all_but_certain_keeps_the_slope_that_is_left():
    logits, right = torch.zeros(1, 3, device=DEVICE, dtype=HALF), torch.full((1,), 17.0, device=DEVICE)
    got = torch.empty(1, device=DEVICE), torch.empty(1, dtype=torch.int64, device=DEVICE)
    unscaled = cross_entropy.Unscaled(*torch.empty(2, 1, device=DEVICE))
    label = torch.tensor([1], device=DEVICE)
    cross_entropy.cross_entropy(logits, right, label, *got, torch.empty_like(logits), unscaled)
    assert float(unscaled.own) == pytest.approx(-2 / (2 + math.exp(17)), rel=1e-3)


@kernels
def test_not_a_number_reaches_the_loss_and_the_token_stays_one_of_the_vocabulary():
    logits = torch.randn(3, 9000, device=DEVICE)
    logits[0, 7], logits[1, 7], logits[2] = float("nan"), float("inf"), float("nan")
    losses, predicted = torch.empty(3, device=DEVICE), torch.empty(3, dtype=torch.int64, device=DEVICE)
    labels = torch.tensor([1, 2, 3], device=DEVICE)
    unscaled = cross_entropy.Unscaled(*torch.empty(2, 3, device=DEVICE))
    rights = logits.gather(1, labels[:, None]).squeeze(1)
    cross_entropy.cross_entropy(logits, rights, labels, losses, predicted, torch.empty_like(logits), unscaled)
    assert losses.isnan().all()
    assert ((predicted >= 0) & (predicted < 9000)).all()


@kernels
def test_a_labels_logit_is_not_rounded():
    torch.manual_seed(4)
    hidden, head = (torch.randn(n, 200, device=DEVICE).to(HALF) for n in (7, 30))
    labels = torch.randint(30, (7,), device=DEVICE)
    wanted = (hidden.double() * head.double()[labels]).sum(1)
    got = cross_entropy.label_logits(hidden, head, labels)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
