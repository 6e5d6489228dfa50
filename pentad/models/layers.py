"""The parts of a decoder layer: norm, rotary positions, attention around a given core, gated mlp.

Shape suffixes: T tokens (all sequences, flat), D hidden, H query heads, K key-value heads, d head
dim, F ffn width. Widths are read from the weights, so that a module with a shard of heads or ffn
columns computes this shard. Rotary frequencies are computed on the CPU in float32, in the same
order as in transformers, so that angles are equal at large positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims, RopeKind
from pentad.core.errors import Problem, UserError
from pentad.core.types import Attend
from pentad.ops.gated import silu_mul

Turn = tuple[Tensor, Tensor]
"""(cos_Td, sin_Td) of the positions of tokens."""


class Rotary(nn.Module):
    """Computes cos and sin of the positions, once per forward, for each kind of layer. For layers
    without rotary they are 1 and 0, which has no effect."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        used = dims.rope_dims
        self.has_unturned = used.pop("none", None) is not None
        self.kinds: dict[RopeKind, ModelDims] = {
            kind: own if kind == "full" else _with_sliding_rope(own) for kind, own in used.items()
        }
        for own in self.kinds.values():
            check_scaling(own)
        self.dims = dims
        # Not a buffer: a model is built on the meta device, where a buffer would lose its values.
        self.on_device: dict[tuple[torch.device, RopeKind], tuple[Tensor, float]] = {}

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> dict[RopeKind, Turn]:
        found = {kind: self.table(kind, positions_T, dtype) for kind in self.kinds}
        if self.has_unturned:
            shape, device = (len(positions_T), self.dims.turned_dim), positions_T.device
            ones = torch.ones(shape, dtype=dtype, device=device)
            found["none"] = ones, torch.zeros_like(ones)
        return found

    def table(self, kind: RopeKind, positions_T: Tensor, dtype: torch.dtype) -> Turn:
        device = positions_T.device
        if (device, kind) not in self.on_device:
            with torch.device("cpu"):
                inverse, scale = frequencies(self.kinds[kind])
            self.on_device[device, kind] = inverse.to(device), scale
        inverse, scale = self.on_device[device, kind]
        angles = positions_T.float()[:, None] * inverse
        cos_Td, sin_Td = self.turns(torch.cat((angles, angles), dim=-1))
        return (cos_Td * scale).to(dtype), (sin_Td * scale).to(dtype)

    def turns(self, angles_Td: Tensor) -> tuple[Tensor, Tensor]:
        return angles_Td.cos(), angles_Td.sin()


def _with_sliding_rope(dims: ModelDims) -> ModelDims:
    scaling = dict(dims.sliding_rope)
    theta = scaling.pop("rope_theta", dims.rope_theta)
    return replace(dims, rope_theta=theta, rope_scaling=scaling)


