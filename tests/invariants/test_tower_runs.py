"""Whole runs that train the text tower of a multimodal folder."""

import json

import pytest
import torch
from closeness import assert_close
from kill_lab import KillLab
from run_lab import FLOAT32, Lab, steps_of
from tower_toys import PROCESSOR, others_of, read_whole, tensors_of, write_whole
from transformers import AutoModelForSequenceClassification

from pentad.checkpoint.restore import export_hf, find_recovery
from pentad.core.errors import UserError
from pentad.core.folders import INDEX, RecoveryPath
from pentad.data.toy import write_byte_model
from pentad.models.decoder import causal_attend
from pentad.models.registry import load_model, plan_export
from pentad.telemetry.steps import read_lines
from pentad.weights.hf import FolderPlan, HfFolder

KINDS = ("gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen3_5")
WHOLE = "actor.init_from_scratch=false"


@pytest.fixture(scope="module")
def wholes(task, tmp_path_factory):
    root = tmp_path_factory.mktemp("wholes")
    for kind in KINDS:
        write_whole(root / kind, kind)
    return root


def check_export(source, exported):
    """The whole of transformers, with the other towers bit for bit, and our logits on text."""
    before, after, others = tensors_of(source), tensors_of(exported), others_of(source)
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in others)
    moved = [name for name in before.keys() - others if not torch.equal(before[name], after[name])]
    assert moved
    for name in ("config.json", "preprocessor_config.json"):
        assert json.loads((exported / name).read_text()) == json.loads((source / name).read_text())
    whole = read_whole(exported)
    assert (
        type(whole).__name__ == json.loads((source / "config.json").read_text())["architectures"][0]
    )
    ids = torch.tensor([5, 4, 3, 9, 2, 7, 7, 10, 3])
    ours = load_model(exported)
    with torch.no_grad():
        hidden = ours(ids, torch.arange(len(ids)), causal_attend)
        assert_close(ours.logits(hidden), whole(input_ids=ids[None]).logits[0])


@pytest.mark.parametrize("kind", KINDS)
def test_sft_and_grpo_train_a_tower_and_export_the_whole(lab, wholes, kind):
    source = wholes / kind
    start = (f"actor.path={source}", WHOLE, "total_train_steps=2")
    sft = lab.sft(*start)
    check_export(source, sft.model)
    rl = lab.train(*start)
    check_export(source, rl.model)
    for record in steps_of(rl):
        assert record["rl"]["logprob_diff_max"] < FLOAT32
    assert (rl.model / "preprocessor_config.json").read_text() == PROCESSOR
    # A run that starts from an export is the same kind of run.
    more = lab.sft(f"actor.path={sft.model}", WHOLE, "total_train_steps=1")
    check_export(source, more.model)


def test_a_tower_is_exported_beside_training_in_files_with_an_index(lab, wholes, monkeypatch):
    size = 20_000
    monkeypatch.setattr(FolderPlan.around.__func__, "__defaults__", (size,))
    monkeypatch.setattr(
        plan_export, "__kwdefaults__", {**plan_export.__kwdefaults__, "shard_bytes": size}
    )
    source = wholes / "qwen2_5_vl"
    more = ("saver.freq_steps=1", "saver.mode=async", "total_train_steps=2")
    summary = lab.sft(f"actor.path={source}", WHOLE, *more)
    check_export(source, summary.model)
    index = json.loads((summary.model / INDEX).read_text())
    infos = HfFolder(summary.model).infos
    assert index["metadata"]["total_size"] == sum(info.size_bytes for info in infos.values())
    assert index["weight_map"].keys() == infos.keys()
    assert len(set(index["weight_map"].values())) > 3


