"""Each algorithm, from samples to gradient, makes a small policy better."""

import numpy as np
import pytest
import torch
from ragged_batches import ListSegments
from sections import settings_for

from pentad.core.types import Greedy, Group, Prompt, Sample, TokenOutputs
from pentad.rl.algorithms import build_policy_loss, make_rows
from pentad.rl.facts import FACTS

VOCAB, GOOD, LENGTH, NUM_STEPS = 6, 2, 3, 30
TEACHER = torch.full((VOCAB,), 0.02).index_fill(0, torch.tensor(GOOD), 0.9).log()


def draw(rng, logits):
    """Three tokens, each rewarded if it is the good one; prompt token 0."""
    logprobs = torch.log_softmax(logits, 0).numpy()
    answer = rng.choice(VOCAB, size=LENGTH, p=np.exp(logprobs) / np.exp(logprobs).sum())
    zeros = np.zeros(LENGTH + 1, dtype=np.float32)
    return Sample(
        ids=np.concatenate([[0], answer]),
        mask=np.array([False] + [True] * LENGTH),
        rollout_logprobs=np.concatenate([[0], logprobs[answer]]).astype(np.float32),
        versions=np.zeros(LENGTH + 1, dtype=np.int64),
        finish="stop",
        reward=float((answer == GOOD).mean()),
        columns={
            "values": zeros,
            "actor_logprobs": np.concatenate([[0], logprobs[answer]]).astype(np.float32),
            "teacher_logprobs": np.concatenate([[0], TEACHER.numpy()[answer]]),
        },
    )


@pytest.mark.parametrize("name", FACTS)
def test_the_rewarded_token_becomes_likely(name):
    rng = np.random.default_rng(0)
    settings = settings_for(name, correction="tis")
    loss = build_policy_loss(settings)
    logits = torch.zeros(VOCAB, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(NUM_STEPS):
        groups = [
            Group(
                Prompt(gid, (0,), {}),
                [draw(rng, logits.detach()) for _ in range(8)],
                greedy=Greedy(float(logits.argmax() == GOOD), LENGTH),
            )
            for gid in range(4)
        ]
        rows = make_rows(groups, settings, max_new_tokens=LENGTH)
        ids = torch.cat([row.ids for row in rows])
        columns = {c: torch.cat([row.columns[c] for row in rows]) for c in loss.columns}
        logprobs = torch.log_softmax(logits, 0)[ids]
        outputs = TokenOutputs(logprobs, None, None, ListSegments([LENGTH + 1] * len(rows)))
        value, _ = loss(outputs, columns)
        optimizer.zero_grad()
        (value / sum(row.count for row in rows)).backward()
        optimizer.step()
    # From 1/6; with the sign of any part wrong it falls instead.
    assert torch.softmax(logits, 0)[GOOD] > 0.6