def rotate(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotates the pairs (j, j + r/2) of each head by the angle of its position; if cos and sin have
    r numbers, fewer than a head, the rest is unchanged."""
    width = cos_Td.shape[-1]
    part, rest = x_THd[..., :width], x_THd[..., width:]
    first, second = part.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    part = part * cos_Td[:, None] + turned * sin_Td[:, None]
    return part if rest.shape[-1] == 0 else torch.cat((part, rest), dim=-1)


def rotate_neighbours(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Like `rotate`, for the pairs (2j, 2j + 1)."""
    half = cos_Td.shape[-1] // 2
    part, rest = x_THd[..., : 2 * half], x_THd[..., 2 * half :]
    cos, sin = cos_Td[:, None, :half], sin_Td[:, None, :half]
    first, second = part.unflatten(-1, (half, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    part = pairs.flatten(-2)
    return part if rest.shape[-1] == 0 else torch.cat((part, rest), dim=-1)


ROTATIONS = {"halves": rotate, "neighbours": rotate_neighbours}


def frequencies(dims: ModelDims) -> tuple[Tensor, float]:
    """The inverse frequencies, one per rotated pair, and the factor of cos and sin."""
    return SCALINGS[_kind(dims)](dims, dims.rope_scaling)


def _kind(dims: ModelDims) -> str:
    return str(dims.rope_scaling.get("rope_type", "default"))


def check_scaling(dims: ModelDims) -> None:
    """Raises UserError for a scaling that is not supported or lacks a setting."""
    kind = _kind(dims)
    where = f"config.json: rope_type = {kind}"
    if kind in ("dynamic", "longrope"):
        rule = (
            "its angles change with the longest sequence of a batch, so packing would change them"
        )
        raise UserError(Problem(where, rule, "use none of it, or yarn"))
    if kind not in SCALINGS:
        raise UserError(Problem(where, "no such scaling", f"use one of {', '.join(SCALINGS)}"))
    missing = [key for key in NEEDS.get(kind, ()) if dims.rope_scaling.get(key) is None]
    if missing:
        raise UserError(Problem(where, f"{', '.join(missing)} missing"))


def _old_length(dims: ModelDims, scaling: Mapping[str, Any]) -> float:
    return float(scaling.get("original_max_position_embeddings") or dims.max_position)


def _plain(dims: ModelDims, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    exponent = torch.arange(0, dims.turned_dim, 2, dtype=torch.float) / dims.turned_dim
    return 1.0 / (dims.rope_theta**exponent), 1.0


def _linear(dims: ModelDims, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    return _plain(dims, scaling)[0] / scaling["factor"], 1.0


def _llama3(dims: ModelDims, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Stretches long wavelengths by the factor and keeps short ones, with a ramp between."""
    inverse, _ = _plain(dims, scaling)
    old_length = _old_length(dims, scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > old_length / low, inverse / scaling["factor"], inverse)
    ramp = (old_length / wavelength - low) / (high - low)
    between = (1 - ramp) * stretched / scaling["factor"] + ramp * stretched
    is_between = ~(wavelength < old_length / high) * ~(wavelength > old_length / low)
    return torch.where(is_between, between, stretched), 1.0


def _yarn(dims: ModelDims, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over the dims between two rotation counts."""
    old_length = _old_length(dims, scaling)
    factor = scaling.get("factor") or dims.max_position / old_length
    size = dims.turned_dim

    def dim_at(num_rotations: float) -> float:
        log_base = 2 * math.log(dims.rope_theta)
        return size * math.log(old_length / (num_rotations * 2 * math.pi)) / log_base

    low = dim_at(scaling.get("beta_fast") or 32)
    high = dim_at(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    keep = 1 - torch.clamp((torch.arange(size // 2, dtype=torch.float) - low) / (high - low), 0, 1)
    power = dims.rope_theta ** (torch.arange(0, size, 2).to(torch.float) / size)
    inverse = 1.0 / (factor * power) * (1 - keep) + 1.0 / power * keep
    return inverse, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1)


def _proportional(dims: ModelDims, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Frequencies as for the whole head, with 0 for pairs beyond the rotated part."""
    inverse, _ = _plain(dims, scaling)
    num = int(scaling.get("partial_rotary_factor", 1.0) * dims.turned_dim // 2)
    inverse[num:] = 0.0
    return inverse / scaling.get("factor", 1.0), 1.0


SCALINGS = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
NEEDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


class Linear(nn.Linear):
    """A projection without initialisation: weights come from a folder or from
    `registry.initialise`."""

    def reset_parameters(self) -> None:
        """Does nothing: torch's random initialisation on the meta device takes seconds without
        effect."""


class Embedding(nn.Embedding):
    """Like `Linear`, without initialisation."""

    def reset_parameters(self) -> None:
        pass


class Norm(nn.Module):
    """RMS norm over the last dim, in float32, with the weight applied in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        return self.weight * wide.to(x.dtype)

    def mean_square(self, wide: Tensor) -> Tensor:
        return wide.pow(2).mean(-1, keepdim=True)


class OffsetNorm(Norm):
    """A norm whose weights are around 0: 1 is added to them, and the product is computed in
    float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class WideNorm(Norm):
    """A norm whose product with the weight is computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class BareNorm(nn.Module):
    """A norm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def make_norm(size: int, dims: ModelDims) -> Norm:
    assert dims.norm_offset in (0.0, 1.0), f"no norm adds {dims.norm_offset} to its weights"
    plain = WideNorm if dims.wide_norms else Norm
    return (OffsetNorm if dims.norm_offset else plain)(size, dims.norm_eps)


class GateUp(nn.Module):
    """Gate and up projections with weight [2, F, D], gate first; outputs are concatenated: [T,
    2F]."""

    def __init__(self, in_size: int, out_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, out_size, in_size))
        self.bias = nn.Parameter(torch.empty(2, out_size)) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x_TD, self.weight.flatten(0, 1), bias)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.gate_up = GateUp(dims.hidden_size, dims.intermediate_size, dims.mlp_bias)
        self.down = Linear(dims.intermediate_size, dims.hidden_size, bias=dims.mlp_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x_TD)))


class GeluMlp(Mlp):
    """down(gelu(gate(x)) * up(x)), gelu by tanh."""

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.gelu(gate_TF, approximate="tanh") * up_TF)


MLPS: dict[str, type[Mlp]] = {"silu": Mlp, "gelu_tanh": GeluMlp}


class Attention(nn.Module):
    """Projections, head norms and rotary; the given core computes attention."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__()
        dims = dims.of_layer(layer)
        self.layer = layer
        self.head_dim = dims.head_dim
        self.window = dims.window(layer)
        width, kv_width = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        self.q = Linear(dims.hidden_size, width, bias=dims.qkv_bias)
        self.k = Linear(dims.hidden_size, kv_width, bias=dims.qkv_bias)
        self.v = Linear(dims.hidden_size, kv_width, bias=dims.qkv_bias)
        self.o = Linear(width, dims.hidden_size, bias=dims.out_bias)
        self.wide_norm = dims.wide_qk_norm
        self.norms_turned = dims.norms_turned
        widths = (width, kv_width) if dims.wide_qk_norm else (dims.head_dim, dims.head_dim)
        self.q_norm = make_norm(widths[0], dims) if dims.qk_norm else None
        self.k_norm = make_norm(widths[1], dims) if dims.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(dims.num_heads)) if dims.attn_sinks else None
        self.query_scale = dims.query_scale
        self.score_cap = dims.score_cap
        self.rotate = ROTATIONS[dims.rotary_pairs]

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        q_THd, k_TKd, v_TKd = self.project(x_TD)
        q_THd, k_TKd = self.turned(q_THd, k_TKd, cos_Td, sin_Td)
        return self.core(q_THd, k_TKd, v_TKd, attend)

    def core(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, attend: Attend) -> Tensor:
        if self.query_scale != 1.0:
            q_THd = q_THd * self.query_scale
        how: dict[str, Any] = {} if self.window is None else {"window": self.window}
        if self.sinks is not None:
            how["sinks"] = self.sinks
        if self.score_cap is not None:
            how["cap"] = self.score_cap
        return self.o(attend(self.layer, q_THd, k_TKd, v_TKd, **how).flatten(-2))

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections to queries, keys and values."""
        return self.q, self.k, self.v

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values by heads."""
        q_THd = self.q(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKd = self.k(x_TD).unflatten(-1, (-1, self.head_dim))
        return q_THd, k_TKd, self.v(x_TD).unflatten(-1, (-1, self.head_dim))

    def turned(
        self, q_THd: Tensor, k_TKd: Tensor, cos_Td: Tensor, sin_Td: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Applies norms and rotary to queries and keys, in the order of the family."""
        if self.norms_turned:
            q_THd, k_TKd = self.rotate(q_THd, cos_Td, sin_Td), self.rotate(k_TKd, cos_Td, sin_Td)
            return self.normed(q_THd, self.q_norm), self.normed(k_TKd, self.k_norm)
        q_THd, k_TKd = self.normed(q_THd, self.q_norm), self.normed(k_TKd, self.k_norm)
        return self.rotate(q_THd, cos_Td, sin_Td), self.rotate(k_TKd, cos_Td, sin_Td)

    def normed(self, x_THd: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x_THd
        if not self.wide_norm:
            return norm(x_THd)
        return norm(x_THd.flatten(-2)).unflatten(-1, (-1, self.head_dim))


class GatedAttention(Attention):
    """Attention whose output is multiplied elementwise by a gate computed from the input."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__(dims, layer)
        width = dims.num_heads * dims.head_dim
        self.gate = Linear(dims.hidden_size, width, bias=dims.qkv_bias)

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        q_THd, k_TKd, v_TKd = self.project(x_TD)
        q_THd, k_TKd = self.turned(q_THd, k_TKd, cos_Td, sin_Td)
        o_TQ = attend(self.layer, q_THd, k_TKd, v_TKd).flatten(-2)
        return self.o(o_TQ * self.gate(x_TD).sigmoid())


class NormedAttention(Attention):
    """Attention with normed values, which may be the keys before norm and rotary."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__(dims, layer)
        self.value_norm = BareNorm(dims.norm_eps)
        self.values_are_keys = dims.of_layer(layer).values_are_keys
        if self.values_are_keys:
            del self.v

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return (self.q, self.k) if self.values_are_keys else (self.q, self.k, self.v)

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_THd, k_TKd = (part(x_TD).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k))
        v_TKd = k_TKd
        if not self.values_are_keys:
            v_TKd = self.v(x_TD).unflatten(-1, (-1, self.head_dim))
        return q_THd, k_TKd, self.value_norm(v_TKd)
