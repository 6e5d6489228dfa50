"""Llama and similar models (SmolLM2): grouped-query attention, gated mlp, optional biases."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import LAYER, ModelSpec, sizes

SPEC = ModelSpec(
    family="llama",
    read_dims=ConfigReader(defaults={"max_position_embeddings": 2048}, windows="none"),
    classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    ignored=(LAYER + "self_attn.rotary_emb.inv_freq",),
    public={
        "HuggingFaceTB/SmolLM2-135M": sizes(576, 1536, 30, 9, 3, 49152, tied=True, rope_theta=1e5),
        "meta-llama/Llama-3.1-8B": sizes(4096, 14336, 32, 32, 8, 128256, rope_theta=5e5),
        "meta-llama/Llama-3.1-70B": sizes(8192, 28672, 80, 64, 8, 128256, rope_theta=5e5),
        "meta-llama/Llama-3.2-1B": sizes(2048, 8192, 16, 32, 8, 128256, tied=True, rope_theta=5e5),
        "meta-llama/Llama-3.2-3B": sizes(3072, 8192, 28, 24, 8, 128256, tied=True, rope_theta=5e5),
        "meta-llama/Llama-3.3-70B": sizes(8192, 28672, 80, 64, 8, 128256, rope_theta=5e5),
    },
)
