"""The catalog counts what the model cards publish, and what transformers builds."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pentad.core.errors import UserError
from pentad.models.catalog import dims_of, known_model, public_dims

MODELS = public_dims()

# Billions on the model cards: all parameters, and those outside the embeddings. A released
# checkpoint counts a tied table once, an untied pair twice.
PUBLISHED = {
    "SmolLM2-135M": (0.135, None),
    "Qwen2.5-0.5B": (0.49, 0.36),
    "Qwen2.5-1.5B": (1.54, 1.31),
    "Qwen2.5-3B": (3.09, 2.77),
    "Qwen2.5-7B": (7.61, 6.53),
    "Qwen2.5-14B": (14.7, 13.1),
    "Qwen2.5-32B": (32.5, 31.0),
    "Qwen2.5-72B": (72.7, 70.0),
    "Qwen3-0.6B": (0.6, 0.44),
    "Qwen3-1.7B": (1.7, 1.4),
    "Qwen3-4B": (4.0, 3.6),
    "Qwen3-8B": (8.2, 6.95),
    "Qwen3-14B": (14.8, 13.2),
    "Qwen3-32B": (32.8, 31.2),
    "Qwen3-30B-A3B": (30.5, 29.9),
    "Qwen3-235B-A22B": (235, 234),
    "GLM-4.5-Air": (106, None),
    "GLM-4.5": (355, None),
    "Llama-3.1-8B": (8.03, None),
    "Llama-3.1-70B": (70.6, None),
    "Llama-3.2-1B": (1.24, None),
    "Llama-3.2-3B": (3.21, None),
    "Llama-3.3-70B": (70.6, None),
    "ERNIE-4.5-0.3B-PT": (0.36, None),
    **{f"gemma-2b{kind}": (2.506, 1.982) for kind in ("", "-it")},
    **{f"gemma-7b{kind}": (8.538, 7.751) for kind in ("", "-it")},
    **{f"gemma-2-2b{kind}": (2.615, 2.025) for kind in ("", "-it")},
    **{f"gemma-2-9b{kind}": (9.242, 8.324) for kind in ("", "-it")},
    **{f"gemma-2-27b{kind}": (27.23, 26.05) for kind in ("", "-it")},
    "glm-4-9b-chat-hf": (9.4, None),
    "gemma-3-270m": (0.268, None),
    "gemma-3-1b-pt": (1.0, None),
    "GLM-4-9B-0414": (9.4, None),
    "GLM-4-32B-0414": (32.6, None),
    "OLMo-2-0425-1B": (1.48, None),
    "OLMo-2-1124-7B": (7.3, None),
    "OLMo-2-1124-13B": (13.7, None),
    "OLMo-2-0325-32B": (32.2, None),
    "Olmo-3-1025-7B": (7.3, None),
    "Olmo-3-1125-32B": (32.2, None),
    "phi-4": (14.7, None),
    "Phi-3-mini-4k-instruct": (3.82, None),
    "SmolLM3-3B": (3.08, None),
    "DeepSeek-V3": (671, None),
    "DeepSeek-R1": (671, None),
    "Moonlight-16B-A3B": (16, 15.29),
    "GLM-4.7-Flash": (30, None),
    "gpt-oss-20b": (20.91, None),
    "gpt-oss-120b": (116.83, None),
    "Qwen3-Next-80B-A3B": (80, 79),
    "EXAONE-4.0-32B": (32, 30.95),
    "EXAONE-4.0-1.2B": (1.28, 1.07),
    "granite-3.3-2b-base": (2.53, None),
    "granite-3.3-2b-instruct": (2.53, None),
    "granite-3.3-8b-base": (8.17, None),
    "granite-3.3-8b-instruct": (8.17, None),
    # Text towers: the cards count 0.15 of images and 0.3 of sounds with the small ones.
    "gemma-4-31B": (30.7, None),
    "gemma-4-26B-A4B": (25.2, None),
    "gemma-4-E2B": (5.1 - 0.45, None),
    "gemma-4-E4B": (8 - 0.45, None),
    "Seed-OSS-36B-Base": (36, None),
    "Seed-OSS-36B-Instruct": (36, None),
    "Mixtral-8x7B-v0.1": (46.7, None),
    "Mixtral-8x7B-Instruct-v0.1": (46.7, None),
    "Mixtral-8x22B-v0.1": (141, None),
    "Mixtral-8x22B-Instruct-v0.1": (141, None),
    "MiniMax-M2": (230, None),
    "ERNIE-4.5-21B-A3B-PT": (21.8, None),
    "dots.llm1.base": (142, None),
    "dots.llm1.inst": (142, None),
    "OLMoE-1B-7B-0924": (6.92, None),
    "OLMoE-1B-7B-0924-Instruct": (6.92, None),
    "OLMoE-1B-7B-0125": (6.92, None),
    "OLMoE-1B-7B-0125-Instruct": (6.92, None),
    "Hunyuan-A13B-Pretrain": (80, None),
    "Hunyuan-A13B-Instruct": (80, None),
    "granite-3.1-1b-a400m-base": (1.33, None),
    "granite-3.1-1b-a400m-instruct": (1.33, None),
    "granite-3.1-3b-a800m-base": (3.3, None),
    "granite-3.1-3b-a800m-instruct": (3.3, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_counts_match_the_model_cards(name):
    dims = MODELS[name]
    total, inner = PUBLISHED[name]
    # The cards round: 1.72 is given as 1.7, and 32.5 stands where the tensors add up to 32.8.
    assert dims.num_params / 1e9 == pytest.approx(total, rel=0.013)
    if inner is not None:
        outside = dims.num_params - dims.embedding_params - dims.head_params
        assert outside / 1e9 == pytest.approx(inner, rel=0.013)


def test_active_parameters_of_the_mixtures():
    assert MODELS["Qwen3-30B-A3B"].num_active_params / 1e9 == pytest.approx(3.3, abs=0.06)
    assert MODELS["Qwen3-235B-A22B"].num_active_params / 1e9 == pytest.approx(22, abs=0.3)
    # The cards leave out the embedding, or the head with it.
    air, glm = MODELS["GLM-4.5-Air"], MODELS["GLM-4.5"]
    assert (air.num_active_params - 2 * air.embedding_params) / 1e9 == pytest.approx(12, abs=0.3)
    assert (glm.num_active_params - 2 * glm.embedding_params) / 1e9 == pytest.approx(32, abs=0.3)
    assert MODELS["gemma-4-26B-A4B"].num_active_params / 1e9 == pytest.approx(3.8, abs=0.06)
    assert MODELS["gemma-4-E2B"].num_active_params / 1e9 == pytest.approx(2.3, abs=0.06)
    assert MODELS["Qwen3-8B"].num_active_params == MODELS["Qwen3-8B"].num_params
    assert MODELS["Mixtral-8x7B-v0.1"].num_active_params / 1e9 == pytest.approx(12.9, abs=0.06)
    assert MODELS["Mixtral-8x22B-v0.1"].num_active_params / 1e9 == pytest.approx(39, abs=0.2)
    assert MODELS["dots.llm1.inst"].num_active_params / 1e9 == pytest.approx(14, abs=0.06)
    assert MODELS["OLMoE-1B-7B-0125"].num_active_params / 1e9 == pytest.approx(1.3, abs=0.06)
    assert MODELS["Hunyuan-A13B-Instruct"].num_active_params / 1e9 == pytest.approx(13, abs=0.3)


def test_exact_counts_of_two_released_checkpoints():
    assert MODELS["Qwen3-0.6B"].num_params == 596_049_920
    assert MODELS["Qwen2.5-7B"].num_params == 7_615_616_512


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.2-1B"])
def test_counts_are_those_transformers_builds(name, tmp_path):
    dims = MODELS[name]
    config = AutoConfig.for_model(
        dims.family,
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        intermediate_size=dims.intermediate_size,
        num_hidden_layers=dims.num_layers,
        num_attention_heads=dims.num_heads,
        num_key_value_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        tie_word_embeddings=dims.tie_embeddings,
        rope_theta=dims.rope_theta,
        **({"num_experts": 128, "moe_intermediate_size": 768} if dims.num_experts else {}),
        norm_topk_prob=True,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dims.num_params == sum(p.numel() for p in model.parameters())
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string())))
    assert dims_of(str(tmp_path)) == dims


def test_names_with_owner_and_variant_are_the_same_model():
    for name in ("Qwen/Qwen3-8B", "Qwen3-8B-Base", "Qwen3-8B"):
        assert known_model(name) is MODELS["Qwen3-8B"]
    assert known_model("Qwen/Qwen2.5-7B-Instruct") is MODELS["Qwen2.5-7B"]
    assert known_model("Qwen/Qwen3-30B-A3B-Instruct-2507") is MODELS["Qwen3-30B-A3B"]
    assert known_model("meta-llama/Llama-3.1-8B-Instruct") is MODELS["Llama-3.1-8B"]
    assert known_model("Seed-OSS-36B-Instruct") is MODELS["Seed-OSS-36B-Instruct"]
    assert known_model("Qwen/Qwen3-8B-FP8") is None
    assert known_model("Qwen/Qwen3-VL-8B") is None


def test_an_unknown_path_names_the_nearest_model(tmp_path):
    with pytest.raises(UserError, match=r"actor.path = Qwen/Qwen3-7B: no such folder; did you"):
        dims_of("Qwen/Qwen3-7B")
    with pytest.raises(UserError, match="no config.json in it"):
        dims_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: is not JSON"):
        dims_of(str(tmp_path))
