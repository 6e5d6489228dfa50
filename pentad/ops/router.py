"""The router of a mixture: scores, the k experts of each token, and their weights.

    score  = softmax(logits) or sigmoid(logits), in fp32
    chosen = the k largest of logits, or of score + bias if there is a bias; of equal ones the
             lower index; if experts are in groups, among those of the best groups, by the sum
             of the two largest score + bias of each
    weight = score[chosen] * scale, first divided by its sum if `renormalise`

The bias affects only the choice (https://arxiv.org/abs/2408.15664): it has no effect on weights and
gradients. Without a bias the choice uses the logits, since both scores are monotonic in them: it
then does not depend on the rounding of exponentials. `reference_route` gives the same choices as
the Triton kernels and, to rounding, the same weights and gradients.

Shapes: T tokens, E experts, k experts a token, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.ops.meter import note_kernel, timed

try:
    import triton
    import triton.language as tl
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

TINY = 1e-20
"""Added to divisors, because all sigmoids may be 0."""
MAX_EXPERTS = 2048
"""Maximum number of experts that the kernels support in a row."""
ENTRIES = 512
"""Entries per program, unless a row is longer: 16 per thread."""


@dataclass(frozen=True, slots=True)
class RouteRule:
    """Routing options of a model. Example: RouteRule(8, "softmax", renormalise=True)."""

    num_chosen: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    """Whether the weights of a token sum to `scale`."""
    scale: float = 1.0
    num_groups: int = 1
    groups_chosen: int = 1
    group_size: int = 0
    """Number of experts in a group; 0: no groups."""

    def __post_init__(self) -> None:
        assert self.num_chosen > 0 and self.scale > 0, f"{self} gives no weights"

    @property
    def is_grouped(self) -> bool:
        return self.groups_chosen < self.num_groups


def gate_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Router logits x @ weight^T in fp32 (fp64 for fp64), never rounded to the input dtype."""
    if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype and x_TD.dtype.itemsize == 2:
        result: Tensor = _GateLogits.apply(x_TD, weight_ED)
        return result
    wide = torch.promote_types(torch.promote_types(x_TD.dtype, weight_ED.dtype), torch.float32)
    return F.linear(x_TD.to(wide), weight_ED.to(wide))


class _GateLogits(torch.autograd.Function):
    """Products of 16-bit numbers are exact in fp32, so tensor cores are exact in forward. Backward
    splits the gradient into a high and a low part, which together keep 16 bits."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weight_ED = ctx.saved_tensors
        parts_TF = split_wide(grads[0], x_TD.dtype)
        dx_TD = parts_TF @ torch.cat([weight_ED, weight_ED])
        dweight_FD = torch.mm(parts_TF.t(), x_TD, out_dtype=torch.float32)
        high_ED, low_ED = dweight_FD.chunk(2)
        return dx_TD, (high_ED + low_ED).to(weight_ED.dtype)


def split_wide(x_TE: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 2E]: x rounded to the dtype, next to its rounded remainder."""
    high = x_TE.to(dtype)
    return torch.cat([high, (x_TE - high).to(dtype)], dim=-1)


