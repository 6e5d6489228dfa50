"""What every store promises: idempotent and whole per group, over processes and their deaths."""

import importlib
import json
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample
from pentad.data import file_blobs
from pentad.data.store import BlobStore, GroupStore, MemoryStore, MissingGroups, open_store

CLEAN = multiprocessing.get_context("forkserver")
"""Processes that share nothing with this one, forked from one that has torch already."""
DEADLINE_S = 60.0


def prompt_of(gid: int) -> Prompt:
    return Prompt(gid, (5, gid % 9), {"answer": gid}, f"prompt {gid}")


def make_group(gid: int, attempt: int = 0, num_samples: int = 3, num_tokens: int = 40) -> Group:
    """Every value follows from gid and attempt, so that a reader sees whether it is whole."""
    draw = np.random.default_rng([gid, attempt])
    samples = []
    for i in range(num_samples):
        size = num_tokens + i
        mask = np.arange(size) > 1
        sample = Sample(
            ids=draw.integers(0, 1000, size),
            mask=mask,
            rollout_logprobs=draw.standard_normal(size).astype(np.float32),
            versions=np.where(mask, attempt, -1),
            finish="stop",
            text=f"answer {gid}.{attempt}.{i} \u00e9",
            turns=(("assistant", "a"), ("tool", "b")),
            reward=float(attempt + i),
            reward_parts={"correct": float(i), "format": 0.1},
            columns={"own": draw.standard_normal(size).astype(np.float32)},
        )
        sample.routes = draw.integers(0, 8, (size, 2, 4)).astype(np.int16)
        samples.append(sample)
    return Group(prompt_of(gid), samples, attempt)


def column_of(group: Group, scale: float = 1.0) -> list[np.ndarray]:
    return [(scale * s.ids).astype(np.float32) for s in group.samples]


def assert_same(got: Group, wanted: Group, columns: dict[str, list[np.ndarray]] | None = None):
    assert (got.gid, got.attempt, len(got.samples)) == (
        wanted.gid,
        wanted.attempt,
        len(wanted.samples),
    )
    assert got.prompt == wanted.prompt
    for i, (left, right) in enumerate(zip(got.samples, wanted.samples, strict=True)):
        for field in fields(right):
            ours, theirs = getattr(left, field.name), getattr(right, field.name)
            if field.name == "columns":
                theirs = theirs | {name: arrays[i] for name, arrays in (columns or {}).items()}
                assert ours.keys() == theirs.keys()
                for name in theirs:
                    np.testing.assert_array_equal(ours[name], theirs[name])
                    assert ours[name].dtype == theirs[name].dtype
            elif isinstance(theirs, np.ndarray):
                np.testing.assert_array_equal(ours, theirs)
                assert ours.dtype == theirs.dtype
            else:
                assert ours == theirs, field.name


SUBJECTS = {
    "memory": MemoryStore,
    "files": lambda: BlobStore(file_blobs.make_blobs(), prompt_of),
}
ON_RAY = [
    pytest.param(name, marks=[pytest.mark.ray, pytest.mark.dist])
    for name in ("ray", "transfer_queue")
]


@pytest.fixture(scope="module")
def on_ray(ray_cluster):
    """Stores with two storage units each, one of a kind for all tests: they take seconds."""
    made: dict[str, GroupStore] = {}

    def make(kind: str) -> GroupStore:
        if kind not in made:
            blobs = importlib.import_module(f"pentad.data.{kind}_blobs")
            made[kind] = BlobStore(blobs.make_blobs(num_units=2), prompt_of)
        return made[kind]

    yield make
    for store in made.values():
        store.close()


def opened(request: pytest.FixtureRequest) -> Iterator[GroupStore]:
    if request.param in SUBJECTS:
        store = SUBJECTS[request.param]()
        yield store
        store.close()
        return
    if request.param == "transfer_queue":
        pytest.importorskip("transfer_queue")
    store = request.getfixturevalue("on_ray")(request.param)
    yield store
    store.delete(range(200))


@pytest.fixture(scope="module", autouse=True)
def one_forkserver():
    before = forkserver._forkserver._preload_modules
    CLEAN.set_forkserver_preload(["pentad.data.store"])
    yield
    forkserver._forkserver._stop()
    # A later server of this process, such as that of `pentad chaos`, has its own modules again.
    CLEAN.set_forkserver_preload(before)


@pytest.fixture(params=["memory", "files", *ON_RAY])
def store(request: pytest.FixtureRequest):
    yield from opened(request)


@pytest.fixture(params=["files", *ON_RAY])
def shared(request: pytest.FixtureRequest):
    yield from opened(request)


def in_process(function: Callable, *arguments) -> None:
    process = CLEAN.Process(target=function, args=arguments)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0


# One process


