"""The dimensions of a decoder model, and the counts derived from them: parameters and FLOPs."""

from __future__ import annotations

from collections import Counter
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
    """Query and output projections, with biases, gates and sinks, or a delta net except its norm:
    split by tp."""
    kv: int
    """Key and value projections, with biases: split by tp up to the number of kv heads."""
    norms: int
    """The layer norms, the q/k norms, and projections to latents and of per-layer embeddings:
    unsplit on every tp rank."""
    dense_ffn: int
    """Gate, up, down of a dense ffn: split by tp; 0 in a mixture layer without one."""
    router: int
    """The router of a mixture, with its scales and the output biases of the experts: unsplit on
    every rank; 0 in a dense layer."""
    shared_expert: int
    """The shared expert, which every token uses, and its gate: unsplit on tp ranks; or 0."""
    expert: int
    """Gate, up, down of ONE expert: experts are distributed over ep, each split by etp."""
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
        """Parameters of everything except the experts."""
        ffn = self.dense_ffn + self.router + self.shared_expert
        return self.q_and_o + self.kv + self.norms + ffn


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """The dimensions of a decoder, used to build models and by `plan` to count."""

    family: str
    """HF `model_type`, such as qwen3."""
    tower_names: tuple[tuple[str, str], ...] = ()
    """For the text tower of a multimodal folder: pairs (prefix of the family's HF-on-disk names,
    prefix in this folder)."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head; may differ from hidden_size / num_heads."""
    intermediate_size: int
    own: tuple[Mapping[str, Any], ...] = ()
    """Per layer, the fields that differ from this object's, such as `head_dim`; empty: the layers
    do not differ. See `of_layer`."""
    kv_latent: int = 0
    """Width of the latent of keys and values (multi-head latent attention); 0: no latent. Rotary
    then applies to the last `rotary_dim` numbers of a head; in keys all heads share these."""
    q_latent: int = 0
    """The same for queries; 0: no latent."""
    value_dim: int = 0
    """Width of a value head; 0 means as wide as a key head."""
    tie_embeddings: bool = False
    padding_id: int | None = None
    """The token whose row of the input table gets no gradient from lookups, as in transformers."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed per head..."""
    wide_qk_norm: bool = False
    """...or all heads as one vector."""
    norms_turned: bool = False
    """Whether queries and keys are normed after rotary instead of before it."""
    value_norm: bool = False
    """Whether values are normed, without a weight."""
    values_are_keys: bool = False
    """Whether values are the keys before norm and rotary, without a separate projection."""
    kv_from: int | None = None
    """Layer whose keys and values are read instead of computing own ones (a field of `own`)."""
    pre_norms: bool = True
    """Whether the inputs of attention and ffn are normed."""
    post_norms: bool = False
    """Whether the outputs of attention and ffn are normed before they are added to the stream."""
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """Number added to the weights of norms."""
    wide_norms: bool = False
    """Whether weights of norms are applied in float32, as with an offset."""
    attn_sinks: bool = False
    """Whether each head has a sink: a logit in the softmax without a value."""
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    """`clamped` is for experts: (up + 1) * gate * sigmoid(CLAMP_SLOPE * gate), both limited to
    CLAMP_LIMIT, from alternating columns of one matrix."""
    embed_scale: float = 1.0
    """Factor of the rows of the input table."""
    query_scale: float = 1.0
    """Factor of queries, besides 1 / sqrt(head_dim)."""
    score_cap: float | None = None
    """Attention scores are limited to cap * tanh(score / cap). None: no limit."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and ffn before they are added to the stream."""
    layer_scale: bool = False
    """Whether the output of a layer is multiplied by a number from its files, which is not
    trained."""
    layer_embed_dim: int = 0
    """Width of the per-layer embeddings of tokens; 0: none..."""
    layer_embed_rows: int = 0
    """...and the number of tokens in their table."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are limited to cap * tanh(x / cap). None: no limit."""
    query_growth: float = 0.0
    query_growth_step: int = 0
    """Queries at position p are also multiplied by 1 + growth * log(1 + p // step)."""
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """HF `rope_scaling` / `rope_parameters` without theta; empty means none."""
    rotary_dim: int = 0
    """Number of rotated elements at the start of a head; 0 means all."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    """Which elements are rotated together: j and j + half, or 2j and 2j + 1."""
    unturned_layers: tuple[bool, ...] = ()
    """Per layer, whether rotary is omitted; empty means in no layer."""
    sliding_rope: Mapping[str, Any] = field(default_factory=dict)
    """Like `rope_scaling`, with `rope_theta`, for layers with a window; empty: as in other
    layers."""
    max_position: int = 32768
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Per layer, whether the window applies; empty means in no layer."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_scale: float = 1.0
    """Factor of the weights of selected experts."""
    router_groups: int = 1
    router_groups_per_token: int = 1
    """Maximum number of expert groups from which a token's experts are selected."""
    router_bias: bool = False
    """Whether the files have a bias that is used only for the selection of experts."""
    moe_bias: bool = False
    """Whether the router and the experts have biases, which are trained."""
    has_dense_beside: bool = False
    """Whether mixture layers also have a dense ffn, with separate norms. The router then norms and
    scales its input, and each expert's weight has a trained factor."""
    shared_expert_size: int = 0
    """Width of the shared expert of mixture layers."""
    shared_expert_gate: bool = True
    """Whether the shared expert is multiplied by a gate."""
    attn_gate: bool = False
    """Whether the attention output is multiplied elementwise by a gate."""
    linear_layers: tuple[bool, ...] = ()
    """Per layer, whether it has a gated delta net instead of attention; empty means in no layer."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    """Width in tokens of the causal convolution of a delta net, the current one included."""
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its ffn is a mixture; empty means in no layer."""
    num_mtp_layers: int = 0
    """Number of multi-token-prediction layers in the files, which are never loaded."""
    initializer_range: float = 0.02
    is_whole: bool = True
    """False if some parts of the model are not described: then counts are invalid."""

    @cached_property
    def _layers(self) -> list[ModelDims]:
        """Dimensions of each layer. Cached, since plans read them thousands of times; not a field,
        which would be sent to other processes."""
        return [replace(self, own=(), **own) for own in self.own]

    def is_beside_text(self, name: str) -> bool:
        """Whether a tensor of a multimodal folder is of another tower, by its name's prefix."""
        own = tuple(there for _, there in self.tower_names)
        return bool(own) and not name.startswith(own)

    def of_layer(self, layer: int) -> ModelDims:
        """The dimensions of one layer."""
        return self._layers[layer] if self.own else self

    @property
    def kinds(self) -> list[ModelDims]:
        """The distinct dimensions of layers."""
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
        """The distinct widths of heads, sorted."""
        return sorted({own.head_dim for own in self.kinds})

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]

    def is_linear(self, layer: int) -> bool:
        return bool(self.linear_layers) and self.linear_layers[layer]

    def window(self, layer: int) -> int | None:
        """Number of tokens, itself included, to which a token attends in this layer; None: all
        earlier ones."""
        slides = bool(self.sliding_layers) and self.sliding_layers[layer]
        return self.sliding_window if slides else None

    def rope_kind(self, layer: int) -> RopeKind:
        """The kind of rotary table that a layer uses."""
        if self.unturned_layers and self.unturned_layers[layer]:
            return "none"
        return "sliding" if self.sliding_rope and self.window(layer) is not None else "full"

    @property
    def turned_dim(self) -> int:
        """Number of elements of a head that are rotated."""
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
        """The layers that compute keys and values, which are cached."""
        layers = range(self.num_layers)
        return [i for i in layers if not self.is_linear(i) and self.of_layer(i).kv_from is None]

    @property
    def num_kv_matrices(self) -> int:
        """Number of projections to keys and values."""
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
        """Number of elements of a head that are not rotated."""
        return self.head_dim - self.turned_dim

    @property
    def latent_kv_dim(self) -> int:
        """Output width of the projection from the kv latent: unrotated keys and values."""
        return self.num_heads * (self.plain_dim + self.v_dim)

    def cache_shape(self, *, expanded: bool = False) -> tuple[int, int, int]:
        """(heads, width of a key, width of a value) that a sampler caches per token and layer. With
        latent attention, values are the first elements of the key."""
        if self.kv_latent and not expanded:
            return 1, self.kv_latent + self.rotary_dim, 0
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def embedding_params(self) -> int:
        """Parameters of the input table; an untied head has as many again."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        return 0 if self.tie_embeddings else self.embedding_params

    @property
    def layer_table_params(self) -> int:
        """Parameters of the table of per-layer embeddings."""
        return self.num_layers * self.layer_embed_dim * self.layer_embed_rows

    @property
    def layer_mix_params(self) -> int:
        """Parameters of the projection of the embedding that is added to them, and its norm."""
        return self.layer_embed_dim * (self.num_layers * self.hidden_size + 1)

    @property
    def num_root_params(self) -> int:
        """Parameters outside the layers."""
        tables = self.embedding_params + self.head_params + self.layer_table_params
        return tables + self.layer_mix_params + self.hidden_size

    def layer_parts(self, layer: int) -> LayerParts:
        return self.of_layer(layer)._parts(layer)

    @cached_property
    def _known_parts(self) -> dict[tuple[bool, bool], LayerParts]:
        """Parts of the kinds of layers counted so far; cached as `_layers` is."""
        return {}

    def _parts(self, layer: int) -> LayerParts:
        kind = self.is_moe(layer), self.is_linear(layer)
        if kind not in self._known_parts:
            self._known_parts[kind] = self._parts_of(*kind)
        return self._known_parts[kind]

    def _parts_of(self, mixture: bool, linear: bool) -> LayerParts:
        width = self.hidden_size
        ffn_bias = (2 * self.intermediate_size + width) if self.mlp_bias else 0
        q_and_o, kv, latents = self._projections
        biases = ((1 + self.attn_gate) * self.q_dim, self.num_kv_matrices * self.kv_dim)
        to_latents = 0
        if self.kv_latent:  # biases and norms are those of the latents
            cut = self.q_latent + self.kv_latent
            biases, to_latents = (0, 0), latents + cut + self.qkv_bias * (cut + self.rotary_dim)
        q_and_o += self.qkv_bias * biases[0] + self.out_bias * width
        q_and_o += self.attn_sinks * self.num_heads
        kv += self.qkv_bias * biases[1]
        inner_norms = self._qk_norm_params + to_latents
        inner_norms += (2 * width * self.layer_embed_dim + width) * bool(self.layer_embed_dim)
        inner_norms += 3 * width * (mixture and self.has_dense_beside)
        is_dense = not mixture or self.has_dense_beside
        if linear:
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
        """Parameters of the router, with biases of its logits and of the experts' outputs, or with
        scales of its input and of the experts."""
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
        """Parameters that one token uses, with embedding and head, without the table of per-layer
        embeddings (the published convention)."""
        layers = sum(self.layer_parts(i).active for i in range(self.num_layers))
        return self.num_root_params - self.layer_table_params + layers

    @property
    def num_matmul_params(self) -> int:
        """Active parameters in matrix products: with the head, no tables, norms or biases."""
        total = self.embedding_params  # the head, tied or not, is one matrix product
        total += self.num_layers * self.layer_embed_dim * self.hidden_size
        return total + sum(self.of_layer(i)._matrices(i) for i in range(self.num_layers))

    def _matrices(self, layer: int) -> int:
        """Elements of a layer's matrices that multiply a token."""
        part, width = self._parts(layer), self.hidden_size
        total = self._linear_matrices if self.is_linear(layer) else sum(self._projections)
        total += 2 * width * self.layer_embed_dim
        if self.is_moe(layer):
            experts = 3 * self.moe_intermediate_size * part.num_experts_per_token
            total += width * (self.num_experts + experts) + part.shared_expert
        return total + 3 * width * self.intermediate_size * bool(part.dense_ffn)

    @cached_property
    def _cores(self) -> Counter[tuple[int | None, int]]:
        """Number of layers by window and width (of queries plus outputs) of their attention."""
        layers = [layer for layer in range(self.num_layers) if not self.is_linear(layer)]
        widths = [self.of_layer(n).q_dim + self.of_layer(n).o_dim for n in layers]
        return Counter(zip(map(self.window, layers), widths, strict=True))

    def attention_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs of all attention cores over one sequence of `seq_len` tokens.

        Forward has two products, 2 * q_dim FLOPs for scores and 2 * o_dim for values per pair, and
        backward costs twice as much: 12 * q_dim per pair if the two are equal. `causal` counts only
        unmasked pairs; the full convention (torchtitan's) counts all pairs. A delta net reads its
        state twice and writes it once per token: 18 * key width * value width per head.
        """
        total = 0.0
        for (window, width), num in self._cores.items():
            seen = min(window or seq_len, seq_len)
            full, corner = seq_len * seen, seen * (seen - 1) // 2
            total += num * 6.0 * width * (full - corner if causal else full)
        states = self.num_linear_layers * self.linear_v_dim * self.linear_key_dim
        return total + 18.0 * states * seq_len

    def train_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Training FLOPs (forward and backward, no recomputation) of one sequence."""
        return 6.0 * self.num_matmul_params * seq_len + self.attention_flops(seq_len, causal=causal)
