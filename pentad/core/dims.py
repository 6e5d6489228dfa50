"""The dimensions of a decoder model: read from a HF config without torch, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    max_position: int = 32768
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Per layer, whether the window applies; empty means nowhere."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    shared_expert_size: int = 0
    """Width of an expert of mixture layers that every token passes, weighed by its own gate."""
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its ffn is a mixture; empty means nowhere."""
    initializer_range: float = 0.02

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token of this layer may see; None: all before it."""
        slides = bool(self.sliding_layers) and self.sliding_layers[layer]
        return self.sliding_window if slides else None

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
        return (3 * size + 1) * self.hidden_size if size else 0

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


_NO_OUT_BIAS = {"qwen2", "qwen2_moe"}
"""Families whose q, k, v have a bias (a switch of its own in qwen2_moe) and whose o has none."""
_QK_NORM = {"qwen3", "qwen3_moe"}
_HEAD_DIM = {"qwen3": 128}
"""Families whose head_dim has an own default; elsewhere it is hidden_size / num_heads."""
_MAX_POSITION = {"llama": 2048}
_WINDOW_EVERYWHERE = {"qwen3_moe", "mistral"}
"""Families without per-layer window choice: a window set is a window on every layer."""
SHARED_EXPERT_FAMILIES = {"qwen2_moe"}
"""Families with an expert that every token passes, behind a gate of its own."""
_UNSUPPORTED = {
    "text_config": "it describes a model with several modalities",
    "kv_lora_rank": "it uses latent attention",
    "n_shared_experts": "it has shared experts",
    "shared_expert_intermediate_size": "it has shared experts",
    "linear_num_key_heads": "it has linear attention layers",
}


def dims_from_hf(hf: Mapping[str, Any]) -> ModelDims:
    """Reads a HF `config.json` as transformers would, old and new key names alike.

    Raises UserError for what these dimensions cannot express: a number that silently means
    another model is worse than none.
    """
    family = str(hf.get("model_type", ""))
    _refuse_unsupported(hf, family)
    num_layers, num_heads = int(hf["num_hidden_layers"]), int(hf["num_attention_heads"])
    hidden = int(hf["hidden_size"])
    theta, scaling = _rope(hf)
    window, sliding_layers = _windows(hf, family, num_layers)
    num_experts = int(hf.get("num_experts") or hf.get("num_local_experts") or 0)
    bias = _has_bias(hf, family)
    return ModelDims(
        family=family,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_dim=int(hf.get("head_dim") or _HEAD_DIM.get(family, hidden // num_heads)),
        intermediate_size=int(hf["intermediate_size"]),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        out_bias=bias and family not in _NO_OUT_BIAS,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=family in _QK_NORM,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=int(hf.get("max_position_embeddings", _MAX_POSITION.get(family, 32768))),
        sliding_window=window,
        sliding_layers=sliding_layers,
        num_experts=num_experts,
        num_experts_per_token=int(hf.get("num_experts_per_tok") or 0) if num_experts else 0,
        moe_intermediate_size=_expert_width(hf) if num_experts else 0,
        norm_topk_prob=bool(hf.get("norm_topk_prob", False)) if num_experts else True,
        shared_expert_size=_shared_expert_size(hf, family) if num_experts else 0,
        moe_layers=_moe_layers(hf, num_layers) if num_experts else (),
        initializer_range=float(hf.get("initializer_range", 0.02)),
    )


def _refuse_unsupported(hf: Mapping[str, Any], family: str) -> None:
    where = f"config.json: model_type = {family or 'missing'}"
    problems = [
        Problem(where, f"{key} = {hf[key]!r}: {why}", "use a plain decoder such as Qwen3 or Llama")
        for key, why in _UNSUPPORTED.items()
        if hf.get(key) and not (family in SHARED_EXPERT_FAMILIES and why == "it has shared experts")
    ]
    act = hf.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        problems.append(Problem(where, f"hidden_act = {act!r}, only silu is built"))
    if float(hf.get("partial_rotary_factor") or 1.0) != 1.0:
        problems.append(Problem(where, "rotary embedding over part of a head is not built"))
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


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling); `rope_parameters` holds both, `rope_theta` + `rope_scaling` is older."""
    given = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UserError(
            Problem("config.json: rope_parameters", "rotary settings per layer type are not built")
        )
    if float(given.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(
            Problem(
                "config.json: rope_parameters",
                "rotary embedding over part of a head is not built",
            )
        )
    theta = float(given.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    given.pop("partial_rotary_factor", None)
    if kind == "default":
        return theta, {}
    return theta, {"rope_type": kind, **given}


def _windows(
    hf: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    width = hf.get("sliding_window")
    if not width or not hf.get("use_sliding_window", family == "mistral"):
        return None, ()
    if family in _WINDOW_EVERYWHERE:
        return int(width), (True,) * num_layers
    kinds = hf.get("layer_types")
    if family == "qwen2_moe" and not kinds:  # every other of the first layers
        first = int(hf.get("max_window_layers", 28))
        slides = tuple(layer % 2 == 0 and layer < first for layer in range(num_layers))
    elif kinds:
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        first = int(hf.get("max_window_layers", 28))
        slides = tuple(layer >= first for layer in range(num_layers))
    return (int(width), slides) if any(slides) else (None, ())


def _has_bias(hf: Mapping[str, Any], family: str) -> bool:
    if family == "qwen2_moe":
        return bool(hf.get("qkv_bias", True))
    return family in _NO_OUT_BIAS or bool(hf.get("attention_bias", False))


def _expert_width(hf: Mapping[str, Any]) -> int:
    return int(hf.get("moe_intermediate_size") or hf["intermediate_size"])


def _shared_expert_size(hf: Mapping[str, Any], family: str) -> int:
    return int(hf["shared_expert_intermediate_size"]) if family in SHARED_EXPERT_FAMILIES else 0


def _moe_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    dense = set(hf.get("mlp_only_layers") or ())
    stride = int(hf.get("decoder_sparse_step") or 1)
    return tuple(layer not in dense and (layer + 1) % stride == 0 for layer in range(num_layers))
