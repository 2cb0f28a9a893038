import math

from dflash.optim import learning_rate
from dflash.settings import Optim


def test_warm_up_rises_to_the_rate_and_the_cosine_ends_at_its_floor():
    optim = Optim(lr=1e-3, warmup=0.1, min_lr=0.2)
    rates = [learning_rate(step, 100, optim) for step in range(1, 101)]
    assert rates[0] == 1e-4
    assert rates[9] == 1e-3 == max(rates)
    assert rates == rates[:10] + sorted(rates[10:], reverse=True)
    assert math.isclose(rates[-1], 2e-4)
    assert math.isclose(rates[54], 1e-3 * (0.2 + 0.8 * 0.5))  # half-way down


def test_one_step_trains_at_the_full_rate():
    assert learning_rate(1, 1, Optim(lr=0.5)) == 0.5
