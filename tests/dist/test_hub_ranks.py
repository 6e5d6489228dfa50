"""Names of the hub in runs of several processes: one of them downloads, all train the same commit,
and a run is resumed with the commit that it began with."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hub_server import serving_hub
from warm_start import warm_starts_with

from pentad.data.toy import write_byte_model

pytestmark = pytest.mark.dist
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
ROWS = "".join(json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(8))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub that processes started meanwhile ask, with a cache of their own."""
    folder = tmp_path_factory.mktemp("hub")
    write_byte_model(folder / "bytes")
    with serving_hub() as server:
        files = {path.name: path.read_bytes() for path in (folder / "bytes").iterdir()}
        for user in ("me", "you"):
            server.add("model", f"{user}/byte", files)
            server.add("dataset", f"{user}/sums", {"train.jsonl": ROWS})
        asked = {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        asked |= {"HF_HOME": str(folder / "home")}
        with warm_starts_with(**asked), pytest.MonkeyPatch.context() as patch:
            for name, value in asked.items():
                patch.setenv(name, value)
            yield server


def pentad(user, folder, *words, launcher=()):
    given = [f"actor.path={user}/byte", "actor.init_from_scratch=true"]
    given += [f"train_dataset.path={user}/sums", "train_dataset.batch_size=2", "user=me"]
    given += ["train_dataset.response_key=answer", f"fileroot={folder}"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, "pentad.cli.main", *words, *given],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
    )


def downloads(hub, user):
    paths = [path for path in hub.paths("GET") if "/resolve/" in path]
    return Counter(path for path in paths if f"/{user}/" in path)


def test_ranks_of_torchrun_share_one_download_and_resume_with_its_commit(hub, tmp_path):
    words = ["sft", "allocation_mode=archon:d2"]
    done = pentad("me", tmp_path, *words, "total_train_steps=1", launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    got = downloads(hub, "me")
    assert got and set(got.values()) == {1}, got
    manifest = json.loads((tmp_path / "logs/me/default/trial-0/manifest.json").read_text())
    was = manifest["config"]["train_dataset"]["path"]
    hub.add("dataset", "me/sums", {"train.jsonl": ROWS + ROWS})
    done = pentad("me", tmp_path, *words, "total_train_steps=2", launcher=TORCHRUN)
    commit = was.partition("@")[2].partition(":")[0]
    assert done.returncode != 0
    assert f"the run began with commit {commit} of it, and the hub now has another" in done.stderr


def test_roles_as_processes_read_what_their_starter_downloaded(hub, tmp_path):
    words = ["train", "allocation_mode=embedded:d1+archon:d1", "reward.fn=exact_match"]
    words += ["gconfig.n_samples=2", "gconfig.max_new_tokens=2", "total_train_steps=1"]
    done = pentad("you", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    got = downloads(hub, "you")
    assert got and set(got.values()) == {1}, got
