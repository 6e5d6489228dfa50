"""The learning rate follows its formula."""

import pytest

from pentad.engine.optim import compute_lr
from pentad.engine.section import OptimizerConfig


def rates(kind: str, steps: range, **more) -> list[float]:
    keys = OptimizerConfig(lr=2.0, lr_scheduler_type=kind, **more)
    return [compute_lr(keys, step, 10) for step in steps]


def test_constant_with_warm_up():
    assert rates("constant", range(6), warmup_steps_proportion=0.4) == [0.5, 1.0, 1.5, 2, 2, 2]


def test_linear_falls_to_its_floor_and_stays():
    got = rates("linear", range(13), min_lr_ratio=0.5)
    assert got == pytest.approx([2 - 0.1 * i for i in range(10)] + [1, 1, 1])


def test_cosine_is_half_way_in_the_middle_of_what_follows_warm_up():
    got = rates("cosine", range(11), warmup_steps_proportion=0.2, min_lr_ratio=0.1)
    assert got[:3] == [1.0, 2.0, 2.0]
    assert got[6] == pytest.approx(0.2 + 0.9)
    assert got[10] == pytest.approx(0.2)
    assert got[2:] == sorted(got[2:], reverse=True)
