"""A gated delta net in place of attention: projections, convolution, decays, gated norm; the core
that is passed provides the state of earlier tokens (`ops.delta`).

Shapes as in `ops.delta`; D hidden. Widths are read from the weights, so that a rank with some of
the heads computes these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.models.layers import Linear, Norm
from pentad.ops.delta import RememberingAttend


class DeltaNet(nn.Module):
    """Called like `layers.Attention`; without rotary."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.key_dim, self.value_dim = dims.linear_key_dim, dims.linear_value_dim
        hidden, heads, width = dims.hidden_size, dims.linear_value_heads, dims.linear_conv
        keys, values = dims.linear_k_dim, dims.linear_v_dim
        self.in_q = Linear(hidden, keys, bias=False)
        self.in_k = Linear(hidden, keys, bias=False)
        self.in_v = Linear(hidden, values, bias=False)
        self.in_z = Linear(hidden, values, bias=False)
        self.in_b = Linear(hidden, heads, bias=False)
        self.in_a = Linear(hidden, heads, bias=False)
        self.conv_q = nn.Parameter(torch.empty(keys, 1, width))
        self.conv_k = nn.Parameter(torch.empty(keys, 1, width))
        self.conv_v = nn.Parameter(torch.empty(values, 1, width))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = Norm(dims.linear_value_dim, dims.norm_eps)
        self.o = Linear(values, hidden, bias=False)

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        assert isinstance(attend, RememberingAttend), "a delta net needs a core with a memory"
        memory = attend.memory
        x_TX = torch.cat((self.in_q(x_TD), self.in_k(x_TD), self.in_v(x_TD)), dim=-1)
        weight_XW = torch.cat((self.conv_q, self.conv_k, self.conv_v)).squeeze(1)
        x_TX = F.silu(memory.convolve(self.layer, x_TX, weight_XW))
        keys = len(self.conv_q)
        q, k, v = x_TX.split((keys, keys, len(self.conv_v)), dim=-1)
        q_TKk, k_TKk = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))
        v_THv = v.unflatten(-1, (-1, self.value_dim))
        b_TH = self.in_b(x_TD).sigmoid()
        g_TH = -self.a_log.float().exp() * F.softplus(self.in_a(x_TD).float() + self.dt_bias)
        o_THv = self.norm(memory.recall(self.layer, q_TKk, k_TKk, v_THv, g_TH, b_TH))
        z_THv = self.in_z(x_TD).unflatten(-1, (-1, self.value_dim))
        o_THv = (o_THv * F.silu(z_THv.float())).to(x_TD.dtype)
        return self.o(o_THv.flatten(-2))
