"""Reads a HF config.json into dimensions, with transformers' defaults; without torch.

This file has the part that all families share; the file of a family gives its differences as fields
of `ConfigReader`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.quantization import quantization_problems

MAX_SIZE = 1 << 24
"""Maximum width or count: far above every model, and products of two fit 64 bits."""
MAX_LAYERS = 10_000
MAX_POSITION = 1 << 40
MAX_PARAMS = 10**14
MAX_FLOAT = sys.float_info.max
NEEDED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "intermediate_size",
)
PER_TOKEN = ("moe_k", "moe_topk", "top_k_experts", "num_experts_per_tok")
"""Keys with the number of experts per token."""
SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size")
LINEAR_KEY_HEADS = "linear_num_key_heads"
UNSUPPORTED = {
    "text_config": "it describes a model with several modalities",
    "kv_lora_rank": "it uses latent attention",
    **dict.fromkeys(SHARED_EXPERTS, "it has shared experts"),
    LINEAR_KEY_HEADS: "it has linear attention layers",
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PART = "partial_rotary_factor"
PROPORTIONAL = "proportional"
OLD_LENGTH = "original_max_position_embeddings"
STRETCHED = {"llama3", "yarn", "longrope"}
"""Kinds of rotary scaling that need the original context length."""
LEFT_OUT = {"rope_parameters", "rope_theta"}
"""Keys for which transformers treats null as missing."""
ROPE_KEYS = {"rope_theta", "rope_type", "type", PART}
ROPE_NUMBERS = {
    *("factor", "low_freq_factor", "high_freq_factor", "attention_factor", OLD_LENGTH),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
UNSET_BY_ZERO = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
"""Keys for which transformers treats 0 as missing."""


ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
    "clamped": ("silu",),
}
"""Supported activations -> their names in configs."""


class ConfigValues:
    """The values of a config. Invalid ones are collected, to be reported together."""

    def __init__(self, hf: Mapping[str, Any], left_out: Set[str] = frozenset()) -> None:
        self.hf = hf
        self.left_out = left_out
        self.problems: list[Problem] = []

    def must(self, holds: bool, key: str, value: object, rule: str) -> None:
        where = f"config.json: {key} = {_short(value)}"
        if key in self.left_out:
            where += " (transformers' value, as the key is missing)"
        if not holds and not any(problem.where == where for problem in self.problems):
            self.problems.append(Problem(where, rule))

    def whole(self, key: str, default: int = 0, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number within bounds; null or missing: the default."""
        value = default if self.hf.get(key) is None else self.hf[key]
        is_whole = _is_number(value) and value >= least and value % 1 == 0
        self.must(is_whole, key, value, f"must be a whole number of at least {least}")
        is_bounded = not is_whole or value <= most
        self.must(is_bounded, key, value, f"must be a whole number of at most {most}")
        return int(value) if is_whole and is_bounded else least

    def flag(self, key: str | bool, default: bool = False) -> bool:
        """A boolean key, or the fixed value of the family."""
        if isinstance(key, bool):
            return key
        value = default if self.hf.get(key) is None else self.hf[key]
        self.must(isinstance(value, bool), key, value, "must be true or false")
        return value is True

    def number(self, key: str, default: float) -> float:
        value = default if self.hf.get(key) is None else self.hf[key]
        is_good = _is_number(value) and 0 < value <= MAX_FLOAT
        self.must(is_good, key, value, "must be a number above 0")
        return float(value) if is_good else default

    def fixed(self, values: Mapping[str, Any]) -> None:
        """Rejects keys with another value than the supported one; null counts as missing."""
        for key, built in values.items():
            given = self.hf.get(key)
            self.must(given is None or given == built, key, given, f"only {built} is built")

    def same(self, names: Mapping[str, str]) -> None:
        """Rejects aliases (name -> key) whose value differs from the key's: transformers reads
        both."""
        for name, key in names.items():
            given, own = self.hf.get(name), self.hf.get(key)
            rule = f"must be {key} = {_short(own)}, of which this is another name"
            self.must(given in (None, own), name, given, rule)

    def maybe(self, key: str) -> float | None:
        """A number above 0; None if null or missing."""
        return None if self.hf.get(key) is None else self.number(key, 1.0)

    @property
    def expert_width(self) -> int:
        has_own = self.hf.get("moe_intermediate_size") is not None
        return self.whole("moe_intermediate_size" if has_own else "intermediate_size")


