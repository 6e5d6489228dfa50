"""Number of parameters of `actor.lora`'s factors, per rank and in total.

A matrix [out, in] has rank * (out + in) parameters. Tensor parallelism splits a factor on the same
side as the matrix, expert parallelism the factors of the experts. They are not sharded further, and
a factor that the experts of a layer share is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from pentad.core.dims import ModelDims
from pentad.core.fit import experts_each
from pentad.core.layout import Layout
from pentad.engine.section import LoraConfig

FACTOR_BYTES = 4
"""Factors, their gradients and their optimizer state are float32."""

JOINED_SHARE = {False: 1.5, True: 2.0}
"""Factor for the 16-bit copies that an embedded sampler's kernels use, by whether the model is a
mixture; for a mixture the B of gate and up is half zeros (`infer.adapters`)."""


def num_factors(
    dims: ModelDims, lora: LoraConfig, layout: Layout | None = None, layers: Iterable[int] = ()
) -> int:
    """Number of elements in the factors of some layers on one rank; without a layout, in all of
    the model."""
    if not lora.targets:  # only a critic's head
        return dims.hidden_size
    chosen = layers if layout is not None else range(dims.num_layers)
    return sum(layer_factors(dims, lora, layer, layout or Layout()) for layer in chosen)


def folder_bytes(dims: ModelDims, lora: LoraConfig) -> float:
    """Size of a PEFT folder, which repeats factors that experts share."""
    apart = lora.model_copy(update={"experts": "each"})
    return float(FACTOR_BYTES * num_factors(dims, apart))


def layer_factors(dims: ModelDims, lora: LoraConfig, layer: int, layout: Layout) -> int:
    dims = dims.of_layer(layer)
    width, tp = dims.hidden_size, layout.tp
    kv = dims.kv_dim // min(tp, dims.num_kv_heads)
    sides = {"q": width + dims.q_dim // tp, "o": dims.o_dim // tp + width}
    if dims.is_linear(layer):
        sides = {"o": dims.linear_v_dim // tp + width}
    elif dims.kv_latent:
        sides |= latent_sides(dims, tp)
    else:
        sides |= dict.fromkeys(("k", "v")[: dims.num_kv_matrices], width + kv)
    # A dense ffn is split by tp, a shared expert is whole.
    has_dense = dims.has_dense_beside or not dims.is_moe(layer)
    inner = dims.intermediate_size // tp if has_dense else dims.shared_expert_size
    if inner:
        sides |= dict.fromkeys(("gate", "up", "down"), width + inner)
    if dims.layer_embed_dim:
        names = ("per_layer_input_gate", "per_layer_projection")
        sides |= dict.fromkeys(names, width + dims.layer_embed_dim)
    if dims.is_moe(layer):
        sides["experts"] = expert_sides(dims, lora, layout)
    words = sides if lora.targets == "all-linear" else lora.targets
    return lora.rank * sum(sides.get(word, 0) for word in words)


def latent_sides(dims: ModelDims, tp: int) -> dict[str, int]:
    """Sum of both dimensions of each latent projection; those to latents are whole on each rank."""
    width, queries, latent = dims.hidden_size, dims.q_latent, dims.kv_latent
    sides = {
        "kv_a": width + latent + dims.rotary_dim,
        "kv_b": latent + dims.latent_kv_dim // tp,
    }
    if queries:
        sides |= {"q": 0, "q_a": width + queries, "q_b": queries + dims.q_dim // tp}
    return sides


def expert_sides(dims: ModelDims, lora: LoraConfig, layout: Layout) -> int:
    """Sum of both dimensions of gate, up and down over the experts of a layer on one rank."""
    count = experts_each(dims.num_experts, layout.ep)
    inner = count * dims.moe_intermediate_size // layout.etp
    outer = dims.hidden_size * (1 if lora.experts == "shared_outer" else count)
    return 3 * (outer + inner)
