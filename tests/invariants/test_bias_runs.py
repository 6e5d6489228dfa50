"""Runs of a mixture whose files hold a selection bias: trained, saved, sampled with, and exact."""

import json

import pytest
import torch
from run_lab import FLOAT32, Lab, steps_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pentad.core.errors import UserError
from pentad.data.toy import write_model, write_task
from pentad.models.decoder import causal_attend
from pentad.models.registry import load_model

RATE = "actor.archon.moe_bias_rate"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "initializer_range": 0.2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
IDS = torch.tensor([3, 9, 4, 11, 2, 12, 5, 5, 8, 10, 6, 7])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    write_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text()) | GLM
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_task(folder, seed=5, num_train=64, num_sft=64, num_valid=16)
    return folder


@pytest.fixture
def lab(mixture, tmp_path):
    return Lab(mixture, tmp_path)


def bias_of(summary):
    return load_file(summary.model / "model.safetensors")[BIAS]


def logits_of(model):
    return model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))


@torch.no_grad()
def check_saved(folder):
    """transformers computes with the saved bias what we compute, and without it something else."""
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    wanted = theirs(IDS[None]).logits[0]
    torch.testing.assert_close(logits_of(load_model(folder)), wanted, rtol=1e-4, atol=1e-4)
    theirs.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    assert (theirs(IDS[None]).logits[0] - wanted).abs().max() > 1e-2


def test_sft_moves_the_bias_and_saves_it(lab):
    moved = lab.sft("total_train_steps=6", f"{RATE}=0.03")
    bias = bias_of(moved)
    assert bias.dtype == torch.float32 and float(bias.abs().max()) > 0.1
    steps = bias / 0.03  # six steps up or down
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert float(steps.abs().max()) <= 6 + 1e-4
    check_saved(moved.model)
    still = lab.sft("total_train_steps=6")
    assert torch.equal(bias_of(still), torch.zeros(8))
    assert steps_of(moved)[0]["loss"] == steps_of(still)[0]["loss"]
    assert steps_of(moved)[-1]["loss"] != steps_of(still)[-1]["loss"]


def test_a_run_that_starts_from_a_saved_bias_goes_on_from_it(lab):
    first = lab.sft("total_train_steps=3", f"{RATE}=0.03")
    start = [f"actor.path={first.model}", "actor.init_from_scratch=false"]
    kept = lab.sft(*start, "total_train_steps=1")
    assert torch.equal(bias_of(kept), bias_of(first))
    again = lab.sft(*start, "total_train_steps=1", f"{RATE}=0.03")
    change = (bias_of(again) - bias_of(first)).abs()
    assert float(change.max()) == pytest.approx(0.03, rel=1e-4)


@pytest.mark.parametrize("strict", ["false", "true"])
def test_the_sampler_draws_with_the_bias_of_every_update(lab, strict):
    """A sampler that kept the first bias would choose other experts after one such update."""
    summary = lab.train("total_train_steps=4", f"{RATE}=0.2", f"strict={strict}")
    records = steps_of(summary)
    limit = 0.0 if strict == "true" else FLOAT32
    assert [record["rl"]["logprob_diff_max"] <= limit for record in records] == [True] * 4
    assert float(bias_of(summary).abs().max()) >= 0.2 - 1e-6
    check_saved(summary.model)


def test_the_reference_keeps_the_bias_it_began_with(lab):
    kl = ["algorithm.name=rloo", "use_kl_loss=true", "algorithm.kl_in=loss"]
    summary = lab.train(*kl, "actor.optimizer.lr=1e-12", f"{RATE}=0.2")
    first, second, _ = steps_of(summary)
    assert first["rl"]["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert second["rl"]["kl_ref"] > 1e-4, "only the bias has moved"


def test_a_family_without_a_place_is_refused_before_anything_starts(lab, mixture):
    config = mixture / "model" / "config.json"
    text = config.read_text()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    other = {**json.loads(text), **experts, "model_type": "qwen3_moe", "n_shared_experts": 0}
    try:
        config.write_text(json.dumps(other))
        with pytest.raises(UserError, match=f"{RATE} = 0.01: a saved qwen3_moe cannot store"):
            lab.sft(f"{RATE}=0.01")
    finally:
        config.write_text(text)
