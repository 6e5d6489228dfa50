"""Models and datasets by their names on the hub, through its real client and a server here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import client_of, serving_hub
from huggingface_hub import constants

from pentad.config.load import dump_config, read_config, record_values
from pentad.core.errors import UserError
from pentad.core.hub import HubName, hub_name, name_in_cache
from pentad.data.rows import open_rows
from pentad.data.toy import write_byte_model
from pentad.planner.hub import fetch, local_model, pin
from pentad.planner.prepare import prepare
from pentad.trainer.run_folders import accept_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
Grade school math.
"""
ROWS = "".join(json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte") / "m"
    write_byte_model(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving_hub() as server, client_of(server, tmp_path / "cache", monkeypatch):
        yield server


@pytest.fixture
def filled(hub, model):
    weights = {"model.safetensors": b"z" * 5000, "flax.msgpack": b"x"}
    hub.add("model", "me/byte", {**model, **weights, "pytorch_model.bin": b"y"})
    files = {"main/train-0.jsonl": ROWS, "main/test-0.jsonl": ROWS, "socratic/train-0.jsonl": ROWS}
    hub.add("dataset", "openai/gsm8k", {**files, "README.md": CARD})
    return hub


NAMED = [
    "actor.path=me/byte",
    "train_dataset.path=openai/gsm8k:main:train",
    "reward.fn=exact_match",
]
SMALL = [*NAMED, "actor.init_from_scratch=true", "gconfig.max_new_tokens=4"]


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("Qwen/Qwen3-0.6B", "model", HubName("model", "Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", "model", HubName("model", "Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/3", "model", HubName("model", "a/b", "refs/pr/3")),
        ("a/b:main:train", "dataset", HubName("dataset", "a/b", None, "main:train")),
        ("a/b@x:d/t-*.parquet", "dataset", HubName("dataset", "a/b", "x", "d/t-*.parquet")),
        ("a/b:main", "model", None),
        ("models", "model", None),
        ("/models/b", "model", None),
        ("./models/b", "model", None),
        ("a/b/c.jsonl", "dataset", None),
        ("here/gone", "model", None),
        ("here/there", "model", None),
        ("here/gone@main", "model", HubName("model", "here/gone", "main")),
    ],
)
def test_what_is_a_name_and_what_is_a_path(tmp_path, monkeypatch, text, kind, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/there").mkdir(parents=True)
    assert hub_name(text, kind) == name
    assert name is None or str(name) == text


def test_a_place_in_the_cache_has_its_name():
    at = f"/home/me/hub/datasets--openai--gsm8k/snapshots/{COMMIT}/main/train-*"
    assert str(name_in_cache(at)) == f"openai/gsm8k@{COMMIT}:main/train-*"
    assert name_in_cache("/home/me/models--me--m/snapshots/main") is None
    assert name_in_cache(f"/home/me/models--me--m/blobs/{COMMIT}") is None


def test_a_run_gets_the_files_it_needs_and_records_the_commits(filled, tmp_path):
    config, notes = prepare(None, [*NAMED, "valid_dataset.path=openai/gsm8k:test"], "train")
    (commit,) = filled.repos["models", "me/byte"].commits
    folder = Path(config.actor.path)
    assert folder.is_relative_to(tmp_path / "cache") and folder.name == commit
    got = {file.name for file in folder.iterdir()}
    assert "model.safetensors" in got and not got & {"pytorch_model.bin", "flax.msgpack"}
    assert len(open_rows(config.train_dataset.path)) == 8
    assert not any("socratic" in path for path in filled.paths("GET"))
    assert f"actor.path = me/byte: of the hub, me/byte@{commit}" in notes
    values = record_values(config)
    assert values["actor"]["path"] == f"me/byte@{commit}"
    assert values["valid_dataset"]["path"].endswith(":main/test-*")
    recipe = tmp_path / "again.yaml"
    recipe.write_text(dump_config(config))
    filled.seen.clear()
    again, _ = prepare(recipe, [], "train")
    assert again.actor.path == config.actor.path and filled.paths("GET") == []


def test_a_moved_branch_is_refused_for_a_run_that_began_with_another_commit(filled, model):
    config, _ = prepare(None, SMALL, "train")
    before = record_values(config)
    assert accept_config(config, before) == []
    files = {"main/train-0.jsonl": ROWS + ROWS, "README.md": CARD}
    filled.add("dataset", "openai/gsm8k", files)
    moved, _ = prepare(None, SMALL, "train")
    was = before["train_dataset"]["path"]
    with pytest.raises(UserError) as error:
        accept_config(moved, before)
    commit = was.partition("@")[2].partition(":")[0]
    said = f"the run began with commit {commit} of it, and the hub now has another; give train_data"
    assert said in str(error.value) and f"train_dataset.path={was}, force" in str(error.value)
    pinned, _ = prepare(None, [*SMALL, f"train_dataset.path={was}"], "train")
    assert accept_config(pinned, before) == []


def test_a_plan_reads_the_config_alone(filled):
    config, _ = prepare(None, ["actor.path=me/byte", "reward.fn=exact_match"], "plan")
    assert [file.name for file in Path(config.actor.path).iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["actor.path=me/none"], "there is no such folder here, and no such model on the hub"),
        (["actor.path=me/byte@v9"], "the hub has no revision v9 of me/byte; see http"),
        (["actor.path=me/gated"], "type: hf auth login"),
        (["actor.path=me/bin"], "me/bin has no model.safetensors on the hub, and only safetensors"),
        (["train_dataset.path=openai/gsm8k"], "several configs and splits; give openai/gsm8k:main"),
        (["train_dataset.path=openai/gsm8k:main:dev"], "has no such config and split; give opena"),
        (["train_dataset.path=openai/gsm8k:x.jsonl"], "the hub has no file x.jsonl in openai/gsm"),
        (["train_dataset.path=me/csv:train"], "the hub shows no files of it that can be read"),
    ],
)
def test_what_is_wrong_with_a_name_is_one_sentence(filled, model, words, sentence):
    filled.add("model", "me/gated", model, is_gated=True)
    small = {name: data for name, data in model.items() if name != "model.safetensors"}
    filled.add("model", "me/bin", {**small, "pytorch_model.bin": b"y"})
    filled.add("dataset", "me/csv", {"train.csv": "a,b"})
    with pytest.raises(UserError) as error:
        prepare(None, [*NAMED, *words], "train")
    (problem,) = error.value.problems
    assert sentence in str(problem)


def test_the_token_of_the_machine_opens_a_gated_model(filled, model, monkeypatch):
    filled.add("model", "me/gated", model, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    config, _ = prepare(None, [*SMALL, "actor.path=me/gated"], "train")
    assert "me--gated" in config.actor.path and filled.keys == {"Bearer hf_mine"}


def test_wrong_names_are_reported_with_everything_else(filled):
    with pytest.raises(UserError) as error:
        prepare(
            None, ["actor.path=me/none", "train_dataset.path=me/none", "gconfig.top_p=2"], "train"
        )
    starts = {str(problem).partition(" ")[0] for problem in error.value.problems}
    assert {"actor.path", "train_dataset.path", "gconfig.top_p"} <= starts


def test_offline_and_half_downloaded_say_what_to_type(filled, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="OFFLINE is set; type: HF_HUB_OFFLINE=0 hf download"):
        local_model("me/byte", "model = me/byte")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    filled.cut_at = 3000
    with pytest.raises(UserError, match="not downloaded to the end.*start again, which continues"):
        local_model("me/byte", "model = me/byte")
    filled.cut_at = None
    folder = local_model("me/byte", "model = me/byte")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_model("me/byte", "model = me/byte") == folder


def test_files_are_found_by_their_names_where_no_card_declares_them(hub):
    files = {f"data/{split}-0000{n}.jsonl": ROWS for split in ("train", "test") for n in (0, 1)}
    hub.add("dataset", "me/plain", {**files, "one/train.jsonl": ROWS, "README.md": "plain"})
    base = ["actor.path=x/y", "reward.fn=exact_match"]
    for part, count in (("default:train", 16), ("test", 16), ("one:train", 8)):
        words = [*base, f"train_dataset.path=me/plain:{part}"]
        with pytest.raises(UserError):
            prepare(None, words, "train")  # the model; the data are looked up all the same
        pinned = pin(read_config(None, words), "reward").config
        fetch(pinned, "reward")
        assert len(open_rows(pinned.train_dataset.path)) == count
    with pytest.raises(UserError, match="give me/plain:default:train or me/plain:one:train"):
        prepare(None, ["train_dataset.path=me/plain:train", "actor.path=me/plain"], "reward")


@pytest.mark.usefixtures("started_cold")
def test_the_command_trains_from_names_with_the_variables_of_the_hub(filled, tmp_path):
    env = {
        **os.environ,
        "HF_ENDPOINT": filled.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "USER": "me",
    }
    words = ["response_key=answer", "batch_size=2"]
    command = [*SMALL[:2], "actor.init_from_scratch=true", "total_train_steps=1", "user=me"]
    command += [f"train_dataset.{word}" for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "pentad.cli.main", "sft", *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "runs/logs/me/default/trial-0/manifest.json").read_text())
    (commit,) = filled.repos["models", "me/byte"].commits
    assert manifest["config"]["actor"]["path"] == f"me/byte@{commit}"
    (cached,) = (tmp_path / "home/hub").glob("models--me--byte/snapshots/*")
    assert cached.name == commit and not (cached / "model.safetensors").exists()
