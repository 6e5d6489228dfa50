"""What is packed comes back with every field, and what was changed on the way is refused."""

from dataclasses import fields

import numpy as np
import pytest

from pentad.core.errors import RunError
from pentad.core.types import Greedy, Group, Prompt, Sample
from pentad.data.packing import pack_column, pack_groups, unpack_column, unpack_groups


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


def same(left, right):
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and left == right


def packed(*groups):
    return b"".join(pack_groups(groups))


def test_groups_come_back_from_bytes_with_every_field():
    one, two, three = make_group(3, attempt=2), make_group(17, num_samples=1), make_group(40)
    one.samples[0].given_text = one.samples[0].text = "other \ud800"
    one.samples[1].turns = (("assistant", "a"), ("tool", "b"))
    one.samples[1].columns = {}
    two.samples[0].routes = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    two.samples[0].finish, two.samples[0].reward = "length", None
    three.samples[0].ids = three.samples[0].ids[:0]
    three.samples[1].text = ""
    three.samples[1].columns["odd"] = np.ones(8)[::2]
    two.greedy = Greedy(-0.1, 7)
    groups = [one, two, three]
    again = list(unpack_groups(packed(*groups), {g.gid: g.prompt for g in groups}.get))
    assert [g.attempt for g in again] == [2, 0, 0]
    assert [g.greedy for g in again] == [None, Greedy(-0.1, 7), None]
    for old, new in zip(groups, again, strict=True):
        assert new.prompt is old.prompt
        for left, right in zip(old.samples, new.samples, strict=True):
            for field in fields(left):
                assert same(getattr(left, field.name), getattr(right, field.name)), field.name


def test_what_only_a_pickle_could_keep_is_refused():
    group = make_group()
    group.samples[0].columns["objects"] = np.array([{"a": 1}], dtype=object)
    with pytest.raises(RunError, match="group 17 cannot be kept in a file: columns/objects"):
        pack_groups([group])
    group = make_group()
    group.samples[0].reward_parts = {"x": np.float32(0.5), "y": b"z"}
    with pytest.raises(RunError, match="bytes is not a plain value"):
        pack_groups([group])


def test_bytes_that_are_cut_or_changed_give_a_sentence_wherever_it_is():
    whole = packed(make_group())
    prompt = make_group().prompt
    for end in (0, 10, 40, 100, len(whole) - 1):
        with pytest.raises(ValueError, match="^it"):
            list(unpack_groups(whole[:end], lambda gid: prompt))
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        with pytest.raises(ValueError, match="^it"):
            list(unpack_groups(changed, lambda gid: prompt))


def test_a_column_comes_back_split_by_samples():
    arrays = [np.arange(3, dtype=np.float32), np.zeros(0, np.float32), np.ones(2, np.float32)]
    again = unpack_column(b"".join(pack_column(arrays)))
    assert all(same(a, b) for a, b in zip(arrays, again, strict=True))
