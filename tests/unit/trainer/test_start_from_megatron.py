"""Runs that start from Megatron folders: the numbers of the HF folder, bit for bit."""

import json

import pytest
import torch

from pentad.core.errors import UserError
from pentad.data.toy import write_model, write_task
from pentad.models.conversion import Conversion, convert
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.planner.prepare import prepare
from pentad.telemetry.record import comparable
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A model with weights, a folder with its config and tokenizer alone, and the toy's data."""
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "bare")
    model = create_model(dims_of(folder / "bare"), seed=3)
    save_model(
        model,
        folder / "model",
        source_folder=folder / "bare",
        tokenizer_folder=folder / "bare",
        dtype=torch.float32,
    )
    for name, form in (("legacy", {"to": "legacy", "tp": 2, "pp": 2}), ("dist", TORCH_DIST)):
        convert(Conversion(source=str(folder / "model"), target=str(folder / name), **form))
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


TORCH_DIST = {"to": "torch_dist"}


def sft_config(task, root, trial, *overrides):
    settings = [
        f"fileroot={root}",
        f"trial_name={trial}",
        f"train_dataset.path={task / 'sft.jsonl'}",
        "train_dataset.batch_size=8",
        "actor.optimizer.lr=1e-2",
        "total_train_steps=2",
        *overrides,
    ]
    return prepare(None, settings, "sft")


def sft(task, root, trial, *overrides):
    """The step records of a run without times, as text."""
    config, notes = sft_config(task, root, trial, *overrides)
    return records_of(run_sft(config, notes, device="cpu"))


def records_of(summary):
    lines = read_lines(summary.records / "steps.jsonl")
    return [json.dumps(comparable(line), sort_keys=True) for line in lines]


def test_sft_from_either_megatron_format_equals_sft_from_the_hf_folder(task, tmp_path):
    expected = sft(task, tmp_path, "hf", f"actor.path={task / 'model'}")
    assert len(expected) == 2
    for kind in ("legacy", "dist"):
        found = sft(
            task,
            tmp_path,
            kind,
            f"actor.path={task / 'bare'}",
            f"actor.checkpoint_load_path={task / kind}",
        )
        assert found == expected


def test_the_first_run_converts_the_second_finds(task, tmp_path):
    expected = sft(task, tmp_path, "hf", f"actor.path={task / 'model'}")
    settings = [
        f"actor.path={task / 'model'}",
        "megatron.use_hf_ckpt=true",
        f"megatron.ckpt_convertor.save_path={tmp_path / 'made'}",
        "megatron.ckpt_convertor.tensor_model_parallel_size=2",
    ]
    assert sft(task, tmp_path, "first", *settings) == expected
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*.pt")}
    assert len(times) == 2
    assert sft(task, tmp_path, "second", *settings) == expected
    assert {path: path.stat().st_mtime_ns for path in times} == times


def train(task, root, trial, *overrides):
    settings = [
        f"fileroot={root}",
        f"trial_name={trial}",
        f"train_dataset.path={task / 'train.jsonl'}",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=4",
        "reward.fn=sort_digits",
        "algorithm.name=ppo",
        "total_train_steps=1",
        *overrides,
    ]
    config, notes = prepare(None, settings, "train")
    return records_of(run_train(config, notes, device="cpu"))


def test_a_critic_begins_as_the_actor_does_or_from_its_own_folder(task, tmp_path):
    expected = train(task, tmp_path, "hf", f"actor.path={task / 'model'}")
    bare = f"actor.path={task / 'bare'}"
    start = f"actor.checkpoint_load_path={task / 'legacy'}"
    assert train(task, tmp_path, "with-actor", bare, start) == expected
    own = f"critic.checkpoint_load_path={task / 'dist'}"
    assert train(task, tmp_path, "own", bare, start, own) == expected


def cut(folder):
    (victim, *_) = sorted(folder.rglob("*.pt"))
    victim.write_bytes(victim.read_bytes()[:200])


def lose(folder):
    sorted(folder.rglob("*.pt"))[-1].unlink()


@pytest.mark.parametrize("harm", [cut, lose])
def test_a_damaged_folder_is_refused_before_the_run_folder_is_made(task, tmp_path, harm):
    broken = tmp_path / "broken"
    convert(Conversion(source=str(task / "model"), target=str(broken), to="legacy", tp=2))
    harm(broken)
    with pytest.raises(UserError, match="broken"):
        sft(
            task,
            tmp_path / "runs",
            "run",
            f"actor.path={task / 'bare'}",
            f"actor.checkpoint_load_path={broken}",
        )
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_model_is_refused_with_the_rest(task, tmp_path):
    other = tmp_path / "other"
    write_model(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(UserError) as caught:
        sft(
            task,
            tmp_path / "runs",
            "run",
            f"actor.path={other}",
            f"actor.checkpoint_load_path={task / 'dist'}",
            "actor.archon.enable_compile=true",
        )
    text = str(caught.value)
    assert "archon.enable_compile" in text and "192" in text
    assert not (tmp_path / "runs").exists()


def test_eval_does_not_take_a_start_for_what_became_of_it(task):
    with pytest.raises(UserError, match="eval judges the weights in actor.path"):
        prepare(
            None,
            [
                f"actor.path={task / 'model'}",
                f"actor.checkpoint_load_path={task / 'dist'}",
                f"valid_dataset.path={task / 'valid.jsonl'}",
                "reward.fn=sort_digits",
            ],
            "eval",
        )
