"""Small HF folders of every family with random weights, and the ways to take them apart by hand."""

from pathlib import Path

import torch

from pentad.core.device import DTYPES
from pentad.models.conversion import Conversion, convert
from pentad.models.families import dims_of, map_of
from pentad.runtime.helper import HelperPool
from pentad.weights.hf import HfFolder, plan_folder, save_folder
from pentad.weights.regions import full_box
from pentad.weights.transfer import TensorInfo

SIZES = {
    "vocab_size": 211,
    "hidden_size": 40,
    "intermediate_size": 84,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 6,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
MODELS = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, few kv heads": {"model_type": "llama", "num_key_value_heads": 2},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "shared": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "shared_expert_intermediate_size": 36,
    },
    "mixed": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]},
    "glm": {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
}


def config_of(kind: str) -> dict:
    return {**SIZES, **MODELS[kind]}


def hf_folder(folder: Path, kind: str, dtype=torch.float32, **more) -> Path:
    """A folder with random weights; `more` are further tensors."""
    config = config_of(kind)
    weight_map = map_of(dims_of(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(source.shape, generator=generator).to(DTYPES.get(source.dtype, dtype))
        for name, source in weight_map.sources.items()
        if not source.optional
    }
    tensors |= more
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    save_folder(folder, tensors.items(), plan_folder(infos, config))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = HfFolder(folder)
    return {n: reader.read(n, full_box(info.shape)) for n, info in reader.infos.items()}


def run(source: Path, target: Path, to: str, **settings):
    processes = settings.pop("processes", 1)
    force = settings.pop("force", False)
    conversion = Conversion(source=str(source), target=str(target), to=to, **settings)
    pool = HelperPool(processes) if processes > 1 else None
    return convert(conversion, pool=pool, force=force)


def bytes_of_folder(folder: Path) -> dict[str, bytes]:
    """Every file but the record, by its path."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    named = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    named.pop("pentad-convert.json", None)
    return named


def rank_file(folder: Path, name: str) -> dict:
    path = folder / "release" / name / "model_optim_rng.pt"
    return torch.load(path, weights_only=False)


def fused_qkv(hf: dict[str, torch.Tensor], layer: int, kind: str, num_groups: int) -> torch.Tensor:
    """Megatron's interleaving written out: for each group its queries, its key, its value."""
    parts = [hf[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"].chunk(num_groups) for x in "qkv"]
    return torch.cat([torch.cat(group) for group in zip(*parts, strict=True)])
