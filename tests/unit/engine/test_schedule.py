"""The learning rate follows its formula; settings that contradict themselves are refused."""

import pytest

from pentad.core.errors import UserError
from pentad.core.settings import EngineSettings, OptimizerSettings
from pentad.engine.optim import compute_lr


def rates(kind: str, steps: range, **more) -> list[float]:
    settings = OptimizerSettings(lr=2.0, lr_scheduler_type=kind, total_steps=10, **more)
    return [compute_lr(settings, step) for step in steps]


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


def test_contradictions_are_refused_together():
    with pytest.raises(UserError) as error:
        OptimizerSettings(lr_scheduler_type="cosine", min_lr_ratio=2, gradient_clipping=0)
    text = str(error.value)
    assert "total_steps = None: cosine with warm-up 0.0 needs it" in text
    assert "min_lr_ratio = 2" in text and "gradient_clipping = 0" in text
    with pytest.raises(UserError) as error:
        EngineSettings(temperature=0, n_mbs=0, ac_selective=0)
    assert len(error.value.problems) == 3
