"""Batch-invariant operations: the result for a token is bitwise independent of the rest of the
batch.

Products, sums and even exponentials round differently for different numbers of rows: libraries
choose other tiles, split sums differently and use other code for the last elements. Here the shape
of every call depends on the model only. On a GPU each is a Triton kernel with one fixed tile
(`invariant_kernels`). On a CPU rows are padded to tiles of one size, so every product, sum and
exponential has one shape; `check_product` verifies once per shape that a row's position in its tile
has no effect.

Gradients are those of the plain operations: correct to rounding, not batch-invariant.

Shapes: T tokens, D and O widths, E experts, N rows sorted by expert, V vocabulary, S spans, H query
heads, K key-value heads, d head width, P places that hold keys and values, R rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.core.errors import Problem, UserError
from pentad.ops import experts as plain_experts
from pentad.ops.gated import clamped_mul as plain_clamped_mul
from pentad.ops.gated import weighted
from pentad.ops.logprob import token_logprobs as plain_logprobs
from pentad.ops.sinks import limited as plain_limited
from pentad.ops.spans import Spans, packed_spans

if TYPE_CHECKING:
    from types import ModuleType

TILE = 16
"""Rows of every product on a CPU."""
SERIAL = 16384
"""Maximum elements of a tile that torch processes on one thread, in order."""
VECTOR = 32
"""Tiles with rows of a multiple of this have no remainder outside vector operations."""
BLOCK = 32
"""Keys per block of attention on a CPU."""
QUERIES = 4
"""Queries of one sequence in a tile of attention on a CPU."""
NO_LOGIT = -1e30
"""Logit with weight 0 that is finite, so that 0 times it is 0."""
LOGITS = 1 << 26
"""Maximum number of logits (rows x vocabulary) in memory at once."""


def kernels() -> ModuleType:
    """Imports the Triton kernels. Triton is installed only on machines with a GPU."""
    from pentad.ops import invariant_kernels

    return invariant_kernels


class _WithPlainGradient(torch.autograd.Function):
    """Batch-invariant forward with the gradient of the plain operation at the same inputs."""

    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Any], plain: Callable[..., Any], *inputs: Any
    ) -> Any:
        ctx.plain = plain
        ctx.set_materialize_grads(False)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.save_for_backward(*tensors)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, inputs = iter(ctx.saved_tensors), []
        for other, is_tensor, needed in zip(
            ctx.others, ctx.is_tensor, ctx.needs_input_grad[2:], strict=True
        ):
            value = next(saved).detach().requires_grad_(needed) if is_tensor else other
            inputs.append(value)
        with torch.enable_grad():
            results = ctx.plain(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(x, g) for x, g in zip(results, grads, strict=True) if g is not None]
        wanted = [x for x, n in zip(inputs, ctx.needs_input_grad[2:], strict=True) if n]
        found = iter(
            torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs])
            if pairs and wanted
            else [None] * len(wanted)
        )
        return (None, None, *(next(found) if n else None for n in ctx.needs_input_grad[2:]))


# Row-wise operations on a CPU.


def by_tiles(fn: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Applies the row-wise function `fn` to tiles of a fixed number of rows; not for GPUs.

    The width of the first tensor sets the tile size; `widened` pads it to need fewer tiles.
    """
    num_rows = xs[0].shape[0]
    if num_rows == 0:
        return fn(*xs)
    width = xs[0][0].numel()
    size = 1 if width % VECTOR else max(1, SERIAL // width)
    padded = [filled_up(x, size) for x in xs]
    tiles = [fn(*(x[i : i + size] for x in padded)) for i in range(0, padded[0].shape[0], size)]
    return torch.cat(tiles)[:num_rows]


def widened(x_TD: Tensor, value: float = 0.0) -> Tensor:
    """Pads columns with `value` to a multiple of VECTOR."""
    missing = -x_TD.shape[-1] % VECTOR
    return F.pad(x_TD, (0, missing), value=value) if missing else x_TD


def filled_up(x: Tensor, size: int) -> Tensor:
    """Copies x to memory with torch's default alignment and pads rows with zeros to a multiple of
    `size`: products may depend on alignment."""
    num_rows = -(-x.shape[0] // size) * size
    missing = num_rows - x.shape[0]
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def wide_of(fn: Callable[[Tensor], Tensor], x_R1: Tensor) -> Tensor:
    """Applies `fn` to a column of numbers, padded so that none falls in a vector remainder."""
    return fn(x_R1.expand(*x_R1.shape[:-1], VECTOR).contiguous())[..., :1]


def check_product(weight_OD: Tensor) -> None:
    """Raises if the matrix product of a row depends on its position in the tile on this machine."""
    _check_product(*weight_OD.shape, weight_OD.dtype)


@cache
def _check_product(num_out: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_out * 7919 + width)
    weight_OD = torch.randn(num_out, width, generator=generator).to(dtype)
    row_D = torch.randn(width, generator=generator).to(dtype)
    y_RO = torch.mm(row_D.repeat(TILE, 1), weight_OD.t())
    if not torch.equal(y_RO, y_RO[:1].expand_as(y_RO)):
        rule = (
            f"this machine's product with a [{num_out}, {width}] weight differs for a row at "
            "other places of a tile"
        )
        raise UserError(Problem("strict = true", rule, "leave strict out on this machine"))


# Linear maps.


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    y_TO: Tensor = _Linear.apply(x_TD, weight_OD)
    return y_TO if bias_O is None else y_TO + bias_O


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_OD)
        return exact_linear(x_TD, weight_OD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_OD = ctx.saved_tensors
        grad_TO = grads[0].to(weight_OD.dtype)
        dx_TD = grad_TO @ weight_OD if ctx.needs_input_grad[0] else None
        dweight_OD = grad_TO.t() @ x_TD if ctx.needs_input_grad[1] else None
        return dx_TD, dweight_OD


def exact_linear(x_TD: Tensor, weight_OD: Tensor, *, wide: bool = False) -> Tensor:
    """x @ weight^T without gradient; with `wide` the result stays in fp32."""
    if x_TD.is_cuda:
        result: Tensor = kernels().linear(x_TD.contiguous(), weight_OD, wide=wide)
        return result
    if wide and x_TD.dtype.itemsize == 2:
        x_TD, weight_OD = x_TD.float(), weight_OD.float()
    check_product(weight_OD)
    padded_TD = filled_up(x_TD.detach(), TILE)
    out_TO = padded_TD.new_empty((padded_TD.shape[0], weight_OD.shape[0]))
    weight_DO = weight_OD.detach().t()
    for start in range(0, padded_TD.shape[0], TILE):
        rows = slice(start, start + TILE)
        torch.mm(padded_TD[rows], weight_DO, out=out_TO[rows])
    return out_TO[: x_TD.shape[0]]


def wide_linear(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Linear map in fp32 for any input dtype, as routers compute it."""

    def plain(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), weight_OD.float())

    def exact(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
        return exact_linear(x_TD, weight_OD, wide=True)

    result: Tensor = _WithPlainGradient.apply(exact, plain, x_TD, weight_OD)
    return result


def grouped_linear(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Grouped GEMM: x @ weight[e]^T for the rows of each expert e."""
    result: Tensor = _WithPlainGradient.apply(
        _exact_grouped, plain_experts.grouped_linear, x_ND, weight_EOD, ends_E
    )
    return result


def _exact_grouped(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    if x_ND.is_cuda:
        result: Tensor = kernels().grouped_linear(x_ND.contiguous(), weight_EOD, ends_E)
        return result
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(x_ND.split(sizes), weight_EOD, strict=True)
    return torch.cat([exact_linear(part, weight) for part, weight in parts])


# Norms and activations.


def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim, with the rounding of `models.layers.Norm`."""

    def plain(x: Tensor, weight_D: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight_D * wide.to(x.dtype)

    def exact(x: Tensor, weight_D: Tensor) -> Tensor:
        if x.is_cuda:
            result: Tensor = kernels().norm(x.contiguous(), weight_D, eps)
            return result
        width = x.shape[-1]

        def scale(tile_RD: Tensor) -> Tensor:
            wide = tile_RD.float()
            mean = wide.pow(2).sum(-1, keepdim=True) / width
            return (wide * torch.rsqrt(mean + eps)).to(x.dtype)

        scaled = by_tiles(scale, widened(x.reshape(-1, width)))[:, :width]
        return weight_D * scaled.reshape(x.shape)

    result: Tensor = _WithPlainGradient.apply(exact, plain, x, weight_D)
    return result


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up. Elementwise results on a GPU do not depend on the position."""
    if gate_TF.is_cuda:
        return F.silu(gate_TF) * up_TF
    width = gate_TF.shape[-1]
    return by_tiles(F.silu, widened(gate_TF))[:, :width] * up_TF


def weighted_silu_mul(h_NG: Tensor, weights_N: Tensor | None) -> Tensor:
    """Invariant `gated.weighted_silu_mul`."""
    return weighted(silu_mul(*h_NG.chunk(2, dim=-1)), weights_N)


def clamped_mul(h_NG: Tensor, weights_N: Tensor | None) -> Tensor:
    """Invariant `gated.clamped_mul`; positions as in `silu_mul`."""

    def sigmoid(x_NM: Tensor) -> Tensor:
        return by_tiles(torch.sigmoid, widened(x_NM))[:, : x_NM.shape[-1]]

    return plain_clamped_mul(h_NG, weights_N, torch.sigmoid if h_NG.is_cuda else sigmoid)


def gelu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation; positions as in `silu_mul`."""

    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    if gate_TF.is_cuda:
        return gelu(gate_TF) * up_TF
    width = gate_TF.shape[-1]
    return by_tiles(gelu, widened(gate_TF))[:, :width] * up_TF


def sigmoid(x_T1: Tensor) -> Tensor:
    if x_T1.is_cuda:
        return x_T1.sigmoid()
    return by_tiles(torch.sigmoid, x_T1.expand(-1, VECTOR))[:, :1]


def cos_sin(angles_Td: Tensor) -> tuple[Tensor, Tensor]:
    if angles_Td.is_cuda:
        return angles_Td.cos(), angles_Td.sin()
    width, wide = angles_Td.shape[-1], widened(angles_Td)
    return by_tiles(torch.cos, wide)[:, :width], by_tiles(torch.sin, wide)[:, :width]


# The lm head.


def label_logprobs(logits_TV: Tensor, labels_T: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor]:
    """(log p(label), entropy) of softmax(logits * scale); logits in fp32, without gradient."""
    if logits_TV.is_cuda:
        result: tuple[Tensor, Tensor] = kernels().label_logprobs(logits_TV, labels_T, scale_T)
        return result

    def reduce(x_RV: Tensor, label_R1: Tensor, scale_R1: Tensor) -> Tensor:
        x_RV = x_RV * scale_R1
        top_R1 = x_RV.amax(-1, keepdim=True)
        weights_RV = torch.exp(x_RV - top_R1)
        total_R1 = weights_RV.sum(-1, keepdim=True)
        lse_R1 = top_R1 + wide_of(torch.log, total_R1)
        mean_R1 = (weights_RV * x_RV).sum(-1, keepdim=True) / total_R1
        return torch.cat([x_RV.gather(1, label_R1) - lse_R1, lse_R1 - mean_R1], dim=1)

    labels_T1 = labels_T.clamp(min=0)[:, None]
    wide_TV = widened(logits_TV, NO_LOGIT)
    logprobs_T, entropy_T = by_tiles(reduce, wide_TV, labels_T1, scale_T[:, None]).unbind(1)
    return logprobs_T, entropy_T


def limited(logits_TV: Tensor, cap: float | None) -> Tensor:
    """Invariant `sinks.limited`, without gradient."""
    if cap is None or logits_TV.is_cuda:
        return plain_limited(logits_TV, cap)
    return by_tiles(partial(plain_limited, cap=cap), widened(logits_TV))[:, : logits_TV.shape[1]]


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    cap: float | None = None,
    chunk_bytes: int | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Invariant `ops.logprob.token_logprobs`; logits are kept only within backward."""

    def plain(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        return plain_logprobs(
            hidden_TD,
            weight_VD,
            labels_T,
            temperature=temperature,
            cap=cap,
            chunk_bytes=chunk_bytes,
            keep=keep,
        )

    def exact(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        size = max(TILE, LOGITS // weight_VD.shape[0])
        out: list[tuple[Tensor, Tensor]] = []
        for hidden_CD, labels_C in zip(hidden_TD.split(size), labels_T.split(size), strict=True):
            logits_CV = limited(exact_linear(hidden_CD, weight_VD, wide=True), cap)
            scale_C = logits_CV.new_full((len(labels_C),), scale_of(temperature))
            pair = label_logprobs(logits_CV, labels_C, scale_C)
            out.append((pair[0], pair[1]))
        no_label_T = labels_T < 0
        logprobs_T, entropy_T = (torch.cat(parts) for parts in zip(*out, strict=True))
        return logprobs_T.masked_fill(no_label_T, 0), entropy_T.masked_fill(no_label_T, 0)

    result: tuple[Tensor, Tensor] = _WithPlainGradient.apply(
        exact, plain, hidden_TD, weight_VD, labels_T
    )
    return result


def scale_of(temperature: float) -> float:
    """1 / temperature rounded once to fp32, the factor of logits; 1 for temperature 0."""
    return float(np.float32(1.0 / temperature)) if temperature > 0 else 1.0


# Attention.


def attend_spans(
    q_THd: Tensor,
    k_PKd: Tensor,
    v_PKd: Tensor,
    spans: Spans,
    window: int | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Causal attention of every query over its sequence on a CPU, without gradient.

    A tile has QUERIES queries of one sequence. A fixed number of tiles, which depends on the
    model's heads, is batched in every operation.
    """
    num_together = max(1, SERIAL // (q_THd.shape[1] * QUERIES * BLOCK))
    num_S = -(-spans.count_S // QUERIES)
    span_N = np.repeat(np.arange(len(num_S)), num_S)
    offset_N = np.arange(len(span_N)) - np.repeat(np.cumsum(num_S) - num_S, num_S)
    offset_N *= QUERIES
    # Tiles with equal numbers of key blocks are batched together.
    order = np.argsort(spans.start_S[span_N] + offset_N, kind="stable")
    out_THd = torch.empty_like(q_THd)
    for start in range(0, len(order), num_together):
        some = order[start : start + num_together]
        # Padded with copies of the last tile to keep the shape fixed.
        some = np.concatenate([some, np.repeat(some[-1:], num_together - len(some))])
        _attend_tiles(
            q_THd, k_PKd, v_PKd, spans, span_N[some], offset_N[some], window, sinks, cap, out_THd
        )  # fmt: skip
    return out_THd


def _attend_tiles(
    q_THd: Tensor,
    k_PKd: Tensor,
    v_PKd: Tensor,
    spans: Spans,
    span_N: np.ndarray,
    offset_N: np.ndarray,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
    out_THd: Tensor,
) -> None:
    """Online softmax over blocks of keys in order. A fully masked block does not change any bit, so
    queries in a tile may need different numbers of blocks."""
    num_heads, num_kv, width = q_THd.shape[1], k_PKd.shape[1], q_THd.shape[2]
    group, num = num_heads // num_kv, len(span_N)
    inner_Q = np.minimum(np.arange(QUERIES), spans.count_S[span_N, None] - offset_N[:, None] - 1)
    token_NQ = torch.from_numpy(spans.first_S[span_N, None] + offset_N[:, None] + inner_Q)
    position_NQ = spans.start_S[span_N, None] + offset_N[:, None] + inner_Q
    q_BRd = q_THd[token_NQ].view(num, QUERIES, num_kv, group, width).transpose(1, 2)
    q_BRd = q_BRd.reshape(num * num_kv, QUERIES * group, width)
    position_B1R1 = torch.from_numpy(np.repeat(position_NQ, group, axis=1))[:, None, :, None]
    top = q_BRd.new_full((*q_BRd.shape[:2], 1), float("-inf"), dtype=torch.float32)
    total, acc = torch.zeros_like(top), torch.zeros_like(q_BRd, dtype=torch.float32)
    if sinks is not None:  # as a first key without a value
        sinks_KR1 = sinks.float().view(num_kv, group).repeat(1, QUERIES)[..., None]
        top, total = sinks_KR1.repeat(num, 1, 1), torch.ones_like(total)
    first = 0 if window is None else max(0, int(position_NQ.min()) - window + 1) // BLOCK
    for b in range(first, int(position_NQ.max()) // BLOCK + 1):
        places = torch.from_numpy(spans.places(span_N, b * BLOCK, BLOCK)).flatten()
        k_Bbd, v_Bbd = (
            x.index_select(0, places).view(num, BLOCK, num_kv, width).transpose(1, 2)
            .reshape(num * num_kv, BLOCK, width) for x in (k_PKd, v_PKd)
        )  # fmt: skip
        distance = position_B1R1 - (b * BLOCK + torch.arange(BLOCK))
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = torch.bmm(q_BRd, k_Bbd.transpose(1, 2)).float() * width**-0.5
        scores = plain_limited(scores, cap).view(num, num_kv, -1, BLOCK)
        scores = scores.masked_fill(hidden, float("-inf"))
        scores = scores.view(num * num_kv, -1, BLOCK)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        keep, weights = wide_of(torch.exp, top - base), torch.exp(scores - base)
        total = total * keep + weights.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weights.to(v_Bbd.dtype), v_Bbd).float()
        top = higher
    o_BRd = (acc / total).to(q_THd.dtype)
    o_NQHd = o_BRd.view(num, num_kv, QUERIES, group, width).transpose(1, 2).flatten(2, 3)
    # Padding queries are copies of the last one and write the same bits.
    out_THd[token_NQ] = o_NQHd


class PackedAttend:
    """Packed attention of the learner; its gradient is that of `plain`."""

    def __init__(
        self, lengths: Sequence[int], plain: Callable[..., Tensor], device: torch.device
    ) -> None:
        self.plain = plain
        self.spans = packed_spans(lengths)
        self.tiles: Any = None
        self.device = device

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        def exact(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, sinks: Tensor | None) -> Tensor:
            if not q_THd.is_cuda:
                return attend_spans(q_THd, k_TKd, v_TKd, self.spans, window, sinks, cap)
            if self.tiles is None:
                group = q_THd.shape[1] // k_TKd.shape[1]
                self.tiles = kernels().tiles_of(self.spans, group, self.device)
            q, k, v = (x.contiguous() for x in (q_THd, k_TKd, v_TKd))
            result: Tensor = kernels().attend(q, k, v, self.tiles, window, sinks, cap)
            return result

        def plain(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, sinks: Tensor | None) -> Tensor:
            given = {"sinks": sinks, "cap": cap}
            options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
            return self.plain(layer, q_THd, k_TKd, v_TKd, window=window, **options)

        result: Tensor = _WithPlainGradient.apply(exact, plain, q_THd, k_TKd, v_TKd, sinks)
        return result
