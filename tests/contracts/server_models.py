"""The config.json that a server is started with, for the contract and for the GPU benchmark.

Imports nothing that only tests have: the benchmark runs beside servers in a smaller environment.
"""

from typing import Any

from pentad.core.dims import ModelDims


def config_of(dims: ModelDims, dtype: str) -> dict[str, Any]:
    """The config.json of a Qwen3, dense or a mixture in every layer."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": dims.family,
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": dims.max_position,
        "rms_norm_eps": dims.norm_eps,
        "rope_theta": dims.rope_theta,
        "tie_word_embeddings": dims.tie_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if dims.num_experts:
        assert all(map(dims.is_moe, range(dims.num_layers))), "a mixture in every layer"
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": dims.num_experts,
            "num_experts_per_tok": dims.num_experts_per_token,
            "moe_intermediate_size": dims.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config