def test_a_killed_run_of_a_tower_ends_as_if_nothing_had_happened(task, wholes, tmp_path):
    lab = KillLab(
        task,
        tmp_path,
        "sft",
        f"train_dataset.path={task / 'sft.jsonl'}",
        "train_dataset.batch_size=4",
        "total_train_steps=4",
        "saver.mode=sync",
        f"actor.path={wholes / 'gemma3'}",
        WHOLE,
    )
    lab.run("whole")
    process = lab.start("killed", hold=2)
    while not (lab.records("killed") / "steps.jsonl").exists() or (
        len(read_lines(lab.records("killed") / "steps.jsonl")) < 2
    ):
        process.join(0.05)
        assert process.exitcode is None, lab.log("killed").read_text()
    lab.kill(process)
    lab.run("killed")
    assert lab.steps("killed") == lab.steps("whole")
    assert lab.weights("killed", 4) == lab.weights("whole", 4)
    # `pentad convert` makes the whole folder of a recovery checkpoint, too.
    (exported,) = lab.checkpoints("killed").glob("default/epoch*globalstep3")
    export_hf(find_recovery(RecoveryPath(lab.checkpoints("killed"))), tmp_path / "out")
    check_export(wholes / "gemma3", exported)
    wanted, found = tensors_of(exported), tensors_of(tmp_path / "out")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_critic_of_a_tower_is_exported_as_a_language_model(lab, wholes, tmp_path):
    """Also where it starts from such an export, and from a recovery checkpoint."""
    source, words = wholes / "gemma3", ("algorithm.name=ppo", "total_train_steps=2", WHOLE)
    summary = lab.train(f"actor.path={source}", *words, "recover.freq_steps=1", trial="ppo")
    check_export(source, summary.model)
    (critic,) = (summary.model.parents[1] / "critic").glob("epoch*")
    found = tensors_of(critic)
    assert found["score.weight"].abs().max() > 0 and not others_of(source) & found.keys()
    begun = tensors_of(source)["language_model.model.layers.0.mlp.down_proj.weight"]
    assert not torch.equal(found["model.layers.0.mlp.down_proj.weight"], begun)
    ids = torch.tensor([5, 4, 3, 9, 2, 7])
    ours, theirs = load_model(critic, value_head=True), AutoModelForSequenceClassification
    with torch.no_grad():
        values = ours.values(ours(ids, torch.arange(len(ids)), causal_attend))
        wanted = theirs.from_pretrained(critic).eval()(input_ids=ids[None]).logits[0, 0]
    assert_close(values[-1], wanted)
    more = lab.train(f"actor.path={source}", f"critic.path={critic}", *words)
    assert len(steps_of(more)) == 2
    place = RecoveryPath(summary.model.parents[1])
    export_hf(find_recovery(place), tmp_path / "out", role="critic")
    again = tensors_of(tmp_path / "out")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["allocation_mode=sglang:d1+archon:d1", "rollout.server.addresses=[http://a:1]"],
            "rollout.server.addresses = .* only started servers serve",
        ),
        (
            ["allocation_mode=sglang:d1+archon:d1", "actor.lora={rank: 2}"],
            "actor.lora: .* sglang would start without the frozen weights",
        ),
        (["allocation_mode=embedded:d1|fsdp:d1"], "fsdp builds only language models"),
        (["allocation_mode=embedded:d1|megatron:d1"], "other towers beside its text"),
        (["algorithm.name=ppo", "critic.lora.rank=2"], "critic.lora: .* is a multimodal folder"),
        (["actor.init_from_scratch=true"], "its other towers are copied from its files"),
    ],
)
def test_what_is_not_built_for_towers_is_rejected(lab, wholes, words, sentence):
    with pytest.raises(UserError, match=sentence):
        lab.train(f"actor.path={wholes / 'qwen2_5_vl'}", WHOLE, *words)


def test_a_critic_of_towers_is_rejected_by_fsdp_before_the_run(lab, wholes):
    critic = f"critic.path={wholes / 'qwen2_5_vl'}"
    words = ["algorithm.name=ppo", critic, "allocation_mode=embedded:d1|fsdp:d1"]
    with pytest.raises(UserError, match="allocation_mode = .*fsdp builds only language models"):
        lab.train(WHOLE, *words)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "12>", "images": ["a.png"]}, 'it has "images", and models are trained on text'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            'message 1 of "messages" has a part of type image',
        ),
    ],
)
def test_rows_with_pictures_are_rejected(tmp_path, row, sentence):
    write_byte_model(tmp_path / "model")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, "answer": "1"}) + "\n")
    key = ["train_dataset.messages_key=messages"] if "messages" in row else []
    lab = Lab(tmp_path, tmp_path / "runs")
    with pytest.raises(UserError, match=sentence):
        lab.train(f"train_dataset.path={path}", *key)
