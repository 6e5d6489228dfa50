"""Memory of a sampler replica: weights, cache, an adapter's factors, and its largest pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pentad.core import sizes
from pentad.core.dims import ModelDims
from pentad.core.layout import Component
from pentad.core.quantization import FP8_BLOCK, WeightDtype, is_quantised
from pentad.core.sizes import SamplerPass
from pentad.models.families import map_of

FP8_BYTES = 1 + 4 / prod(FP8_BLOCK)
"""Bytes of a weight in fp8, with its share of the scale of its block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The values that determine the memory of one sampler replica's device."""

    dims: ModelDims
    tp: int = 1
    pp: int = 1
    weight_bytes: int = 2
    weight_dtype: WeightDtype = "auto"
    cache_dtype: sizes.CacheDtype = "auto"
    sequence_tokens: int
    """Maximum length of prompt and answer."""
    num_sequences: int
    """Number of sequences that one replica runs at once if its memory allows it."""
    max_running: int
    """Maximum number of sequences decoded together."""
    max_batch_tokens: int | None = None
    """Tokens of a forward pass, if the user set them."""
    adapter_bytes: float = 0.0
    """Bytes of an adapter's factors, in addition to the weights."""
    shares_weights: bool = False
    """Whether it uses the learner's frozen weights (`config.topology`)."""
    device: str = "cuda"
    strict: bool = False

    @property
    def largest(self) -> SamplerPass:
        """The largest pass of an embedded sampler."""
        return SamplerPass(self.dims, self.weight_bytes, self.max_running, self.max_batch_tokens)


def sampler_weights(sampling: Sampling) -> float:
    """Bytes of the model, split by the replica's tp and pp, and of an adapter's factors."""
    if sampling.shares_weights:
        return sampling.adapter_bytes
    whole = base_bytes(sampling) + sampling.adapter_bytes
    return whole / (sampling.tp * sampling.pp)


def base_bytes(sampling: Sampling) -> float:
    """Bytes of the model without an adapter."""
    whole = float(sampling.weight_bytes * sampling.dims.num_params)
    if sampling.weight_dtype == "fp8":
        whole += (FP8_BYTES - sampling.weight_bytes) * num_quantised(sampling.dims)
    return whole


def num_quantised(dims: ModelDims) -> int:
    """Number of weights that servers can get in fp8."""
    sources = map_of(dims).sources.items() if dims.is_whole else ()
    return sum(prod(source.shape) for name, source in sources if is_quantised(name, source.shape))


def conversion_bytes(servers: Component, dims: ModelDims, weight_bytes: int) -> float:
    """Bytes of the copies that a publish makes for servers in fp8, for all at the same time: all
    matrices quantised, and for SGLang on one GPU dequantised, to compare them."""
    is_dequantised = servers.backend == "sglang" and servers.size("t") * servers.size("p") == 1
    each = FP8_BYTES + weight_bytes * is_dequantised
    return servers.size("d") * each * num_quantised(dims)


def kv_token_bytes(sampling: Sampling) -> float:
    """Bytes of keys and values of one token on one device."""
    args = sampling.dims, sampling.weight_bytes, sampling.cache_dtype
    return sizes.kv_token_bytes(*args, expanded=sampling.strict, tp=sampling.tp) / sampling.pp
