"""When a device got somewhere is told right, however late somebody asks."""

import time

import pytest
import torch

from dflash.pipeline.clock import Clock
from dflash.pipeline.transfer import Underway


def test_on_a_cpu_a_mark_is_the_time_it_was_made():
    clock = Clock(torch.device("cpu"))
    before = time.time()
    mark = clock.mark()
    after = time.time()
    assert before <= clock.when(mark) <= after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_time_is_the_devices_and_not_the_readers():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    clock, ended = Clock(device), []
    with torch.cuda.device(device):
        for _ in range(2):
            torch.cuda._sleep(200_000_000)  # cycles, about a tenth of a second
            ended.append(Underway(torch.ones(1, device=device), clock))
    asked = time.time()
    time.sleep(1.5)
    (first, _), (second, numbers) = (one.read() for one in ended)
    assert numbers == [1.0]
    assert asked - 0.5 < first < second - 0.02 < asked + 1.0
