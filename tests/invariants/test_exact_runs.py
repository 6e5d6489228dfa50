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


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_strict_run_has_no_gap_at_all(lab, task, mixture, kind):
    path = mixture if kind == "mixture" else task / "model"
    summary = lab.train(f"actor.path={path}", "strict=true", "gconfig.temperature=0.8")
    for record in steps_of(summary):
        assert record["rl"]["logprob_diff_max"] == 0.0
        assert record["rl"]["ratio_max"] == record["rl"]["ratio_mean"] == 1.0
        assert record["grad_norm"] > 0
    manifest = json.loads((summary.records / "manifest.json").read_text())
    assert '"sampler_max_difference": 0.0' in json.dumps(manifest)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("allocation_mode=vllm:d1|archon:d1", "computes with other kernels"),
        ("allocation_mode=embedded:d2|archon:d1t2", "tp = 2: layers split over ranks"),
        ("actor.archon.enable_compile=true", "compiled code sums"),
    ],
)
def test_what_strict_cannot_keep_is_refused(lab, override, sentence):
    with pytest.raises(UserError, match=sentence):
        lab.train("strict=true", override)


def test_a_run_with_a_cache_of_eight_bits_reports_its_gap(lab):
    found = {}
    for form in ("auto", "int8"):
        summary = lab.train(f"rollout.kv_cache_dtype={form}")
        found[form] = max(record["rl"]["logprob_diff_max"] for record in steps_of(summary))
    assert found["auto"] < 1e-4 < found["int8"] < 1.0
