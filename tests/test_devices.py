"""Which GPUs each worker gets, on machines made up."""

import pytest
import torch

from dflash.devices import place
from dflash.settings import Data, JobSettings, SettingError, Target


def job(split, gpus=1, device="auto"):
    return JobSettings(data=Data(path="x"), target=Target(model="m", gpus=gpus), split=split, device=device)


@pytest.fixture
def machine(monkeypatch):
    return lambda gpus: monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def numbers(placement):
    return [[d.index for d in worker] for worker in placement.targets], [d.index for d in placement.drafters]


def test_targets_stand_on_the_first_gpus_and_drafters_on_those_after(machine):
    machine(8)
    assert numbers(place(job("5t3d"))) == ([[0], [1], [2], [3], [4]], [5, 6, 7])
    assert numbers(place(job("2t2d", gpus=3))) == ([[0, 1, 2], [3, 4, 5]], [6, 7])
    machine(2)
    assert numbers(place(job("1t2d", gpus=2, device="shared"))) == ([[0, 1]], [0, 1])


def test_too_few_gpus_are_told_with_what_a_target_takes(machine):
    machine(4)
    with pytest.raises(SettingError, match=r"split=2t1d: needs 5 GPUs \(2 targets of target\.gpus=2\).*has 4"):
        place(job("2t1d", gpus=2))
    with pytest.raises(SettingError, match=r"target\.gpus=8: is more than"):
        place(job("1t1d", gpus=8, device="shared"))
    machine(0)
    with pytest.raises(SettingError, match=r"device=cuda: needs a GPU"):
        place(job("1t1d", device="cuda"))


def test_on_cpu_a_target_is_one_worker(machine):
    machine(0)
    placement = place(job("2t1d"))
    assert (placement.targets, placement.kind) == ([(torch.device("cpu"),)] * 2, "cpu")
    with pytest.raises(SettingError, match=r"target\.gpus=2: must be 1 on a CPU"):
        place(job("2t1d", gpus=2))
