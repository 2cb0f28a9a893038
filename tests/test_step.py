"""One step: what pads the supervised slots changes nothing, and on a GPU nothing waits for the device."""

import pytest
import torch
from small_drafter import SHAPE

from dflash import settings, strategies
from dflash.drafter import Drafter, Geometry
from dflash.optim import Master
from dflash.pipeline import step, sums
from dflash.pipeline.batch import Batch
from dflash.pipeline.step import FrozenEnds, gradient_step
from dflash.settings import LOSSES, JobSettings
from dflash.weights import draw


def _job(kind):
    values = {"data": {"path": "-", "row_tokens": 18}, "target": {"model": "-"}, "loss": {"kind": kind}}
    return JobSettings.from_dict(values | {"drafter": {"block": 4, "anchors": 5, "layers": 2}})


def _batch(kind, device="cpu", dtype=torch.float32):
    torch.manual_seed(3)
    document = torch.cat([torch.full((n,), i) for i, n in enumerate([5, 7, 4])] + [torch.full((2,), -1)])[None]
    position = torch.cat([torch.arange(n) for n in (5, 7, 4, 2)])[None]
    width = 24 * (4 if kind in settings.DISTILLING else 3)
    features = torch.randn(1, 18, width).to(device, dtype)
    anchors = torch.tensor([[2, 6, 9, 13, -1]])
    tokens = torch.randint(50, (1, 18))
    return Batch(0, tokens, document >= 0, document, position, 16, features, anchors=anchors)


def _drafter(strategy, device="cpu", dtype=torch.float32, **shape):
    torch.manual_seed(0)
    target = type(SHAPE)(**vars(SHAPE) | shape)
    geometry = Geometry.settle(settings.Drafter(layers=2, block=4), target)
    drafter = Drafter(geometry, strategy.prepare, strategy.attend, draw(geometry, 0, device, dtype))
    ends = FrozenEnds(*(torch.randn(50, 24).to(device, dtype), 1.0, torch.randn(50, 24).to(device, dtype)), 49)
    return drafter, ends


@pytest.mark.parametrize("kind", LOSSES)
def test_padded_slots_change_no_figure_and_no_gradient(kind, monkeypatch, probe):
    strategy = strategies.make("eager", "cpu", probe)
    drafter, ends = _drafter(strategy)
    seen = []
    for multiple in (1, 16):
        monkeypatch.setitem(step.PADDED_TO, "cpu", multiple)
        counted = gradient_step(_job(kind), drafter, drafter, ends, _batch(kind), True, False)
        seen.append([counted, *(p.grad.clone() for p in drafter.parameters())])
    assert seen[0][0][sums.SCALARS.index("labelled")] == 9 == seen[1][0][sums.SCALARS.index("labelled")]
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_no_step_waits_for_the_device(probe):
    strategy = strategies.make("triton", "cuda", probe)
    drafter, ends = _drafter(strategy, "cuda", torch.bfloat16, head_dim=16)
    master, batch = Master(list(drafter.parameters()), settings.Optim()), _batch("ce", "cuda", torch.bfloat16)
    job = _job("ce")
    for number in range(3):
        torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")  # before, kernels are compiled
        try:
            counted = gradient_step(job, drafter, drafter, ends, batch, True, False)
            total = master.gradient(counted)
            norm = master.step(total[: -len(counted)], 1e-3, counted[sums.WEIGHT])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert norm.item() > 0
    assert counted[sums.SCALARS.index("labelled")].item() == 9
