"""The mixture-of-experts ffn: router, stacked experts, and the seam where dispatch is replaced.

Shape suffixes: T tokens, D hidden, E experts held here, k experts per token, M expert width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims


class Experts(nn.Module):
    """The experts' weights, gate and up on an own axis: gate_up [E, 2, M, D], down [E, D, M]."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        num, width, hidden = dims.num_experts, dims.moe_intermediate_size, dims.hidden_size
        self.gate_up = nn.Parameter(torch.empty(num, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, width))

    def forward(self, x_ND: Tensor, sizes_E: Tensor) -> Tensor:
        """Runs rows sorted by expert, sizes_E[e] of them through expert e."""
        parts = x_ND.split(sizes_E.tolist())
        return torch.cat([self.one(e, part) for e, part in enumerate(parts)])

    def one(self, expert: int, x_ND: Tensor) -> Tensor:
        gate, up = F.linear(x_ND, self.gate_up[expert].flatten(0, 1)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert])


class Router(nn.Module):
    """Softmax over all experts in float32, then the k largest."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        self.num_chosen = dims.num_experts_per_token
        self.normalise = dims.norm_topk_prob

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the chosen experts' weights and indices, both [T, k]."""
        probs_TR = F.linear(x_TD.to(self.weight.dtype), self.weight).float().softmax(-1)
        weights_Tk, chosen_Tk = probs_TR.topk(self.num_chosen, dim=-1)
        if self.normalise:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        return weights_Tk.to(x_TD.dtype), chosen_Tk


class Dispatch(Protocol):
    """Brings tokens to their experts and the weighted results back."""

    def __call__(
        self, x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor, experts: Experts
    ) -> Tensor: ...


def dispatch_local(x_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor, experts: Experts) -> Tensor:
    """All experts are here: sort the (token, expert) pairs by expert, run, add back."""
    num_chosen = chosen_Tk.shape[1]
    expert_N, order_N = chosen_Tk.flatten().sort(stable=True)
    sizes_E = torch.bincount(expert_N, minlength=experts.down.shape[0])
    token_N = order_N // num_chosen
    y_ND = experts(x_TD[token_N], sizes_E) * weights_Tk.flatten()[order_N, None]
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND.to(x_TD.dtype))


class Moe(nn.Module):
    """A layer's ffn as a mixture; `dispatch` is set anew where experts lie on several ranks."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.router = Router(dims)
        self.experts = Experts(dims)
        self.dispatch: Dispatch = dispatch_local

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_Tk, chosen_Tk = self.router(x_TD)
        return self.dispatch(x_TD, weights_Tk, chosen_Tk, self.experts)