def route(
    logits_TE: Tensor,
    rule: RouteRule,
    bias_E: Tensor | None = None,
    chosen_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (weights_Tk, chosen_Tk). A given `chosen_Tk` (router replay) is used as the choice.

    The experts of a token must be distinct. Gradients flow from the weights to the logits.
    """
    if chosen_Tk is None and rule.is_grouped:  # the kernels do not support expert groups
        chosen_Tk = choose(logits_TE, compute_scores(logits_TE, rule), rule, bias_E)
    is_fused = HAS_TRITON and logits_TE.is_cuda and logits_TE.dtype == torch.float32
    if is_fused and logits_TE.shape[1] <= MAX_EXPERTS:
        return fused_route(logits_TE, rule, bias_E, chosen_Tk)
    if torch.compiler.is_compiling():  # a graph cannot contain timers
        return reference_route(logits_TE, rule, bias_E, chosen_Tk)
    with timed("route", logits_TE.device, moved_bytes(logits_TE, rule.num_chosen)):
        return reference_route(logits_TE, rule, bias_E, chosen_Tk)


def moved_bytes(logits_TE: Tensor, num_chosen: int) -> int:
    """Bytes that routing reads and writes: the logits, and the weight and index of each choice."""
    wide = torch.int64.itemsize + logits_TE.element_size()
    return logits_TE.nbytes + len(logits_TE) * num_chosen * wide


def reference_route(
    logits_TE: Tensor,
    rule: RouteRule,
    bias_E: Tensor | None = None,
    chosen_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` in plain torch, in the dtype of the logits."""
    scores_TE = compute_scores(logits_TE, rule)
    if chosen_Tk is None:
        chosen_Tk = choose(logits_TE, scores_TE, rule, bias_E)
    weights_Tk = scores_TE.gather(-1, chosen_Tk)
    if rule.renormalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + TINY)
    return weights_Tk * rule.scale, chosen_Tk


def choose(logits_TE: Tensor, scores_TE: Tensor, rule: RouteRule, bias_E: Tensor | None) -> Tensor:
    """Selects the k experts of each token."""
    keys_TE = scores_TE if rule.is_grouped else logits_TE
    keys_TE = (keys_TE if bias_E is None else scores_TE + bias_E).detach()
    # Stable sorts: topk does not define the order of equal keys.
    if rule.is_grouped:  # columns that strict mode adds are in no group
        keys_TGe = keys_TE[:, : rule.num_groups * rule.group_size].unflatten(
            -1, (rule.num_groups, rule.group_size)
        )
        best_TG = keys_TGe.topk(2).values.sum(-1)
        rest_TG = best_TG.sort(descending=True, stable=True).indices[:, rule.groups_chosen :]
        is_out_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, rest_TG, True)
        keys_TE = keys_TGe.masked_fill(is_out_TG[..., None], float("-inf")).flatten(1)
    order_TE = keys_TE.sort(dim=-1, descending=True, stable=True).indices
    return order_TE[:, : rule.num_chosen].contiguous()


def compute_scores(logits_TE: Tensor, rule: RouteRule) -> Tensor:
    return logits_TE.softmax(-1) if rule.score == "softmax" else logits_TE.sigmoid()


def expert_load(chosen_Tk: Tensor, num_experts: int) -> Tensor:
    """Number of pairs of each expert, int64 [E]; without device synchronization."""
    flat_N = chosen_Tk.flatten()
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=flat_N.device)
    return zeros_E.scatter_add(0, flat_N, torch.ones_like(flat_N))


