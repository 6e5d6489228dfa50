"""A saved model goes to the hub whole, with a card: held against a server that speaks its
protocol."""

import json

import pytest
import torch
import yaml
from hub_server import client_of, serving_hub
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.config.schema import Config
from pentad.core.errors import RunError, UserError
from pentad.weights.hf import SINGLE, plan_folder, push_to_hub, save_folder
from pentad.weights.transfer import TensorInfo

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving_hub() as server, client_of(server, tmp_path / "cache", monkeypatch):
        yield server


def saved(folder):
    tensor = torch.arange(6.0)
    infos = {"a": TensorInfo((6,), torch.float32)}
    save_folder(folder, [("a", tensor)], plan_folder(infos, {"model_type": "toy"}))
    return folder


def test_every_file_arrives_as_it_is(tmp_path, hub):
    folder = saved(tmp_path / "m")
    url = push_to_hub(folder, "me/model", token="secret", endpoint=hub.address)
    assert url.startswith(f"{hub.address}/me/model")
    repo = hub.repos["models", "me/model"]
    files = repo.commits[repo.refs["main"]]
    assert set(files) == {SINGLE, "config.json"}
    for name, content in files.items():
        assert content == (folder / name).read_bytes()


def test_a_torn_folder_never_leaves_the_machine(tmp_path, hub):
    folder = saved(tmp_path / "m")
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes, but its header says"):
        push_to_hub(folder, "me/model", token="secret", endpoint=hub.address)
    with pytest.raises(UserError, match="a repository is named user/name"):
        push_to_hub(saved(tmp_path / "n"), "model", token="secret", endpoint=hub.address)
    assert hub.seen == []


def test_a_hub_that_is_not_there_is_one_sentence(tmp_path, hub):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(RunError, match="was not uploaded to me/model at http.*; check"):
        push_to_hub(saved(tmp_path / "m"), "me/model", token="secret", endpoint=hub.address)


@pytest.fixture
def run(tmp_path):
    """Records of three steps and a model of the last."""
    folder = tmp_path / "runs/logs/me/sums/trial-0"
    folder.mkdir(parents=True)
    config = Config(user="me", experiment_name="sums").model_dump(mode="json")
    config["actor"]["path"] = f"Qwen/Qwen3-0.6B@{COMMIT}"
    config["train_dataset"] |= {"path": f"openai/gsm8k@{COMMIT}:main/train-*", "batch_size": 8}
    config["reward"]["fn"] = "gsm8k"
    start = {"versions": {"torch": "2.13.0"}}
    (folder / "manifest.json").write_text(json.dumps({"config": config, "starts": [start]}))
    steps = [{"step": n, "loss": 0.5 / n, "rl": {"reward_mean": n / 4}} for n in (1, 2, 3)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    saved(tmp_path / "runs/checkpoints/me/sums/trial-0/default/epoch0epochstep2globalstep2")
    return folder


def test_a_pushed_model_has_a_card_of_its_run(run, hub):
    done = CliRunner().invoke(app, ["export", str(run), "--push", "me/sums"])
    assert done.exit_code == 0, done.output
    repo = hub.repos["models", "me/sums"]
    files = repo.commits[repo.refs["main"]]
    assert set(files) == {SINGLE, "config.json", "README.md"}
    card = files["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B" and front["datasets"] == ["openai/gsm8k"]
    assert "grpo" in front["tags"] and front["library_name"] == "transformers"
    for line in (f"| Base | Qwen/Qwen3-0.6B@{COMMIT} |", "| Reward | gsm8k |", "| 3 | 0.75 | 0.1"):
        assert line in card
    assert "batch_size: 8" in card and "torch 2.13.0" in card and "gconfig" not in card


def card_of(run, steps, **blocks):
    """What `pentad export` writes for such a run."""
    manifest = json.loads((run / "manifest.json").read_text())
    for key, value in blocks.items():
        known = manifest["config"].get(key)
        manifest["config"][key] = known | value if isinstance(known, dict) else value
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    done = CliRunner().invoke(app, ["export", str(run)])
    assert done.exit_code == 0, done.output
    model = next((run.parents[4] / "runs/checkpoints").glob("**/epoch*"))
    card = (model / "README.md").read_text()
    return yaml.safe_load(card.split("---")[1]), card


@pytest.mark.parametrize(
    ("preference", "text", "tags", "label"),
    [
        (None, "supervised fine-tuning", ["pentad", "sft"], "text-generation"),
        ("ipo", "training on preferences (ipo)", ["pentad", "preferences", "ipo"], None),
        ("reward", "training as a reward model", ["pentad", "reward-model"], "text-classification"),
    ],
)
def test_a_card_of_a_run_on_examples_has_no_reward(run, hub, preference, text, tags, label):
    """Their records have the block `rl` too, with nulls."""
    step = {"step": 1, "loss": 0.5, "rl": {"reward_mean": None}}
    found = {"accuracy": 0.75, "margin": 0.25} if preference else {"accuracy": None}
    block = preference and {"loss": preference, "beta": 0.1}
    given = {"allocation_mode": "archon:d1", "preference": block}
    front, card = card_of(run, [step | {"preference": found}], **given)
    assert front["tags"] == tags and front["pipeline_tag"] == (label or "text-generation")
    assert f"after {text}" in card and "| Reward |" not in card and "grpo" not in card
    assert ("| 1 | 0.75 | 0.25 | 0.5 |" if preference else "| 1 | 0.5 |") in card


def test_a_card_names_the_reward_of_each_environment(run, hub):
    own = {"fn": ["judge", "math"]}
    workflows = [{"workflow": "single_turn", "reward": own}, {"workflow": "gym:Lake"}]
    for one in workflows:
        one["data"] = {"path": "rows.jsonl"}
    given = {"rollout": {"workflows": workflows}, "reward": {"fn": None}}
    _, card = card_of(run, [{"step": 1, "loss": 0.5, "rl": {"reward_mean": 0.5}}], **given)
    assert "| Reward | judge, math; of the workflow gym:Lake |" in card


def test_a_card_that_is_there_stays(run, hub):
    model = next((run.parents[4] / "runs/checkpoints").glob("**/epoch*"))
    (model / "README.md").write_text("mine")
    done = CliRunner().invoke(app, ["export", str(run)])
    assert "as it was" in done.output and (model / "README.md").read_text() == "mine"
    assert hub.seen == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["nowhere"],
            "run = nowhere: has no manifest of a run; give the folder of a run's records",
        ),
        (["{run}", "--push", "sums"], "--push = sums: a model of the hub is named OWNER/NAME"),
        (["{run}", "--step", "2"], "steps 3; saver.freq_steps sets"),
    ],
)
def test_bad_words_of_export_are_a_sentence(run, words, sentence):
    done = CliRunner().invoke(app, ["export", *(word.format(run=run) for word in words)])
    assert done.exit_code == 2 and sentence in done.stderr
