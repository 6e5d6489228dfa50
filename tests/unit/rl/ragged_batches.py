"""Random ragged batches for the tests of pentad.rl."""

import numpy as np
import torch
from hypothesis import strategies as st
from plain_rl import Plain

from pentad.core.types import Greedy, Group, Prompt, Sample
from pentad.rl.ragged import Rollouts

REWARDS = [0.0, 1.0, 0.1, -2.5]
"""Few values, so that groups of equal rewards are common; 0.1 has no exact binary form."""


@st.composite
def plain_samples(draw, max_groups=4):
    """Samples of several groups; masks with gaps, empty masks, groups of one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_groups))
    has_equal_rewards = draw(st.booleans())
    samples = []
    for group, size in enumerate(sizes):
        reward = draw(st.sampled_from(REWARDS))
        for _ in range(size):
            mask = [False, *draw(st.lists(st.booleans(), max_size=9))]
            samples.append(
                Plain(
                    group=group,
                    reward=reward if has_equal_rewards else draw(st.sampled_from(REWARDS)),
                    mask=mask,
                    token_rewards=rng.normal(size=len(mask)).tolist(),
                    values=rng.normal(size=len(mask)).tolist(),
                )
            )
    return samples


def rollouts_of(samples, *, token_rewards=True, dtype=torch.float64):
    tokens = [t for s in samples for t in s.token_rewards]
    return Rollouts(
        rewards_S=torch.tensor([s.reward for s in samples], dtype=dtype),
        groups_S=torch.tensor([s.group for s in samples]),
        mask_T=torch.tensor([m for s in samples for m in s.mask]),
        samples_T=torch.tensor([i for i, s in enumerate(samples) for _ in s.mask]),
        token_rewards_T=torch.tensor(tokens, dtype=dtype) if token_rewards else None,
        values_T=torch.tensor([v for s in samples for v in s.values], dtype=dtype),
    )


def flat(rows):
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


class ListSegments:
    """Segments of sequences that lie one after the other."""

    def __init__(self, lengths):
        self.index_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths).long())
        self.num = len(lengths)

    def sum(self, x_T):
        return x_T.new_zeros(self.num).index_add(0, self.index_T, x_T)

    def spread(self, x_S):
        return x_S[self.index_T]


def make_sample(rng, mask, *, reward=0.0, finish="stop", version=0, columns=()):
    """A sample with random ids and log-probs; `columns` names further random ones."""
    mask = np.asarray(mask, dtype=bool)
    logprobs = np.where(mask, -rng.exponential(size=mask.size), 0).astype(np.float32)
    return Sample(
        ids=rng.integers(0, 7, mask.size),
        mask=mask,
        rollout_logprobs=logprobs,
        versions=np.where(mask, version, -1),
        finish=finish,
        reward=reward,
        columns={
            name: np.where(mask, logprobs + rng.normal(size=mask.size) / 3, 0).astype(np.float32)
            for name in columns
        },
    )


def make_groups(rng, sizes, *, max_length=8, columns=()):
    """Groups of the given sizes with random lengths (0 included) and rewards."""
    groups = []
    for gid, size in enumerate(sizes):
        samples = [
            make_sample(
                rng,
                [False, False, *rng.integers(0, 2, rng.integers(0, max_length + 1))],
                reward=float(rng.choice(REWARDS)),
                columns=columns,
            )
            for _ in range(size)
        ]
        greedy = Greedy(REWARDS[gid % len(REWARDS)], max_length // 2)
        groups.append(Group(Prompt(gid, (1, 2), {}), samples, greedy=greedy))
    return groups
