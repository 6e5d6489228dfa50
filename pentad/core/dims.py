"""The dimensions of a decoder model: read from a HF config without torch, and counted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from pentad.core.errors import Problem, UserError


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parameter counts of one decoder layer by what cuts them: tp, ep/etp, or nothing."""

    q_and_o: int
    """Query and output projections, biases included: cut by tp."""
    kv: int
    """Key and value projections, biases included: cut by tp up to the number of kv heads."""
    norms: int
    """Two layer norms and the q/k norms: whole on every tp rank."""
    dense_ffn: int
    """Gate, up, down of a dense ffn: cut by tp; 0 in a mixture layer."""
    router: int
    """The gate of a mixture: whole on every rank; 0 in a dense layer."""
    shared_expert: int
    """The expert every token passes, and its gate: whole on every tp rank; 0 without one."""
    expert: int
    """Gate, up, down of ONE expert: experts are dealt over ep, each cut by etp."""
    num_experts: int
    num_experts_per_token: int

    @property
    def total(self) -> int:
        return self.shared + self.expert * self.num_experts

    @property
    def active(self) -> int:
        """What one token passes through."""
        return self.shared + self.expert * self.num_experts_per_token

    @property
    def shared(self) -> int:
        """Everything but the experts."""
        ffn = self.dense_ffn + self.router + self.shared_expert
        return self.q_and_o + self.kv + self.norms + ffn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """What a decoder is made of. Model files build from it; `plan` counts with it."""

    family: str
    """HF `model_type`, such as qwen3."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Explicit: not hidden_size / num_heads in general."""
    intermediate_size: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """HF `rope_scaling` / `rope_parameters` without theta; empty means none."""
    rotary_dim: int = 0
    """How many numbers of a head are turned, from the first on; 0 means all."""
    max_position: int = 32768
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Per layer, whether the window applies; empty means nowhere."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_scale: float = 1.0
    """What the weights of a token's experts are multiplied by."""
    router_bias: bool = False
    """Whether the files hold a bias that takes part in the choice of experts, and only there."""
    shared_expert_size: int = 0
    """Width of an expert of mixture layers that every token passes."""
    shared_expert_gate: bool = True
    """Whether that expert is weighed by a gate of its own."""
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its ffn is a mixture; empty means nowhere."""
    num_mtp_layers: int = 0
    """Layers behind the last that files may hold to predict further tokens; never held here."""
    initializer_range: float = 0.02
    is_whole: bool = True
    """False where a model has parts that are not told here: nothing may be counted then."""

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token of this layer may see; None: all before it."""
        slides = bool(self.sliding_layers) and self.sliding_layers[layer]
        return self.sliding_window if slides else None

    @property
    def turned_dim(self) -> int:
        """The numbers of a head that rotary turns."""
        return self.rotary_dim or self.head_dim

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_params(self) -> int:
        """The input table; an untied head has as many again."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        return 0 if self.tie_embeddings else self.embedding_params

    def layer_parts(self, layer: int) -> LayerParts:
        mixture = self.is_moe(layer)
        width = self.hidden_size
        ffn_bias = (2 * self.intermediate_size + width) if self.mlp_bias else 0
        return LayerParts(
            q_and_o=2 * width * self.q_dim + self.qkv_bias * self.q_dim + self.out_bias * width,
            kv=2 * self.kv_dim * (width + self.qkv_bias),
            norms=2 * width + self.qk_norm * 2 * self.head_dim,
            dense_ffn=0 if mixture else 3 * width * self.intermediate_size + ffn_bias,
            router=self.num_experts * width if mixture else 0,
            shared_expert=self._shared_expert_params if mixture else 0,
            expert=3 * width * self.moe_intermediate_size if mixture else 0,
            num_experts=self.num_experts if mixture else 0,
            num_experts_per_token=self.num_experts_per_token if mixture else 0,
        )

    @property
    def _shared_expert_params(self) -> int:
        size = self.shared_expert_size
        return (3 * size + self.shared_expert_gate) * self.hidden_size if size else 0

    @property
    def num_params(self) -> int:
        layers = sum(self.layer_parts(i).total for i in range(self.num_layers))
        return self.embedding_params + layers + self.hidden_size + self.head_params

    @property
    def num_active_params(self) -> int:
        """What one token uses, embedding and head included (the published convention)."""
        layers = sum(self.layer_parts(i).active for i in range(self.num_layers))
        return self.embedding_params + layers + self.hidden_size + self.head_params

    @property
    def num_matmul_params(self) -> int:
        """Active parameters that multiply: the head always, no lookup table, norms or biases."""
        total = self.embedding_params  # the head, tied or not, is one matrix product
        for i in range(self.num_layers):
            part = self.layer_parts(i)
            total += 2 * self.hidden_size * (self.q_dim + self.kv_dim) + part.router
            if self.is_moe(i):
                total += part.expert * part.num_experts_per_token + part.shared_expert
            else:
                total += 3 * self.hidden_size * self.intermediate_size
        return total

    def attention_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs of all attention cores over one sequence of `seq_len` tokens.

        Two products (scores, values) of 2 * q_dim FLOPs per visible pair, and backward costs
        twice forward: 12 * q_dim per pair. `causal` counts the pairs a token may see; the full
        convention (torchtitan's) counts all of them.
        """
        pairs = 0
        for layer in range(self.num_layers):
            seen = min(self.window(layer) or seq_len, seq_len)
            full, corner = seq_len * seen, seen * (seen - 1) // 2
            pairs += full - corner if causal else full
        return 12.0 * self.q_dim * pairs

    def train_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs (forward and backward, no recomputation) of one sequence."""
        return 6.0 * self.num_matmul_params * seq_len + self.attention_flops(seq_len, causal=causal)

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs per token in sequences of `seq_len`."""
        return self.train_flops(seq_len, causal=causal) / seq_len


