"""A decoder of batch-invariant operations: a token's numbers do not depend on its batch.

Learner and sampler both apply it to their model; then log-probs of all tokens are bitwise equal,
for any batching, packing, chunking or caching.
"""

from __future__ import annotations

from torch import Tensor, nn

from pentad.core.swap import swap_classes
from pentad.models.decoder import Decoder
from pentad.models.layers import GateUp, GeluMlp, Linear, Mlp, Norm, OffsetNorm, Rotary
from pentad.models.moe import Beside, ClampedExperts, Experts, Moe, Router, SharedExpert
from pentad.ops import invariant
from pentad.ops.experts import sort_pairs, take_rows, take_weights
from pentad.ops.router import route


class StrictLinear(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return invariant.linear(input, self.weight, self.bias)


class StrictGateUp(GateUp):
    def forward(self, x_TD: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return invariant.linear(x_TD, self.weight.flatten(0, 1), bias)


class StrictNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return invariant.norm(x, self.weight, self.eps)


class StrictOffsetNorm(OffsetNorm):
    def forward(self, x: Tensor) -> Tensor:
        return invariant.norm(x, (1.0 + self.weight.float()).to(x.dtype), self.eps)


class StrictGeluMlp(GeluMlp):
    def forward(self, x_TD: Tensor) -> Tensor:
        down: Tensor = self.down(invariant.gelu_mul(*self.gate_up(x_TD).chunk(2, dim=-1)))
        return down


class StrictMlp(Mlp):
    def forward(self, x_TD: Tensor) -> Tensor:
        down: Tensor = self.down(invariant.silu_mul(*self.gate_up(x_TD).chunk(2, dim=-1)))
        return down


class StrictSharedExpert(SharedExpert):
    def forward(self, x_TD: Tensor, a_TM: Tensor | None = None) -> Tensor:
        if a_TM is None:
            return invariant.silu_mul(*self.gate_up(x_TD).chunk(2, dim=-1))
        y_TD: Tensor = self.down(a_TM)
        return y_TD if self.gate is None else invariant.sigmoid(self.gate(x_TD)) * y_TD


class StrictRotary(Rotary):
    def turns(self, angles_Td: Tensor) -> tuple[Tensor, Tensor]:
        return invariant.cos_sin(angles_Td)


class StrictRouter(Router):
    logits = staticmethod(invariant.wide_linear)

    def route(self, logits_TR: Tensor, chosen_Tk: Tensor | None) -> tuple[Tensor, Tensor]:
        if logits_TR.is_cuda:  # each row of scores is one row of a tile
            return super().route(logits_TR, chosen_Tk)
        # Padding experts: never chosen, with weight 0.
        wide_TR = invariant.widened(logits_TR, float("-inf"))
        if chosen_Tk is None:
            chosen_Tk = invariant.by_tiles(self._choose, wide_TR.detach())
        return invariant.by_tiles(self._weigh, wide_TR, chosen_Tk), chosen_Tk

    def _choose(self, logits_RE: Tensor) -> Tensor:
        bias_E = self.bias
        if bias_E is not None:
            bias_E = invariant.widened(bias_E, float("-inf"))
        return route(logits_RE, self.rule, bias_E)[1]

    def _weigh(self, logits_RE: Tensor, chosen_Rk: Tensor) -> Tensor:
        return route(logits_RE, self.rule, None, chosen_Rk)[0]


class StrictExperts(Experts):
    linear = staticmethod(invariant.grouped_linear)
    mul = staticmethod(invariant.weighted_silu_mul)


class StrictClampedExperts(ClampedExperts):
    linear = staticmethod(invariant.grouped_linear)
    mul = staticmethod(invariant.clamped_mul)


class StrictMoe(Moe):
    def biases(self, weights_Tk: Tensor, chosen_Tk: Tensor, bias_RD: Tensor) -> Tensor:
        """Sums the choices in order."""
        parts = [
            weights_T[:, None].to(bias_RD.dtype) * bias_RD.index_select(0, chosen_T)
            for weights_T, chosen_T in zip(weights_Tk.unbind(1), chosen_Tk.unbind(1), strict=True)
        ]
        return sum(parts[1:], start=parts[0])


STRICT: dict[type[nn.Module], type[nn.Module]] = {
    Linear: StrictLinear,
    GateUp: StrictGateUp,
    Norm: StrictNorm,
    OffsetNorm: StrictOffsetNorm,
    Mlp: StrictMlp,
    GeluMlp: StrictGeluMlp,
    SharedExpert: StrictSharedExpert,
    Rotary: StrictRotary,
    Router: StrictRouter,
    Experts: StrictExperts,
    ClampedExperts: StrictClampedExperts,
    Moe: StrictMoe,
}


def dispatch_strict(
    x_TD: Tensor,
    weights_Tk: Tensor,
    chosen_Tk: Tensor,
    experts: Experts,
    beside: Beside | None = None,
) -> Tensor:
    """Like `moe.dispatch_local`; a token's outputs are added in the order of its choices."""
    pairs = sort_pairs(chosen_Tk, experts.down.shape[0])
    weights_N = take_weights(weights_Tk, pairs)
    y_ND: Tensor = experts(take_rows(x_TD, pairs), pairs.sizes_E, weights_N)
    parts = y_ND.index_select(0, pairs.place_N).unflatten(0, chosen_Tk.shape).unbind(1)
    out_TD = parts[0]
    for part_TD in parts[1:]:
        out_TD = out_TD + part_TD
    return out_TD if beside is None else out_TD + beside()()


def apply_strict(model: Decoder) -> None:
    swap_classes(model, STRICT)
    for module in model.modules():
        if isinstance(module, Moe):
            module.dispatch = dispatch_strict
