"""CPU layers for the sampler's own instance of a model: same weights and names, faster products of
few rows, fewer operations. Forward only."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.swap import swap_class, swap_classes
from pentad.core.types import Attend
from pentad.models.decoder import Decoder
from pentad.models.joined import join_projections
from pentad.models.layers import Attention, GateUp, Linear, Norm

HAS_MKL = torch.backends.mkl.is_available()
TURNED_ROWS = range(4, 97)
TURNED_SIZE = 1 << 18
"""From this number of weights, and for these numbers of rows, MKL computes W x^T up to twice as
fast as x W^T."""


def product(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Returns x W^T + b; the result may be in column-major order."""
    if len(x_TD) not in TURNED_ROWS or weight_ND.numel() < TURNED_SIZE or not HAS_MKL:
        return F.linear(x_TD, weight_ND, bias_N)
    y_TN = torch.mm(weight_ND, x_TD.t().contiguous()).t()
    return y_TN if bias_N is None else y_TN.add_(bias_N)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm over the last dim in float32, in five operations."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    square = torch.addcmul(scalar(eps), length, length, value=1 / x.shape[-1])
    return (x * square.rsqrt_()).mul_(weight)


@cache
def scalar(value: float) -> Tensor:
    return torch.tensor(value)


class HostLinear(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


class HostGateUp(GateUp):
    def forward(self, x_TD: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return product(x_TD, self.weight.flatten(0, 1), bias)


class HostNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps)


class HostAttention(Attention):
    """Attention with one product for q, k and v, whose weights are parts of one tensor."""

    weight_ND: Tensor
    bias_N: Tensor | None

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        heads_TNd = product(x_TD, self.weight_ND, self.bias_N).unflatten(-1, (-1, self.head_dim))
        num_kv = len(self.k.weight) // self.head_dim
        turned_TNd, v_TKd = heads_TNd.tensor_split((-num_kv,), dim=1)
        if self.norms_turned:
            q_THd, k_TKd = turned_TNd.tensor_split((-num_kv,), dim=1)
            return self.core(*self.turned(q_THd, k_TKd, cos_Td, sin_Td), v_TKd, attend)
        if self.wide_norm or not isinstance(self.q_norm, HostNorm | None):
            halves = turned_TNd.tensor_split((-num_kv,), dim=1)
            norms = self.q_norm, self.k_norm
            pairs = zip(halves, norms, strict=True)
            turned_TNd = torch.cat([self.normed(x, norm) for x, norm in pairs], dim=1)
        elif self.q_norm is not None and self.k_norm is not None:
            num_q = turned_TNd.shape[1] - num_kv
            parts = self.q_norm.weight.expand(num_q, -1), self.k_norm.weight.expand(num_kv, -1)
            turned_TNd = normed(turned_TNd, torch.cat(parts), self.q_norm.eps)
        q_THd, k_TKd = self.rotate(turned_TNd, cos_Td, sin_Td).tensor_split((-num_kv,), dim=1)
        return self.core(q_THd, k_TKd, v_TKd, attend)


HOST: dict[type[nn.Module], type[nn.Module]] = {
    Norm: HostNorm,
    Linear: HostLinear,
    GateUp: HostGateUp,
}


def apply_host(model: Decoder, *, joins: bool = True) -> None:
    """Replaces layers by those of this file. `joins`: projections of one input become one product,
    with its own memory."""
    for module in list(model.modules()):
        if joins and type(module) is Attention:
            weight, bias = join_projections(module)
            swap_class(module, HostAttention, weight_ND=weight, bias_N=bias)
    swap_classes(model, HOST)
