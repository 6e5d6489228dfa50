"""Dimensions are read as transformers reads them, and counted as transformers builds them."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.models.families import planned_dims

# All dimensions distinct, so that no swapped pair can pass.
ODD = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rope_theta": 1234.0,
    "max_position_embeddings": 777,
}
MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 13}
GLM = {
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 13,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.7,
    "partial_rotary_factor": 0.4,
    "num_nextn_predict_layers": 2,
}
CASES = {
    "qwen2": {k: v for k, v in ODD.items() if k != "head_dim"},
    "qwen2 tied": {**ODD, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3": ODD,
    "qwen3 biased": {**ODD, "attention_bias": True},
    "qwen3_moe": {**ODD, **MOE, "norm_topk_prob": True},
    "qwen3_moe mixed": {**ODD, **MOE, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    "llama": {**ODD, "attention_bias": True, "mlp_bias": True},
    "glm4_moe": {**ODD, **GLM, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe plain": {**ODD, **GLM, "n_shared_experts": 1, "first_k_dense_replace": 0},
}


def config_of(name: str) -> AutoConfig:
    return AutoConfig.for_model(name.split()[0], **CASES[name])


def written(config: AutoConfig) -> dict:
    return json.loads(config.to_json_string())


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_transformers_builds(name):
    config = config_of(name)
    dims = planned_dims(written(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dims.num_params == sum(p.numel() for p in model.parameters())
    for i, layer in enumerate(model.model.layers):
        assert dims.layer_parts(i).total == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("name", CASES)
def test_old_key_names_read_the_same_as_what_transformers_writes(name):
    raw = {"model_type": name.split()[0], **CASES[name]}
    new = written(config_of(name))
    assert "rope_theta" not in new and "rope_parameters" in new
    assert planned_dims(raw) == planned_dims(new)


def test_moe_layers_follow_stride_and_exceptions():
    dims = planned_dims({"model_type": "qwen3_moe", **CASES["qwen3_moe mixed"]})
    assert dims.moe_layers == (False, False, False, True, False)
    assert (dims.layer_parts(3).dense_ffn, dims.layer_parts(3).expert) == (0, 3 * 48 * 13)
    assert (dims.layer_parts(0).dense_ffn, dims.layer_parts(0).expert) == (3 * 48 * 71, 0)
    assert planned_dims({"model_type": "qwen3_moe", **ODD, **MOE}).norm_topk_prob is False


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_layers_are_those_of_transformers(family):
    raw = {**CASES[family], "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    new = written(AutoConfig.for_model(family, **raw))
    for source in (new, {"model_type": family, **raw}):
        dims = planned_dims(source)
        assert [dims.window(i) for i in range(5)] == [None, None, None, 9, 9]
    off = planned_dims({"model_type": family, **raw, "use_sliding_window": False})
    assert off.sliding_window is None and off.sliding_layers == ()


def test_rope_scaling_keeps_its_numbers_and_loses_theta():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 99}
    old = planned_dims({"model_type": "qwen3", **ODD, "rope_scaling": scaling})
    assert (old.rope_theta, old.rope_scaling) == (1234.0, scaling)
    new = planned_dims({**ODD, "rope_parameters": {**scaling, "rope_theta": 5.0}})
    assert (new.rope_theta, new.rope_scaling) == (5.0, scaling)
    older = planned_dims({**ODD, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert older.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"text_config": {"x": 1}}, "several modalities"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"n_shared_experts": 2}, "shared experts"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"model_type": "qwen3_moe", "n_shared_experts": 2}, "shared experts"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of a head"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"hidden_size": None}, "hidden_size missing"),
    ],
)
def test_what_cannot_be_expressed_is_refused(extra, said):
    with pytest.raises(UserError, match=said):
        planned_dims({"model_type": "other", **ODD, **extra})


def plain_flops(dims: ModelDims, seq_len: int, *, causal: bool) -> float:
    """By walking over every matrix and every pair of tokens."""
    total = 0.0
    for layer in range(dims.num_layers):
        rows = [(dims.hidden_size, dims.q_dim), (dims.q_dim, dims.hidden_size)]
        rows += [(dims.hidden_size, dims.kv_dim)] * 2
        if dims.is_moe(layer):
            rows += [(dims.hidden_size, dims.num_experts)]
            width, copies = dims.moe_intermediate_size, dims.num_experts_per_token
        else:
            width, copies = dims.intermediate_size, 1
        rows += [(dims.hidden_size, width)] * 3 * copies
        if dims.is_moe(layer):
            rows += [(dims.hidden_size, dims.shared_expert_size)] * 3
        total += sum(2 * a * b * seq_len for a, b in rows)
        for t in range(seq_len):
            seen = t + 1 if causal else seq_len
            seen = min(seen, dims.window(layer) or seq_len)
            total += 2 * 2 * dims.q_dim * seen
    total += 2 * dims.hidden_size * dims.vocab_size * seq_len
    return 3 * total


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_flops_equal_a_plain_walk(name, causal):
    raw = {"model_type": name.split()[0], **CASES[name]}
    raw |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    dims = planned_dims(raw)
    assert dims.train_flops(23, causal=causal) == plain_flops(dims, 23, causal=causal)


NAN = float("nan")


@pytest.mark.parametrize(
    "bad",
    [
        {"hidden_size": NAN},
        {"rms_norm_eps": NAN},
        {"rms_norm_eps": "small"},
        {"rope_theta": -3},
        {"rope_theta": float("inf")},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": "two"},
        {"num_key_value_heads": 4},
        {"head_dim": 7},
        {"vocab_size": True},
        {"tie_word_embeddings": "false"},
        {"initializer_range": NAN},
        {"use_sliding_window": True, "sliding_window": -5},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"]},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["linear"] * 5},
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"rope_type": "linear", "factor": NAN}},
        {"num_experts": 4, "num_experts_per_tok": 5},
        {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": "1"},
        {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": -1},
    ],
    ids=str,
)
def test_a_value_that_is_none_is_told_with_its_key(bad):
    config = {"model_type": "qwen3", **ODD, **bad}
    value = list(bad.values())[-1]
    key, value = list(value.items())[-1] if isinstance(value, dict) else (list(bad)[-1], value)
    with pytest.raises(UserError) as told:
        planned_dims(config)
    assert f"config.json: {key} = {value}: must " in str(told.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            {"n_group": 4, "topk_group": 2},
            "n_group = 4: must divide n_routed_experts = 7 into groups",
        ),
        ({"topk_group": 2}, "topk_group = 2: must be at most n_group = 1"),
        ({"num_local_experts": 4}, "num_local_experts = 4: must be n_routed_experts = 7"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0: must be a whole number of at least 1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor = 0: must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: turns 5 numbers of a head"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: must be a number above 0"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok = 8: must be at most the number"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1: must be a whole number"),
    ],
    ids=str,
)
def test_a_mixture_that_is_not_built_is_refused(bad, said):
    with pytest.raises(UserError, match=f"config.json: {said}"):
        planned_dims({"model_type": "glm4_moe", **ODD, **GLM, **bad})


def test_rotary_over_part_of_a_head_is_read_where_transformers_reads_it():
    inner = {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.8}}
    assert planned_dims({"model_type": "glm4_moe", **ODD, **GLM}).rotary_dim == 4
    assert planned_dims({"model_type": "glm4_moe", **ODD, **GLM, **inner}).rotary_dim == 8
    whole = planned_dims({"model_type": "glm4_moe", **ODD, **GLM, "partial_rotary_factor": 1.0})
    assert (whole.rotary_dim, whole.turned_dim) == (0, 10)


def test_all_wrong_values_are_told_together():
    with pytest.raises(UserError) as told:
        planned_dims({"model_type": "qwen3", **ODD, "vocab_size": 0.5, "rms_norm_eps": NAN})
    assert len(told.value.problems) == 2


def test_a_quantised_model_is_refused():
    config = {"model_type": "qwen3", **ODD, "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(UserError, match="its weights are quantised in a way that is not read"):
        planned_dims(config)


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_left_out_means_what_transformers_takes(name):
    """Or is refused: a config never means another model silently."""
    full = written(config_of(name))
    kind = type(config_of(name))
    for key in full.keys() - {"model_type"}:
        rest = {k: v for k, v in full.items() if k != key}
        try:
            theirs = written(kind.from_dict(dict(rest)))
        except Exception:  # each config class refuses in its own way
            continue
        try:
            ours = planned_dims(rest)
        except UserError:
            continue
        assert ours == planned_dims(theirs), key
