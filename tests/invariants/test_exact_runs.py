"""Runs in which trainer and sampler are made to compute alike."""

import json
import shutil

import pytest
from run_lab import steps_of

from pentad.core.errors import UserError

MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


@pytest.fixture(scope="session")
def mixture(task):
    """The toy model as a mixture, with the same tokenizer."""
    folder = task / "mixture"
    shutil.copytree(task / "model", folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | MIXTURE))
    return folder


def test_a_run_replays_the_routes_of_its_sampler(lab, mixture):
    replayed = lab.train(f"actor.path={mixture}", "rollout.replay_routes=true")
    for record in steps_of(replayed):
        # fp32 on one machine: no two experts are near enough to change places.
        assert record["rl"]["rerouted_share"] == 0.0
        assert record["rl"]["logprob_diff_max"] < 1e-4
    plain = lab.train(f"actor.path={mixture}")
    assert steps_of(plain)[0]["rl"]["rerouted_share"] is None


def test_a_dense_model_has_no_routes_to_replay(lab):
    with pytest.raises(UserError, match="has no mixture of experts"):
        lab.train("rollout.replay_routes=true")


def test_a_server_does_not_tell_its_routes(lab, mixture):
    with pytest.raises(UserError, match="vllm does not tell which experts it used"):
        lab.train(
            f"actor.path={mixture}",
            "rollout.replay_routes=true",
            "allocation_mode=vllm:d1|archon:d1",
        )
