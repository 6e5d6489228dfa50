"""Text towers of multimodal folders: their family, config and names of tensors on disk. No torch.

Loading, publishing, exports, plans and `verify-model` all use this module for towers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.folders import read_object, tensor_bytes, tensor_names
from pentad.core.quantization import REMEDY
from pentad.models.config_reader import PART, ConfigReader
from pentad.weights.map import WeightMap, sources_of

Names = tuple[tuple[str, str], ...]
"""How names begin, and how they begin under another spelling."""
T = TypeVar("T")
TEXT, TIED = "text_config", "tie_word_embeddings"
EMBEDDING = "model.embed_tokens.weight"
SPELLINGS = tuple(
    (("model.", begin), ("lm_head.", head))
    for begin, head in (
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.text_model.", "lm_head."),
        ("model.", "lm_head."),
    )
)
"""Pairs (prefix of a family's names, prefix in multimodal folders). Most types have two:
transformers reads both, and which one it writes depends on its version."""
IN_MEMORY: Names = SPELLINGS[0]
"""The module names of transformers. Adapters use them for their factors, whatever the spelling of
the base."""
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
MROPE = ("mrope_section", "mrope_interleaved")
NOT_TEXT = ("vision_config", "model_type", "architectures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Describes the text tower in a config.json of several modalities."""

    family: str = ""
    """The family of the tower; empty: `model_type` of `text_config`..."""
    default: str = ""
    """...and this one if that is missing."""
    read_dims: Callable[[Mapping[str, Any]], ModelDims] | None = None
    """The config adapter if the tower has a separate config class; None: the family's."""
    tied: bool = False
    """Default of `tie_word_embeddings`."""
    text_ties: bool = False
    """Whether `text_config` (or the family's default) can also tie the embeddings."""
    is_flat: bool = False
    """Whether older files have the keys of `text_config` beside `vision_config`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults of missing keys of `text_config`, besides the adapter's."""


QWEN2_VL = Tower(
    family="qwen2",
    read_dims=ConfigReader(
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        slides_key=("max_window_layers", 80, 0),
    ),
    text_ties=True,
    is_flat=True,
)
LLAVA = Tower(default="llama", text_ties=True)
GEMMA4_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
TOWERS: Mapping[str, Tower] = {
    "gemma3": Tower(
        family="gemma3_text",
        tied=True,
        defaults={"vocab_size": 262208, "num_attention_heads": 8},
    ),
    "gemma4": Tower(family="gemma4_text", tied=True, defaults=GEMMA4_SIZES),
    "glm4v": Tower(
        family="glm4",
        read_dims=ConfigReader(
            defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
            qkv_bias=True,
            out_bias=False,
            mlp_bias=False,
            post_norms=True,
            partial_rotary=True,
            rotary_pairs="neighbours",
            windows="none",
        ),
        text_ties=True,
    ),
    "internvl": Tower(default="qwen2", tied=True),
    "llava": LLAVA,
    "llava_next": Tower(default="llama"),
    "llava_onevision": Tower(default="qwen2", text_ties=True),
    "mistral3": Tower(default="mistral", tied=True),
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_VL,
    "qwen3_5": Tower(family="qwen3_5_text"),
    "qwen3_5_moe": Tower(family="qwen3_5_moe_text"),
    "qwen3_vl": Tower(
        family="qwen3",
        read_dims=ConfigReader(
            defaults={
                "num_key_value_heads": 32,
                "head_dim": 128,
                "max_position_embeddings": 128000,
                "rope_theta": 5e5,
            },
            mlp_bias=False,
            qk_norm=True,
            windows="none",
        ),
    ),
}
"""`model_type` of the multimodal config -> tower."""
LLAMA_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SIZES = {"llama": LLAMA_SIZES, "mistral": LLAMA_SIZES | {"intermediate_size": 14336}}
"""transformers' defaults of sizes that a `text_config` of these types omits, as in LLaVA."""


def tower_of(config: Mapping[str, Any]) -> Tower | None:
    """The text tower of a config; None for a language model and for unsupported types."""
    return TOWERS.get(str(config.get("model_type")))


def text_family(config: Mapping[str, Any], tower: Tower) -> str:
    return tower.family or str(_given(config, tower).get("model_type") or tower.default)


def text_config(config: Mapping[str, Any], tower: Tower) -> dict[str, Any]:
    """The config of the tower in the form of its family."""
    text, family = _given(config, tower), text_family(config, tower)
    own = {**SIZES.get(family, {}), **tower.defaults, **text}  # null is a value, such as no window
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(own.get(key), Mapping):
            own[key] = _plain_rope(key, own[key], own)
    tied = config.get(TIED, tower.tied)  # null is false
    if tied or not tower.text_ties:
        own[TIED] = False if tied is None else tied
    if config.get("quantization_config") or text.get("quantization_config"):
        where = f"config.json: model_type = {config.get('model_type')}"
        raise UserError(Problem(where, "its weights are quantised", REMEDY))
    return {**own, "model_type": family}


def language_config(config: Mapping[str, Any], tower: Tower) -> dict[str, Any]:
    """The config of the tower as a language model of its family, with the token ids of the
    whole."""
    own = tower.read_dims.defaults if isinstance(tower.read_dims, ConfigReader) else {}
    ids = {key: value for key, value in config.items() if key in TOKEN_IDS}
    return {**ids, **own, **text_config(config, tower)}


def _given(config: Mapping[str, Any], tower: Tower) -> Mapping[str, Any]:
    text = config.get(TEXT)
    if text is None and tower.is_flat:
        return {key: value for key, value in config.items() if key not in NOT_TEXT}
    if not isinstance(text, Mapping):
        where = f"config.json: model_type = {config.get('model_type')}"
        rule = f"{TEXT} = {str(text)[:80]}: must be a JSON object, which describes the text tower"
        raise UserError(Problem(where, rule, "give the config.json of the model"))
    return text


def _plain_rope(key: str, rope: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without the sections for time, height and width, which have no effect on
    text: its three positions are equal."""
    out = {name: value for name, value in rope.items() if name not in MROPE}
    for name in ("rope_type", "type"):
        if out.get(name) == "mrope":
            out[name] = "default"
    sections = rope.get(MROPE[0])
    if sections is not None:
        pairs = _head_dim(text) * float(rope.get(PART) or text.get(PART) or 1) // 2
        if not isinstance(sections, list | tuple) or sum(sections) != pairs:
            where = f"config.json: {TEXT}.{key}.{MROPE[0]} = {sections}"
            rule = f"must sum to {int(pairs)}, the pairs that rotary turns in a head"
            raise UserError(Problem(where, rule))
    return out


def _head_dim(text: Mapping[str, Any]) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def tower_names(folder: Path | None) -> Names:
    """Name prefixes of the tower in a folder; without one, those of transformers in memory."""
    return IN_MEMORY if folder is None else spelling_of(tensor_names(folder)) or IN_MEMORY


def spelling_of(held: Container[str]) -> Names | None:
    """Name prefixes of the tower among the tensor names of a folder; None if it has none."""
    found = (names for names in SPELLINGS if names[0][1] + EMBEDDING.partition(".")[2] in held)
    return next(found, None)


def other_bytes(folder: Path, dims: ModelDims) -> int:
    """Bytes of the other towers, which every export copies."""
    sizes = tensor_bytes(folder) if dims.tower_names else {}
    return sum(size for name, size in sizes.items() if dims.is_beside_text(name))


def by_adapter_names(folder: str | Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors of a folder under the names that adapters use, without those of other towers."""
    if tower_of(read_object(Path(folder) / "config.json")) is None:
        return dict(tensors)
    held = (there for _, there in tower_names(Path(folder)))
    pairs = tuple(zip(held, (new for _, new in IN_MEMORY), strict=True))
    begins = tuple(begin for begin, _ in pairs)
    return {_renamed(n, pairs): one for n, one in tensors.items() if n.startswith(begins)}


def _renamed(name: str, names: Names) -> str:
    found = ((begin, new) for begin, new in names if name.startswith(begin))
    begin, new = next(found, ("", ""))
    return new + name.removeprefix(begin)


def named_by_family(name: str, dims: ModelDims) -> str:
    """The name of a tower's tensor in a folder of its family; other names unchanged."""
    return _renamed(name, tuple((there, own) for own, there in dims.tower_names))


def in_tower(own: WeightMap, names: Names) -> WeightMap:
    """Renames the map of a family to the names of a text tower."""

    def there(name: str) -> str:
        return _renamed(name, names)

    entries = {
        name: replace(
            entry, regions=tuple(replace(r, source=there(r.source)) for r in entry.regions)
        )
        for name, entry in own.entries.items()
    }
    return replace(
        own,
        entries=entries,
        sources=sources_of(entries, own.dims),
        tied={there(name): there(twin) for name, twin in own.tied.items()},
        ignored=frozenset(map(there, own.ignored)),
        ignored_prefixes=tuple(map(there, own.ignored_prefixes)),
    )
