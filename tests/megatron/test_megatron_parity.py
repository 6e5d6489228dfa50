"""A learner on megatron-core computes what archon and transformers compute: losses, gradients and
weights after steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("megatron_worker.py")
CLOSE = 2e-5
"""Of the largest number: float32 sums in another order, over three steps of Adam."""
QWEN3 = {}
QWEN2 = {"model_type": "qwen2", "pad_token_id": 3}
LLAMA = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
}
WINDOWS = {
    **QWEN2,
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "tie_word_embeddings": False}
QWEN3_MOE = {
    **EXPERTS,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
GLM = {
    **EXPERTS,
    "model_type": "glm4_moe",
    "head_dim": 12,
    "attention_bias": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
QWEN2_MOE = {
    **EXPERTS,
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "shared_expert_intermediate_size": 12,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
PHI = {
    "model_type": "phi3",
    "head_dim": 12,
    "hidden_size": 48,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
SMOLLM3 = {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": None}
FULL = {"gradient_checkpointing": True, "ac_mode": "full"}
TURNS = {"pp_schedule": "Interleaved1F1B"}
CASES = {
    1: {
        "qwen3": {"model": QWEN3, "temperature": 0.7},
        "qwen2": {"model": QWEN2},
        "llama": {"model": LLAMA},
        "windows and yarn": {"model": WINDOWS},
        "smollm3": {"model": SMOLLM3},
        "mistral": {"model": {"model_type": "mistral", "sliding_window": 6}},
        "phi3": {"model": PHI},
        "qwen2_moe": {"model": QWEN2_MOE},
        "qwen3_moe": {"model": QWEN3_MOE},
        "glm4_moe": {"model": GLM},
        "critic": {"model": QWEN3, "value_head": True},
        "shared prompts": {"model": QWEN3, "shared": True},
        "recomputed": {"model": QWEN3, "keys": FULL},
        "recomputed attention": {"model": QWEN3, "keys": FULL | {"ac_mode": "selective"}},
        "routes": {"model": QWEN3_MOE, "routes": (3, 8, 2), "keys": FULL, "most": 2e-4},
        "bfloat16": {"model": QWEN3, "keys": {"dtype": "bfloat16"}, "close": 0.03, "most": 6e-3},
    },
    2: {
        "qwen3 t2": {"model": QWEN3, "layout": {"tp": 2}},
        "qwen2 t2": {"model": QWEN2, "layout": {"tp": 2}},
        "llama t2": {"model": {**LLAMA, "num_key_value_heads": 1}, "layout": {"tp": 2}},
        "critic t2": {"model": QWEN3, "value_head": True, "layout": {"tp": 2}},
        "qwen3 d2": {"model": QWEN3, "layout": {"dp_shard": 2}},
        "qwen3_moe e2": {"model": QWEN3_MOE, "layout": {"dp_shard": 2, "ep": 2}},
        "glm4_moe t2": {"model": GLM, "layout": {"tp": 2}},
        "glm4_moe t2 of experts": {"model": GLM, "layout": {"tp": 2, "etp": 2}},
        "qwen2 p2": {"model": QWEN2, "layout": {"pp": 2}},
        "llama p2": {"model": LLAMA, "layout": {"pp": 2}, "keys": TURNS},
        "glm4_moe p2": {"model": GLM, "layout": {"pp": 2}, "keys": FULL | TURNS},
        "critic p2": {"model": QWEN3, "value_head": True, "layout": {"pp": 2}},
        "routes p2": {"model": GLM, "layout": {"pp": 2}, "routes": (3, 8, 2), "keys": TURNS},
        "qwen3_moe c2": {"model": QWEN3_MOE, "layout": {"cp": 2}},
    },
    4: {
        "qwen3_moe e4": {"model": QWEN3_MOE, "layout": {"dp_shard": 4, "ep": 4}},
        "glm4_moe d2t2e2": {"model": GLM, "layout": {"dp_shard": 2, "tp": 2, "ep": 2}},
        "glm4_moe t2p2e2": {"model": GLM, "layout": {"tp": 2, "pp": 2, "ep": 2}, "keys": TURNS},
    },
}
HEAVY = {
    4: {
        "qwen3 p4": {
            "model": {**QWEN3, "num_hidden_layers": 9},
            "layout": {"pp": 4},
            "keys": TURNS,
        },
        "qwen2 d2c2": {"model": QWEN2, "layout": {"dp_shard": 2, "cp": 2}},
    },
    8: {
        "qwen3_moe d2t2p2e2": {
            "model": QWEN3_MOE,
            "layout": {"dp_shard": 2, "tp": 2, "pp": 2, "ep": 2},
            "keys": TURNS,
        },
        "qwen3 d2t2c2": {"model": QWEN3, "layout": {"dp_shard": 2, "tp": 2, "cp": 2}},
    },
}
"""More than CI has time for: `make test-megatron ARGS='-m full'`."""
TABLE = [
    *(pytest.param(n, cases, id=f"{n} ranks") for n, cases in CASES.items()),
    *(pytest.param(n, c, id=f"more of {n}", marks=pytest.mark.full) for n, c in HEAVY.items()),
]


def run(environment, folder, num_ranks, cases):
    """What the cases returned on rank 0."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", WORKER, folder / "cases.json", folder / "out.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-9000:]
    return torch.load(folder / "out.pt")


