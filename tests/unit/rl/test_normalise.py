"""Loss normalisation: each mean as defined, and the same gradient however rows are split."""

import numpy as np
import pytest
import torch
from ragged_batches import ListSegments, make_groups
from sections import settings_for

from pentad.core.types import TokenOutputs
from pentad.rl.algorithms import (
    build_policy_loss,
    build_value_loss,
    make_rows,
)
from pentad.rl.facts import FACTS
from pentad.rl.shaping import normalise

MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1]).bool()
SAMPLES = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
GROUPS = torch.tensor([7, 7, 7, 4])
TERMS = torch.tensor([9, 1, 2, 9, 9, 5, 9, 9, 10, 20, 60], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_norm", "expected"),
    [
        ("token", (1 + 2 + 5 + 10 + 20 + 60) / 6),
        ("sequence", (1.5 + 5 + 30) / 3),
        ("group", (8 / 3 + 30) / 2),
        ("constant", (3 + 5 + 90) / 3 / 8),
    ],
)
def test_weighted_sum_over_count_is_the_mean(loss_norm, expected):
    norm = normalise(loss_norm, MASK, SAMPLES, GROUPS, max_new_tokens=8)
    value = (norm.weights_T * TERMS).sum() / norm.counts_S.sum()
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert (norm.weights_T[~MASK] == 0).all() and (norm.weights_T[MASK] > 0).all()
    assert norm.counts_S[2] == 0  # the sample without sampled tokens


def gradient(rows, split, loss, theta):
    """The step's gradient when `split` (lists of row indices) are its microbatches."""
    total, count = torch.zeros_like(theta), 0.0
    for part in split:
        chosen = [rows[i] for i in part]
        ids = torch.cat([row.ids for row in chosen])
        columns = {
            name: torch.cat([row.columns[name] for row in chosen]).double()
            for name in chosen[0].columns
        }
        # A toy model: its log-prob and entropy of a token depend on the token alone.
        logprobs = torch.log_softmax(theta, 0)[ids]
        outputs = TokenOutputs(
            logprobs, logprobs**2, theta[ids], ListSegments([row.ids.numel() for row in chosen])
        )
        value, _ = loss(outputs, columns)
        total += torch.autograd.grad(value, theta)[0]
        count += sum(row.count for row in chosen)
    return total / count


def random_split(rng, num):
    order = rng.permutation(num)
    cuts = np.sort(rng.integers(1, num, size=rng.integers(0, num)))
    return [part.tolist() for part in np.split(order, np.unique(cuts))]


COLUMNS = ("actor_logprobs", "ref_logprobs", "teacher_logprobs", "values")


CASES = [
    (name, loss_norm, ("token", "sequence", "geometric")[(i + j) % 3])
    for i, name in enumerate(FACTS)
    for j, loss_norm in enumerate(("token", "sequence", "group", "constant"))
]


@pytest.mark.parametrize(("name", "loss_norm", "level"), CASES)
def test_gradient_does_not_depend_on_the_split(name, loss_norm, level):
    rng = np.random.default_rng(5)
    groups = make_groups(rng, [3, 1, 4, 2], columns=COLUMNS)
    settings = settings_for(
        name,
        loss_norm=loss_norm,
        kl_coef=0.1,
        entropy_coef=0.01,
        correction="tis",
        correction_level=level,
    )
    rows = make_rows(groups, settings, max_new_tokens=8)
    theta = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    built = [build_policy_loss(settings)]
    built += [build_value_loss(settings)] if settings.facts.needs_critic else []
    for loss in built:
        whole = gradient(rows, [list(range(len(rows)))], loss, theta)
        assert whole.abs().max() > 1e-3
        for _ in range(5):
            split = gradient(rows, random_split(rng, len(rows)), loss, theta)
            # fp64 sums of 50 terms in another order.
            torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-13)
