"""Uploads to a real server: what is committed is whole, whatever happens on the way."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pentad.checkpoint.fetch import fetch_newest, read_remote, remote_damage
from pentad.checkpoint.folders import COMMIT, MANIFEST, Damaged, damage, info_folder
from pentad.checkpoint.s3 import Store, StoreError
from pentad.checkpoint.upload import Taken, prune_remote, upload

SMALL = 2000


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_a_fresh_machine_gets_every_byte_back(remote, make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(7)
    store = Store(remote)
    upload(store, checkpoint)
    found = read_remote(store, 7)
    assert found is not None and remote_damage(found) == []
    fetched = fetch_newest(store, tmp_path / "fresh")
    assert fetched is not None and (fetched.step, damage(fetched)) == (7, [])
    assert contents(tmp_path / "fresh") == contents(tmp_path / "local")


def test_objects_lie_under_the_run_by_their_local_paths(remote, make_checkpoint, client):
    upload(Store(remote), make_checkpoint(7, size=SMALL))
    team = remote.prefix.split("/")[0]
    listed = client.list_objects_v2(Bucket=remote.bucket, Prefix=team)["Contents"]
    keys = {one["Key"] for one in listed}
    base = f"{team}/me/math/trial-0"
    assert f"{base}/default/recover_checkpoint/globalstep7/__0_0.distcp" in keys
    assert f"{base}/recover_info/globalstep7/COMMIT" in keys


def test_commit_is_created_last_and_after_every_head(remote, make_checkpoint, proxy):
    upload(Store(replace(remote, endpoint_url=proxy.url)), make_checkpoint(3, size=SMALL))
    puts = [r.target.rpartition("/")[2] for r in proxy.seen if r.method in ("PUT", "POST")]
    assert puts[-2:] == [MANIFEST, COMMIT]
    before_commit = proxy.seen[: [r.target.endswith(MANIFEST) for r in proxy.seen].index(True)]
    checked = [r.target for r in before_commit[-5:] if r.method == "HEAD"]
    assert len(set(checked)) == 5


def test_what_is_there_already_is_not_sent_again(remote, make_checkpoint, client):
    checkpoint, store = make_checkpoint(3), Store(remote)
    upload(store, checkpoint)
    client.delete_object(Bucket=remote.bucket, Key=f"{remote.prefix}{checkpoint.info}/{COMMIT}")
    first, store.num_bytes = store.num_bytes, 0
    upload(store, checkpoint)
    assert store.num_bytes < 100_000 < first


def test_a_file_that_changed_on_disk_is_not_committed(remote, make_checkpoint):
    checkpoint = make_checkpoint(3)
    path = checkpoint.root / "default/recover_checkpoint/globalstep3/__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[2_000_000] ^= 1
    path.write_bytes(data)
    store = Store(remote)
    with pytest.raises(Damaged, match=r"__1_0.distcp: piece tensor\.2\d "):
        upload(store, checkpoint)
    assert read_remote(store, 3) is None


def test_the_store_refuses_bytes_that_changed_on_the_way(remote):
    store = Store(replace(remote, max_attempts=2))
    key = store.begin("x", "0" * 64)
    with pytest.raises(StoreError, match="BadDigest"):
        store.send_part("x", key, 1, b"a" * 100, hashlib.sha256(b"b" * 100).digest())


@pytest.mark.parametrize("fault", ["busy", "reset", "lost"])
def test_storms_are_weathered(remote, make_checkpoint, proxy, tmp_path, fault):
    """Every request fails at first, whatever it is; with `lost` it has been obeyed."""
    counts: dict[object, int] = {}

    def first_time(request):
        counts[request] = counts.get(request, 0) + 1
        return fault if counts[request] == 1 else ""

    proxy.choose = first_time
    store = Store(replace(remote, endpoint_url=proxy.url))
    upload(store, make_checkpoint(4))
    assert store.num_retries >= 10
    fetched = fetch_newest(store, tmp_path / "fresh")
    assert fetched is not None and damage(fetched) == []


def test_a_stall_is_ended_by_the_timeout(remote, make_checkpoint, proxy):
    faults = iter(["stall"])
    proxy.choose = lambda request: next(faults, "") if request.is_part else ""
    store = Store(replace(remote, endpoint_url=proxy.url, timeout_s=2.0))
    upload(store, make_checkpoint(4))
    assert store.num_retries >= 1 and read_remote(store, 4) is not None
    assert proxy.faults.count("stall") == 1


def test_cut_bodies_are_continued_where_they_ended(remote, make_checkpoint, proxy, tmp_path):
    upload(Store(remote), make_checkpoint(4))
    turns = iter(range(1000))
    proxy.choose = lambda r: "cut" if r.is_object_read and next(turns) % 3 == 0 else ""
    store = Store(replace(remote, endpoint_url=proxy.url))
    fetched = fetch_newest(store, tmp_path / "fresh")
    assert fetched is not None and damage(fetched) == []
    assert proxy.faults.count("cut") >= 3


def test_a_store_that_stays_busy_ends_in_a_sentence(remote, make_checkpoint, proxy):
    proxy.choose = lambda request: "busy" if request.is_part else ""
    store = Store(replace(remote, endpoint_url=proxy.url, max_attempts=3))
    with pytest.raises(StoreError, match=r"(?s)SlowDown.*__0_0.distcp, after 3 attempts"):
        upload(store, make_checkpoint(4))
    proxy.choose = lambda request: ""
    upload(store, make_checkpoint(4))
    assert read_remote(store, 4) is not None


def test_two_uploaders_of_one_step_have_one_winner(remote, make_checkpoint, tmp_path):
    """Of the same checkpoint both are content; of another the loser says so."""
    mine = make_checkpoint(5, size=SMALL)
    twin = make_checkpoint(5, root=tmp_path / "twin", size=SMALL)
    other = make_checkpoint(5, root=tmp_path / "other", size=SMALL + 1)
    store = Store(remote)
    upload(store, mine)
    upload(store, twin)
    with pytest.raises(Taken, match="same step that is not this run's.*trial_name"):
        upload(store, other)


def test_a_race_for_commit_has_one_winner(remote):
    barrier = threading.Barrier(8)
    won: list[int] = []

    store = Store(replace(remote, num_workers=8))

    def race(number: int) -> None:
        barrier.wait()
        if store.put_once(f"{info_folder(1)}/{COMMIT}", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read(f"{info_folder(1)}/{COMMIT}") == str(won[0]).encode()


def test_the_bandwidth_is_kept_to(remote, make_checkpoint):
    store = Store(replace(remote, bandwidth_mb_s=10.0))
    began = time.monotonic()
    upload(store, make_checkpoint(4))  # 15 MiB; the last part may still be on its way
    assert time.monotonic() - began > 1.0


def test_retention_removes_commit_first_and_orphans_but_keeps_the_newest(
    remote, make_checkpoint, proxy
):
    store = Store(replace(remote, endpoint_url=proxy.url))
    for step in (1, 2, 3, 4):
        upload(store, make_checkpoint(step, size=1000))
    store.put("default/recover_checkpoint/globalstep2/left", b"x")
    store.begin("default/recover_checkpoint/globalstep4/__0_0.distcp", "0" * 64)
    store.begin("default/recover_checkpoint/globalstep9/__0_0.distcp", "0" * 64)
    store.put("default/epoch1/model.safetensors", b"not ours")
    assert prune_remote(store, 2) == [4, 3]
    left = store.sizes()
    assert {int(key.split("globalstep")[1].split("/")[0]) for key in left if "step" in key} == {
        3,
        4,
    }
    assert "default/epoch1/model.safetensors" in left
    assert list(store.uploads()) == ["default/recover_checkpoint/globalstep9/__0_0.distcp"]


def test_retention_never_counts_what_is_not_whole(remote, make_checkpoint, client):
    store = Store(remote)
    for step in (1, 2, 3):
        upload(store, make_checkpoint(step, size=1000))
    for step, name in ((3, MANIFEST), (2, "step_info.json")):
        key = f"{remote.prefix}{info_folder(step)}/{name}"
        client.delete_object(Bucket=remote.bucket, Key=key)
    assert prune_remote(store, 1) == [1]
    assert read_remote(store, 1) is not None
