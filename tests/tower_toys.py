"""Tiny multimodal folders, made by transformers' own classes, with the tokenizer of the demo."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from pentad.core.folders import tensor_names
from pentad.data.toy import write_model
from pentad.models.towers import SPELLINGS
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
GRID = {"image_grid_pinpoints": [[16, 16]]}


def mrope(*sections: int, **more: object) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


def whole(text: dict[str, Any], vision: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"text_config": {**TEXT, **text}, "vision_config": vision, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": whole(
        {"sliding_window": 4, "query_pre_attn_scalar": 5, "sliding_window_pattern": 2},
        VISION,
        mm_tokens_per_image=4,
    ),
    "gemma4": whole(
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"sliding_window": 4, "global_head_dim": 12, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 400},
            **{"use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
        },
        {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "glm4v": whole(mrope(0, 1, 1, partial_rotary_factor=0.5), QWEN_VISION),
    "internvl": whole(
        {"model_type": "qwen2"}, {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    ),
    "llava": whole({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
    "llava_next": whole(
        {"model_type": "mistral", "sliding_window": 4},
        {**VISION, "model_type": "clip_vision_model"},
        **GRID,
    ),
    "llava_onevision": whole(
        {"model_type": "qwen2"}, {**VISION, "model_type": "siglip_vision_model"}, **GRID
    ),
    "mistral3": whole(
        {"model_type": "mistral"}, {**VISION, "model_type": "pixtral"}, tie_word_embeddings=False
    ),
    "qwen2_vl": whole(
        mrope(1, 1, 2), {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    ),
    "qwen2_5_vl": whole(mrope(1, 1, 2), QWEN_VISION),
    "qwen3_5": whole(
        {**LINEAR, **mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)},
        QWEN_VISION,
    ),
    "qwen3_5_moe": whole(
        {
            **{**LINEAR, **mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "shared_expert_intermediate_size": 16,
        },
        QWEN_VISION,
    ),
    "qwen3_vl": whole(mrope(2, 1, 1, mrope_interleaved=True), QWEN_VISION),
}
PROCESSOR = '{"image_processor_type": "Fast",\n  "crop": [16, 16]}\n'


def write_whole(folder: Path, kind: str, **more: Any) -> PreTrainedModel:
    """A folder whose numbers are all random, with tokenizer and processor; `more` are keys of the
    whole. Returns transformers' model."""
    write_model(folder)
    toy = json.loads((folder / "config.json").read_text())
    ids = {key: toy[key] for key in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")}
    given = json.loads(json.dumps({**CONFIGS[kind], **more}))
    given["text_config"] |= ids
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**given)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    return model


def read_whole(folder: Path | str) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    reader = HfFolder(folder)
    return {n: reader.read(n, full_box(i.shape)) for n, i in reader.infos.items()}


def others_of(folder: Path) -> set[str]:
    """The tensors of the other towers, by what their names are not."""
    names = tensor_names(folder)
    own = next(s for s in SPELLINGS if f"{s[0][1]}embed_tokens.weight" in names)
    return {name for name in names if not name.startswith(tuple(there for _, there in own))}
