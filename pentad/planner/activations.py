"""Bytes that a forward pass keeps for backward, counted tensor by tensor, without torch.

The counts follow the code of `pentad.models`, so they are valid for its layers only; a test
compares them with the real models.

Legend of the formulas: c bytes of the compute dtype, h hidden size, q = heads * head_dim, k = kv
heads * head_dim, f ffn width, m expert width, K experts per token, E experts. Everything is per
token of the microbatch and per layer. Under tensor parallelism q, k, f and m are split, h is split
outside the matrix products (sequence parallelism) and whole as the input of a product. Context
parallelism splits tokens.
"""

from __future__ import annotations

from pentad.core.dims import ModelDims
from pentad.core.layout import Layout
from pentad.core.sizes import chunks_bytes
from pentad.engine.section import ModelConfig

WIDE = 4
"""Bytes of float32: norms and routers compute in it whatever the compute dtype."""

INDEX_BYTES = 24
"""Bytes of one routed row: expert, position in the order, and token, int64 each."""


def kept_bytes(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes a layer keeps until its backward, per token of the microbatch on this rank."""
    handed = handed_bytes(dims, layer, layout, keys)
    # c * h: the residual stream between two layers
    full = keys.compute_bytes * dims.hidden_size / (layout.cp * layout.tp) + handed
    if keys.archon.is_recomputed(layer):
        return full
    none = whole_layer(dims, layer, layout, keys)
    if keys.archon.ac_mode == "memory_budget":
        return full + keys.archon.ac_memory_budget * (none - full)
    if keys.archon.keeps_products:
        return products(dims, layer, layout, keys) + handed
    return none


def handed_bytes(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes of keys and values that later layers read; recomputation does not free them."""
    if all(own.get("kv_from") != layer for own in dims.own):
        return 0.0
    return 2 * keys.compute_bytes * kv_width(dims.of_layer(layer), layout.tp) / layout.cp


def whole_layer(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes of all tensors that backward reads; these are kept without checkpointing."""
    dims = dims.of_layer(layer)
    if keys.archon.enable_compile:
        # The compiler keeps no float32 copies, only the inputs of products and of the core.
        return products(dims, layer, layout, keys) + read_by_products(dims, layer, layout, keys)
    mix = delta_net_kept if dims.is_linear(layer) else attention_kept
    kept = mix(dims, layout, keys) + embedding_kept(dims, layout, keys)
    if not dims.is_moe(layer):
        return kept + mlp_kept(dims, layout, keys)
    if dims.has_dense_beside:
        kept += mlp_kept(dims, layout, keys)
        kept += 2 * norm_kept(dims.hidden_size, keys.compute_bytes) / (layout.tp * layout.cp)
    return kept + experts_kept(dims, layout, keys)


def products(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes kept by selective op: the input, and the results of matrix products and attention."""
    dims = dims.of_layer(layer)
    c, tp = keys.compute_bytes, layout.tp
    q, k = dims.q_dim / tp, kv_width(dims, tp)
    h = dims.hidden_size / tp
    made = dims.latent_kv_dim / tp if dims.kv_latent else dims.num_kv_matrices * k
    kept = c * (h + q + made + q + h) + statistics_bytes(dims, tp)  # input, q, k and v, core, o
    kept += c * (latent_width(dims) + q * dims.attn_gate)
    if dims.is_linear(layer):  # input, q, k, v, z, a, b, o
        kept = c * (2 * h + mixed_width(dims, tp))
        kept += c * (dims.linear_v_dim + 2 * dims.linear_value_heads) / tp
    if keys.lora is not None:  # results of A for seven matrices
        kept += 7 * c * keys.lora.rank
    kept += c * (dims.layer_embed_dim / tp + h * bool(dims.layer_embed_dim))
    if dims.has_dense_beside or not dims.is_moe(layer):
        kept += c * (2 * dims.intermediate_size / tp + h)
    if not dims.is_moe(layer):
        return kept / layout.cp
    rows = dims.num_experts_per_token * 2 * dims.moe_intermediate_size
    rows += dims.moe_bias * dims.hidden_size  # the biases of the token's experts
    if dims.shared_expert_size:
        rows += 2 * dims.shared_expert_size + dims.hidden_size
    return (kept + (c * rows + WIDE * dims.num_experts) / tp) / layout.cp


def read_by_products(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes of normed inputs, rotated q and k, input of `down`; for a mixture also its rows."""
    dims = dims.of_layer(layer)
    c, tp, h = keys.compute_bytes, layout.tp, dims.hidden_size
    kept = c * ((1 + dims.attn_gate) * dims.q_dim / tp + kv_width(dims, tp) + h)
    if dims.kv_latent:  # padded values, normed latents
        normed = dims.q_latent + dims.kv_latent
        kept += c * (kv_width(dims, tp) + normed + unpadded(dims, tp))
    if dims.is_linear(layer):
        kept = c * (h + dims.linear_v_dim / tp) + chunks_bytes(dims) / tp
    kept += c * (dims.value_norm * kv_width(dims, tp) + 3 * dims.layer_embed_dim / tp)
    if dims.has_dense_beside or not dims.is_moe(layer):
        kept += c * (h + dims.intermediate_size / tp)
    if dims.is_moe(layer):
        rows = dims.num_experts_per_token * (h + dims.moe_intermediate_size)
        kept += c * (h + rows + dims.shared_expert_size) / tp
    return kept / layout.cp


def unread(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes of a dense layer that backward does not need: the result of `down`."""
    if dims.is_moe(layer):
        return 0.0
    return keys.compute_bytes * dims.hidden_size / (layout.cp * layout.tp)


def attention_kept(dims: ModelDims, layout: Layout, keys: ModelConfig) -> float:
    """First half of a layer: norm, projections, head norms, core."""
    c, tp = keys.compute_bytes, layout.tp
    q, k = dims.q_dim / tp, kv_width(dims, tp)
    kept = layer_norms_kept(dims, dims.hidden_size / tp, c)
    kept += c * dims.hidden_size  # input of q, k, v, gathered over tp
    k = v = 0.0 if dims.kv_from is not None else k  # counted for the other layer
    if dims.qk_norm:
        kept += norm_kept(q + k, c)
    kept += c * (q + k)  # rotated, read by the core
    kept += c * (v + q)  # v, and the core's result, which is the input of o
    kept += c * 2 * q * dims.attn_gate  # its sigmoid, and their product
    if dims.value_norm and not (dims.values_are_keys and c == WIDE):
        kept += WIDE * v
    if dims.kv_latent:  # latents and their norms, which every rank has whole; unpadded results
        kept += c * latent_width(dims) + norm_kept(dims.q_latent + dims.kv_latent, c)
        kept += c * unpadded(dims, tp)
    return (kept + statistics_bytes(dims, tp)) / layout.cp


def embedding_kept(dims: ModelDims, layout: Layout, keys: ModelConfig) -> float:
    """End of a layer with a per-layer embedding: gate, gelu, product, projection, norm."""
    if not dims.layer_embed_dim:
        return 0.0
    c, h, width = keys.compute_bytes, dims.hidden_size, dims.layer_embed_dim
    return (c * (h + 3 * width) + norm_kept(h, c)) / (layout.tp * layout.cp)


def delta_net_kept(dims: ModelDims, layout: Layout, keys: ModelConfig) -> float:
    """First half of a layer with a delta net: norm, projections, convolution, chunks, norm."""
    c, tp = keys.compute_bytes, layout.tp
    mixed, values = mixed_width(dims, tp), dims.linear_v_dim / tp
    kept = layer_norms_kept(dims, dims.hidden_size / tp, c) + c * dims.hidden_size
    kept += WIDE * mixed * dims.linear_conv  # every token that the convolution sees
    kept += 2 * c * mixed  # silu, before and after
    is_narrow = c < WIDE
    kept += is_narrow * WIDE * 2 * dims.linear_k_dim / tp  # q and k in float32
    kept += chunks_bytes(dims) / tp
    kept += norm_kept(values, c) + 3 * c * values  # weighed; z; the input of o
    kept += (1 + is_narrow) * WIDE * values  # silu of z; z in float32
    return kept


def mixed_width(dims: ModelDims, tp: int) -> float:
    """Width of q, k and v of a delta net together."""
    return (2 * dims.linear_k_dim + dims.linear_v_dim) / tp


def mlp_kept(dims: ModelDims, layout: Layout, keys: ModelConfig) -> float:
    """Second half of a dense layer: norm, gate and up, silu(gate), their product. An upper bound: a
    GPU's kernel for 16-bit numbers does not keep silu(gate)."""
    c, tp = keys.compute_bytes, layout.tp
    kept = layer_norms_kept(dims, dims.hidden_size / tp, c)
    kept += c * dims.hidden_size  # input of gate and up, gathered over tp
    kept += c * 4 * dims.intermediate_size / tp
    return kept / layout.cp


def experts_kept(dims: ModelDims, layout: Layout, keys: ModelConfig) -> float:
    """Second half of a mixture layer: norm, router, K copies of each token through experts.

    Experts see the tokens of this rank only (1/tp of them, sequence parallelism); routing is
    assumed to be balanced.
    """
    c, tp, chosen = keys.compute_bytes, layout.tp, dims.num_experts_per_token
    h, width = dims.hidden_size, dims.moe_intermediate_size
    kept = layer_norms_kept(dims, h, c) + c * h
    kept += WIDE * dims.num_experts + INDEX_BYTES * chosen  # probabilities; order of the rows
    kept += dims.moe_bias * c * dims.num_experts  # weights of the experts' biases
    kept += chosen * c * (h + 3 * width)  # rows sorted by expert; gate, up, their weighted product
    if layout.ep > 1:
        kept += chosen * c * h  # rows as received, before they are sorted
    if dims.shared_expert_size:
        kept += c * 4 * dims.shared_expert_size  # as a dense ffn
        kept += c * h * dims.shared_expert_gate  # its result before the gate
    return kept / (tp * layout.cp)


def layer_norms_kept(dims: ModelDims, width: float, c: int) -> float:
    """Activations kept by the norms of half a layer, before and after its computation."""
    return (dims.pre_norms + dims.post_norms) * norm_kept(width, c)


def norm_kept(width: float, c: int) -> float:
    """The input in float32 and the normed values, of `width` elements a token."""
    return WIDE * width + c * width


def statistics_bytes(dims: ModelDims, tp: int) -> float:
    """The softmax statistics attention keeps: one float32 a head."""
    return WIDE * dims.num_heads / tp


def kv_width(dims: ModelDims, tp: int) -> float:
    """k or v on one tp rank: whole heads are repeated once there are more ranks than heads."""
    return dims.head_dim * max(dims.num_kv_heads / tp, 1.0)


def latent_width(dims: ModelDims) -> int:
    """Width of a token's latents in latent attention, before its heads."""
    return dims.q_latent + dims.kv_latent + dims.rotary_dim if dims.kv_latent else 0


def unpadded(dims: ModelDims, tp: int) -> float:
    """The attention output without the padding of values; 0 without padding."""
    return dims.o_dim / tp if dims.o_dim < dims.q_dim else 0.0


def rebuilt_bytes(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes that this layer's backward recomputes, in addition to the kept ones."""
    missing = whole_layer(dims, layer, layout, keys) - kept_bytes(dims, layer, layout, keys)
    is_op = keys.archon.keeps_products
    return max(missing, 0.0) + (unread(dims, layer, layout, keys) if is_op else 0.0)


def flowing_bytes(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes of gradients during a layer's backward: its widest tensor and the residual stream. Kept
    tensors are freed one by one as gradients are computed, so no more exist at once."""
    c, h = keys.compute_bytes, dims.hidden_size
    dims = dims.of_layer(layer)
    if dims.is_moe(layer):
        rows = dims.num_experts_per_token * max(h, dims.moe_intermediate_size)
        return c * (rows + h) / (layout.tp * layout.cp)
    return c * (dims.intermediate_size / layout.tp + 2 * h) / layout.cp


def forward_bytes(dims: ModelDims, layer: int, layout: Layout, keys: ModelConfig) -> float:
    """Bytes of a layer that keeps nothing, in its ffn: gate, up, silu and the residual stream."""
    c, h = keys.compute_bytes, dims.hidden_size
    dims = dims.of_layer(layer)
    if dims.is_moe(layer):
        rows = dims.num_experts_per_token * (3 * dims.moe_intermediate_size + 2 * h)
        return c * (rows + 3 * h) / (layout.tp * layout.cp)
    return c * (4 * dims.intermediate_size / layout.tp + 3 * h) / layout.cp


def ends_bytes(dims: ModelDims, layout: Layout, keys: ModelConfig) -> float:
    """Bytes kept outside the layers: final norm, input of the head, rotary tables."""
    c, h = keys.compute_bytes, dims.hidden_size
    turned = sum(own.turned_dim for own in dims.rope_dims.values())
    kept = norm_kept(h / layout.tp, c) + c * h + 2 * c * turned
    whole = dims.num_layers * dims.layer_embed_dim
    if whole:  # the norm of the projection, and its sum with rows of the table
        kept += (c * whole + norm_kept(whole, c)) / layout.tp
    return kept / layout.cp