def balance_loss(logits_TE: Tensor, chosen_Tk: Tensor, rule: RouteRule) -> Tensor:
    """E * sum_e f_e * P_e (https://arxiv.org/abs/2101.03961): 1 when balanced, up to E / k.

    f_e is the share of pairs routed to e, P_e the mean share of the scores; the gradient flows
    through P. Both are means over the tokens given, so it depends on the microbatch.
    """
    num_experts = logits_TE.shape[1]
    scores_TE = compute_scores(logits_TE, rule)
    if rule.score == "sigmoid":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
    share_E = expert_load(chosen_Tk, num_experts) / max(chosen_Tk.numel(), 1)
    return num_experts * (share_E * scores_TE.sum(0)).sum() / max(len(logits_TE), 1)


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean square of log-sum-exp: keeps logits small (https://arxiv.org/abs/2202.08906)."""
    return logits_TE.logsumexp(-1).square().sum() / max(len(logits_TE), 1)


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Returns x unchanged and adds `loss` to the backward of everything computed from x."""
    result: Tensor = _AddLoss.apply(x, loss)
    return result


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


# The kernels. One program handles BLOCK rows; a row of scores is in registers. They are custom ops,
# so that compilation and recomputation handle them as ops.


def fused_route(
    logits_TE: Tensor,
    rule: RouteRule,
    bias_E: Tensor | None = None,
    chosen_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` in two Triton kernels, one for forward and one for backward."""
    num_chosen, num_experts = rule.num_chosen, logits_TE.shape[1]
    assert num_chosen <= num_experts, f"{num_chosen} of {num_experts} experts cannot be chosen"
    assert chosen_Tk is not None or not rule.is_grouped, "`choose` comes first"
    is_softmax = rule.score == "softmax"
    weights_Tk, own_Tk = torch.ops.pentad.route(
        logits_TE, bias_E, chosen_Tk, num_chosen, is_softmax, rule.renormalise, rule.scale
    )
    return weights_Tk, own_Tk if chosen_Tk is None else chosen_Tk


def _launch(num_experts: int) -> dict[str, int]:
    """Rows and warps per program: one warp, so that reductions stay within a warp."""
    block = min(16, max(1, ENTRIES // triton.next_power_of_2(num_experts)))
    return {"BLOCK": block, "num_warps": 1}


if HAS_TRITON:

    @triton.jit
    def _forward_kernel(
        logits_ptr: tl.tensor,
        bias_ptr: tl.tensor,
        chosen_ptr: tl.tensor,
        weights_ptr: tl.tensor,
        num_tokens: tl.tensor,
        scale: tl.tensor,
        HAS_BIAS: tl.constexpr,
        IS_GIVEN: tl.constexpr,
        NUM_EXPERTS: tl.constexpr,
        WIDE: tl.constexpr,
        NUM_CHOSEN: tl.constexpr,
        IS_SOFTMAX: tl.constexpr,
        RENORMALISE: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        e = tl.arange(0, WIDE)
        is_row = row < num_tokens
        is_expert = (e < NUM_EXPERTS)[None, :]
        logits = tl.load(
            logits_ptr + row[:, None] * NUM_EXPERTS + e[None, :],
            mask=is_row[:, None] & is_expert,
            other=-float("inf"),
        )
        if IS_SOFTMAX:
            exps = tl.exp(logits - tl.max(logits, 1)[:, None])
        if IS_SOFTMAX and (HAS_BIAS or not RENORMALISE):
            scores = exps / tl.sum(exps, 1)[:, None]
        elif IS_SOFTMAX:
            scores = exps  # the division by the sum cancels
        else:
            scores = tl.where(is_expert, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
        # slot: rank of an expert among the chosen of its row, NUM_CHOSEN if it is not chosen.
        slot = tl.full([BLOCK, WIDE], NUM_CHOSEN, dtype=tl.int32)
        if IS_GIVEN:
            for j in tl.static_range(NUM_CHOSEN):
                index = tl.load(chosen_ptr + row * NUM_CHOSEN + j, mask=is_row, other=-1)
                slot = tl.where(e[None, :] == index[:, None], j, slot)
        else:
            keys = logits
            if HAS_BIAS:
                keys = scores + tl.load(bias_ptr + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
            # nan counts as the largest, so that errors become visible; -0 equals 0.
            keys = tl.where(keys == keys, keys + 0.0, float("inf"))
            # As integers in the order of the floats: integer reductions are single instructions.
            lowest: tl.constexpr = -(2**31)
            keys = keys.to(tl.int32, bitcast=True)
            keys = tl.where(is_expert, keys ^ ((keys >> 31) & 0x7FFFFFFF), lowest)
            for j in tl.static_range(NUM_CHOSEN):
                best = tl.max(keys, 1)[:, None]
                index = tl.min(tl.where(keys == best, e[None, :], WIDE), 1)[:, None]
                slot = tl.where(e[None, :] == index, j, slot)
                keys = tl.where(e[None, :] == index, lowest, keys)
        is_chosen = slot < NUM_CHOSEN
        if RENORMALISE:
            total = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
            scores = scores / (total[:, None] + 1e-20)
        pair = row[:, None] * NUM_CHOSEN + slot
        is_written = is_row[:, None] & is_chosen
        tl.store(weights_ptr + pair, scores * scale, mask=is_written)
        if not IS_GIVEN:
            experts = tl.zeros([BLOCK, WIDE], dtype=tl.int64) + e[None, :]
            tl.store(chosen_ptr + pair, experts, mask=is_written)

    @triton.jit
    def _backward_kernel(
        grad_ptr: tl.tensor,
        weights_ptr: tl.tensor,
        chosen_ptr: tl.tensor,
        logits_ptr: tl.tensor,
        out_ptr: tl.tensor,
        num_tokens: tl.tensor,
        scale: tl.tensor,
        NUM_EXPERTS: tl.constexpr,
        WIDE: tl.constexpr,
        NUM_CHOSEN: tl.constexpr,
        CHOSEN_WIDE: tl.constexpr,
        IS_SOFTMAX: tl.constexpr,
        RENORMALISE: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        e = tl.arange(0, WIDE)
        k = tl.arange(0, CHOSEN_WIDE)
        is_row = row < num_tokens
        is_entry = is_row[:, None] & (e < NUM_EXPERTS)[None, :]
        is_pair = is_row[:, None] & (k < NUM_CHOSEN)[None, :]
        pair = row[:, None] * NUM_CHOSEN + k[None, :]
        entry = row[:, None] * NUM_EXPERTS + e[None, :]
        chosen = tl.load(chosen_ptr + pair, mask=is_pair, other=0)
        at = row[:, None] * NUM_EXPERTS + chosen
        # g: gradient to the weights before the scale; p: those weights.
        g = tl.load(grad_ptr + pair, mask=is_pair, other=0.0) * scale
        p = tl.load(weights_ptr + pair, mask=is_pair, other=0.0) / scale
        mean = tl.sum(g * p, 1)[:, None]
        if IS_SOFTMAX and not RENORMALISE:
            logits = tl.load(logits_ptr + entry, mask=is_entry, other=-float("inf"))
            exps = tl.exp(logits - tl.max(logits, 1)[:, None])
            rest = -mean * (exps / tl.sum(exps, 1)[:, None])
        else:
            rest = tl.zeros([BLOCK, WIDE], dtype=tl.float32)
        tl.store(out_ptr + entry, rest, mask=is_entry)
        if IS_SOFTMAX:
            found = p * (g - mean)
        else:
            s = tl.load(logits_ptr + at, mask=is_pair, other=-float("inf"))
            s = 1.0 / (1.0 + tl.exp(-s))
            if RENORMALISE:
                total = tl.sum(tl.where(is_pair, s, 0.0), 1)[:, None] + 1e-20
                found = (g - mean) / total * s * (1.0 - s)
            else:
                found = g * s * (1.0 - s)
        # Other threads of this program wrote the row: wait before it is changed below.
        tl.debug_barrier()
        tl.store(out_ptr + at, found, mask=is_pair)

    def _options(num_experts: int, num_chosen: int, is_softmax: bool) -> dict[str, Any]:
        return {
            "NUM_EXPERTS": num_experts,
            "WIDE": triton.next_power_of_2(num_experts),
            "NUM_CHOSEN": num_chosen,
            "IS_SOFTMAX": is_softmax,
            **_launch(num_experts),
        }

    @torch.library.custom_op(
        "pentad::route",
        mutates_args=(),
        schema="(Tensor logits, Tensor? bias, Tensor? given, int num_chosen, bool is_softmax, "
        "bool renormalise, float scale) -> (Tensor, Tensor)",
    )
    def _route(
        logits: Tensor,
        bias: Tensor | None,
        given: Tensor | None,
        num_chosen: int,
        is_softmax: bool,
        renormalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns (weights, chosen); chosen is empty if the choice was given."""
        num_tokens, num_experts = logits.shape
        logits = logits.contiguous()
        weights = logits.new_empty((num_tokens, num_chosen), dtype=torch.float32)
        rows = num_tokens if given is None else 0
        chosen = logits.new_empty((rows, num_chosen), dtype=torch.int64)
        if not num_tokens:
            return weights, chosen
        options = _options(num_experts, num_chosen, is_softmax)
        # Inside the op, which also runs eagerly in compiled code.
        with timed("route", logits.device, moved_bytes(logits, num_chosen)):
            kernel = _forward_kernel[(triton.cdiv(num_tokens, options["BLOCK"]),)](
                logits,
                logits if bias is None else bias.contiguous(),
                chosen if given is None else given.contiguous(),
                weights,
                num_tokens,
                scale,
                HAS_BIAS=bias is not None,
                IS_GIVEN=given is not None,
                RENORMALISE=renormalise,
                **options,
            )
            if kernel is not None:  # None under Triton's interpreter
                note_kernel("route", kernel.metadata.shared)
        return weights, chosen

    @_route.register_fake
    def _(
        logits: Tensor,
        bias: Tensor | None,
        given: Tensor | None,
        num_chosen: int,
        is_softmax: bool,
        renormalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = logits.shape[0]
        rows = num_tokens if given is None else 0
        weights = logits.new_empty((num_tokens, num_chosen), dtype=torch.float32)
        return weights, logits.new_empty((rows, num_chosen), dtype=torch.int64)

    @torch.library.custom_op(
        "pentad::route_backward",
        mutates_args=(),
        schema="(Tensor grad, Tensor weights, Tensor chosen, Tensor? logits, int num_experts, "
        "bool is_softmax, bool renormalise, float scale) -> Tensor",
    )
    def _route_backward(
        grad: Tensor,
        weights: Tensor,
        chosen: Tensor,
        logits: Tensor | None,
        num_experts: int,
        is_softmax: bool,
        renormalise: bool,
        scale: float,
    ) -> Tensor:
        num_tokens, num_chosen = weights.shape
        out = weights.new_empty((num_tokens, num_experts))
        options = _options(num_experts, num_chosen, is_softmax)
        if num_tokens:
            _backward_kernel[(triton.cdiv(num_tokens, options["BLOCK"]),)](
                grad.contiguous(),
                weights.contiguous(),
                chosen.contiguous(),
                weights if logits is None else logits.contiguous(),
                out,
                num_tokens,
                scale,
                CHOSEN_WIDE=triton.next_power_of_2(num_chosen),
                RENORMALISE=renormalise,
                **options,
            )
        return out

    @_route_backward.register_fake
    def _(
        grad: Tensor,
        weights: Tensor,
        chosen: Tensor,
        logits: Tensor | None,
        num_experts: int,
        is_softmax: bool,
        renormalise: bool,
        scale: float,
    ) -> Tensor:
        return weights.new_empty((weights.shape[0], num_experts))

    def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, _, given, _, is_softmax, renormalise, scale = inputs
        weights, chosen = output
        # A softmax over only the chosen needs no logits in backward.
        needs_logits = not (is_softmax and renormalise)
        ctx.save_for_backward(
            weights, chosen if given is None else given, logits if needs_logits else None
        )
        ctx.num_experts = logits.shape[1]
        ctx.is_softmax, ctx.renormalise, ctx.scale = is_softmax, renormalise, scale

    def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        weights, chosen, logits = ctx.saved_tensors
        dlogits = torch.ops.pentad.route_backward(
            grad,
            weights,
            chosen,
            logits,
            ctx.num_experts,
            ctx.is_softmax,
            ctx.renormalise,
            ctx.scale,
        )
        return dlogits, None, None, None, None, None, None

    _route.register_autograd(_differentiate, setup_context=_remember)
