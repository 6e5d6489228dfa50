"""The mixture-of-experts ffn: router, stacked experts, and the dispatch interface.

Shape suffixes: T tokens, D hidden, E experts on this rank, R experts of the model, k experts per
token, M expert width, N pairs of a token and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from pentad.core.dims import ModelDims
from pentad.models.layers import MLPS, BareNorm, GateUp, Linear, make_norm
from pentad.ops.experts import (
    add_rows,
    grouped_linear,
    sort_pairs,
    sum_rows,
    take_rows,
    take_weights,
)
from pentad.ops.gated import clamped_mul, silu_mul, weighted_gelu_mul, weighted_silu_mul
from pentad.ops.router import RouteRule, add_loss, balance_loss, gate_logits, route, z_loss

Routes = dict[int, Tensor]
"""Layer -> chosen_Tk, for the tokens of one forward pass. A layer with an entry uses it; a layer
without one chooses experts and adds an entry."""


class Experts(nn.Module):
    """The experts' weights, gate and up on a separate axis: gate_up [E, 2, M, D], down [E, D,
    M]."""

    linear: ClassVar[Callable[..., Tensor]] = staticmethod(grouped_linear)
    mul: ClassVar[Callable[..., Tensor]] = staticmethod(weighted_silu_mul)
    """Computes the gated activation times the weights of rows."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        num, width, hidden = dims.num_experts, dims.moe_intermediate_size, dims.hidden_size
        self.gate_up = nn.Parameter(torch.empty(num, 2, width, hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, width))

    def forward(self, x_ND: Tensor, sizes_E: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Computes rows sorted by expert, sizes_E[e] of them by expert e; outputs are multiplied by
        weights, if given.

        Weights are applied before the down projection: this scales M numbers instead of D, and
        backward does not need the output.
        """
        ends_E = sizes_E.cumsum(0, dtype=torch.int32)
        a_NM = self.mul(self.opened(x_ND, ends_E), weights_N)
        return self.linear(a_NM, self.down, ends_E)

    def opened(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        """Returns gate and up of each row."""
        return self.linear(x_ND, self.matrices[0], ends_E)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """The matrices of both products, [E, O, I] each."""
        return self.gate_up.flatten(1, 2), self.down


class ClampedExperts(Experts):
    """Experts with gate and up as interleaved rows of one matrix: gate_up [E, 2M, D], with a bias
    per row. Output biases belong to the mixture."""

    mul: ClassVar[Callable[..., Tensor]] = staticmethod(clamped_mul)

    def __init__(self, dims: ModelDims) -> None:
        super().__init__(dims)
        rows = 2 * dims.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(dims.num_experts, rows, dims.hidden_size))
        self.gate_up_bias = nn.Parameter(torch.empty(dims.num_experts, rows))

    def opened(self, x_ND: Tensor, ends_E: Tensor) -> Tensor:
        return add_rows(super().opened(x_ND, ends_E), self.gate_up_bias, ends_E)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down


class GeluExperts(Experts):
    """down(gelu(gate(x)) * up(x)), gelu by tanh."""

    mul = staticmethod(weighted_gelu_mul)


EXPERTS: dict[str, type[Experts]] = {
    "silu": Experts,
    "gelu_tanh": GeluExperts,
    "clamped": ClampedExperts,
}


class Router(nn.Module):
    """Selects and weights each token's experts, always in float32."""

    bias: Tensor | None
    logits: ClassVar[Callable[..., Tensor]] = staticmethod(gate_logits)

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        self.rule = RouteRule(
            dims.num_experts_per_token,
            dims.router_score,
            renormalise=dims.norm_topk_prob,
            scale=dims.router_scale,
            num_groups=dims.router_groups,
            groups_chosen=dims.router_groups_per_token,
            group_size=dims.num_experts // dims.router_groups,
        )
        # A weight without gradient: it is saved, and changed by `balance.move_biases`.
        bias_R = torch.empty(dims.num_experts) if dims.router_bias else None
        self.register_buffer("bias", bias_R)
        self.offset = nn.Parameter(torch.empty(dims.num_experts)) if dims.moe_bias else None
        """Trained bias of the logits."""
        # Set by `models.balance`; off by default.
        self.aux_loss_coef = self.z_loss_coef = 0.0
        self.loss_scale: Tensor | None = None

    def forward(self, x_TD: Tensor, chosen_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights (float32) and indices of the chosen experts, both [T, k]; given indices
        are kept and get weights, with the same gradients."""
        logits_TR = self.logits(x_TD, self.weight)
        if self.offset is not None:
            logits_TR = logits_TR + self.offset.to(logits_TR.dtype)
        weights_Tk, chosen_Tk = self.route(logits_TR, chosen_Tk)
        if (self.aux_loss_coef or self.z_loss_coef) and torch.is_grad_enabled():
            weights_Tk = add_loss(weights_Tk, self.own_loss(logits_TR, chosen_Tk))
        return weights_Tk, chosen_Tk

    def route(self, logits_TR: Tensor, chosen_Tk: Tensor | None) -> tuple[Tensor, Tensor]:
        return route(logits_TR, self.rule, self.bias, chosen_Tk)

    def own_loss(self, logits_TR: Tensor, chosen_Tk: Tensor) -> Tensor:
        """The auxiliary loss in the unit of the summed loss: mean times number of tokens."""
        loss = logits_TR.new_zeros(())
        if self.aux_loss_coef:
            loss = loss + self.aux_loss_coef * balance_loss(logits_TR, chosen_Tk, self.rule)
        if self.z_loss_coef:
            loss = loss + self.z_loss_coef * z_loss(logits_TR)
        loss = loss * len(logits_TR)
        return loss if self.loss_scale is None else loss * self.loss_scale


class ScaledRouter(Router):
    """A router that norms its input and multiplies it by trained scales; each expert's weight has a
    trained factor."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__(dims)
        self.norm = BareNorm(dims.norm_eps)
        self.root = dims.hidden_size**-0.5
        self.in_scale = nn.Parameter(torch.empty(dims.hidden_size))
        self.expert_scale = nn.Parameter(torch.empty(dims.num_experts))

    def forward(self, x_TD: Tensor, chosen_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x_TD = self.norm(x_TD) * self.in_scale * self.root
        weights_Tk, chosen_Tk = super().forward(x_TD, chosen_Tk)
        return weights_Tk * self.expert_scale[chosen_Tk], chosen_Tk


Beside = Callable[[], Callable[[], Tensor]]
"""Local work in two halves: the call does the first half and returns a function for the second,
which returns the result."""


class SharedExpert(nn.Module):
    """The shared expert of every token: mlp(x), or sigmoid(gate . x) * mlp(x).

    Only FSDP shards it: like the router, it computes each rank's own tokens. It runs in two halves,
    one while pairs are sent to experts, one while results are returned.
    """

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        hidden, width = dims.hidden_size, dims.shared_expert_size
        self.gate_up = GateUp(hidden, width, bias=False)
        self.down = Linear(width, hidden, bias=False)
        self.gate = Linear(hidden, 1, bias=False) if dims.shared_expert_gate else None

    def begin(self, x_TD: Tensor) -> Callable[[], Tensor]:
        """Implements `Beside`, given the tokens."""
        return partial(self, x_TD, self(x_TD))

    def forward(self, x_TD: Tensor, a_TM: Tensor | None = None) -> Tensor:
        """First half, or the second if given its result; one function, because it is compiled."""
        if a_TM is None:
            return silu_mul(self.gate_up(x_TD))
        y_TD: Tensor = self.down(a_TM)
        return y_TD if self.gate is None else self.gate(x_TD).sigmoid() * y_TD


class Dispatch(Protocol):
    """Sends tokens to their experts and returns the weighted results."""

    def __call__(
        self,
        x_TD: Tensor,
        weights_Tk: Tensor,
        chosen_Tk: Tensor,
        experts: Experts,
        beside: Beside | None = None,
    ) -> Tensor:
        """Returns weighted sums of experts; `beside` runs during waits, its result is added."""
        ...


def dispatch_local(
    x_TD: Tensor,
    weights_Tk: Tensor,
    chosen_Tk: Tensor,
    experts: Experts,
    beside: Beside | None = None,
) -> Tensor:
    """Dispatch with all experts on this rank: sorts pairs, computes experts, sums outputs."""
    pairs = sort_pairs(chosen_Tk, experts.down.shape[0])
    weights_N = take_weights(weights_Tk, pairs)
    y_TD = sum_rows(experts(take_rows(x_TD, pairs), pairs.sizes_E, weights_N), pairs)
    return y_TD if beside is None else y_TD + beside()()


class Moe(nn.Module):
    """A layer's ffn as a mixture; `dispatch` is replaced if experts are on several ranks."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.router = (ScaledRouter if dims.has_dense_beside else Router)(dims)
        self.experts = EXPERTS[dims.activation](dims)
        # Not in `Experts`: each is added once, on the rank of its token, for any distribution of
        # experts.
        rows = (dims.num_experts, dims.hidden_size)
        self.down_bias = nn.Parameter(torch.empty(rows)) if dims.moe_bias else None
        self.shared = SharedExpert(dims) if dims.shared_expert_size else None
        self.dispatch: Dispatch = dispatch_local

    def forward(self, x_TD: Tensor, chosen_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the mixture's output, and the chosen (or given) experts."""
        weights_Tk, chosen_Tk = self.router(x_TD, chosen_Tk)
        beside = None if self.shared is None else partial(self.shared.begin, x_TD)
        y_TD = self.dispatch(x_TD, weights_Tk, chosen_Tk, self.experts, beside)
        if self.down_bias is not None:
            y_TD = y_TD + self.biases(weights_Tk, chosen_Tk, self.down_bias)
        return y_TD, chosen_Tk

    def biases(self, weights_Tk: Tensor, chosen_Tk: Tensor, bias_RD: Tensor) -> Tensor:
        """Weighted sum of the output biases of each token's experts."""
        zeros_TR = weights_Tk.new_zeros(len(weights_Tk), len(bias_RD))
        weights_TR = zeros_TR.scatter(1, chosen_Tk, weights_Tk).to(bias_RD.dtype)
        return weights_TR @ bias_RD


class DenseMoe(Moe):
    """A mixture and a dense ffn of the same unnormed input; each has separate input and output
    norms."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__(dims)
        self.dense = MLPS[dims.activation](dims)
        self.dense_norm, self.dense_post_norm, self.norm, self.post_norm = (
            make_norm(dims.hidden_size, dims) for _ in range(4)
        )

    def forward(self, x_TD: Tensor, chosen_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights_Tk, chosen_Tk = self.router(x_TD, chosen_Tk)
        y_TD = self.dispatch(self.norm(x_TD), weights_Tk, chosen_Tk, self.experts)
        dense_TD = self.dense_post_norm(self.dense(self.dense_norm(x_TD)))
        return self.post_norm(y_TD) + dense_TD, chosen_Tk


def make_mixture(dims: ModelDims) -> Moe:
    return (DenseMoe if dims.has_dense_beside else Moe)(dims)
