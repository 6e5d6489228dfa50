"""SFT of a mixture with a selection bias over ranks: one process's bias, in the saved folder."""

import json

import pytest
import torch
from run_cases import config_of, run_ranks
from safetensors.torch import load_file

from pentad.data.toy import write_model, write_task
from pentad.trainer.sources.examples import run_sft

pytestmark = pytest.mark.dist

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
}
SETTINGS = ["total_train_steps=3", "actor.archon.moe_bias_rate=0.02", "actor.optimizer.lr=1e-4"]
"""A small step: rounding that Adam blows up to its size must not send tokens elsewhere."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    write_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text()) | GLM
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("alone")
    config, notes = config_of(task, root, "sft", "sft", *SETTINGS)
    return load_file(run_sft(config, notes, device="cpu").model / "model.safetensors")


@pytest.mark.parametrize("layout", ["d2e2", "p2", "t2"])
def test_the_saved_bias_is_that_of_one_process(task, tmp_path, alone, layout):
    summary = run_ranks(
        command="sft",
        task=task,
        root=tmp_path,
        trial=layout,
        overrides=[*SETTINGS, f"allocation_mode=archon:{layout}"],
    )
    found = load_file(summary.model / "model.safetensors")
    assert float(found[BIAS].abs().max()) > 0.05
    assert torch.equal(found[BIAS], alone[BIAS]), "the same tokens went to the same experts"
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5)  # Adam: lr 1e-4
