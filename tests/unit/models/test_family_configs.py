"""Configs drawn at random: a family's logits are transformers', or the config is refused."""

import json
import random

import pytest
import torch
import transformers
from family_toys import FAMILY_CONFIGS, LATENT, ROUTED, SIZES

from pentad.core.errors import UserError
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of
from pentad.models.registry import load_model

NUM_LAYERS = 4
KINDS = ("sliding_attention", "full_attention")
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}
PLAIN = {"rope_type": "default", "rope_theta": 55.0}
NEEDED = {
    "deepseek_v3": LATENT,
    "dots1": ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2},
    "glm4_moe_lite": LATENT,
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"hidden_size": 64, "num_experts": 6, "num_experts_per_tok": 2},
}
"""Keys without which transformers builds no such model, or one of hundreds of experts."""
IDS = torch.randint(0, 37, (40,), generator=torch.Generator().manual_seed(3))


def edits(draw: random.Random) -> list[dict]:
    """Keys of any family: each reads its own, and transformers passes over the rest."""
    return [
        {"sliding_window": draw.choice([None, 5, 9])},
        {"use_sliding_window": draw.random() < 0.5},
        {"layer_types": [draw.choice(KINDS) for _ in range(NUM_LAYERS)]},
        *({name: draw.random() < 0.5} for name in ("attention_bias", "mlp_bias", "use_bias")),
        {"rope_theta": draw.choice([50.0, 3e5])},
        {"rope_scaling": draw.choice([{"type": "linear", "factor": 3.0}, LINEAR])},
        {"rope_parameters": draw.choice([PLAIN, dict(zip(KINDS, (PLAIN, LINEAR), strict=True))])},
        {"rope_parameters": {"full_attention": PLAIN}},
        {"partial_rotary_factor": draw.choice([0.5, 1.0])},
        {"tie_word_embeddings": draw.random() < 0.5},
        {"rms_norm_eps": 1e-2},
        {"head_dim": draw.choice([8, 16])},
        {"num_key_value_heads": draw.choice([1, 4])},
        {"hidden_act": draw.choice(["silu", "gelu"])},
        {"no_rope_layers": [draw.choice([0, 1]) for _ in range(NUM_LAYERS)]},
        {"no_rope_layer_interval": draw.choice([1, 2, 3])},
        {"query_pre_attn_scalar": 7},
        {"sliding_window_pattern": draw.choice([2, 3])},
        {"rope_local_base_freq": 33.0},
        *({name: 5.0} for name in ("attn_logit_softcapping", "final_logit_softcapping")),
        {"original_max_position_embeddings": 32},
        {"use_bidirectional_attention": True},
        {"num_local_experts": draw.choice([3, 6])},
        {"num_experts_per_tok": draw.choice([1, 3])},
        {"swiglu_limit": draw.choice([7.0, 5.0])},
        {"num_experts": draw.choice([3, 6])},
        {"norm_topk_prob": draw.random() < 0.5},
        {"moe_topk": draw.choice([1, [1, 1, 1, 1], [1, 2, 1, 2]])},
        {"n_group": 2, "topk_group": draw.choice([1, 2])},
        {"first_k_dense_replace": draw.choice([0, 2])},
        {"moe_layer_interval": draw.choice([1, 2]), "moe_layer_start_index": draw.choice([0, 1])},
        {"moe_layer_end_index": draw.choice([-1, 0, 2])},
        {"moe_num_shared_experts": draw.choice([0, 1])},
        {"moe_norm_min": draw.choice([1e-12, 0.1])},
        {"router_jitter_noise": draw.choice([0.0, 0.1])},
        {"clip_qkv": draw.choice([None, 0.1])},
        {"max_window_layers": draw.choice([0, 2])},
        {"hidden_size_per_layer_input": draw.choice([0, 6])},
        {"num_kv_shared_layers": draw.choice([1, 2, 3])},
        {"attention_k_eq_v": True, "num_global_key_value_heads": draw.choice([None, 1])},
    ]


@torch.no_grad()
def theirs(config: dict, folder) -> torch.Tensor | None:
    """transformers' logits, their weights left in the folder; None where it cannot build it."""
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(2)
    try:
        read = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.3 * torch.randn_like(parameter))
        logits = model.eval()(IDS[None]).logits[0]
    except Exception:  # each config class, and each layer, raises its own kinds
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return logits


@pytest.mark.full
@pytest.mark.timeout(2400)  # delta nets with experts take minutes of a core
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_no_config_is_silently_another_model(family, tmp_path):
    draw, num_same = random.Random(sum(map(ord, family))), 0
    for number in range(100):
        chosen = draw.sample(edits(draw), draw.randint(0, 4))
        config = {"model_type": family, **SIZES, "num_hidden_layers": NUM_LAYERS}
        config |= NEEDED.get(family, {})
        config["vocab_size_per_layer_input"] = SIZES["vocab_size"]  # else tables of a gigabyte
        for one in chosen:
            config |= one
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            dims_of(config)  # before transformers builds a model for nothing
            wanted = theirs(config, folder)
            model = None if wanted is None else load_model(folder)
        except UserError:
            continue
        if wanted is None or model is None:
            continue
        with torch.no_grad():
            found = model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))
        error = float((found - wanted).abs().max() / wanted.abs().max())
        assert error < 1e-4, f"{chosen}: off by {error:.1e} of the largest logit"
        num_same += 1
    assert num_same > 50, "most configs must be compared, or the test shows nothing"
