"""Runs with the backend `fsdp`: models without a model file train, and export what transformers
loads."""

import json

import pytest
import torch
from sections import engine_settings
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.data.render import DataSource
from pentad.data.sft import open_sft
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_model, write_task
from pentad.engine.engine import build_engine
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.rank.learners import trained_dims
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train
from pentad.weights.hf import HfFolder
from pentad.weights.transfer import PairsReader

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
}
FAMILIES = {
    "granite": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 9},
    "qwen3": {},
    "mamba": {},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folders of several families with the toy's tokenizer, and its data."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=5, num_train=16, num_sft=32, num_valid=2)
    for family, more in FAMILIES.items():
        write_model(folder / family)
        toy = json.loads((folder / family / "config.json").read_text())
        given = {**SMALL, **more, "vocab_size": toy["vocab_size"]}
        given |= {"eos_token_id": toy["eos_token_id"], "pad_token_id": 0}
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
        model.float().save_pretrained(folder / family)
    return folder


def sft(task, root, family, *overrides):
    settings = [
        f"fileroot={root}",
        f"trial_name={family}",
        f"actor.path={task / family}",
        f"train_dataset.path={task / 'sft.jsonl'}",
        "train_dataset.batch_size=8",
        "actor.optimizer.lr=1e-2",
        "total_train_steps=3",
        *overrides,
    ]
    config, notes = prepare(None, settings, "sft")
    return config, run_sft(config, notes, device="cpu")


@pytest.mark.parametrize("family", ["granite", "gemma3_text"])
def test_sft_trains_a_model_without_a_model_file(task, tmp_path, family):
    more = ["total_train_epochs=4", "total_train_steps=12"]
    config, summary = sft(task, tmp_path, family, "allocation_mode=fsdp:d1", *more)
    losses = [record["loss"] for record in read_lines(summary.records / "steps.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    model, info = AutoModelForCausalLM.from_pretrained(
        summary.model, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = load_tokenizer(str(summary.model))
    data = open_sft(DataSource(data=config.train_dataset, seed=config.seed, room=64), tokenizer)
    # The export's own loss on the data went down too: it is the model that was trained.
    before = AutoModelForCausalLM.from_pretrained(task / family, dtype=torch.float32)
    rows = data.batch(0, 16)
    assert mean_loss(model, rows) < mean_loss(before, rows) - 0.1


def mean_loss(model, rows) -> float:
    total = count = 0.0
    for row in rows:
        with torch.no_grad():
            logp = torch.log_softmax(model(row.ids[None]).logits[0].float(), -1)
        taken = logp[:-1].gather(1, row.ids[1:, None])[:, 0]
        total -= float((taken * row.columns["weights"][1:]).sum())
        count += float(row.columns["weights"].sum())
    return total / count


def test_both_backends_give_the_same_run(task, tmp_path):
    records = []
    for backend in ("archon", "fsdp"):
        _, summary = sft(task, tmp_path / backend, "qwen3", f"allocation_mode={backend}:d1")
        records.append(read_lines(summary.records / "steps.jsonl"))
    for ours, theirs in zip(*records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def rl(task, root, family, *overrides):
    settings = [
        f"fileroot={root}",
        f"trial_name={family}",
        f"actor.path={task / family}",
        f"train_dataset.path={task / 'train.jsonl'}",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=6",
        "reward.fn=exact_match",
        "total_train_steps=1",
        *overrides,
    ]
    config, notes = prepare(None, settings, "train")
    return run_train(config, notes, device="cpu")


def test_rl_samples_from_the_model_file_what_transformers_module_trains(task, tmp_path):
    """The self-test at the start compares both models' log-probs and the published weights."""
    summary = rl(task, tmp_path, "qwen3", "allocation_mode=embedded:d1|fsdp:d1")
    assert summary.num_steps == 1
    with pytest.raises(UserError, match="no model file for model_type = granite; sample with vllm"):
        rl(task, tmp_path, "granite", "allocation_mode=embedded:d1|fsdp:d1")


def test_servers_take_weights_of_models_without_a_model_file(task):
    """Their names are those of the folder, each once."""
    engine = build_engine(task / "granite", engine_settings(total_steps=None), backend="fsdp")
    pairs = list(engine.iter_weights())
    PairsReader(pairs)
    assert {name for name, _ in pairs} == set(HfFolder(task / "granite").infos)
    with pytest.raises(UserError, match="given twice"):
        PairsReader([*pairs, pairs[0]])


def test_refusals_come_before_anything_is_started(task, tmp_path):
    with pytest.raises(UserError, match="carry state or convolve"):
        sft(task, tmp_path, "mamba", "allocation_mode=fsdp:d1", "actor.init_from_scratch=true")
    assert not (tmp_path / "logs").exists()
    with pytest.raises(UserError, match=r"strict = true.*fsdp:d1 trains without one"):
        rl(task, tmp_path, "qwen3", "allocation_mode=embedded:d1|fsdp:d1", "strict=true")
    with pytest.raises(UserError, match="or train it with the backend fsdp"):
        sft(task, tmp_path, "granite")


def test_mfu_is_not_guessed_for_an_unknown_architecture(task):
    overrides = [f"actor.path={task / 'granite'}", f"train_dataset.path={task / 'sft.jsonl'}"]
    config, _ = prepare(None, [*overrides, "allocation_mode=fsdp:d1"], "sft")
    assert not trained_dims(config, str(task / "granite")).is_whole
    assert trained_dims(config, str(task / "qwen3")).is_whole


def test_plan_says_where_it_cannot_count(task):
    shared = [f"train_dataset.path={task / 'sft.jsonl'}", "gconfig.max_new_tokens=8"]
    args = ["plan", f"actor.path={task / 'granite'}", "allocation_mode=fsdp:d2t2", *shared]
    said = CliRunner().invoke(app, args)
    assert said.exit_code == 0, said.output
    assert "actor: fsdp:d2t2 on 0-3" in said.output
    assert "memory unknown for this architecture (model_type = granite)" in said.output
    told = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert told["memory"] is None
    args[1] = f"actor.path={task / 'qwen3'}"
    assert "memory unknown" not in CliRunner().invoke(app, args).output
