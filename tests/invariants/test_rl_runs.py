"""Whole RL runs on CPU: the same numbers however they are run."""

import json

import numpy as np
import pytest
import torch
from run_lab import FLOAT32, steps_of, values_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pentad.infer.sampler import EmbeddedSampler
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.rank import service
from pentad.trainer.rank.learners import build_learner
from pentad.trainer.saving.batches import read_batch, read_trained
from pentad.trainer.sources.rollouts import run_train


def weights_of(summary):
    return load_file(summary.model / "model.safetensors")


def assert_same_weights(one, other):
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_seed_gives_one_run(lab, task):
    valid = f"valid_dataset.path={task / 'valid.jsonl'}"
    one, other = (
        lab.train(valid, "evaluator.freq_steps=2"),
        lab.train(valid, "evaluator.freq_steps=2"),
    )
    assert values_of(one) == values_of(other)
    assert_same_weights(one, other)
    third = lab.train(valid, "evaluator.freq_steps=2", "seed=2")
    assert values_of(third) != values_of(one)


@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_the_three_modes_agree_at_staleness_0(lab, mode):
    colocated = lab.train("mode=colocate")
    assert_same_weights(lab.train(f"mode={mode}"), colocated)


def test_modes_agree_when_groups_are_refilled(lab):
    drops = ["algorithm.dynamic_filter=true", "gconfig.n_samples=2", "gconfig.max_new_tokens=3"]
    colocated = lab.train(*drops)
    assert steps_of(colocated)[-1]["funnel"]["dropped"].get("no_signal", 0) > 0
    assert_same_weights(lab.train(*drops, "mode=hybrid"), colocated)


def test_chunks_change_nothing_but_rounding(lab):
    whole = lab.train()
    chunked = lab.train("num_iters_per_train_update=4")
    for one, other in zip(steps_of(whole)[:1], steps_of(chunked)[:1], strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert other["rl"]["reward_mean"] == one["rl"]["reward_mean"]


def test_unbalanced_data_changes_nothing_but_the_passes(lab):
    small = ["actor.mb_spec.max_tokens_per_mb=50", "gconfig.max_new_tokens=12"]
    by_cost, in_order = (
        steps_of(lab.train(*small)),
        steps_of(lab.train(*small, "balance_data=false")),
    )
    assert in_order[0]["grad_norm"] == pytest.approx(by_cost[0]["grad_norm"], rel=1e-4)
    assert in_order[0]["rl"]["reward_mean"] == by_cost[0]["rl"]["reward_mean"]
    passes, fewest = (sum(step["num_microbatches"] for step in x) for x in (in_order, by_cost))
    assert passes > fewest


def test_a_trainer_that_makes_room_trains_the_same(lab, task, monkeypatch):
    """Its memory is gone while the sampler decodes; evaluation, saves and resume bring it back."""
    sizes = []
    generate = EmbeddedSampler.generate

    async def note(self, *args, **kwargs):
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in engine.tensors.values()))
        return await generate(self, *args, **kwargs)

    def build(*args, **kwargs):
        nonlocal engine
        engine = build_learner(*args, **kwargs)
        return engine

    engine = None
    monkeypatch.setattr(EmbeddedSampler, "generate", note)
    monkeypatch.setattr(service, "build_learner", build)
    more = ["algorithm.kl_coef=0.1", f"valid_dataset.path={task / 'valid.jsonl'}"]
    more += ["evaluator.freq_steps=2", "saver.freq_steps=2", "recover.freq_steps=1"]
    plain = lab.train(*more)
    assert all(sizes)
    sizes.clear()
    moved = lab.train(*more, "offload_train=true", "total_train_steps=2", trial="moved")
    assert sizes and not any(sizes)
    moved = lab.train(*more, "offload_train=true", trial="moved")
    assert not any(sizes)
    assert_same_weights(moved, plain)
    # It is recorded before it leaves, and so before it is published and evaluated.
    one, other = (
        [json.loads(line) | {"evals": None} for line in values_of(x)] for x in (moved, plain)
    )
    assert one == other
    one, other = (read_lines(x.records / "evals.jsonl") for x in (moved, plain))
    assert [line["reward_mean"] for line in one] == [line["reward_mean"] for line in other]


def test_staleness_is_bounded_and_used(lab):
    summary = lab.train("mode=hybrid", "max_staleness=2", "total_train_steps=8")
    lags = {int(lag) for record in steps_of(summary) for lag in record["rl"]["staleness"]}
    assert lags <= {0, 1, 2}
    assert max(lags) > 0, "sampling never ran ahead: the overlap is not real"
    # The correction that was left open is chosen, written down, and at work.
    assert "correction: tis" in (summary.records / "config.yaml").read_text()
    assert (
        "algorithm.correction = tis: max_staleness = 2" in (summary.records / "log.txt").read_text()
    )
    weights = [record["rl"]["correction_weight_mean"] for record in steps_of(summary)]
    assert any(abs(weight - 1) > 1e-4 for weight in weights)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_the_ratio_against_the_sampler_runs_through_the_loop(lab, name):
    base = [f"algorithm.name={name}", "updates_per_batch=2"]
    summary = lab.train(*base, "algorithm.correction=sampler_ratio")
    for record in steps_of(summary):
        assert record["grad_norm"] > 0 and record["rl"]["correction_weight_mean"] is None


