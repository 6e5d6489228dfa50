"""The dimensions of public models by name, so that a run can be planned before any download."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pentad.core.dims import ModelDims, dims_from_hf
from pentad.core.errors import Problem, UserError
from pentad.core.model_files import read_object

Row = tuple[int, int, int, int, int, int, bool]
# name: (hidden, intermediate, layers, heads, kv heads, vocabulary, tied)
QWEN2_5 = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064, False),
}
QWEN3 = {  # head_dim 128 throughout
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 151936, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 151936, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 151936, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 151936, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 151936, False),
}
QWEN3_MOE = {  # with the width of an expert; 128 experts, 8 a token
    "Qwen3-30B-A3B": ((2048, 6144, 48, 32, 4, 151936, False), 768),
    "Qwen3-235B-A22B": ((4096, 12288, 94, 64, 4, 151936, False), 1536),
}
GLM: dict[
    str, tuple[Row, dict[str, Any]]
] = {  # with the rest of its config.json that counts; rotary turns half of a head
    "GLM-4.5-Air": (
        (4096, 10944, 46, 96, 8, 151552, False),
        {"n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    ),
    "GLM-4.5": (
        (5120, 12288, 92, 96, 8, 151552, False),
        {
            "n_routed_experts": 160,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
}
LLAMA = {
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, False),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128256, False),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256, True),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128256, True),
    "Llama-3.3-70B": (8192, 28672, 80, 64, 8, 128256, False),
}


def _dense(family: str, row: Row, head_dim: int | None = None) -> ModelDims:
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = row
    return ModelDims(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=intermediate,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        rope_theta=500000.0 if family == "llama" else 1000000.0,
    )


def _mixture(row: Row, expert_width: int) -> ModelDims:
    dense = _dense("qwen3_moe", row, 128)
    return replace(
        dense,
        num_experts=128,
        num_experts_per_token=8,
        moe_intermediate_size=expert_width,
        moe_layers=(True,) * dense.num_layers,
    )


def _glm(row: Row, mixture: dict[str, Any]) -> ModelDims:
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = row
    sizes = {
        "model_type": "glm4_moe",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "attention_bias": True,
        "rope_theta": 1000000.0,
    }
    return dims_from_hf(sizes | mixture)


MODELS: dict[str, ModelDims] = {
    **{name: _dense("qwen2", row) for name, row in QWEN2_5.items()},
    **{name: _dense("qwen3", row, 128) for name, row in QWEN3.items()},
    **{name: _mixture(row, width) for name, (row, width) in QWEN3_MOE.items()},
    **{name: _glm(row, mixture) for name, (row, mixture) in GLM.items()},
    **{name: _dense("llama", row) for name, row in LLAMA.items()},
}
"""What can be counted with: layers, heads, widths. Positions and norms of a released checkpoint
are those of its config.json."""
OWNERS = ("Qwen/", "zai-org/", "meta-llama/")
VARIANT = re.compile(r"(-(Base|Instruct|Thinking|Chat))?(-2507)?$")


def known_model(name: str) -> ModelDims | None:
    """The dimensions behind a public name, owner and -Instruct or -Base left aside."""
    bare = name
    for owner in OWNERS:
        bare = bare.removeprefix(owner)
    return MODELS.get(VARIANT.sub("", bare))


def dims_of(path: str, where: str = "actor.path") -> ModelDims:
    """Dimensions of a local folder with config.json, or of a public name of the catalog."""
    config = Path(path) / "config.json"
    if config.is_file():
        return dims_from_hf(read_object(config))
    known = known_model(path)
    if known is not None:
        return known
    near = difflib.get_close_matches(path.rsplit("/", 1)[-1], MODELS, 2, 0.7)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    rule = "there is no config.json in it" if Path(path).is_dir() else "no such folder"
    remedy = f"{guess}give a model folder, or a public name such as Qwen/Qwen3-8B to plan with"
    raise UserError(Problem(f"{where} = {path}", rule, remedy))


def model_type(path: str) -> str | None:
    """What config.json of a folder says; None if there is none that can be read."""
    try:
        return str(read_object(Path(path) / "config.json").get("model_type"))
    except (OSError, UserError):
        return None
