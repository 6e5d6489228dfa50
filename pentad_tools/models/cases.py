"""Tiny configs that test weight maps, and random transformers models of them.

Every size differs from every other, head_dim is not hidden / heads, there are four key heads with
three query heads each, vocabulary and ffn are odd, and dense and mixture layers alternate. Square
or equal dims would hide transposed, swapped and wrongly sharded weights. Constants differ from
every default, so ignored config keys are detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.dims import ModelDims
from pentad.models.config_reader import PART
from pentad.models.decoder import Decoder
from pentad.models.families import dims_of, map_of, path_of
from pentad.models.registry import load_model
from pentad.models.spec import ModelSpec
from pentad.weights.hf import HfFolder
from pentad.weights.map import WeightMap
from pentad.weights.regions import full_box

NUM_LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 14,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "rms_norm_eps": 0.003,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERT_SIZES: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 27,
    "mlp_only_layers": [1],
}
LOCAL_EXPERT_SIZES: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 76,
}
"""Families in which `intermediate_size` is the width of experts: `etp` splits gate-up pairs."""
EVEN_EXPERT_SIZES: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "intermediate_size": 76,
}
"""Other names of these keys."""
ERNIE_SIZES: dict[str, Any] = {
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_intermediate_size": 27,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 2,
}
SQUARE: dict[str, Any] = {"hidden_size": 72, "head_dim": 6}
"""Families in which the norm of queries has the hidden size in transformers."""
SHARED_SIZES: dict[str, Any] = {"shared_expert_intermediate_size": 35}
DEEPSEEK_SIZES: dict[str, Any] = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 27,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
"""For families with mixtures as in DeepSeek-V3."""
LATENT_SIZES: dict[str, Any] = {
    "num_key_value_heads": 12,
    "head_dim": 6,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}
"""For latent attention; `head_dim` is transformers' name of the rotated part."""
PARTIAL_ROTARY: dict[str, Any] = {"head_dim": 16, "partial_rotary_factor": 0.4}
"""Rotates six numbers of a head; the factor does not divide evenly."""
LINEAR_SIZES: dict[str, Any] = {
    "linear_num_key_heads": 12,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
"""As many key heads of delta nets as query heads, because every tp must divide both."""
BY_LAYER_SIZES: dict[str, Any] = {
    "global_head_dim": 22,
    "num_global_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "vocab_size_per_layer_input": 217,
    "hidden_size_per_layer_input": 10,
}
"""For different heads by kind of layer, and per-layer embeddings."""
SHARED_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
"""For last layers that read the keys and values of earlier ones."""
TP_GRID = (1, 2, 4, 12)
"""One rank, fewer than, as many as, and more than the key heads; all divide the query heads."""
EXPERT_GRID = ((1, 1), (2, 1), (2, 2), (3, 4))
"""(ep, etp) for each tp; they need not divide the experts or their width."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
TUNED_YARN = {
    **YARN,
    "beta_fast": 5.0,
    "beta_slow": 0.3,
    "mscale": 0.7,
    "mscale_all_dim": 0.2,
    "truncate": False,
}
GROWTH = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 9}
"""For queries that grow with the position, with every rotary; yarn's length has priority."""
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 333.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 55.0}
LAYER_KINDS = {"full_attention", "sliding_attention"}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "qkv_bias": False},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "yarn rope, tuned": {"rope_parameters": TUNED_YARN},
    "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "every second layer": {"decoder_sparse_step": 2, "mlp_only_layers": []},
    "top-k normalised": {"norm_topk_prob": True},
    "top-k as it is": {"norm_topk_prob": False},
    "head norms": {"use_qk_norm": True},
    "dense layers": {"first_k_dense_replace": 2},
    "groups of experts": {"n_group": 4, "topk_group": 2, "n_routed_experts": 12},
}