def apart(one, other):
    """Of the largest number."""
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize(("num_ranks", "table"), TABLE)
def test_losses_gradients_and_weights_are_those_of_archon_and_transformers(
    environment, tmp_path, num_ranks, table
):
    cases = [{"name": name, "do": "parity", **case} for name, case in table.items()]
    compare_all(run(environment, tmp_path, num_ranks, cases), table)


@pytest.mark.gpu
def test_layers_of_transformer_engine_compute_the_same(tmp_path):
    """In float32, which cuBLAS must not round to TensorFloat-32 as Transformer Engine lets it."""
    pytest.importorskip("transformer_engine.pytorch")
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"}
    beside = {"do": "parity", "device": "cuda", "transformer_impl": "transformer_engine"}
    table = {name: {"close": 1e-4, "most": 5e-4, **case} for name, case in CASES[1].items()}
    cases = [{"name": name, **beside, **case} for name, case in table.items()]
    compare_all(run(environment, tmp_path, 1, cases), table)


def compare_all(found, table):
    for name, learners in found.items():
        mine = learners.pop("megatron")
        for other, truth in learners.items():
            compare(f"{name}, {other}", mine, truth, **limits_of(table[name]))
        for one, other in zip(mine["steps"], learners["archon"]["steps"], strict=True):
            assert one["balance"] == other["balance"], name


def limits_of(case):
    """Of losses, norms and gradients, relative to the largest, and of weights."""
    return {"close": case.get("close", CLOSE), "most": case.get("most", 1e-4)}


def compare(what, mine, truth, *, close, most):
    for key in ("before", "after"):
        assert apart(truth[key], mine[key]) < close, f"{what}: log-probs {key} three steps"
    # A loss is a sum of terms of both signs, as large as the largest of these sums.
    largest = max(abs(one) for step in truth["steps"] for one in step["sums"])
    for one, other in zip(mine["steps"], truth["steps"], strict=True):
        assert one["sums"] == pytest.approx(other["sums"], rel=0, abs=close * largest), what
        assert one["norm"] == pytest.approx(other["norm"], rel=close), what
    gradients = mine["steps"][0]["gradients"]
    floor = 1e-3 * max(float(x.abs().max()) for x in gradients.values())
    for key, gradient in of_names(gradients, truth["steps"][0]["gradients"]):
        size = max(float(gradient.abs().max()), floor)
        off = float((gradient - gradients[key]).abs().max()) / size
        assert off < close, f"{what}: the gradient of {key} is off by {off:.1e} of its size"
    for key, weight in of_names(mine["weights"], truth["weights"]):
        if key.endswith("k_proj.bias"):
            continue  # where it is not turned, its gradient is 0 but for rounding
        # Adam's first steps have the size of lr = 1e-3 whatever the gradient's, so a weight is off
        # by a share of a step where a gradient is near 0; few are.
        off = (weight - mine["weights"][key]).abs()
        assert float(off.max()) < most, f"{what}: {key} is off by {float(off.max()):.1e}"
        assert float(off.mean()) < most / 20, f"{what}: {key} is off by {float(off.mean()):.1e}"


def of_names(mine, truth):
    """A head that is the table has no name of its own in some files; a buffer has no gradient."""
    missing = mine.keys() - truth.keys()
    assert all(name.endswith("e_score_correction_bias") for name in missing), missing
    assert truth.keys() - mine.keys() <= {"lm_head.weight"}
    return [(name, tensor) for name, tensor in truth.items() if name in mine]


MOVES = {
    "qwen2 t2": {"model": QWEN2, "layout": {"tp": 2}},
    "qwen3 d2": {"model": QWEN3, "layout": {"dp_shard": 2}},
    "glm4_moe e2": {"model": GLM, "layout": {"dp_shard": 2, "ep": 2}},
    "qwen2 p2": {"model": QWEN2, "layout": {"pp": 2}, "keys": TURNS},
    "archon t2, megatron d2": {
        "model": QWEN3_MOE,
        "layout": {"tp": 2},
        "there": {"dp_shard": 2, "ep": 2},
    },
    "fsdp d2, megatron t2": {
        "model": QWEN3,
        "layout": {"dp_shard": 2},
        "there": {"tp": 2},
        "other": "fsdp",
    },
}


def test_state_moves_to_megatron_and_back_bit_for_bit(environment, tmp_path):
    """Weights, moments, step counts and tags; a restored learner repeats the step bit for bit."""
    cases = [
        {"name": name, "do": "moved", "root": str(tmp_path / name), **case}
        for name, case in MOVES.items()
    ]
    found = run(environment, tmp_path, 2, cases)
    for name, result in found.items():
        assert result["names"] and result["num"] > 100, name
        assert result["differ"] == [], name
        assert result["resumed"], name


BESIDE = {
    "stages": {"layout": {"pp": 2}, "keys": TURNS, "critic": {"keys": {"pp_schedule": "1F1B"}}},
    "axes": {"layout": {"tp": 2}, "critic": {"layout": {"dp_shard": 2}}},
}


def test_a_critic_of_another_layout_keeps_the_actor_s_groups_apart(environment, tmp_path):
    """megatron-core has one set of process groups in a process."""
    cases = [{"name": name, "do": "beside", "model": QWEN3, **one} for name, one in BESIDE.items()]
    assert run(environment, tmp_path, 2, cases) == dict.fromkeys(BESIDE, True)