def test_all_fields_come_back_in_the_order_asked_for(store):
    for gid in (3, 67, 131):
        store.put(make_group(gid))
    for gid, got in zip((131, 3, 67), store.get([131, 3, 67]), strict=True):
        assert_same(got, make_group(gid))
    assert store.get([]) == []


def test_what_is_not_here_is_named(store):
    store.put(make_group(1))
    with pytest.raises(RunError, match="the samples of group 11 are not in the store"):
        store.get([1, 11])


def test_a_put_again_changes_nothing(store):
    store.put(make_group(17))
    column = column_of(make_group(17))
    assert store.write(17, 0, {"ref_logprobs": column})
    store.put(make_group(17))
    assert_same(store.get([17])[0], make_group(17), {"ref_logprobs": column})


def test_a_later_attempt_wins_and_has_no_column_of_the_earlier(store):
    store.put(make_group(17))
    store.write(17, 0, {"ref_logprobs": column_of(make_group(17))})
    store.put(make_group(17, attempt=12))
    assert_same(store.get([17])[0], make_group(17, attempt=12))


def test_a_zombie_of_an_earlier_attempt_changes_nothing(store):
    store.put(make_group(17, attempt=2))
    store.put(make_group(17, attempt=1))
    assert not store.write(17, 1, {"ref_logprobs": column_of(make_group(17, attempt=1))})
    assert_same(store.get([17])[0], make_group(17, attempt=2))


def test_columns_are_replaced_one_by_one(store):
    group = make_group(17)
    store.put(group)
    first, second = column_of(make_group(17)), column_of(make_group(17), 2.0)
    assert store.write(17, 0, {"ref_logprobs": first, "values": first})
    assert store.write(17, 0, {"values": second})
    wanted = {"ref_logprobs": first, "values": second}
    assert_same(store.get([17])[0], make_group(17), wanted)


def test_a_column_that_does_not_fit_is_refused(store):
    store.put(make_group(17))
    with pytest.raises(RunError, match=r"column values of group 17 has \[1\] values"):
        store.write(17, 0, {"values": [np.zeros(1, np.float32)]})
        store.get([17])


def test_deletion_is_quiet_and_ends_columns_too(store):
    for gid in (30, 2, 11):
        store.put(make_group(gid))
    store.write(11, 0, {"values": column_of(make_group(11))})
    store.delete([11, 30])
    store.delete([11])
    with pytest.raises(RunError, match="the samples of group 11 are not in"):
        store.get([11])
    assert not store.write(11, 0, {"values": column_of(make_group(11))})
    assert_same(store.get([2])[0], make_group(2))