def variants_of(family_keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Config variants of a family, by the keys that its transformers config has."""
    has_experts = "moe_intermediate_size" in family_keys
    rope = family_keys.get("rope_parameters") or {}
    by_layer = LAYER_KINDS & rope.keys()
    grown = GROWTH if GROWTH.keys() <= rope.keys() else {}
    base = {**SIZES, "rope_parameters": {**grown, **PLAIN_ROPE}}
    if "moe_num_experts" in family_keys:
        base |= ERNIE_SIZES
    elif has_experts:
        base |= DEEPSEEK_SIZES if "n_routed_experts" in family_keys else EXPERT_SIZES
    elif "num_local_experts" in family_keys:
        base |= LOCAL_EXPERT_SIZES
    elif "num_experts" in family_keys:
        base |= {key: size for key, size in EVEN_EXPERT_SIZES.items() if key in family_keys}
    if "clip_qkv" in family_keys:
        base |= SQUARE
    if "partial_rotary_factor" in family_keys:
        base |= PARTIAL_ROTARY
    if "kv_lora_rank" in family_keys:
        base |= LATENT_SIZES
    if "vocab_size_per_layer_input" in family_keys:
        base |= BY_LAYER_SIZES
    for sizes in (SHARED_SIZES, LINEAR_SIZES if "linear_num_key_heads" in family_keys else {}):
        base |= {key: size for key, size in sizes.items() if key in family_keys}
    out = {}
    for name, changes in VARIANTS.items():
        known = {key: value for key, value in changes.items() if key in family_keys}
        if "rope_parameters" in known:
            known["rope_parameters"] = {**grown, **known["rope_parameters"]}
        if known and by_layer:
            kinds = base.get("layer_types", LAYER_TYPES)
            known |= {"layer_types": kinds, "sliding_window": 5}
            full = {**known.get("rope_parameters", PLAIN_ROPE)}
            full.pop("truncate", None)  # transformers ignores it there
            known["rope_parameters"] = {"full_attention": full, "sliding_attention": LOCAL_ROPE}
        if known and (name != "window" or "sliding_window" in known):
            out[name] = deepcopy({**base, **known})  # transformers' configs modify their input
    return out


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Shrinks a real config to tiny sizes and keeps its options."""
    out = {**config, **SIZES, "head_dim": PARTIAL_ROTARY["head_dim"]}
    for key in ("layer_types", "num_local_experts", "moe_layer_end_index", "dtype", "torch_dtype"):
        out.pop(key, None)
    length = config.get("num_hidden_layers")
    for key, value in out.items():
        if isinstance(value, list) and len(value) == length:  # one for each layer
            out[key] = value[:NUM_LAYERS]
    out |= _shrunk_experts(config)
    if "clip_qkv" in config:
        out |= SQUARE
    if config.get("rotary_dim"):  # transformers ignores this key and reads the other
        out |= {"rotary_dim": out["head_dim"] // 2, PART: 0.5}
    if config.get("n_routed_experts"):
        kept = {"routed_scaling_factor": config.get("routed_scaling_factor", 1.0)}
        out |= {**DEEPSEEK_SIZES, **kept}
    if config.get("linear_num_key_heads"):
        out |= LINEAR_SIZES
    if config.get("kv_lora_rank"):
        rank = LATENT_SIZES["q_lora_rank"] if config.get("q_lora_rank") else None
        out |= {**LATENT_SIZES, "q_lora_rank": rank}
    if "vocab_size_per_layer_input" in config:
        out |= BY_LAYER_SIZES
        if not config.get("hidden_size_per_layer_input"):
            out["hidden_size_per_layer_input"] = 0
        if config.get("enable_moe_block"):
            out["top_k_experts"] = EXPERT_SIZES["num_experts_per_tok"]
        if config.get("num_kv_shared_layers"):
            out |= SHARED_LAYERS
        out.pop("per_layer_config", None)
    if config.get("sliding_window"):
        out |= {"sliding_window": 5, "max_window_layers": 1}
    return out


def _shrunk_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of experts by the keys of Qwen, Mixtral, ERNIE and Hunyuan."""
    if config.get("moe_num_experts"):
        none = {key: 0 for key in ("moe_num_shared_experts",) if config.get(key) == 0}
        return ERNIE_SIZES | none
    if not (config.get("num_experts") or config.get("num_local_experts")):
        return {}
    if "moe_topk" in config:
        width = EVEN_EXPERT_SIZES["intermediate_size"]
        return EVEN_EXPERT_SIZES | {"moe_intermediate_size": width, "num_shared_expert": 1}
    out = {key: size for key, size in SHARED_SIZES.items() if config.get(key)}
    out |= {**EXPERT_SIZES, "decoder_sparse_step": config.get("decoder_sparse_step", 1)}
    if "moe_intermediate_size" not in config:
        out |= LOCAL_EXPERT_SIZES if config.get("num_local_experts") else EVEN_EXPERT_SIZES
    return out


NUM_TOKENS = 37
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""transformers' eager implementations: its fused expert kernels reject odd widths."""


LOGITS_TOLERANCE = 1e-5
"""Tolerance relative to the largest logit: float32 rounding over a few layers."""
ROUNDING_DRAWS, ROUNDING_FACTOR = 3, 4.0


class Fault(Exception):
    """A failed check: one sentence with the tensor and the rule."""


@dataclass
class FamilyCase:
    """One tiny config, a transformers model of it with random weights, and its folder."""

    name: str
    spec: ModelSpec
    dims: ModelDims
    theirs: nn.Module
    folder: Path
    ids: Tensor

    @property
    def weight_map(self) -> WeightMap:
        return map_of(self.dims)

    def disk(self) -> dict[str, Tensor]:
        """All tensors that transformers wrote, by name on disk."""
        return read_all(self.folder)

    def load(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return load_model(self.folder, dtype=dtype, model=path_of(self.spec.family))

    @cached_property
    def tolerance(self) -> float:
        return logits_tolerance(self.theirs, self.ids)

    def expected(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Reference logits, weights of a scalar loss, and its gradients by name on disk."""
        self.theirs.zero_grad()
        logits = self.theirs(self.ids[None]).logits[0]
        weight = torch.randn(logits.shape, generator=generator(2))
        (logits * weight).sum().backward()
        grads = {n: p.grad for n, p in self.theirs.named_parameters() if p.grad is not None}
        # transformers fuses experts in memory; this restores the names and shapes of its files.
        on_disk = revert_weight_conversion(self.theirs, grads)
        own = {name: grad for name, grad in on_disk.items() if name not in self.weight_map.tied}
        return logits.detach(), weight, own


@torch.no_grad()
def logits_tolerance(model: nn.Module, ids: Tensor) -> float:
    """Measures how much logits of an equal model may differ, relative to the largest.

    Some layers amplify rounding (delta nets 20 times as much as attention), and how much depends on
    the CPU. So it is measured: every weight is moved by up to one unit in its last place.
    """
    state = {n: t for n, t in model.state_dict().items() if t.is_floating_point()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    expected = model(input_ids=ids[None]).logits[0]
    moved = 0.0
    for seed in range(ROUNDING_DRAWS):
        source = generator(seed)
        for name, tensor in state.items():
            shift = 2 * torch.rand(tensor.shape, generator=source) - 1
            tensor.copy_(kept[name] * (1 + torch.finfo(torch.float32).eps * shift))
        logits = model(input_ids=ids[None]).logits[0]
        moved = max(moved, float((logits - expected).abs().max() / expected.abs().max()))
    for name, tensor in state.items():
        tensor.copy_(kept[name])
    return max(LOGITS_TOLERANCE, ROUNDING_FACTOR * moved)


def read_all(folder: Path) -> dict[str, Tensor]:
    reader = HfFolder(folder)
    return {name: reader.read(name, full_box(info.shape)) for name, info in reader.infos.items()}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build_case(name: str, spec: ModelSpec, config: Mapping[str, Any], scratch: Path) -> FamilyCase:
    config = {key: deepcopy(value) for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(spec.family, **config)
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config, **PLAIN)
    randomise(theirs)
    theirs.save_pretrained(scratch / "hf")
    dims = dims_of(scratch / "hf", path_of(spec.family))
    ids = torch.randint(dims.vocab_size, (NUM_TOKENS,), generator=generator(1))
    if dims.padding_id is not None:
        ids[NUM_TOKENS // 2] = dims.padding_id  # the padding row of the table is frozen
    return FamilyCase(name, spec, dims, theirs.eval(), scratch / "hf", ids)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Randomises parameters and persistent buffers, so swapped norms are detected."""
    source = generator(0)
    for tensor in model.state_dict().values():
        noise = torch.randn(tensor.shape, generator=source)
        tensor.copy_(0.15 * noise if tensor.dim() > 1 else 0.7 + 0.3 * noise)
