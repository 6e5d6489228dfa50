"""A tiny config of each model family, on which every switch of the family has an effect."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 20,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.3,
    "n_group": 4,
    "topk_group": 2,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.3,
}
EVERYWHERE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 16,
}
"""A mixture in every layer, of experts of that width."""
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 2.5,
    "attention_multiplier": 0.6,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 1.0, "alpha": 9.0}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "rope_parameters": STRETCHED},
    "dots1": {
        **ROUTED,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 2,
    },
    "exaone4": {"sliding_window": 7, "layer_types": LAYER_TYPES},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 0.8,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "sliding_window": 7,
        "layer_types": LAYER_TYPES,
        "query_pre_attn_scalar": 5,
        "rope_local_base_freq": 90.0,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        + ["full_attention", "full_attention"],
        "num_hidden_layers": 5,
        "global_head_dim": 12,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 2.0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 16,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "sliding_window": 7,
        "layer_types": LAYER_TYPES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # No biases: no gradient reaches that of a key's unturned half, and Adam would follow noise.
    "glm": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {
        **LATENT,
        "q_lora_rank": None,
        "rope_interleave": False,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "granite": FACTORS,
    "granitemoe": EVERYWHERE | FACTORS,
    "hunyuan_v1_dense": {"rope_parameters": ALPHA},
    "hunyuan_v1_moe": {
        "num_experts": 8,
        "moe_topk": [3, 3, 3],
        "intermediate_size": 16,
        "rope_parameters": ALPHA,
    },
    "minimax_m2": EVERYWHERE | {"rotary_dim": 4},
    "ministral": {"sliding_window": 7, "layer_types": LAYER_TYPES},
    "ministral3": {
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 5,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "mixtral": EVERYWHERE | {"sliding_window": 9},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 7,
        "layer_types": LAYER_TYPES,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    # The norm of queries is as wide as the stream.
    "olmoe": {
        "hidden_size": 32,
        "head_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 16,
    },
    "phi3": {"sliding_window": 9},
    "qwen3_5_moe_text": LINEAR | EXPERTS,
    "qwen3_5_text": LINEAR | {"linear_conv_kernel_dim": 3},
    "qwen3_next": LINEAR | EXPERTS | {"mlp_only_layers": [1]},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
}
LINEAR_FAMILIES = [name for name, own in OWN.items() if "linear_num_key_heads" in own]
LAX_FAMILIES = [*LINEAR_FAMILIES, "gemma4_text"]
"""Families without strict mode."""
FAMILY_CONFIGS = {name: {"model_type": name, **SIZES, **own} for name, own in OWN.items()}
SHARED_KEYS = "gemma4_text, shared keys"
FURTHER_CONFIGS: dict[str, dict[str, Any]] = {
    SHARED_KEYS: {
        **FAMILY_CONFIGS["gemma4_text"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 41,
        "num_kv_shared_layers": 2,
        "rms_norm_eps": 0.01,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": False,
    }
}
"""Other parts of a family."""
ALL_CONFIGS = FAMILY_CONFIGS | FURTHER_CONFIGS