_NO_OUT_BIAS = {"qwen2", "qwen2_moe", "glm4_moe"}
"""Families whose q, k, v may have a bias and whose o has none."""
_QK_NORM = {"qwen3", "qwen3_moe"}
_PARTIAL_ROTARY = {"glm4_moe"}
"""Families that turn the first part of a head only, as `partial_rotary_factor` says."""
_DEEPSEEK_KIND = {"glm4_moe"}
"""Families whose mixtures are of DeepSeek-V3's kind: scores by sigmoid, a selection bias in the
files, weights scaled, shared experts without a gate, and the first layers dense."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "glm4_moe": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
}
"""What transformers takes for keys that a family's config leaves out, where it is not the plain
value: no window, as many key heads as heads, hidden_size / num_heads, and so on."""
_NO_WINDOW = {"llama", "glm4_moe"}
"""Families of which transformers reads no window, whatever their config says."""
_WINDOW_EVERYWHERE = {"qwen3_moe", "mistral"}
"""Families without per-layer window choice: a window set is a window on every layer."""
_NO_MLP_BIAS = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4_moe"}
"""Families whose ffn never has a bias, whatever their config says."""
MAX_SIZE = 1 << 24
"""Of any width or count: far above every model, and products of two stay in 64 bits."""
MAX_LAYERS = 10_000
MAX_POSITION = 1 << 40
MAX_PARAMS = 10**14
MAX_FLOAT = sys.float_info.max
_SHARED_EXPERT = {"qwen2_moe", *_DEEPSEEK_KIND}
"""Families with an expert that every token passes."""
_UNSUPPORTED = {
    "text_config": "it describes a model with several modalities",
    "kv_lora_rank": "it uses latent attention",
    "n_shared_experts": "it has shared experts",
    "shared_expert_intermediate_size": "it has shared experts",
    "linear_num_key_heads": "it has linear attention layers",
    "quantization_config": "its weights are quantised",
}


def dims_from_hf(hf: Mapping[str, Any]) -> ModelDims:
    """Reads a HF `config.json` as transformers would, old and new key names alike.

    Raises UserError for what these dimensions cannot express: a number that silently means
    another model is worse than none.
    """
    family = str(hf.get("model_type", ""))
    _refuse_unsupported(hf, family)
    defaults = _DEFAULTS.get(family, {})
    hf, left_out = {**defaults, **hf}, defaults.keys() - hf.keys()
    read = _Numbers(hf, left_out)
    num_layers = read.whole("num_hidden_layers", most=MAX_LAYERS)
    num_heads = read.whole("num_attention_heads")
    hidden = read.whole("hidden_size")
    num_kv_heads = read.whole("num_key_value_heads", num_heads)
    head_dim = read.whole("head_dim", hidden // num_heads)
    theta, scaling = _rope(read)
    window, sliding_layers = _windows(read, family, num_layers)
    bias = _has_bias(read, family)
    mixture = _mixture(read, family, num_layers)
    dims = ModelDims(
        family=family,
        vocab_size=read.whole("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.whole("intermediate_size"),
        tie_embeddings=read.flag("tie_word_embeddings"),
        qkv_bias=bias,
        out_bias=bias and family not in _NO_OUT_BIAS,
        mlp_bias=read.flag("mlp_bias"),
        qk_norm=family in _QK_NORM or (family == "glm4_moe" and read.flag("use_qk_norm")),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=_rotary_dim(read, head_dim),
        max_position=read.whole("max_position_embeddings", 32768, most=MAX_POSITION),
        sliding_window=window,
        sliding_layers=sliding_layers,
        initializer_range=read.number("initializer_range", 0.02),
        **mixture,
    )
    fits = num_heads % num_kv_heads == 0
    rule = f"must divide num_attention_heads = {num_heads}"
    read.must(fits, "num_key_value_heads", num_kv_heads, rule)
    read.must(head_dim % 2 == 0, "head_dim", head_dim, "must be even: rotary turns pairs")
    top_k, num_experts = dims.num_experts_per_token, dims.num_experts
    rule = f"must be at most the number of experts, {num_experts}"
    read.must(top_k <= num_experts, "num_experts_per_tok", top_k, rule)
    if family in _NO_MLP_BIAS:
        rule = f"the ffn of {family} has no bias, and transformers ignores the key"
        read.must(not dims.mlp_bias, "mlp_bias", True, f"{rule}; remove it")
    if not read.problems and dims.num_params > MAX_PARAMS:
        rule = f"with the other sizes this makes {dims.num_params:.0e} parameters"
        read.must(False, "hidden_size", hidden, rule)
    if read.problems:
        raise UserError(read.problems)
    return dims


class _Numbers:
    """The numbers of a config. Those that are none are collected, to be told together."""

    def __init__(self, hf: Mapping[str, Any], left_out: Set[str] = frozenset()) -> None:
        self.hf = hf
        self.left_out = left_out
        self.problems: list[Problem] = []

    def must(self, holds: bool, key: str, value: object, rule: str) -> None:
        where = f"config.json: {key} = {_short(value)}"
        if key in self.left_out:
            where += " (transformers' value, as it is left out)"
        if not holds and not any(problem.where == where for problem in self.problems):
            self.problems.append(Problem(where, rule))

    def whole(self, key: str, default: int = 0, least: int = 1, most: int = MAX_SIZE) -> int:
        """A count; null is the default."""
        value = default if self.hf.get(key) is None else self.hf[key]
        is_whole = _is_number(value) and value >= least and value % 1 == 0
        self.must(is_whole, key, value, f"must be a whole number of at least {least}")
        is_bounded = not is_whole or value <= most
        self.must(is_bounded, key, value, f"must be a whole number of at most {most}")
        return int(value) if is_whole and is_bounded else least

    def flag(self, key: str, default: bool = False) -> bool:
        value = default if self.hf.get(key) is None else self.hf[key]
        self.must(isinstance(value, bool), key, value, "must be true or false")
        return value is True

    def number(self, key: str, default: float) -> float:
        value = default if self.hf.get(key) is None else self.hf[key]
        is_good = _is_number(value) and 0 < value <= MAX_FLOAT
        self.must(is_good, key, value, "must be a number above 0")
        return float(value) if is_good else default


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:80]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_unsupported(hf: Mapping[str, Any], family: str) -> None:
    where = f"config.json: model_type = {family or 'missing'}"
    problems = [
        Problem(where, f"{key} = {hf[key]!r}: {why}", "use a plain decoder such as Qwen3 or Llama")
        for key, why in _UNSUPPORTED.items()
        if hf.get(key) and not (family in _SHARED_EXPERT and why == "it has shared experts")
    ]
    act = hf.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        problems.append(Problem(where, f"hidden_act = {act!r}, only silu is built"))
    if not hf.get("is_causal", True):
        rule = f"is_causal = {hf['is_causal']!r}: its tokens see those after them"
        problems.append(Problem(where, rule, "only causal decoders can be trained"))
    if family not in _PARTIAL_ROTARY and _rotary_factor(hf)[1] != 1.0:
        rule = "partial_rotary_factor: rotary over part of a head is not built for this family"
        problems.append(Problem(where, rule))
    needed = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    )
    missing = [key for key in needed if not hf.get(key)]
    if missing and not problems:
        rule = f"{', '.join(missing)} missing"
        problems.append(Problem(where, rule, "give the config.json of a decoder model"))
    if problems:
        raise UserError(problems)


def _rope_settings(hf: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, settings): as transformers has it, `rope_scaling` replaces `rope_parameters`."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    return key, hf.get(key) or {}


def _rope(read: _Numbers) -> tuple[float, dict[str, Any]]:
    """(theta, scaling); theta may lie beside the settings, and so may the original length."""
    key, given = _rope_settings(read.hf)
    where = f"config.json: {key}"
    if not isinstance(given, Mapping):
        raise UserError(Problem(f"{where} = {_short(given)}", "must be a JSON object"))
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UserError(Problem(where, "rotary settings per layer type are not built"))
    scaling = _Numbers(given)
    theta = scaling.number("rope_theta", read.number("rope_theta", 10000.0))
    kind = given.get("rope_type") or given.get("type") or "default"
    rest = {k: v for k, v in given.items() if k not in _ROPE_KEYS}
    for name in rest.keys() & _ROPE_NUMBERS:
        scaling.number(name, 1.0)
    read.problems += scaling.problems
    if kind in _STRETCHED and read.hf.get(_OLD_LENGTH) is not None:
        rest[_OLD_LENGTH] = read.whole(_OLD_LENGTH, most=MAX_POSITION)  # transformers lets it win
    return theta, {} if kind == "default" else {"rope_type": kind, **rest}


def _rotary_factor(hf: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, factor): among the rotary settings, else beside them, else the whole head."""
    place, rope = _rope_settings(hf)
    if isinstance(rope, Mapping) and rope.get(_PART) is not None:
        return f"{place}.{_PART}", rope[_PART]
    return _PART, 1.0 if hf.get(_PART) is None else hf[_PART]


