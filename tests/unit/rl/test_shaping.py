"""Shaping on its own: the overlong ramp, clipping, and which groups carry signal."""

import torch

from pentad.rl.shaping import has_signal, overlong_penalties, scale_rewards, teacher_rewards


def test_the_overlong_penalty_is_zero_then_a_ramp_then_flat():
    lengths = torch.tensor([0.0, 80.0, 85.0, 95.0, 100.0, 120.0])
    got = overlong_penalties(lengths, max_new_tokens=100, buffer=20, penalty=1.0)
    assert got.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    # Without a buffer, the last fifth; a limit below five still has one token of it.
    same = overlong_penalties(lengths, max_new_tokens=100, buffer=None, penalty=1.0)
    assert torch.equal(same, got)
    tiny = overlong_penalties(torch.tensor([2.0, 3.0]), max_new_tokens=3, buffer=None, penalty=0.5)
    assert tiny.tolist() == [0.0, -0.5]


def test_rewards_are_clipped_after_scaling():
    rewards = torch.tensor([-3.0, 0.2, 3.0])
    torch.testing.assert_close(
        scale_rewards(rewards, scale=2.0, clip=1.0), torch.tensor([-1.0, 0.4, 1.0])
    )
    assert torch.equal(scale_rewards(rewards), rewards)


def test_a_group_has_signal_when_its_rewards_differ():
    assert has_signal([0.0, 0.0, 1.0])
    assert not has_signal([0.1, 0.1, 0.1])
    assert not has_signal([1.0])
    assert not has_signal([])


def test_the_teacher_judges_sampled_tokens_only():
    mask = torch.tensor([False, True, True])
    got = teacher_rewards(torch.tensor([5.0, -1.0, -2.0]), torch.tensor([0.0, -3.0, -1.0]), mask)
    assert got.tolist() == [0.0, 2.0, -1.0]