def test_arrays_can_be_given_to_torch_and_changed(store):
    store.put(make_group(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that cannot be written to
        tensor = torch.from_numpy(store.get([4])[0].samples[0].rollout_logprobs)
    tensor += 1.0


def test_an_address_is_json(store):
    assert json.loads(json.dumps(store.address)) == store.address


def test_a_store_in_memory_cannot_be_opened_elsewhere():
    with pytest.raises(RunError, match="store memory can be opened only by the process"):
        open_store(MemoryStore().address, prompt_of)


# Several processes


def score(address):
    """What a scorer does."""
    store = open_store(address, prompt_of)
    for group in store.get(range(8)):
        assert_same(group, make_group(group.gid))
        assert store.write(group.gid, group.attempt, {"ref_logprobs": column_of(group)})
    store.close()


def test_columns_written_by_another_process_are_seen(shared):
    for gid in range(8):
        shared.put(make_group(gid))
    in_process(score, shared.address)
    for group in shared.get(range(8)):
        assert_same(group, make_group(group.gid), {"ref_logprobs": column_of(group)})


def put_for_ever(address, seed):
    """Attempts of a few groups, large enough that a kill comes amid one."""
    store = open_store(address, prompt_of)
    draw = random.Random(seed)
    for attempt in range(10**6):
        gid = draw.randrange(4)
        store.put(make_group(gid, attempt, num_tokens=20_000))
        store.write(gid, attempt, {"values": column_of(make_group(gid, attempt, 3, 20_000))})


def found(store: GroupStore) -> list[Group]:
    groups = []
    for gid in range(4):
        try:
            groups += store.get([gid])
        except RunError as error:
            assert "are not in the store" in str(error)
    return groups


def test_a_group_is_whole_after_any_kill_of_its_writer(shared):
    draw = random.Random(5)
    for seed in range(3):
        process = CLEAN.Process(target=put_for_ever, args=(shared.address, seed))
        process.start()
        end = time.monotonic() + DEADLINE_S
        while not found(shared) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.05, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)
        groups = found(shared)
        assert groups
        for group in groups:
            wanted = make_group(group.gid, group.attempt, num_tokens=20_000)
            has_values = "values" in group.samples[0].columns
            assert_same(group, wanted, {"values": column_of(wanted)} if has_values else None)
            shared.delete([group.gid])


def put_attempts(address, gids, attempts, seed):
    store = open_store(address, prompt_of)
    work = [(gid, attempt) for gid in gids for attempt in attempts]
    random.Random(seed).shuffle(work)
    for gid, attempt in work:
        store.put(make_group(gid, attempt, num_tokens=500))


def test_two_processes_put_at_once_and_the_latest_attempt_stays(shared):
    processes = [
        CLEAN.Process(target=put_attempts, args=(shared.address, range(20), attempts, seed))
        for seed, attempts in enumerate([range(0, 10, 2), range(1, 10, 2)])
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        for gid in range(20):
            try:
                (group,) = shared.get([gid])
            except RunError as error:
                assert "are not in the store" in str(error)
            else:
                assert_same(group, make_group(gid, group.attempt, num_tokens=500))
        time.sleep(0.02)  # or the reader takes the writers' core
    assert [process.exitcode for process in processes] == [0, 0]
    assert [group.attempt for group in shared.get(range(20))] == [9] * 20
    shared.delete(range(20))
    with pytest.raises(RunError):
        shared.get([0])


# Units that die


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.parametrize("shared", ["ray"], indirect=True)
def test_a_unit_that_dies_comes_back_empty_and_alone(shared):
    import ray

    for gid in range(6):
        shared.put(make_group(gid))
    reader = open_store(shared.address, prompt_of)
    pid = ray.get(shared.blobs.units[1].__ray_call__.remote(lambda unit: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    assert shared.missing(range(6)) == [1, 3, 5]
    with pytest.raises(MissingGroups) as caught:
        shared.get(range(6))
    assert caught.value.gids == [1, 3, 5]

    def put_again():
        for gid in (1, 3, 5):
            shared.put(make_group(gid))

    later = threading.Timer(0.5, put_again)
    later.start()
    for gid, got in enumerate(reader.get(range(6))):  # it waits for what is put again
        assert_same(got, make_group(gid))
    later.join()


# Files


@pytest.fixture
def files(tmp_path):
    store = BlobStore(file_blobs.make_blobs(tmp_path / "shared"), prompt_of)
    yield store
    store.close()


def test_a_reader_keeps_what_was_deleted_under_it(files):
    files.put(make_group(3))
    reader = open_store(files.address, prompt_of)
    (group,) = reader.get([3])
    files.delete([3])
    assert_same(group, make_group(3))
    group.samples[0].ids[0] = 77  # its own


def test_what_a_reader_changes_nobody_else_gets(files):
    files.put(make_group(3))
    files.get([3])[0].samples[0].ids[:] = 0
    assert_same(files.get([3])[0], make_group(3))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-80] + bytes(80)])
def test_a_garbled_file_is_named(files, damage):
    files.put(make_group(3))
    path = Path(files.blobs.describe("3.0"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunError, match=f"{path} cannot be read: it"):
        files.get([3])


def test_no_file_stays_after_training_and_no_folder_after_the_end(files):
    folder = Path(files.address["folder"])
    for batch in range(3):
        gids = range(8 * batch, 8 * batch + 8)
        for gid in gids:
            files.put(make_group(gid, attempt=1))
            files.put(make_group(gid, attempt=2))
            files.write(gid, 2, {"values": column_of(make_group(gid, 2))})
        files.delete(gids)
        assert [path.name for path in folder.rglob("*") if path.is_file()] == ["owner.lock"]
    open_store(files.address, prompt_of).close()
    assert folder.is_dir()
    files.close()
    assert not folder.exists()
    with pytest.raises(RunError, match=f"the store {folder} is not here: the run that made it"):
        open_store(files.address, prompt_of)


def test_a_folder_that_is_full_is_named(files):
    folder = Path(files.address["folder"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(RunError, match=rf"bytes of samples cannot be written to {folder}: \w+"):
            files.put(make_group(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["owner.lock"]


def test_a_reader_whose_run_has_ended_says_so(files):
    reader = open_store(files.address, prompt_of)
    files.close()
    with pytest.raises(RunError, match="is not here: the run that made it has ended"):
        reader.get([3])


def make_and_wait(parent, said):
    store = BlobStore(file_blobs.make_blobs(parent), prompt_of)
    store.put(make_group(1))
    said.put(store.address["folder"])
    time.sleep(DEADLINE_S)


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    said = CLEAN.Queue()
    process = CLEAN.Process(target=make_and_wait, args=(tmp_path, said))
    process.start()
    left = Path(said.get(timeout=DEADLINE_S))
    beside = file_blobs.make_blobs(tmp_path)
    assert left.is_dir()  # its maker lives
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    after = file_blobs.make_blobs(tmp_path)
    assert not left.exists() and beside.folder.is_dir()
    beside.close(), after.close()
    assert list(tmp_path.iterdir()) == []
