"""On-policy distillation: its teacher judges, so it needs no reward."""

import pytest
from run_lab import steps_of

from pentad.core.errors import UserError


@pytest.fixture(scope="module")
def teacher(task, tmp_path_factory):
    from run_lab import Lab

    return Lab(task, tmp_path_factory.mktemp("teacher")).sft("total_train_steps=2").model


def test_distillation_runs_without_a_reward(lab, teacher):
    words = ("algorithm.name=distill", f"teacher.path={teacher}", "reward.fn=null")
    steps = steps_of(lab.train(*words))
    assert [record["rl"]["reward_mean"] for record in steps] == [None] * 3
    assert all(record["grad_norm"] > 0 for record in steps)


def test_evaluated_distillation_without_a_reward_is_refused(lab, task, teacher):
    words = ("algorithm.name=distill", f"teacher.path={teacher}", "reward.fn=null")
    with pytest.raises(UserError, match="without it the answers to valid_dataset have no score"):
        lab.train(*words, f"valid_dataset.path={task / 'valid.jsonl'}")
