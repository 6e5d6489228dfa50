"""Stores give back what was put, exactly, and never half of it."""

import math
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample
from pentad.data.store import FileStore, MemoryStore


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


def assert_same(left: Group, right: Group) -> None:
    assert left.prompt == right.prompt
    assert left.attempt == right.attempt
    assert len(left.samples) == len(right.samples)
    for one, other in zip(left.samples, right.samples, strict=True):
        assert (one.finish, one.text, one.reward) == (other.finish, other.text, other.reward)
        assert one.reward_parts == other.reward_parts
        assert list(one.columns) == list(other.columns)
        pairs = [(one.columns[name], other.columns[name]) for name in one.columns]
        for name in ("ids", "mask", "rollout_logprobs", "versions"):
            pairs.append((getattr(one, name), getattr(other, name)))
        for a, b in pairs:
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "groups")


def test_what_was_put_is_got_back_exactly(store):
    group = make_group()
    store.put(group)
    assert_same(store.get(17), group)
    assert store.keys() == [17] and store.intact(17)


def test_keys_are_in_order_and_deletion_is_quiet(store):
    for gid in (30, 2, 11):
        store.put(make_group(gid))
    store.delete(11)
    store.delete(11)
    assert store.keys() == [2, 30]
    assert not store.intact(11)
    with pytest.raises(RunError, match="the samples of group 11 are not in"):
        store.get(11)


def test_an_older_attempt_never_replaces_a_newer_one(store):
    store.put(make_group(attempt=1, reward=1.0))
    store.put(make_group(attempt=0, reward=0.0))
    assert store.get(17).samples[0].reward == 1.0
    store.put(make_group(attempt=2, reward=2.0))
    assert store.get(17).samples[0].reward == 2.0
    assert store.keys() == [17]


def test_rewards_that_are_missing_or_not_finite_survive(tmp_path):
    store = FileStore(tmp_path)
    for reward in (None, math.inf, 1 / 3):
        store.put(make_group(reward=reward))
        assert store.get(17).samples[0].reward == reward


@settings(max_examples=25, deadline=None)
@given(
    column=hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16, np.int32, np.bool_]),
        st.integers(0, 9),
    ),
    text=st.text(),
)
def test_files_keep_every_dtype_and_every_text(tmp_path_factory, column, text):
    store = FileStore(tmp_path_factory.mktemp("store"))
    group = make_group(num_samples=1)
    group.samples[0].columns["odd/name"] = column
    group.samples[0].text = text.encode("utf-8", "replace").decode()
    store.put(group)
    assert_same(store.get(17), group)


def test_a_torn_file_is_damaged_not_wrong(tmp_path):
    store = FileStore(tmp_path)
    store.put(make_group())
    (path,) = tmp_path.glob("*.npz")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("0/rollout_logprobs.npy")
    flipped = bytearray(whole)
    flipped[info.header_offset + 200] ^= 1
    for bad in (whole[: len(whole) // 2], b"", bytes(flipped)):
        path.write_bytes(bad)
        assert not store.intact(17)
        with pytest.raises(RunError, match="is damaged"):
            store.get(17)


def test_a_file_left_aside_by_a_killed_writer_is_not_seen(tmp_path):
    store = FileStore(tmp_path)
    (tmp_path / f".{3:012d}-0000.npz.{os.getpid() + 1}").write_bytes(b"half")
    assert store.keys() == []


def test_a_failed_put_leaves_the_store_as_it_was(tmp_path):
    store = FileStore(tmp_path)
    store.put(make_group())
    broken = make_group(attempt=1)
    broken.prompt.fields["image"] = b"\x00"
    with pytest.raises(RunError, match="group 17 cannot be kept in a file: .*bytes"):
        store.put(broken)
    assert_same(store.get(17), make_group())
    assert len(list(tmp_path.iterdir())) == 1


def test_no_pickle_is_written_or_read(tmp_path):
    store = FileStore(tmp_path)
    group = make_group()
    group.samples[0].columns["objects"] = np.array([{"a": 1}], dtype=object)
    with pytest.raises(RunError, match="group 17 cannot be kept in a file"):
        store.put(group)
