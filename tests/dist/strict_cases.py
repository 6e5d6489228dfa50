"""Strict scores of a tiny model on any layout."""

import torch
from sections import engine_settings

from pentad.core.layout import Layout
from pentad.core.types import Row
from pentad.engine.engine import build_engine

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def scores(model: str, layout: Layout | None = None) -> list[list[float]]:
    """Log-probs of ragged rows, exact: every fp32 number is a Python float."""
    settings = engine_settings(strict=True, pp_schedule="1F1B", max_tokens_per_mb=40)
    config = MIXTURE if model == "mixture" else DENSE
    engine = build_engine(config, settings, layout=layout, init_from_scratch=True, seed=5)
    generator = torch.Generator().manual_seed(1)
    rows = [Row(torch.randint(0, 37, (n,), generator=generator), {}) for n in (3, 17, 30, 8, 1, 22)]
    return [output["logprobs"].tolist() for output in engine.forward(rows)]
