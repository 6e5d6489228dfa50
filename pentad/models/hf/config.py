"""Reads configs of transformers' models, rejects unsupported ones, and derives dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.quantization import quantization_problems
from pentad.models.config_reader import MAX_LAYERS
from pentad.models.families import ConfigLike, read_config

PACKABLE = {"full_attention", "sliding_attention"}
"""`layer_types` in which tokens interact only in attention."""
CARRYING = {"conv", "hybrid", "linear_attention"}
"""`layer_types` that carry state or convolve from token to token: rows are computed one by one."""
SHIFTING = {"dynamic", "longrope"}
"""Kinds of rotary embeddings that depend on the length of rows."""
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys with the number of layers."""
UNBOUNDED = 1 << 20
"""Number of positions if a config has no limit."""


def read_hf_config(source: ConfigLike) -> PretrainedConfig:
    """The config of a folder or dict as transformers' own class, if its model can be trained."""
    given = read_config(source)
    where = f"config.json: model_type = {given.get('model_type', 'missing')}"
    folder = source if isinstance(source, str | Path) else None
    for key in LAYER_COUNTS:
        if isinstance(given.get(key), int) and given[key] > MAX_LAYERS:
            rule = f"must be a whole number of at most {MAX_LAYERS}"
            raise UserError(Problem(f"config.json: {key} = {given[key]:.6g}", rule))
    try:
        config = AutoConfig.for_model(**given) if folder is None else _read_folder(folder)
    except Exception as error:  # config classes raise anything
        rule = f"transformers cannot read it ({str(error).partition('. ')[0]})"
        remedy = "give a model type that it knows, or a model file of your own"
        raise UserError(Problem(where, rule, remedy)) from error
    raise_problems(quantization_problems(given))
    raise_problems(Problem(where, rule) for rule in _faults(config))
    vars(config).pop("quantization_config", None)  # the model is built for 16-bit weights
    return config


def _read_folder(folder: str | Path) -> PretrainedConfig:
    path = Path(folder)
    place = path if path.is_dir() else path.parent
    return AutoConfig.from_pretrained(place, trust_remote_code=False)


def _faults(config: PretrainedConfig) -> list[str]:
    """Reasons in the config why the model cannot be trained by the fsdp backend."""
    fields = config.to_dict()
    faults = []
    if config.get_text_config() is not config:
        faults.append("it describes a model with several modalities")
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        faults.append("transformers has no causal language model of it")
    if fields.get("is_encoder_decoder"):
        faults.append("it is an encoder with a decoder")
    if not getattr(config, "is_causal", True):
        faults.append("is_causal = false: tokens attend to later ones")
    rope = fields.get("rope_parameters") or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    shifting = sorted({str(part.get("rope_type")) for part in (rope, *nested)} & SHIFTING)
    if shifting:
        faults.append(
            f"rotary frequencies of kind {', '.join(shifting)} depend on the longest row of a "
            "batch, so a row's log-probs would depend on its neighbours"
        )
    turned = rope.get("partial_rotary_factor", 1.0) * (fields.get("head_dim") or 0)
    if config.model_type == "minimax_m2" and fields.get("rotary_dim") not in (None, turned):
        faults.append(
            f"rotary_dim = {fields['rotary_dim']}: this transformers would turn {turned:g} numbers "
            "of a head; use archon, or a transformers that reads the key"
        )
    try:
        measure(config)
    except AttributeError as error:
        faults.append(f"it is not an attention decoder: its config has no {error.name}")
    mixing = sorted(set(fields.get("layer_types") or ()) - PACKABLE - CARRYING)
    if mixing:
        faults.append(
            f"its layers of kind {', '.join(mixing)} mix tokens outside of causal attention, "
            "so rows cannot be packed"
        )
    return faults


def carries_state(config: PretrainedConfig) -> bool:
    """Whether tokens interact outside of attention, so that rows cannot be packed."""
    return bool(CARRYING & set(config.to_dict().get("layer_types") or ()))


def dims_of_hf(source: ConfigLike) -> ModelDims:
    """The dimensions of any decoder of transformers, as far as engine and data need them.

    They suffice to check, distribute and balance tokens, but do not describe layers (experts,
    windows), so FLOPs and memory must not be computed from them.
    """
    return measure(read_hf_config(source))


def measure(config: PretrainedConfig) -> ModelDims:
    # Key names differ between families; attributes of the config have common names.
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    fields = config.to_dict()

    def number(key: str, default: int) -> int:
        value: Any = fields.get(key)
        return value if isinstance(value, int) and value else default

    return ModelDims(
        family=str(config.model_type),
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        intermediate_size=number("intermediate_size", 4 * hidden),
        tie_embeddings=bool(fields.get("tie_word_embeddings")),
        max_position=number("max_position_embeddings", number("n_positions", UNBOUNDED)),
        initializer_range=float(fields.get("initializer_range") or 0.02),
        score_cap=fields.get("attn_logit_softcapping"),
        is_whole=False,
    )
