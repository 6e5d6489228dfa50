"""Default sizes of a run, also used by plans; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.core.machine import GIB

DeviceKind = Literal["cuda", "cpu"]
PublishKind = Literal["none", "ipc", "shm", "file"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_BYTES = {"cuda": int(1.5 * GIB), "cpu": int(0.4 * GIB)}
"""CUDA context, workspaces of libraries, allocator slack; on a CPU the process itself."""

OPTIMIZER_STATES = 2
"""States of AdamW: first and second moment, in the dtype of the master weights."""
STAGING_HEADROOM = 1.25
"""Free host memory must be at least this multiple of the staging memory of saves."""

PUBLISH_BUCKET_BYTES = 64 << 20
"""Maximum bytes (as float32) of a shard that a rank casts and hashes at once in a publish."""
DIGEST_WORDS = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Number of words of a block that are hashed at once, each with a workspace of DIGEST_BYTES."""
DIGEST_BYTES = 64

MICROBATCH_TOKENS = {"cuda": 32768, "cpu": 4096}
"""Tokens in flight if mb_spec.max_tokens_per_mb is unset: one microbatch without a pipeline."""
HOST_BOUND_FLOPS = 2e12
"""FLOPs of a layer's training pass over a microbatch below which launching its kernels takes longer
than running them: on an H200 a layer takes about 4 ms of the host, in which the GPU computes 2e12
FLOPs."""
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Memory for the logits of one chunk, their exponentials and their gradient, by device type."""
LOGIT_COPIES = 3
"""Number of logit-sized arrays for which a chunk reserves memory; the kernels need half of it."""

PASS_TOKENS = {"cuda": 32768, "cpu": 8192}
"""Maximum tokens of a forward pass of the embedded sampler if rollout.max_batch_tokens is unset: on
a GPU, smaller passes are bound by kernel launches."""
PASS_BYTES, PASS_SHARE = 2 * GIB, 0.125
"""Limits of a layer's activations in such a pass, in bytes and as a share of free memory; a pass is
never smaller than on a CPU."""
DELTA_EPS = 1e-6
"""Added to the squared norm of the queries and keys of a gated delta net."""
DELTA_CHUNK = 64
"""Number of tokens in a chunk of delta nets."""
BLOCK_TOKENS = 16
"""Tokens in one block of the embedded sampler's cache."""
EMBEDDED_SHARE = 0.5
"""Share of the free GPU memory for the cache of the embedded sampler."""
EMBEDDED_CPU_BYTES = 1 * GIB
"""Size of its cache on a CPU."""
SERVER_SHARE = 0.9
"""Share of a device's memory that vLLM and SGLang use by default."""
COLOCATED_SHARE = 0.4
"""The same on a device shared with the trainer, unless rollout.server.gpu_memory_share is set."""
MIN_TEMPERATURE = 1e-3
"""Logits divided by less may overflow fp32, and one such request would fail the whole batch."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """Values of the run, besides the config, on which engines depend."""

    num_steps: int
    """Total steps of the run; the learning rate may depend on it."""
    max_row_tokens: int
    """The longest possible sequence of the run: no microbatch is smaller."""


@dataclass(frozen=True, slots=True)
class SamplerPass:
    """The largest forward pass of the embedded sampler: its tokens and their memory."""

    dims: ModelDims
    itemsize: int
    max_running: int
    """Number of sequences decoded together, one token each."""
    given: int | None = None
    """The value of rollout.max_batch_tokens."""
    state_bytes: int = 0
    """Bytes of the states of a running sequence that the dimensions do not describe."""

    @property
    def token_bytes(self) -> int:
        """Bytes per token of a layer: hidden states, projections and ffn activations at once."""
        dims = self.dims
        ffn = dims.num_experts_per_token * dims.moe_intermediate_size if dims.num_experts else 0
        dense = max(own.intermediate_size for own in dims.kinds)
        plain = (5 * dims.hidden_size + 3 * max(ffn, dense)) * self.itemsize
        plain += dims.num_layers * dims.layer_embed_dim * self.itemsize
        return plain + (int(chunks_bytes(dims)) if dims.linear_layers else 0)

    def tokens(self, free_bytes: float | None) -> int:
        """Tokens per pass, from the `free_bytes` of a GPU without the cache; None: on a CPU."""
        if self.given is not None:
            return self.given
        least = max(PASS_TOKENS["cpu"], self.max_running)
        if free_bytes is None:
            return least
        room = int(min(PASS_BYTES, PASS_SHARE * free_bytes)) // self.token_bytes
        return max(least, min(PASS_TOKENS["cuda"], room))

    def cache_bytes(self, free_bytes: float) -> int:
        """Default cache size on a GPU: its share, less if the smallest pass needs more than the
        rest."""
        free_bytes -= self.slots_bytes
        rest = free_bytes - self.tokens(None) * self.token_bytes
        return max(0, int(min(EMBEDDED_SHARE * free_bytes, rest)))

    @property
    def slots_bytes(self) -> int:
        """Bytes of the states of all running sequences, and of padding."""
        own = slot_bytes(self.dims, self.itemsize) + self.state_bytes
        return (self.max_running + 1) * own

    def state_problems(self, free_bytes: float) -> list[Problem]:
        """Problems of states that do not fit into the free memory of a GPU."""
        if self.slots_bytes <= free_bytes:
            return []
        each = self.slots_bytes / (self.max_running + 1)
        rule = f"their states take {self.slots_bytes / GIB:.3g} GiB, and {free_bytes / GIB:.3g} "
        rule += "GiB of the device are free"
        most = int(free_bytes // each) - 1
        remedy = f"set it to less than {most}: the cache needs memory too" if most > 1 else ""
        return [Problem(f"rollout.max_running = {self.max_running}", rule, remedy)]


def default_microbatch_tokens(longest: int, device: str, num_stages: int = 1) -> int:
    """Default size of the largest microbatch: about as many are in flight as there are stages."""
    return max(longest, MICROBATCH_TOKENS[device] // num_stages)


CacheDtype = Literal["auto", "bf16", "int8", "fp8"]
EIGHT_BIT_CACHES = ("int8", "fp8")


def kv_token_bytes(
    dims: ModelDims,
    weight_bytes: int,
    cache_dtype: CacheDtype = "auto",
    *,
    expanded: bool = False,
    tp: int = 1,
) -> int:
    """Bytes of keys and values of one token in all layers, on the fullest rank of `tp`: heads are
    repeated if there are more ranks. With 8 bits a head has a float32 scale. `expanded`: for latent
    attention in strict mode."""
    is_small = cache_dtype in EIGHT_BIT_CACHES
    total = 0
    for layer in dims.cached_layers:
        heads, *widths = dims.of_layer(layer).cache_shape(expanded=expanded)
        head_bytes = sum(n + 4 if is_small else n * weight_bytes for n in widths if n)
        total += -(-heads // tp) * head_bytes
    return total


def chunks_bytes(dims: ModelDims) -> float:
    """Bytes per token of the chunked delta rule, in float32: for every value head q, k and values
    derived from them, v, solved and new values, five chunk matrices, and the state."""
    heads, keys, values = dims.linear_value_heads, dims.linear_key_dim, dims.linear_value_dim
    kept = 6 * keys + 3 * values + 5 * DELTA_CHUNK + keys * values / DELTA_CHUNK
    return 4 * heads * kept


def slot_bytes(dims: ModelDims, weight_bytes: int) -> int:
    """Bytes of delta-net state for a running sequence: last inputs of the convolutions, and float32
    states."""
    inputs = max(dims.linear_conv - 1, 0) * (2 * dims.linear_k_dim + dims.linear_v_dim)
    states = dims.linear_v_dim * dims.linear_key_dim
    return dims.num_linear_layers * (inputs * weight_bytes + 4 * states)


def latent_cache_problems(dims: ModelDims, cache_dtype: CacheDtype) -> list[Problem]:
    """Problems of 8-bit caches with latents: latents and rotated keys would share a scale."""
    if cache_dtype not in EIGHT_BIT_CACHES or not dims.kv_latent:
        return []
    rule = f"the cache of {dims.family} has latents, for which 8 bits are not supported"
    return [Problem(f"rollout.kv_cache_dtype = {cache_dtype}", rule, "leave it at auto")]


def state_bytes(weight_bytes: float, num_tags: int) -> float:
    """Bytes of the training state: master weights, AdamW's moments, further tags."""
    return (1 + OPTIMIZER_STATES + num_tags) * weight_bytes


def export_bytes(dims: ModelDims, weight_bytes: int) -> float:
    """Bytes of one HF folder; tied weights are written once."""
    return float(weight_bytes * dims.num_params)