def _rotary_dim(read: _Numbers, head_dim: int) -> int:
    key, factor = _rotary_factor(read.hf)
    is_part = _is_number(factor) and 0 < factor <= 1
    read.must(is_part, key, factor, "must be a number above 0, at most 1")
    width = int(head_dim * factor) if is_part else head_dim
    rule = f"turns {width} numbers of a head of {head_dim}, and rotary turns pairs"
    read.must(width == head_dim or width % 2 == 0 < width, key, factor, rule)
    return 0 if width == head_dim else width


_PART = "partial_rotary_factor"
_OLD_LENGTH = "original_max_position_embeddings"
_STRETCHED = {"llama3", "yarn", "longrope"}
"""Kinds of scaling that ask for the length before the stretch."""
_ROPE_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_ROPE_NUMBERS = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    _OLD_LENGTH,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}


def _windows(read: _Numbers, family: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    hf = read.hf
    is_set = hf.get("sliding_window") is not None and family not in _NO_WINDOW
    has_window = read.flag("use_sliding_window", family == "mistral") and is_set
    width = read.whole("sliding_window", most=MAX_POSITION) if has_window else None
    if family in _NO_WINDOW or family in _WINDOW_EVERYWHERE:
        return width, (True,) * num_layers if width else ()
    kinds = hf.get("layer_types")
    names = kinds if isinstance(kinds, list | tuple) else []
    if width is None:
        rule = "names sliding_attention, but sliding_window and use_sliding_window set no window"
        read.must("sliding_attention" not in names, "layer_types", kinds, rule)
        return None, ()
    if kinds:
        known = all(kind in ("sliding_attention", "full_attention") for kind in names)
        rule = f"must name sliding_attention or full_attention for each of {num_layers} layers"
        read.must(known and len(names) == num_layers, "layer_types", kinds, rule)
        slides = tuple(kind == "sliding_attention" for kind in names)
    else:
        first = read.whole("max_window_layers", 28, 0)
        slides = tuple(layer >= first for layer in range(num_layers))
        if family == "qwen2_moe":  # every other of the first layers
            slides = tuple(layer % 2 == 0 and layer < first for layer in range(num_layers))
    return (width, slides) if any(slides) else (None, ())


def _has_bias(read: _Numbers, family: str) -> bool:
    if family == "qwen2_moe":
        return read.flag("qkv_bias", True)
    return family == "qwen2" or read.flag("attention_bias")


def _mixture(read: _Numbers, family: str, num_layers: int) -> dict[str, Any]:
    """The dimensions of the experts; none where there are no experts."""
    if family in _DEEPSEEK_KIND:
        return _deepseek_mixture(read, num_layers)
    key = "num_experts" if read.hf.get("num_experts") else "num_local_experts"
    num_experts = read.whole(key, 0, 0)
    if not num_experts:
        return {}
    shared = family in _SHARED_EXPERT
    return {
        "num_experts": num_experts,
        "num_experts_per_token": read.whole("num_experts_per_tok"),
        "moe_intermediate_size": _expert_width(read),
        "norm_topk_prob": read.flag("norm_topk_prob"),
        "shared_expert_size": read.whole("shared_expert_intermediate_size") if shared else 0,
        "moe_layers": _moe_layers(read, num_layers),
    }


def _deepseek_mixture(read: _Numbers, num_layers: int) -> dict[str, Any]:
    groups, groups_per_token = read.whole("n_group", 1), read.whole("topk_group", 1)
    rule = f"must equal n_group = {groups}: a choice among some groups of experts is not built"
    read.must(groups == groups_per_token, "topk_group", groups_per_token, rule)
    width, num_dense = _expert_width(read), read.whole("first_k_dense_replace", 0, 0)
    return {
        "num_experts": read.whole("n_routed_experts"),
        "num_experts_per_token": read.whole("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "norm_topk_prob": read.flag("norm_topk_prob"),
        "router_score": "sigmoid",
        "router_scale": read.number("routed_scaling_factor", 1.0),
        "router_bias": True,
        "shared_expert_size": width * read.whole("n_shared_experts"),
        "shared_expert_gate": False,
        "moe_layers": tuple(layer >= num_dense for layer in range(num_layers)),
        "num_mtp_layers": read.whole("num_nextn_predict_layers", 0, 0),
    }


def _expert_width(read: _Numbers) -> int:
    has_own = read.hf.get("moe_intermediate_size") is not None
    return read.whole("moe_intermediate_size" if has_own else "intermediate_size")


def _moe_layers(read: _Numbers, num_layers: int) -> tuple[bool, ...]:
    given = read.hf.get("mlp_only_layers") or []
    is_list = isinstance(given, list | tuple)
    read.must(is_list, "mlp_only_layers", given, "must be a list of layer numbers")
    dense = set(given) if is_list else set()
    stride = read.whole("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % stride == 0 for layer in range(num_layers))
