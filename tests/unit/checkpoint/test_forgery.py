"""Whoever can write the folder can forge manifest and COMMIT: what follows is a sentence, and no
memory, file or code of the forger's choice."""

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import QuickDisk, save

from pentad.checkpoint.folders import (
    COMMIT,
    MANIFEST,
    Checkpoint,
    Damaged,
    Manifest,
    commit_marker,
    info_folder,
    read_checkpoint,
    read_file,
    read_json,
    state_folder,
)
from pentad.checkpoint.job import run_job
from pentad.checkpoint.restore import ManifestVerifier, open_state, read_counters

INFO = "recover_info/globalstep1/step_info.json"
STATE = state_folder("default", 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(lambda job: run_job(job, QuickDisk()), tmp_path, 1)
    return tmp_path


def entry_of(size: int, digest: str) -> dict[str, Any]:
    whole = hashlib.sha256(bytes.fromhex(digest)).hexdigest()
    return {"size": size, "sha256": whole, "pieces": [["x", 0, size, digest]]}


def forge(root: Path, **changes: Any) -> Checkpoint:
    """A manifest with other entries, its own digest and a COMMIT that fits."""
    place = root / info_folder(1)
    body = json.loads((place / MANIFEST).read_bytes())
    del body["digest"]
    body |= {**changes, "files": body["files"] | changes.get("files", {})}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    body["digest"] = hashlib.sha256(text).hexdigest()
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    (place / MANIFEST).write_bytes(data)
    (place / COMMIT).write_bytes(commit_marker(data))
    found = read_checkpoint(root, 1)
    assert found is not None and isinstance(found.manifest, Manifest)
    return found


def plant(root: Path, path: str, data: bytes) -> Checkpoint:
    """A file of the forger's, with the digest it has."""
    (root / path).write_bytes(data)
    return forge(root, files={path: entry_of(len(data), hashlib.sha256(data).hexdigest())})


@pytest.mark.parametrize("size", [1 << 40, 1 << 59, 1 << 63, 10**30])
def test_no_memory_is_made_for_sizes_that_the_files_do_not_have(root, size):
    state = f"{STATE}/__0_0.distcp"
    with pytest.raises(Damaged, match="were written|does not follow"):
        read_file(forge(root, files={INFO: entry_of(size, "0" * 64)}), INFO)
    with pytest.raises(Damaged, match="were written|does not follow"):
        forged = forge(root, files={state: entry_of(size, "0" * 64)})
        ManifestVerifier(forged, STATE).pieces("__0_0.distcp")


@pytest.mark.parametrize(
    "path",
    [
        "../../secrets",
        "/etc/passwd",
        "recover_info/globalstep1/..",
        "recover_info/globalstep1/../x",
        "../recover_checkpoint/globalstep1/x",
        "default/recover_checkpoint/globalstep2/x",
        "recover_info/globalstep1/COMMIT",
        "recover_info/globalstep1/manifest.json",
        "recover_info/globalstep1/\x1b[2J",
    ],
)
def test_names_outside_of_the_step_are_refused(root, path):
    with pytest.raises(Damaged, match="is not a file of step 1"):
        forge(root, files={path: entry_of(1, "0" * 64)})


@pytest.mark.parametrize("facts", [None, [], 3, "x"])
def test_facts_are_an_object(root, facts):
    with pytest.raises(Damaged, match="facts are not a JSON object"):
        forge(root, facts=facts)


@pytest.mark.parametrize("text", [b"nonsense", b"\xff", b"[]", b'{"a":' * 100_000])
def test_small_files_that_are_no_json_object_are_damage(root, text):
    with pytest.raises(Damaged, match=r"step_info.json: is not (a )?JSON"):
        read_json(plant(root, INFO, text), INFO)
    with pytest.raises(Damaged, match=r"counters.json: is not (a )?JSON"):
        read_counters(plant(root, f"{STATE}/counters.json", text), STATE)


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def test_an_index_that_would_run_code_is_refused_and_runs_nothing(root):
    forged = plant(root, f"{STATE}/.metadata", pickle.dumps(Bomb(root / "ran")))
    with pytest.raises(Damaged, match=r"\.metadata: its pickle contains posix\.mkdir"):
        open_state(forged, STATE)
    assert not (root / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",  # a text of 4 EiB
        b"\x80\x04" + b"(" * 100_000,
    ],
)
def test_an_index_that_is_none_is_damage(root, data):
    with pytest.raises(Damaged, match=r"\.metadata: (is not a whole|holds a NoneType)"):
        open_state(plant(root, f"{STATE}/.metadata", data), STATE)
