"""The dimensions of a decoder model, and the counts derived from them: parameters and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

RopeKind = Literal["full", "sliding", "none"]


CLAMP_SLOPE, CLAMP_LIMIT = 1.702, 7.0
"""Constants of the activation `clamped`."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parameter counts of one decoder layer by the axis that splits them: tp, ep/etp, or none."""

    q_and_o: int
    """Query and output projections, biases, gates and sinks included, or all of a delta net but its
    norm: cut by tp."""
    kv: int
    """Key and value projections, biases included: cut by tp up to the number of kv heads."""
    norms: int
    """The layer norms, the q/k norms, and projections to latents and of per-layer embeddings: whole
    on every tp rank."""
    dense_ffn: int
    """Gate, up, down of a dense ffn: cut by tp; 0 in a mixture layer without one."""
    router: int
    """The gate of a mixture, with its scales and the biases of the experts' results: whole on every
    rank; 0 in a dense layer."""
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
        """Parameters that one token uses."""
        return self.shared + self.expert * self.num_experts_per_token

    @property
    def shared(self) -> int:
        """Everything but the experts."""
        ffn = self.dense_ffn + self.router + self.shared_expert
        return self.q_and_o + self.kv + self.norms + ffn


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """The dimensions of a decoder. Model files build from it; `plan` counts with it."""

    family: str
    """HF `model_type`, such as qwen3."""
    tower_names: tuple[tuple[str, str], ...] = ()
    """For the text tower of a multimodal folder: how the family's HF-on-disk names begin, and how
    they begin there."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Explicit: not hidden_size / num_heads in general."""
    intermediate_size: int
    own: tuple[Mapping[str, Any], ...] = ()
    """Per layer, the fields that have another value there than here, such as `head_dim`; empty: the
    layers do not differ. See `of_layer`."""
    kv_latent: int = 0
    """Width of the latent of keys and values (multi-head latent attention); 0: no latent. Rotary
    then applies to the last `rotary_dim` numbers of a head, which one key has for all heads."""
    q_latent: int = 0
    """The same for queries; 0: no latent."""
    value_dim: int = 0
    """Numbers of a head of values; 0 means as many as of keys."""
    tie_embeddings: bool = False
    padding_id: int | None = None
    """The token whose row of the input table gets no gradient from lookups, as in transformers."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed, each head for itself..."""
    wide_qk_norm: bool = False
    """...or all heads as one vector."""
    norms_turned: bool = False
    """Whether they are normed after rotary, not before it."""
    value_norm: bool = False
    """Whether values are normed, without a weight."""
    values_are_keys: bool = False
    """Whether values are the keys before norm and rotary, without a projection of their own."""
    kv_from: int | None = None
    """The layer whose keys and values are read instead of own ones (a field of `own`)."""
    pre_norms: bool = True
    """Whether the inputs of attention and ffn are normed."""
    post_norms: bool = False
    """Whether their results are normed before they are added to the stream."""
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    wide_norms: bool = False
    """Whether weights of norms are applied in float32, as with an offset."""
    attn_sinks: bool = False
    """Whether each head has a logit that takes attention weight and gives no value."""
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    """The last one is that of experts: (up + 1) * gate * sigmoid(CLAMP_SLOPE * gate), both
    limited to CLAMP_LIMIT, as columns of one matrix that take turns."""
    embed_scale: float = 1.0
    """Factor of the rows of the input table."""
    query_scale: float = 1.0
    """Factor of queries, besides 1 / sqrt(head_dim)."""
    residual_scale: float = 1.0
    """Factor of the results of attention and ffn before they are added to the stream."""
    layer_scale: bool = False
    """Whether the result of a layer is multiplied by a number of its files, which is not
    trained."""
    layer_embed_dim: int = 0
    """Width of the embedding of a token that each layer has of its own; 0: none..."""
    layer_embed_rows: int = 0
    """...and the number of tokens in their table."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are bent to cap * tanh(x / cap)."""
    query_growth: float = 0.0
    query_growth_step: int = 0
    """Queries of position p are multiplied by 1 + growth * log(1 + p // step), too."""
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """HF `rope_scaling` / `rope_parameters` without theta; empty means none."""
    rotary_dim: int = 0
    """How many numbers of a head are rotated, from the first on; 0 means all."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    """Which numbers are rotated together: j and j + half, or 2j and 2j + 1."""
    unturned_layers: tuple[bool, ...] = ()
    """Per layer, whether rotary is left out; empty means nowhere."""
    sliding_rope: Mapping[str, Any] = field(default_factory=dict)
    """Like `rope_scaling`, with `rope_theta`, for the layers with a window; empty: as the
    others."""
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
    """Factor of the weights of a token's experts."""
    router_groups: int = 1
    router_groups_per_token: int = 1
    """Groups of experts, and how many of them a token's experts may be of."""
    router_bias: bool = False
    """Whether the files have a bias that is used only for the choice of experts."""
    moe_bias: bool = False
    """Whether the router and the experts have biases, which are trained."""
    has_dense_beside: bool = False
    """Whether mixture layers also have a dense ffn, and norms for each of the two; the router then
    norms and scales its input, and each expert's weight has a trained factor."""
    shared_expert_size: int = 0
    """Width of the shared expert of mixture layers."""
    shared_expert_gate: bool = True
    """Whether the shared expert is multiplied by a gate."""
    attn_gate: bool = False
    """Whether attention's output is multiplied element by element by a gate."""
    linear_layers: tuple[bool, ...] = ()
    """Per layer, whether it has a gated delta net instead of attention; empty means nowhere."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    """How many tokens, itself included, the convolution of a delta net sees."""
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its ffn is a mixture; empty means nowhere."""
    num_mtp_layers: int = 0
    """Layers for multi-token prediction after the last in some files; never loaded."""
    initializer_range: float = 0.02
    is_whole: bool = True
    """False if dimensions do not describe some parts of the model: nothing may be counted."""

    @cached_property
    def _layers(self) -> list[ModelDims]:
        """Made once, since plans ask for them thousands of times; not a field, which would be sent
        to other processes."""
        return [replace(self, own=(), **own) for own in self.own]

    def is_beside_text(self, name: str) -> bool:
        """Whether a tensor of a multimodal folder is of another tower, by the begin of its name."""
        own = tuple(there for _, there in self.tower_names)
        return bool(own) and not name.startswith(own)

    def of_layer(self, layer: int) -> ModelDims:
        """The dimensions of one layer."""
        return self._layers[layer] if self.own else self

    @property
    def kinds(self) -> list[ModelDims]:
        """The dimensions of the layers, once for each kind of layer."""
        first = [i for i, own in enumerate(self.own) if own not in self.own[:i]]
        return [self.of_layer(i) for i in first] or [self]

    @property
    def shares_keys(self) -> bool:
        """Whether some layers read the keys and values of others."""
        return any(own.kv_from is not None for own in self.kinds)

    @property
    def rope_dims(self) -> dict[RopeKind, ModelDims]:
        """The dimensions of the first layer that uses each of the rotary tables."""
        return {self.rope_kind(i): self.of_layer(i) for i in reversed(range(self.num_layers))}

    @property
    def head_dims(self) -> list[int]:
        """The widths of heads."""
        return sorted({own.head_dim for own in self.kinds})

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]

    def is_linear(self, layer: int) -> bool:
        return bool(self.linear_layers) and self.linear_layers[layer]

    def window(self, layer: int) -> int | None:
        """Number of tokens, itself included, that a token of this layer attends to; None: all
        before it."""
        slides = bool(self.sliding_layers) and self.sliding_layers[layer]
        return self.sliding_window if slides else None

    def rope_kind(self, layer: int) -> RopeKind:
        """Which of the model's rotary tables a layer uses."""
        if self.unturned_layers and self.unturned_layers[layer]:
            return "none"
        return "sliding" if self.sliding_rope and self.window(layer) is not None else "full"

    @property
    def turned_dim(self) -> int:
        """The numbers of a head that rotary rotates."""
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
    def cached_layers(self) -> list[int]:
        """The layers with keys and values of their own."""
        layers = range(self.num_layers)
        return [i for i in layers if not self.is_linear(i) and self.of_layer(i).kv_from is None]

    @property
    def num_kv_matrices(self) -> int:
        """Projections to keys and to values."""
        return 2 - self.values_are_keys if self.kv_from is None else 0

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def o_dim(self) -> int:
        """Width of the attention output, the input of the output projection."""
        return self.num_heads * self.v_dim

    @property
    def plain_dim(self) -> int:
        """The numbers of a head that rotary does not change."""
        return self.head_dim - self.turned_dim

    @property
    def latent_kv_dim(self) -> int:
        """Outputs of the latent: of each head the unrotated part of keys, and the values."""
        return self.num_heads * (self.plain_dim + self.v_dim)

    def cache_shape(self, *, expanded: bool = False) -> tuple[int, int, int]:
        """(heads, numbers of a key, of a value) that a sampler caches per token and layer. The
        values of latent attention are the first numbers of its key."""
        if self.kv_latent and not expanded:
            return 1, self.kv_latent + self.rotary_dim, 0
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def embedding_params(self) -> int:
        """The input table; an untied head has as many again."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        return 0 if self.tie_embeddings else self.embedding_params

    @property
    def layer_table_params(self) -> int:
        """The table of per-layer embeddings."""
        return self.num_layers * self.layer_embed_dim * self.layer_embed_rows

    @property
    def layer_mix_params(self) -> int:
        """The projection of the embedding that is added to rows of that table, and its norm."""
        return self.layer_embed_dim * (self.num_layers * self.hidden_size + 1)

    @property
    def num_root_params(self) -> int:
        """Parameters outside the layers."""
        tables = self.embedding_params + self.head_params + self.layer_table_params
        return tables + self.layer_mix_params + self.hidden_size

    def layer_parts(self, layer: int) -> LayerParts:
        return self.of_layer(layer)._parts(layer)

    def _parts(self, layer: int) -> LayerParts:
        mixture = self.is_moe(layer)
        width = self.hidden_size
        ffn_bias = (2 * self.intermediate_size + width) if self.mlp_bias else 0
        q_and_o, kv, latents = self._projections
        biases = ((1 + self.attn_gate) * self.q_dim, self.num_kv_matrices * self.kv_dim)
        to_latents = 0
        if self.kv_latent:  # biases are those of the latents, which are normed
            cut = self.q_latent + self.kv_latent
            biases, to_latents = (0, 0), latents + cut + self.qkv_bias * (cut + self.rotary_dim)
        q_and_o += self.qkv_bias * biases[0] + self.out_bias * width
        q_and_o += self.attn_sinks * self.num_heads
        kv += self.qkv_bias * biases[1]
        inner_norms = self._qk_norm_params + to_latents
        inner_norms += (2 * width * self.layer_embed_dim + width) * bool(self.layer_embed_dim)
        inner_norms += 3 * width * (mixture and self.has_dense_beside)
        is_dense = not mixture or self.has_dense_beside
        if self.is_linear(layer):
            q_and_o, kv, inner_norms = self._linear_params, 0, self.linear_value_dim
        return LayerParts(
            q_and_o=q_and_o,
            kv=kv,
            norms=2 * width * (self.pre_norms + self.post_norms) + inner_norms,
            dense_ffn=3 * width * self.intermediate_size + ffn_bias if is_dense else 0,
            router=self._router_params if mixture else 0,
            shared_expert=self._shared_expert_params if mixture else 0,
            expert=(3 * width + 2 * self.moe_bias) * self.moe_intermediate_size if mixture else 0,
            num_experts=self.num_experts if mixture else 0,
            num_experts_per_token=self.num_experts_per_token if mixture else 0,
        )

    @property
    def _linear_matrices(self) -> int:
        """Elements of a delta net's projections to q, k, v, z, b and a, and out."""
        rows = 2 * self.linear_k_dim + 3 * self.linear_v_dim + 2 * self.linear_value_heads
        return rows * self.hidden_size

    @property
    def _linear_params(self) -> int:
        mixed = 2 * self.linear_k_dim + self.linear_v_dim
        return self._linear_matrices + mixed * self.linear_conv + 2 * self.linear_value_heads

    @property
    def _projections(self) -> tuple[int, int, int]:
        """Elements of the matrices of attention: queries and output, keys and values, latents."""
        width = self.hidden_size
        if not self.kv_latent:
            kv = self.num_kv_matrices * width * self.kv_dim
            return (2 + self.attn_gate) * width * self.q_dim, kv, 0
        latents = width * (self.q_latent + self.kv_latent + self.rotary_dim)
        q_and_o = (self.q_latent or width) * self.q_dim + width * self.o_dim
        return q_and_o, self.kv_latent * self.latent_kv_dim, latents

    @property
    def _qk_norm_params(self) -> int:
        q, k = (self.q_dim, self.kv_dim) if self.wide_qk_norm else (self.head_dim, self.head_dim)
        return self.qk_norm * (q + k * bool(self.num_kv_matrices))

    @property
    def _router_params(self) -> int:
        """With the biases of router logits and of experts' results, or the scales of the router's
        input and of experts."""
        of_expert = self.hidden_size + self.moe_bias * (1 + self.hidden_size)
        scales = self.hidden_size + self.num_experts
        return self.num_experts * of_expert + self.has_dense_beside * scales

    @property
    def _shared_expert_params(self) -> int:
        size = self.shared_expert_size
        return (3 * size + self.shared_expert_gate) * self.hidden_size if size else 0

    @property
    def num_params(self) -> int:
        return self.num_root_params + sum(self.layer_parts(i).total for i in range(self.num_layers))

    @property
    def num_active_params(self) -> int:
        """Parameters that one token uses, embedding and head included, the table of per-layer
        embeddings left out (the published convention)."""
        layers = sum(self.layer_parts(i).active for i in range(self.num_layers))
        return self.num_root_params - self.layer_table_params + layers

    @property
    def num_matmul_params(self) -> int:
        """Active parameters that multiply: the head always, no lookup table, norms or biases."""
        total = self.embedding_params  # the head, tied or not, is one matrix product
        total += self.num_layers * self.layer_embed_dim * self.hidden_size
        return total + sum(self.of_layer(i)._matrices(i) for i in range(self.num_layers))

    def _matrices(self, layer: int) -> int:
        """The elements of a layer that multiply a token."""
        part, width = self._parts(layer), self.hidden_size
        total = self._linear_matrices if self.is_linear(layer) else sum(self._projections)
        total += 2 * width * self.layer_embed_dim
        if self.is_moe(layer):
            experts = 3 * self.moe_intermediate_size * part.num_experts_per_token
            total += width * (self.num_experts + experts) + part.shared_expert
        return total + 3 * width * self.intermediate_size * bool(part.dense_ffn)

    def attention_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs of all attention cores over one sequence of `seq_len` tokens.

        Two products, of 2 * q_dim FLOPs for scores and 2 * o_dim for values per visible pair, and
        backward costs twice forward: 12 * q_dim per pair where they are equal. `causal` counts the
        pairs a token may see; the full convention (torchtitan's) counts all of them. A delta net
        reads its state twice and writes it once per token: 18 * key width * value width per head.
        """
        total = 0.0
        for layer in range(self.num_layers):
            if self.is_linear(layer):
                continue
            seen = min(self.window(layer) or seq_len, seq_len)
            full, corner = seq_len * seen, seen * (seen - 1) // 2
            own = self.of_layer(layer)
            total += 6.0 * (own.q_dim + own.o_dim) * (full - corner if causal else full)
        states = self.num_linear_layers * self.linear_v_dim * self.linear_key_dim
        return total + 18.0 * states * seq_len

    def train_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs (forward and backward, no recomputation) of one sequence."""
        return 6.0 * self.num_matmul_params * seq_len + self.attention_flops(seq_len, causal=causal)
