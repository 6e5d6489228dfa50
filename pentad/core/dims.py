"""The dimensions of a decoder model, and what is counted from them: parameters and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["full", "sliding", "none"]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parameter counts of one decoder layer by what cuts them: tp, ep/etp, or nothing."""

    q_and_o: int
    """Query and output projections, biases and gates included, or all of a delta net but its norm:
    cut by tp."""
    kv: int
    """Key and value projections, biases included: cut by tp up to the number of kv heads."""
    norms: int
    """The layer norms and the q/k norms: whole on every tp rank."""
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
    padding_id: int | None = None
    """The token whose lookups give its row of the input table no gradient, as in transformers."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed, each head for itself..."""
    wide_qk_norm: bool = False
    """...or all heads as one vector."""
    pre_norms: bool = True
    """Whether attention and ffn are given the normed stream, or the stream itself."""
    post_norms: bool = False
    """Whether their results are normed before they are added to the stream."""
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    """What the rows of the input table are multiplied by."""
    query_scale: float = 1.0
    """What queries are multiplied by, beside 1 / sqrt(head_dim)."""
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """HF `rope_scaling` / `rope_parameters` without theta; empty means none."""
    rotary_dim: int = 0
    """How many numbers of a head are turned, from the first on; 0 means all."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    """Which numbers are turned together: j and j + half, or 2j and 2j + 1."""
    unturned_layers: tuple[bool, ...] = ()
    """Per layer, whether rotary is left out; empty means nowhere."""
    sliding_rope: Mapping[str, Any] = field(default_factory=dict)
    """As `rope_scaling`, with `rope_theta`, of the layers with a window; empty: as the others."""
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
    attn_gate: bool = False
    """Whether each number of attention's result is weighed by a gate of its own."""
    linear_layers: tuple[bool, ...] = ()
    """Per layer, whether a gated delta net stands in attention's place; empty means nowhere."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    """How many tokens, itself included, the convolution of a delta net sees."""
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its ffn is a mixture; empty means nowhere."""
    num_mtp_layers: int = 0
    """Layers behind the last that files may hold to predict further tokens; never held here."""
    initializer_range: float = 0.02
    is_whole: bool = True
    """False where a model has parts that dimensions do not describe: nothing may be counted."""

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]

    def is_linear(self, layer: int) -> bool:
        return bool(self.linear_layers) and self.linear_layers[layer]

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token of this layer may see; None: all before it."""
        slides = bool(self.sliding_layers) and self.sliding_layers[layer]
        return self.sliding_window if slides else None

    def rope_kind(self, layer: int) -> RopeKind:
        """Which of the model's rotary tables a layer uses."""
        if self.unturned_layers and self.unturned_layers[layer]:
            return "none"
        return "sliding" if self.sliding_rope and self.window(layer) is not None else "full"

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
    def linear_k_dim(self) -> int:
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_v_dim(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    @property
    def num_linear_layers(self) -> int:
        return sum(self.linear_layers)

    @property
    def num_cached_layers(self) -> int:
        """Those with keys and values."""
        return self.num_layers - self.num_linear_layers

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
        is_linear = self.is_linear(layer)
        num_q = 1 + self.attn_gate
        q_and_o = (num_q + 1) * width * self.q_dim
        q_and_o += num_q * self.qkv_bias * self.q_dim + self.out_bias * width
        head_norms = self.linear_value_dim if is_linear else self._qk_norm_params
        return LayerParts(
            q_and_o=self._linear_params if is_linear else q_and_o,
            kv=0 if is_linear else 2 * self.kv_dim * (width + self.qkv_bias),
            norms=2 * width * (self.pre_norms + self.post_norms) + head_norms,
            dense_ffn=0 if mixture else 3 * width * self.intermediate_size + ffn_bias,
            router=self.num_experts * width if mixture else 0,
            shared_expert=self._shared_expert_params if mixture else 0,
            expert=3 * width * self.moe_intermediate_size if mixture else 0,
            num_experts=self.num_experts if mixture else 0,
            num_experts_per_token=self.num_experts_per_token if mixture else 0,
        )

    @property
    def _linear_matrices(self) -> int:
        """Of a delta net: projections to q, k, v, z, b and a, and out."""
        rows = 2 * self.linear_k_dim + 3 * self.linear_v_dim + 2 * self.linear_value_heads
        return rows * self.hidden_size

    @property
    def _linear_params(self) -> int:
        mixed = 2 * self.linear_k_dim + self.linear_v_dim
        return self._linear_matrices + mixed * self.linear_conv + 2 * self.linear_value_heads

    @property
    def _qk_norm_params(self) -> int:
        width = self.q_dim + self.kv_dim if self.wide_qk_norm else 2 * self.head_dim
        return self.qk_norm * width

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
            q_and_o = (2 + self.attn_gate) * self.q_dim
            attention = self.hidden_size * (q_and_o + 2 * self.kv_dim)
            total += self._linear_matrices if self.is_linear(i) else attention
            total += part.router
            if self.is_moe(i):
                total += part.expert * part.num_experts_per_token + part.shared_expert
            else:
                total += 3 * self.hidden_size * self.intermediate_size
        return total

    def attention_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs of all attention cores over one sequence of `seq_len` tokens.

        Two products (scores, values) of 2 * q_dim FLOPs per visible pair, and backward costs
        twice forward: 12 * q_dim per pair. `causal` counts the pairs a token may see; the full
        convention (torchtitan's) counts all of them. A delta net reads its state twice and
        writes it once per token: 18 * key width * value width per value head.
        """
        pairs = 0
        for layer in range(self.num_layers):
            if self.is_linear(layer):
                continue
            seen = min(self.window(layer) or seq_len, seq_len)
            full, corner = seq_len * seen, seen * (seen - 1) // 2
            pairs += full - corner if causal else full
        states = self.num_linear_layers * self.linear_v_dim * self.linear_key_dim
        return 12.0 * self.q_dim * pairs + 18.0 * states * seq_len

    def train_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs (forward and backward, no recomputation) of one sequence."""
        return 6.0 * self.num_matmul_params * seq_len + self.attention_flops(seq_len, causal=causal)

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs per token in sequences of `seq_len`."""
        return self.train_flops(seq_len, causal=causal) / seq_len