def test_the_funnel_reconciles_at_every_step(lab):
    for record in steps_of(lab.train("total_train_steps=4")):
        funnel = record["funnel"]
        total = funnel["trained"] + sum(funnel["dropped"].values()) + funnel["in_flight"]
        assert funnel["drawn"] == total
        assert funnel["trained"] == 4 * record["step"]


def test_trainer_and_sampler_agree_from_step_1(lab):
    for record in steps_of(lab.train()):
        assert record["rl"]["logprob_diff_max"] < FLOAT32
        assert record["rl"]["ratio_max"] == pytest.approx(1.0, abs=FLOAT32)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=ppo"],
        ["algorithm.name=ppo", "updates_per_batch=2", "algorithm.kl_coef=0.05"],
        ["algorithm.name=reinforce_plus_plus", "num_iters_per_train_update=2"],
        [
            "algorithm.name=rloo",
            "use_kl_loss=true",
            "algorithm.kl_in=loss",
            "ref_update_interval=2",
        ],
        ["algorithm.name=gspo", "updates_per_batch=2"],
        ["algorithm.name=cispo", "use_tis=true"],
        ["algorithm.name=dapo", "gconfig.max_new_tokens=8"],
        ["algorithm.name=dr_grpo", "algorithm.decoupled=true"],
    ],
)
def test_every_kind_of_algorithm_runs_through_the_loop(lab, overrides):
    records = steps_of(lab.train(*overrides))
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["grad_norm"] > 0
        assert not record["update_skipped"]
    if "algorithm.name=ppo" in overrides:
        assert all(record["rl"]["critic_loss"] > 0 for record in records)
    if any("kl" in entry for entry in overrides):
        if "updates_per_batch=2" not in overrides:  # else half of step 1 sees moved weights
            assert records[0]["rl"]["kl_ref"] == pytest.approx(0, abs=1e-6)
        assert records[1]["rl"]["kl_ref"] > 0


def test_distillation_moves_the_student_to_its_teacher(lab, task):
    teacher = lab.sft("total_train_steps=8")
    summary = lab.train(
        "algorithm.name=distill",
        f"teacher.path={teacher.model}",
        "actor.optimizer.lr=3e-3",
        "total_train_steps=12",
        "gconfig.n_samples=8",
    )
    gaps = [record["rl"]["advantage_mean"] for record in steps_of(summary)]
    assert gaps[-1] > gaps[0]  # teacher minus student log-prob: rises towards 0


def test_the_exported_model_is_what_transformers_loads(lab):
    summary = lab.train()
    model = AutoModelForCausalLM.from_pretrained(summary.model)
    AutoTokenizer.from_pretrained(summary.model)
    ids = torch.tensor(read_lines(summary.records / "samples.jsonl")[0]["ids"])
    with torch.no_grad():
        assert torch.isfinite(model(ids[None]).logits).all()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights_of(summary).items())


def test_the_recorded_config_repeats_the_run(lab, tmp_path):
    summary = lab.train()
    config, notes = prepare(summary.records / "config.yaml", ["trial_name=again"], "train")
    again = run_train(config, notes, device="cpu")
    assert_same_weights(again, summary)


def test_learning_rate_0_trains_nothing(lab, task):
    summary = lab.train("actor.optimizer.lr=0", "total_train_steps=2")
    first, last = steps_of(summary)
    assert last["rl"]["logprob_diff_max"] < FLOAT32
    again = lab.train("actor.optimizer.lr=0", "total_train_steps=1")
    assert_same_weights(summary, again)
    assert first["grad_norm"] > 0


def test_a_run_leaves_every_file_it_explains(lab, task):
    summary = lab.train(f"valid_dataset.path={task / 'valid.jsonl'}", "telemetry.tensorboard=true")
    readme = (summary.records / "README.md").read_text()
    left = {path.name for path in summary.records.iterdir()}
    for name in left:
        assert name in readme, f"{name} is not explained"
    assert {"config.yaml", "manifest.json", "steps.jsonl", "samples.jsonl", "evals.jsonl"} <= left
    manifest = json.loads((summary.records / "manifest.json").read_text())
    assert manifest["starts"][0]["selftest"]["sampler_max_difference"] < FLOAT32
    evals = read_lines(summary.records / "evals.jsonl")
    assert [entry["version"] for entry in evals] == [0, 3]
    spans = [
        span for line in read_lines(summary.records / "timeline.jsonl") for span in line["spans"]
    ]
    assert {"learner", "embedded", "publish", "rollout waits"} <= {lane for lane, *_ in spans}
    steps = read_lines(summary.records / "steps.jsonl")
    gates = [line["gates"] for line in steps]
    assert "staleness" in gates[0] and "end of the run" in gates[-1]
    trained = read_trained(summary.records / "batches", 3)
    for group in read_batch(summary.records / "batches", 3).groups:
        for index, sample in enumerate(group.samples):
            found = trained[group.gid, index]
            moved = (found.logprobs - sample.rollout_logprobs)[sample.mask]
            assert np.abs(moved).max() < FLOAT32  # one optimizer step, on-policy
            assert len(set(found.advantages[sample.mask].tolist())) == 1
