"""Whole SFT runs on CPU."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from run_lab import steps_of, values_of

from pentad.core.errors import RunError, UserError
from pentad.engine.engine import Engine
from pentad.runtime.environment import DETERMINISTIC
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines


def test_sft_learns_and_repeats(lab, task):
    settings = ["total_train_epochs=8", f"valid_dataset.path={task / 'sft.jsonl'}"]
    one, other = lab.sft(*settings), lab.sft(*settings)
    assert values_of(one) == values_of(other)
    losses = [record["loss"] for record in steps_of(one)]
    assert len(losses) == 64
    assert losses[-1] < 0.7 * losses[0]
    evals = read_lines(one.records / "evals.jsonl")
    assert evals[-1]["loss"] < 0.7 * evals[0]["loss"]


def test_held_out_loss_before_training_is_the_loss_of_step_1_on_the_same_rows(lab, task):
    summary = lab.sft(
        "train_dataset.batch_size=64",
        "total_train_steps=1",
        f"valid_dataset.path={task / 'sft.jsonl'}",
    )
    (step,) = steps_of(summary)
    assert summary.evals[0]["loss"] == pytest.approx(step["loss"], rel=1e-5)


def test_rl_starts_from_what_sft_saved(lab):
    warm = lab.sft("total_train_steps=40")
    cold_reward = steps_of(lab.train())[0]["rl"]["reward_mean"]
    summary = lab.train(f"actor.path={warm.model}", "actor.init_from_scratch=false")
    assert steps_of(summary)[0]["rl"]["reward_mean"] > cold_reward + 0.05


def test_everything_wrong_with_the_inputs_comes_at_once(lab):
    broken = lab.fileroot / "broken.jsonl"
    broken.write_text('{"prompt": "12>", "response": "12"}\n{"prompt": "1>"}\n')
    with pytest.raises(UserError) as caught:
        lab.sft(f"train_dataset.path={broken}", "actor.archon.enable_compile=true")
    text = str(caught.value)
    assert "broken.jsonl:2" in text and "actor.archon.enable_compile = true" in text


def test_a_signal_ends_sft_after_its_step_and_saves(lab, monkeypatch):
    record = Recorder.step

    def stop_at_2(self, *args, **kwargs):
        line = record(self, *args, **kwargs)
        if line["step"] == 2:
            signal.raise_signal(signal.SIGTERM)
        return line

    monkeypatch.setattr(Recorder, "step", stop_at_2)
    with pytest.raises(RunError, match="stopped by SIGTERM after 2 of 8 steps; what was trained"):
        lab.sft()
    (folder,) = lab.fileroot.glob("checkpoints/*/default/*/default/epoch*")
    assert folder.name == "epoch0epochstep1globalstep1"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def no_process_group():
    """Offloading makes a process group of one; leave none behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_memory_options_change_where_things_lie_and_no_number(lab, no_process_group):
    plain = lab.sft("total_train_steps=3")
    same = lab.sft(
        "total_train_steps=3",
        "actor.archon.offload_params=true",
        "actor.gradient_checkpointing=true",
        "actor.archon.ac_mode=full",
        "actor.archon.ac_debug=true",
        "actor.pad_to_maximum=true",
        "actor.mb_spec.max_tokens_per_mb=400",
    )
    for one, other in zip(steps_of(plain), steps_of(same), strict=True):
        # Sums in another order, three AdamW steps of them.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    log = (same.records / "log.txt").read_text()
    assert log.count("ac_debug: layer") >= 2 and "aten.mm.default" in log
    assert "ac_debug" not in (plain.records / "log.txt").read_text()


def test_a_deterministic_run_leaves_the_process_as_it_was(lab, monkeypatch):
    for name in DETERMINISTIC:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    before, during, plain = dict(os.environ), [], Engine.end_step

    def end_step(engine):
        during.append((torch.are_deterministic_algorithms_enabled(), dict(os.environ)))
        return plain(engine)

    monkeypatch.setattr(Engine, "end_step", end_step)
    lab.sft("actor.archon.use_deterministic_algorithms=true", "total_train_steps=1")
    [(is_deterministic, environment)] = during
    assert is_deterministic and environment == {**DETERMINISTIC, **before}
    assert not torch.are_deterministic_algorithms_enabled()
    assert dict(os.environ) == before, "or ranks of the next run would inherit it"


def test_what_needs_a_gpu_is_refused_before_anything_is_made(lab):
    with pytest.raises(UserError, match=r"memory_budget.*compiled on CUDA only.*use selective"):
        lab.sft("actor.gradient_checkpointing=true", "actor.archon.ac_mode=memory_budget")
    assert not list(lab.fileroot.glob("logs/*"))