def read_mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """The dimensions of the experts, from Qwen's key names; empty without experts."""
    key = "num_experts" if read.hf.get("num_experts") else "num_local_experts"
    num_experts = read.whole(key, 0, 0)
    if not num_experts:
        return {}
    given = read.hf.get("mlp_only_layers") or []
    is_list = isinstance(given, list | tuple)
    read.must(is_list, "mlp_only_layers", given, "must be a list of layer numbers")
    dense, stride = set(given) if is_list else set(), read.whole("decoder_sparse_step", 1)
    return {
        "num_experts": num_experts,
        "num_experts_per_token": read.whole("num_experts_per_tok"),
        "moe_intermediate_size": read.expert_width,
        "norm_topk_prob": read.flag("norm_topk_prob"),
        "moe_layers": tuple(i not in dense and (i + 1) % stride == 0 for i in range(num_layers)),
    }


def read_linear(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """The dimensions of gated delta nets, and the layers that have one."""
    kinds = read.hf.get("layer_types")
    if kinds is None:
        interval = read.whole("full_attention_interval", 4)
        linear = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    else:
        names = kinds if isinstance(kinds, list | tuple) else []
        known = len(names) == num_layers and all(n in (LINEAR, FULL) for n in names)
        rule = f"must name {LINEAR} or {FULL} for each of {num_layers} layers"
        read.must(known, "layer_types", kinds, rule)
        linear = tuple(name == LINEAR for name in names)
    key = "full_attention_interval" if kinds is None else "layer_types"
    rule = f"names no {FULL} layer, and the sampler's cache is made of them"
    read.must(not all(linear), key, read.hf.get(key), rule)
    keys, values = read.whole(LINEAR_KEY_HEADS), read.whole("linear_num_value_heads")
    rule = f"must be a multiple of {LINEAR_KEY_HEADS} = {keys}"
    read.must(values % keys == 0, "linear_num_value_heads", values, rule)
    return {
        "linear_layers": linear if any(linear) else (),
        "linear_key_heads": keys,
        "linear_value_heads": values,
        "linear_key_dim": read.whole("linear_key_head_dim"),
        "linear_value_dim": read.whole("linear_value_head_dim"),
        "linear_conv": read.whole("linear_conv_kernel_dim"),
    }


def from_layer(layer: int, first: int) -> bool:
    return layer >= first


def nothing_more(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    return {}


def turned_everywhere(read: ConfigValues, num_layers: int) -> tuple[bool, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReader:
    """Reads the config of a family like transformers. A switch is the name of its key, or a fixed
    value."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of missing keys, if they differ from the usual ones: no window, as many key heads as
    heads, hidden_size / num_heads, and so on."""
    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    """False if the ffn never has a bias: a config that sets one is rejected."""
    qk_norm: str | bool = False
    wide_qk_norm: bool = False
    """Whether queries and keys are normed over all heads as one vector."""
    norm_offset: float = 0.0
    attn_sinks: bool = False
    activation: tuple[str, Literal["silu", "gelu_tanh", "clamped"]] = ("hidden_act", "silu")
    """The key with the activation, and the only supported value."""
    attention: Callable[[ConfigValues], dict[str, Any]] | None = None
    """The dimensions of latent attention, if the family has it."""
    more: Callable[[ConfigValues, ModelDims], dict[str, Any]] = nothing_more
    """Further dimensions, such as `embed_scale`, from the config and other dimensions."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Keys of the family that must be unset -> what they would change."""
    pre_norms: bool = True
    post_norms: bool = False
    """Whether attention and ffn have norms before and after them."""
    partial_rotary: bool = False
    """Whether rotary is applied only to the first part of a head, by `partial_rotary_factor`."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    ropes: Set[str] = frozenset()
    """The supported kinds of rotary scaling; empty: all."""
    sliding_theta: tuple[str, float] | None = None
    """If layers with a window have separate rotary settings: the key of their theta in older files,
    and its default."""
    unturned: Callable[[ConfigValues, int], tuple[bool, ...]] = turned_everywhere
    """(config, number of layers) -> for each layer, whether it has no rotary."""
    windows: Literal["none", "all", "by_layer"] = "by_layer"
    """Layers with a window: none, all, or by `layer_types`; without that key, `unturned` layers, or
    those for which `slides` (called with the layer and the number at `slides_key`) is true."""
    slides: Callable[[int, int], bool] = from_layer
    slides_key: tuple[str, int, int] = ("max_window_layers", 28, 0)
    """The key of the number for `slides`, its default, and its minimum."""
    window_switch: str | bool = "use_sliding_window"
    has_shared_experts: bool = False
    """Whether `mixture` reads a shared expert."""
    mixture: Callable[[ConfigValues, int], dict[str, Any]] = read_mixture
    """(config, number of layers) -> dimensions of the experts."""
    attn_gate: bool = False
    linear: Callable[[ConfigValues, int], dict[str, Any]] | None = None
    """(config, number of layers) -> dimensions of delta-net layers, if the family has them."""

    def __call__(self, hf: Mapping[str, Any]) -> ModelDims:
        """Returns the dimensions, from old and new key names. Raises UserError for settings that
        dimensions cannot express."""
        self._refuse_unsupported(hf)
        hf = {key: v for key, v in hf.items() if v is not None or key not in LEFT_OUT}
        read = ConfigValues({**self.defaults, **hf}, self.defaults.keys() - hf.keys())
        dims = self._read(read)
        if self.attention is not None:
            dims = replace(dims, **self.attention(read))
        dims = replace(dims, **self.more(read, dims))
        self._check(read, dims)
        raise_problems(read.problems)
        return dims

    def _read(self, read: ConfigValues) -> ModelDims:
        num_layers = read.whole("num_hidden_layers", most=MAX_LAYERS)
        num_heads, hidden = read.whole("num_attention_heads"), read.whole("hidden_size")
        head_dim = read.whole("head_dim", hidden // num_heads)
        unturned = self.unturned(read, num_layers)
        window, sliding_layers = self._windows(read, num_layers, unturned)
        theta, scaling, sliding_rope = self._ropes(read, slides=any(sliding_layers))
        return ModelDims(
            family=str(read.hf.get("model_type", "")),
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=read.whole("num_key_value_heads", num_heads),
            head_dim=head_dim,
            intermediate_size=read.whole("intermediate_size"),
            tie_embeddings=read.flag("tie_word_embeddings"),
            padding_id=_padding_id(read),
            qkv_bias=read.flag(self.qkv_bias),
            out_bias=read.flag(self.out_bias),
            mlp_bias=read.flag(self.mlp_bias),
            qk_norm=read.flag(self.qk_norm),
            wide_qk_norm=self.wide_qk_norm,
            pre_norms=self.pre_norms,
            post_norms=self.post_norms,
            norm_offset=self.norm_offset,
            attn_sinks=self.attn_sinks,
            activation=self.activation[1],
            norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            rotary_dim=_rotary_dim(read, head_dim),
            rotary_pairs=self.rotary_pairs,
            unturned_layers=unturned if any(unturned) else (),
            sliding_rope=sliding_rope,
            max_position=read.whole("max_position_embeddings", 32768, most=MAX_POSITION),
            sliding_window=window,
            sliding_layers=sliding_layers,
            initializer_range=read.number("initializer_range", 0.02),
            **self.mixture(read, num_layers),
            attn_gate=self.attn_gate,
            **({} if self.linear is None else self.linear(read, num_layers)),
        )

    def _check(self, read: ConfigValues, dims: ModelDims) -> None:
        """Checks relations between values."""
        fits = dims.num_heads % dims.num_kv_heads == 0
        rule = f"must divide num_attention_heads = {dims.num_heads}"
        read.must(fits, "num_key_value_heads", dims.num_kv_heads, rule)
        rule = "must be even: rotary turns pairs"
        read.must(dims.head_dim % 2 == 0, "head_dim", dims.head_dim, rule)
        top_k, num_experts = dims.num_experts_per_token, dims.num_experts
        rule = f"must be at most the number of experts, {num_experts}"
        key = next((key for key in PER_TOKEN if read.hf.get(key) is not None), PER_TOKEN[-1])
        read.must(top_k <= num_experts, key, top_k, rule)
        if self.mlp_bias is False:
            rule = f"the ffn of {dims.family} has no bias, and transformers ignores the key"
            read.must(not read.flag("mlp_bias"), "mlp_bias", True, f"{rule}; remove it")
        if not read.problems and dims.num_params > MAX_PARAMS:
            rule = f"with the other sizes this makes {dims.num_params:.0e} parameters"
            read.must(False, "hidden_size", dims.hidden_size, rule)

    def _refuse_unsupported(self, hf: Mapping[str, Any]) -> None:
        where = f"config.json: model_type = {hf.get('model_type') or 'missing'}"
        remedy = "use a plain decoder such as Qwen3 or Llama"
        read_here: tuple[str, ...] = SHARED_EXPERTS if self.has_shared_experts else ()
        read_here += () if self.linear is None else (LINEAR_KEY_HEADS,)
        read_here += () if self.attention is None else ("kv_lora_rank",)
        problems = [
            Problem(where, f"{key} = {_short(hf[key])}: {why}", remedy)
            for key, why in UNSUPPORTED.items()
            if hf.get(key) and key not in read_here
        ]
        problems += quantization_problems(hf)
        key, built = self.activation
        names = ACTIVATIONS[built]
        if hf.get(key, names[0]) not in names:
            rule, fix = f"{key} = {hf[key]!r}, only {names[0]} is built", ""
            if (built, hf[key]) == ("gelu_tanh", "gelu"):
                fix = f"if it was trained with {names[0]}, as the first release of Gemma was, "
                fix += "write that into its config.json"
            problems.append(Problem(where, rule, fix))
        problems += [
            Problem(where, f"{key} = {_short(hf[key])}: {why} is not supported")
            for key, why in self.refused.items()
            if hf.get(key)
        ]
        if not hf.get("is_causal", True):
            rule = f"is_causal = {hf['is_causal']!r}: tokens attend to later ones"
            problems.append(Problem(where, rule, "only causal decoders can be trained"))
        if not self.partial_rotary and _rotary_factor(hf)[1] != 1.0:
            rule = f"{PART}: rotary over part of a head is not supported for this family"
            problems.append(Problem(where, rule))
        missing = [key for key in NEEDED if not (hf.get(key) or self.defaults.get(key))]
        if missing and not problems:
            rule = f"{', '.join(missing)} missing"
            problems.append(Problem(where, rule, "give the config.json of a decoder model"))
        raise_problems(problems)

    def _ropes(
        self, read: ConfigValues, *, slides: bool
    ) -> tuple[float, dict[str, Any], dict[str, Any]]:
        """(theta, scaling, all settings of layers with a window if they differ)."""
        if self.sliding_theta is None:
            theta, scaling = _rope(read)
            kinds = [scaling.get("rope_type", "default")]
            sliding: dict[str, Any] = {}
        else:
            (theta, scaling), (own_theta, own) = _ropes_by_layer(read, *self.sliding_theta)
            kinds = [one.get("rope_type", "default") for one in (scaling, own)]
            is_other = slides and (own_theta, own) != (theta, scaling)
            sliding = {"rope_theta": own_theta, **own} if is_other else {}
        for kind in kinds:
            family, names = read.hf.get("model_type"), ", ".join(sorted(self.ropes))
            rule = f"transformers has {names} for {family}"
            is_known = not self.ropes or kind in self.ropes
            read.must(is_known, "rope_type", kind, f"{rule}, or reads it as another kind")
        return theta, scaling, sliding

    def _windows(
        self, read: ConfigValues, num_layers: int, unturned: tuple[bool, ...]
    ) -> tuple[int | None, tuple[bool, ...]]:
        is_set = read.hf.get("sliding_window") is not None and self.windows != "none"
        has_window = read.flag(self.window_switch) and is_set
        width = read.whole("sliding_window", most=MAX_POSITION) if has_window else None
        if self.windows != "by_layer":
            return width, (True,) * num_layers if width else ()
        kinds = read.hf.get("layer_types")
        names = kinds if isinstance(kinds, list | tuple) else []
        if width is None:
            rule = (
                "names sliding_attention, but sliding_window and use_sliding_window set no window"
            )
            read.must("sliding_attention" not in names, "layer_types", kinds, rule)
            return None, ()
        if kinds:
            known = all(kind in ("sliding_attention", "full_attention") for kind in names)
            rule = f"must name sliding_attention or full_attention for each of {num_layers} layers"
            read.must(known and len(names) == num_layers, "layer_types", kinds, rule)
            slides = tuple(kind == "sliding_attention" for kind in names)
        elif unturned:
            slides = unturned
        else:
            first = read.whole(*self.slides_key)
            slides = tuple(self.slides(layer, first) for layer in range(num_layers))
        return (width, slides) if any(slides) else (None, ())


dims_from_hf = ConfigReader()
"""The reader of families without differences."""


def _padding_id(read: ConfigValues) -> int | None:
    """`pad_token_id`, negative from the end as in torch; None if outside the vocabulary."""
    given, size = read.hf.get("pad_token_id"), read.whole("vocab_size")
    if not isinstance(given, int) or isinstance(given, bool) or not -size <= given < size:
        return None
    return given % size


def _short(value: object) -> str:
    text = f"{{{len(value)} keys}}" if isinstance(value, Mapping) else str(value)
    return text if len(text) < 100 else f"{text[:80]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rope_settings(hf: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, settings): as in transformers, `rope_scaling` replaces `rope_parameters`."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    return key, hf.get(key) or {}


def _rope(read: ConfigValues) -> tuple[float, dict[str, Any]]:
    """(theta, scaling); theta and original length may also be outside the rotary settings."""
    key, given = rope_settings(read.hf)
    where = f"config.json: {key}"
    if isinstance(given, Mapping) and any(isinstance(value, Mapping) for value in given.values()):
        raise UserError(Problem(where, "rotary settings per layer type are not supported"))
    theta, rest = _one_rope(read, key, given, read.number("rope_theta", 10000.0))
    if rest.get("rope_type") in STRETCHED and read.hf.get(OLD_LENGTH) is not None:
        rest[OLD_LENGTH] = read.whole(OLD_LENGTH, most=MAX_POSITION)  # has priority there
    return theta, rest


def _ropes_by_layer(
    read: ConfigValues, local_key: str, local_theta: float
) -> list[tuple[float, dict[str, Any]]]:
    """Like `_rope`, for layers without and with a window. In older files `rope_theta` and
    `rope_scaling` are for layers without a window."""
    given, scaling = read.hf.get("rope_parameters"), read.hf.get("rope_scaling") or {}
    where = "config.json: rope_parameters"
    if given is None:
        given = {}
    elif not isinstance(given, Mapping) or not given.keys() <= {FULL, SLIDING}:
        rule = f"must be a JSON object of {FULL} and {SLIDING}: transformers reads nothing else"
        raise UserError(Problem(f"{where} = {_short(given)}", rule))
    thetas = read.number("rope_theta", 10000.0), read.number(local_key, local_theta)
    found = []
    for kind, theta in zip((FULL, SLIDING), thetas, strict=True):
        own = given.get(kind) or {"rope_type": "default"}
        if not isinstance(own, Mapping):
            rule = "must be a JSON object"
            raise UserError(Problem(f"{where}.{kind} = {_short(own)}", rule))
        more = scaling if kind == FULL else {}
        if not isinstance(more, Mapping):
            rule = "must be a JSON object"
            raise UserError(Problem(f"config.json: rope_scaling = {_short(more)}", rule))
        given_here = {**own, **more}
        rule = "transformers does not read it in settings by layer type; remove it"
        is_read = given_here.get("truncate", True) is True
        read.must(is_read, f"rope_parameters.{kind}.truncate", given_here.get("truncate"), rule)
        rule = f"rotary over part of a head is built for rope_type = {PROPORTIONAL} only"
        kinds = ("default", PROPORTIONAL)  # transformers ignores it for the first
        is_read = given_here.get(PART) in (None, 1) or given_here.get("rope_type") in kinds
        read.must(is_read, f"rope_parameters.{kind}.{PART}", given_here.get(PART), rule)
        found.append(_one_rope(read, f"rope_parameters.{kind}", given_here, theta))
    return found


def _one_rope(
    read: ConfigValues, key: str, given: Any, theta: float
) -> tuple[float, dict[str, Any]]:
    if not isinstance(given, Mapping):
        where = f"config.json: {key} = {_short(given)}"
        raise UserError(Problem(where, "must be a JSON object"))
    scaling = ConfigValues(given)
    theta = scaling.number("rope_theta", theta)
    kind = given.get("rope_type") or given.get("type") or "default"
    unset = {name for name in UNSET_BY_ZERO if given.get(name) == 0}
    rest = {k: v for k, v in given.items() if k not in ROPE_KEYS | unset}
    if kind == PROPORTIONAL and given.get(PART) is not None:
        is_part = _is_number(given[PART]) and 0 <= given[PART] <= 1
        read.must(is_part, f"{key}.{PART}", given[PART], "must be a number from 0 to 1")
        rest[PART] = given[PART]
    for name in rest.keys() & ROPE_NUMBERS:
        scaling.number(name, 1.0)
    read.problems += scaling.problems
    return theta, {} if kind == "default" else {"rope_type": kind, **rest}


def _rotary_factor(hf: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, factor) from the rotary settings, else from the config; default: the whole head."""
    place, rope = rope_settings(hf)
    if isinstance(rope, Mapping) and rope.get(PART) is not None:
        return f"{place}.{PART}", rope[PART]
    return PART, 1.0 if hf.get(PART) is None else hf[PART]


def _rotary_dim(read: ConfigValues, head_dim: int) -> int:
    key, factor = _rotary_factor(read.hf)
    is_part = _is_number(factor) and 0 < factor <= 1
    read.must(is_part, key, factor, "must be a number above 0, at most 1")
    width = int(head_dim * factor) if is_part else head_dim
    rule = f"turns {width} numbers of a head of {head_dim}, and rotary turns pairs"
    read.must(width == head_dim or width % 2 == 0 < width, key, factor, rule)
    return 0 if width == head_dim else width
