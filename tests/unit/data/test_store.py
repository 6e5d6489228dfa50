"""The store gives back what was put, and no older attempt replaces a newer one."""

import numpy as np
import pytest

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample
from pentad.data.store import Store


def make_group(gid=17, attempt=0, num_samples=2, reward=0.5):
    samples = [
        Sample(
            ids=np.array([5, 9, 7, 2 + i], np.int64),
            mask=np.array([False, False, True, True]),
            rollout_logprobs=np.array([0, 0, -0.1, -0.7], np.float32),
            versions=np.array([-1, -1, 3, 4], np.int64),
            finish="stop",
            text='seven "two"\n\u00e9',
            reward=reward,
            reward_parts={"correct": 1.0, "format": 0.1},
            columns={"ref_logprobs": np.array([0, 0, -1e-8, -3.25], np.float32)},
        )
        for i in range(num_samples)
    ]
    fields = {"answer": "42", "level": 3, "tags": ["a", {"b": None}], "ratio": 0.1}
    return Group(Prompt(gid, (5, 9), fields, "6*7=", 2), samples, attempt)


@pytest.fixture
def store():
    return Store()


def test_what_was_put_is_got_back(store):
    group = make_group()
    store.put(group)
    assert store.get(17) is group


def test_deletion_is_quiet(store):
    for gid in (30, 2, 11):
        store.put(make_group(gid))
    store.delete(11)
    store.delete(11)
    with pytest.raises(RunError, match="the samples of group 11 are not in"):
        store.get(11)


def test_an_older_attempt_never_replaces_a_newer_one(store):
    store.put(make_group(attempt=1, reward=1.0))
    store.put(make_group(attempt=0, reward=0.0))
    assert store.get(17).samples[0].reward == 1.0
    store.put(make_group(attempt=2, reward=2.0))
    assert store.get(17).samples[0].reward == 2.0
