"""The parts of a decoder layer: norm, attention around a given core, gated mlp.

Shape suffixes: T tokens (all sequences, flat), D hidden, H query heads, K key-value heads,
d head dim, F ffn width. Widths are read from the weights, so a part that holds only a shard of
its heads or ffn columns computes that shard.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.models.rope import rotate


class Linear(nn.Linear):
    """Without weights of its own: they come from a folder or from `registry.initialise`."""

    def reset_parameters(self) -> None:
        """Nothing: torch's random numbers on the meta device cost seconds, and mean nothing."""


class Embedding(nn.Embedding):
    """As `Linear`, without weights of its own."""

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
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GateUp(nn.Module):
    """Two projections of one input on an own leading axis, gate first: weight [2, F, D]."""

    def __init__(self, in_size: int, out_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, out_size, in_size))
        self.bias = nn.Parameter(torch.empty(2, out_size)) if bias else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        bias = None if self.bias is None else self.bias.flatten()
        gate, up = F.linear(x_TD, self.weight.flatten(0, 1), bias).chunk(2, dim=-1)
        return gate, up


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.gate_up = GateUp(dims.hidden_size, dims.intermediate_size, dims.mlp_bias)
        self.down = Linear(dims.intermediate_size, dims.hidden_size, bias=dims.mlp_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TD)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Projections, head norms and rotary; who sees whom is the given core's business."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = dims.head_dim
        self.window = dims.window(layer)
        width, kv_width = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        self.q = Linear(dims.hidden_size, width, bias=dims.qkv_bias)
        self.k = Linear(dims.hidden_size, kv_width, bias=dims.qkv_bias)
        self.v = Linear(dims.hidden_size, kv_width, bias=dims.qkv_bias)
        self.o = Linear(width, dims.hidden_size, bias=dims.out_bias)
        self.q_norm = Norm(dims.head_dim, dims.norm_eps) if dims.qk_norm else None
        self.k_norm = Norm(dims.head_dim, dims.norm_eps) if dims.qk_norm else None

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        q_THd = self.q(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKd = self.k(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKd = self.v(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k_TKd)
        q_THd, k_TKd = rotate(q_THd, cos_Td, sin_Td), rotate(k_TKd, cos_Td, sin_Td)
        if self.window is None:
            o_THd = attend(self.layer, q_THd, k_TKd, v_TKd)
        else:
            o_THd = attend(self.layer, q_THd, k_TKd, v_TKd, window=self.window)
        return self.o(o_THd.flatten(-2))
