"""Best, worst and random samples of a step, written so that people and programs can read them."""

import json

import numpy as np
import pytest

from pentad.core.types import Group, Prompt, Sample
from pentad.telemetry.samples import pick_samples


def make_group(gid, rewards):
    def sample(reward):
        return Sample(
            ids=np.array([5, 6, 7, 8, 9]),
            mask=np.array([False, True, False, True, True]),
            rollout_logprobs=np.zeros(5, np.float32),
            versions=np.array([-1, 2, -1, 3, 3]),
            finish="stop",
            text=f"answer {reward}",
            reward=reward,
            reward_parts={} if reward is None else {"correct": reward},
        )

    return Group(Prompt(gid, (5,), {}, f"prompt {gid}", 1), [sample(r) for r in rewards], attempt=2)


def test_best_and_worst_come_first_then_others():
    groups = [make_group(4, [0.1, 0.9]), make_group(7, [-1.0, 0.5])]
    picks = pick_samples(groups, 3, step=6)
    assert [(p["pick"], p["gid"], p["index"]) for p in picks[:2]] == [
        ("best", 4, 1),
        ("worst", 7, 0),
    ]
    assert picks[2]["pick"] == "random" and picks[2]["reward"] in (0.1, 0.5)
    assert json.loads(json.dumps(picks[0])) == {
        "step": 6,
        "pick": "best",
        "gid": 4,
        "index": 1,
        "environment": None,
        "epoch": 1,
        "attempt": 2,
        "question": "prompt 4",
        "prompt": "prompt 4",
        "expected": None,
        "text": "answer 0.9",
        "turns": [],
        "reward": 0.9,
        "reward_parts": {"correct": 0.9},
        "finish": "stop",
        "num_sampled": 3,
        "min_version": 2,
        "max_version": 3,
        "ids": [5, 6, 7, 8, 9],
        "trained_spans": [[1, 2], [3, 5]],
    }


def test_random_picks_depend_on_seed_and_step_alone():
    groups = [make_group(i, [0.0, 1.0, 2.0, 3.0]) for i in range(8)]

    def drawn(step, seed=0):
        return [(p["gid"], p["index"]) for p in pick_samples(groups, 6, step=step, seed=seed)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4) and drawn(3) != drawn(3, seed=1)
    assert len(set(drawn(3))) == 6


@pytest.mark.parametrize("num", [0, 1, 2, 3, 50])
def test_never_more_than_asked_for_or_than_there_are(num):
    picks = pick_samples([make_group(0, [0.5, 0.5, 0.5])], num, step=1)
    assert len(picks) == min(num, 3)
    assert len({p["index"] for p in picks}) == len(picks), "equal rewards give different samples"
    assert [p["pick"] for p in picks] == ["best", "worst", "random"][:num]


def test_samples_without_reward_are_neither_best_nor_worst():
    picks = pick_samples([make_group(0, [None, 0.3, None])], 3, step=1)
    assert [p["pick"] for p in picks] == ["best", "random", "random"]
    assert picks[0]["reward"] == 0.3


def test_no_groups_no_samples():
    assert pick_samples([], 4, step=1) == []
