"""Objects altered behind our back: all are noticed and named, and the checkpoint before is used."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from tables import table
from typer.testing import CliRunner

from pentad.checkpoint.fetch import (
    ASIDE,
    committed_steps,
    fetch_newest,
    give_up,
    read_remote,
    remote_damage,
    set_aside,
)
from pentad.checkpoint.folders import (
    COMMIT,
    MANIFEST,
    Unreadable,
    commit_marker,
    damage,
    find_checkpoints,
    info_folder,
)
from pentad.checkpoint.s3 import Store, StoreError
from pentad.checkpoint.tiers import Tiers
from pentad.checkpoint.upload import upload
from pentad.cli.main import app
from pentad.core.errors import RunError

FILES = {
    "data": "default/recover_checkpoint/globalstep{}/__0_0.distcp",
    "pieces": "default/recover_checkpoint/globalstep{}/__1_0.distcp",
    "metadata": "default/recover_checkpoint/globalstep{}/.metadata",
    "infos": "recover_info/globalstep{}/step_info.json",
    "manifest": "recover_info/globalstep{}/manifest.json",
    "commit": "recover_info/globalstep{}/COMMIT",
}


def alter(how: str, data: bytes, older: bytes, other: bytes) -> bytes | None:
    middle = len(data) // 2
    return {
        "bit flip": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        "truncation": data[:-1],
        "appended": data + b"x",
        "zeroed": bytes(len(data)),
        "missing": None,
        "swapped": other,
        "stale": older,
    }[how]


HOW = ["bit flip", "truncation", "appended", "zeroed", "missing", "swapped", "stale"]
DAMAGES = [(how, name) for how in HOW for name in FILES]
DAMAGES_REST = [
    (how, name)
    for how, name in DAMAGES
    if how not in ("bit flip", "missing") and (HOW.index(how) + [*FILES].index(name)) % 2
]
"""The same checks find these in a local folder (tests/unit/checkpoint/test_corruption.py)."""


@pytest.mark.parametrize(("how", "name"), table(DAMAGES, DAMAGES_REST))
def test_every_damage_is_found_and_the_one_before_is_used(
    remote, make_checkpoint, client, tmp_path, uploaded, how, name
):
    store, objects = uploaded
    place = {step: store.prefix + FILES[name].format(step) for step in (1, 2)}
    other = objects[store.prefix + FILES["data" if name == "infos" else "infos"].format(2)]
    altered = alter(how, objects[place[2]], objects[place[1]], other)
    if altered is None:
        client.delete_object(Bucket=store.bucket, Key=place[2])
    else:
        client.put_object(Bucket=store.bucket, Key=place[2], Body=altered)
    said: list[str] = []
    fetched = fetch_newest(store, tmp_path / "fresh", report=said.append)
    assert fetched is not None and (fetched.step, damage(fetched)) == (1, [])
    if (name, how) == ("commit", "missing"):
        return  # then it does not exist
    assert "globalstep2" in said[0] and "set aside" in said[0]
    if name not in ("manifest", "commit"):
        assert f"s3://{store.bucket}/{place[2]}" in said[0]
    assert not (tmp_path / "fresh" / info_folder(2)).exists()
    keys = store.sizes("recover_info/globalstep2/")
    assert "recover_info/globalstep2/COMMIT" not in keys
    assert "recover_info/globalstep2/COMMIT.damaged" in keys


@pytest.fixture(scope="module")
def shared():
    """A store, whose making takes long, and the content of two checkpoints."""
    return {}, {}


@pytest.fixture
def uploaded(remote, make_checkpoint, client, shared):
    """Two checkpoints in the store: sent once, copied for every case."""
    stores, two_checkpoints = shared
    store = copy.copy(stores.setdefault("store", None) or Store(remote))
    stores["store"] = store
    store.prefix = remote.prefix
    if not two_checkpoints:
        for step in (1, 2):
            upload(store, make_checkpoint(step, size=20_000))
        for key in store.sizes():
            body = client.get_object(Bucket=store.bucket, Key=store.prefix + key)["Body"]
            two_checkpoints[key] = body.read()
    else:
        for key, data in two_checkpoints.items():
            client.put_object(Bucket=store.bucket, Key=store.prefix + key, Body=data)
    return store, {store.prefix + key: data for key, data in two_checkpoints.items()}


def test_a_remote_checkpoint_is_verified_without_a_local_copy(uploaded, client):
    store, objects = uploaded
    found = read_remote(store, 2)
    assert found is not None and remote_damage(found) == []
    for name in ("data", "infos"):
        key = store.prefix + FILES[name].format(2)
        client.put_object(Bucket=store.bucket, Key=key, Body=bytes(len(objects[key])))
    first, second = sorted(remote_damage(found))
    assert "__0_0.distcp: piece tensor.0" in first and "step_info.json: piece tensor.0" in second


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(
    uploaded, client, tmp_path, monkeypatch
):
    store, _ = uploaded
    said: list[str] = []
    read = Store.head

    def remove_then_read(self, key):
        if key.endswith("globalstep2/__0_0.distcp"):
            for name in FILES.values():
                client.delete_object(Bucket=store.bucket, Key=store.prefix + name.format(2))
        return read(self, key)

    monkeypatch.setattr(Store, "head", remove_then_read)
    fetched = fetch_newest(store, tmp_path / "fresh", report=said.append)
    assert fetched is not None and fetched.step == 1
    assert "was removed while it was read" in said[0]
    assert "recover_info/globalstep2/COMMIT.damaged" not in store.sizes()


def test_a_disk_that_cannot_take_it_is_named_and_the_store_is_not_blamed(uploaded, tmp_path):
    store, _ = uploaded
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "default").write_text("a file where a folder should be")
    with pytest.raises(RunError, match=r"fresh: cannot take s3://.*/globalstep2 \("):
        fetch_newest(store, tmp_path / "fresh")
    assert read_remote(store, 2) is not None


def test_a_manifest_cannot_name_files_outside_its_checkpoint(remote, make_checkpoint, tmp_path):
    checkpoint, store = make_checkpoint(1, size=1000), Store(remote)
    upload(store, checkpoint)
    files = dict(checkpoint.manifest.files)
    files["default/model.safetensors"] = files.pop("recover_info/globalstep1/step_info.json")
    data = replace(checkpoint.manifest, files=files).to_bytes()
    store.put(f"{checkpoint.info}/{MANIFEST}", data)
    store.put(f"{checkpoint.info}/{COMMIT}", commit_marker(data))
    said: list[str] = []
    assert fetch_newest(store, tmp_path / "fresh", report=said.append) is None
    assert "'default/model.safetensors' is not a file of step 1" in said[0]
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("fault", ["busy", "reset", "denied"])
@pytest.mark.parametrize("name", [*FILES, "list"])
def test_a_store_that_fails_to_read_an_object_is_no_damage(uploaded, proxy, tmp_path, name, fault):
    """Every object that a start reads, times the ways a store fails."""
    store, _ = uploaded
    key = "list-type" if name == "list" else FILES[name].format(2)
    proxy.choose = lambda request: fault if key in request.target else ""
    before, said = store.sizes(), []
    through = Store(replace(store.remote, endpoint_url=proxy.url, max_attempts=2))
    through.prefix = store.prefix
    with pytest.raises(StoreError):
        fetch_newest(through, tmp_path / "fresh", report=said.append)
    assert fault in proxy.faults and said == []
    assert store.sizes() == before, "nothing is set aside"
    assert find_checkpoints(tmp_path / "fresh", pytest.fail) == []
    fetched = fetch_newest(store, tmp_path / "fresh", report=said.append)
    assert fetched is not None and fetched.step == 2


def test_a_manifest_of_a_later_version_in_the_store_is_left_as_it_is(uploaded, tmp_path):
    store, objects = uploaded
    key = FILES["manifest"].format(2)
    data = objects[store.prefix + key].replace(b'"format":1', b'"format":2')
    store.put(key, data)
    store.put(FILES["commit"].format(2), commit_marker(data))
    before = store.sizes()
    with pytest.raises(Unreadable, match="format is 2, and this version reads 1"):
        fetch_newest(store, tmp_path / "fresh", report=pytest.fail)
    assert store.sizes() == before


def test_what_was_set_aside_in_the_store_is_put_back_or_given_up(uploaded, tmp_path):
    store, _ = uploaded
    uri = store.place("").rstrip("/")
    store.put(FILES["infos"].format(1), b"damaged")
    for step in (1, 2):
        set_aside(store, step, "damaged", "why")
    tiers = Tiers(tmp_path / "fresh", replace(store.remote, uri=uri))
    assert tiers.find() is None
    assert list(tiers.set_aside().values()) == [2, 1]
    tiers.close(0.0)
    words = ["--restore", "--endpoint-url", store.remote.endpoint_url]
    result = CliRunner().invoke(app, ["verify-checkpoint", uri, *words])
    assert result.exit_code == 1
    assert f"{store.place(info_folder(2))}: every byte is as saved" in result.output
    assert f"{store.place(info_folder(1))}: is damaged, and keeps its name" in result.output
    assert committed_steps(store.sizes()) == [2]
    assert committed_steps(store.sizes(), ASIDE) == [1]
    give_up(store)
    assert committed_steps(store.sizes()) == committed_steps(store.sizes(), ASIDE) == []
