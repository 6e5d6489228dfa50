"""Prefix sharing in training: rows with a common prefix form a tree whose prefix is computed once.

A microbatch of rows with common prefixes holds, for each prefix, its tokens and then the rest of
each row. The last common token is kept in each row, since it predicts a different token there. A
token attends to the prefix and to earlier tokens of its own row, so results and gradients equal
those of whole rows up to rounding.

Only attention and code that reads its results need changes, since all other layers are per token.
In attention, the rest of a row is a sequence with the keys of its prefix and its own keys.

Shapes: T tokens of whole rows (of the tree, where attention is called), U tokens of the tree, E
keys with each prefix repeated for its rows, H query heads, K key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentad.ops import flash4
from pentad.ops.attention import (
    PaddedAttend,
    Window,
    flash_kind,
    varlen,
)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Maps tokens of whole rows to tokens of the tree."""

    at_T: np.ndarray
    """int64 [T]: token of the tree for each token of the rows."""
    first_U: np.ndarray
    """int64 [U]: first row token that maps to each token of the tree; any for padding."""
    num_real: int
    """Number of tokens before the padding."""
    queries: tuple[int, ...]
    """Query tokens of each sequence of attention: prefixes, rests of rows, padding."""
    keys: tuple[int, ...]
    """Key tokens of each sequence, those of the prefix included."""
    keys_E: np.ndarray
    """int64 [E]: token of the tree of each key."""

    @property
    def num_tokens(self) -> int:
        return len(self.first_U)


def plan_tree(
    lengths: Sequence[int],
    prefixes: Sequence[tuple[int, int]],
    *,
    filling: Sequence[int] = (),
    num_filled: int = 0,
) -> TreePlan:
    """Builds a plan. `prefixes`: (prefix index, number of its tokens) of each row; 0 tokens for a
    row without prefix. `filling`: lengths of padding sequences at the end of the tree;
    `num_filled`: padding tokens at the end of the rows."""
    at: list[np.ndarray] = [np.empty(0, np.int64)] * len(lengths)
    queries: list[int] = []
    keys: list[int] = []
    picked: list[np.ndarray] = []
    end = 0

    def add(num: int, before: np.ndarray) -> np.ndarray:
        nonlocal end
        own = np.arange(end, end + num)
        end += num
        queries.append(num)
        keys.append(len(before) + num)
        picked.extend((before, own))
        return own

    none = np.empty(0, np.int64)
    begun: dict[int, np.ndarray] = {}
    for row in _by_prefix(prefixes):
        which, shared = prefixes[row]
        if shared and which not in begun:
            begun[which] = add(shared, none)
        prefix = begun[which] if shared else none
        at[row] = np.concatenate((prefix, add(lengths[row] - shared, prefix)))
    num_real = end
    for num in filling:
        add(num, none)
    at_T = np.concatenate((*at, np.full(num_filled, num_real if filling else 0)))
    first_U = np.zeros(end, np.int64)
    first_U[at_T[::-1]] = np.arange(len(at_T))[::-1]  # of duplicates the first is written last
    return TreePlan(at_T, first_U, num_real, tuple(queries), tuple(keys), np.concatenate(picked))


def _by_prefix(prefixes: Sequence[tuple[int, int]]) -> list[int]:
    """Row indices with the rows of a prefix grouped together."""
    first: dict[int, int] = {}
    for row, (which, shared) in enumerate(prefixes):
        if shared:
            first.setdefault(which, row)
    place = [first[which] if shared else row for row, (which, shared) in enumerate(prefixes)]
    return sorted(range(len(prefixes)), key=lambda row: (place[row], row))


class Copies:
    """Maps each entry of a shorter list to its copies in a longer one; on the device."""

    def __init__(self, source: np.ndarray, num: int, device: torch.device) -> None:
        self.source = send(source, device)
        """Position i of the long list copies entry source[i]."""
        self.order = send(np.argsort(source, kind="stable"), device)
        """Positions of the long list, grouped by entry."""
        counts = np.bincount(source, minlength=num)
        self.bounds = send(np.concatenate(([0], np.cumsum(counts))), device)
        """Start of each entry's positions in `order`, and the end of the last ones."""


def send(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Spread(torch.autograd.Function):
    """Copies entries to their positions; backward sums the copies in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, x_U: Tensor, source_T: Tensor, order_T: Tensor, bounds_U: Tensor
    ) -> Tensor:
        ctx.save_for_backward(order_T, bounds_U)
        return x_U.index_select(0, source_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order_T, bounds_U = ctx.saved_tensors
        return sum_copies(grads[0], order_T, bounds_U), None, None, None


def spread(x_U: Tensor, copies: Copies) -> Tensor:
    result: Tensor = Spread.apply(x_U, copies.source, copies.order, copies.bounds)
    return result


def sum_copies(x_E: Tensor, order_E: Tensor, bounds_U: Tensor) -> Tensor:
    """Entry u: the sum of its copies, in at least fp32."""
    if x_E.device.type == "cuda" and x_E.dtype in (torch.bfloat16, torch.float16):
        # Imported here: Triton takes a second to import and is not installed on every machine.
        from pentad.ops.sum_kernel import sum_spans

        return sum_spans(x_E, order_E, bounds_U)
    flat = x_E.flatten(1) if x_E.ndim > 1 else x_E[:, None]
    wide = flat if flat.dtype == torch.float64 else flat.float()
    lengths_U = bounds_U.diff()
    picked = wide.index_select(0, order_E)
    summed = torch.segment_reduce(picked, "sum", lengths=lengths_U, unsafe=True)
    return summed.to(x_E.dtype).view(len(lengths_U), *x_E.shape[1:])


def build_tree_attend(
    plan: TreePlan,
    rows: Copies,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    longest: int | None = None,
) -> TreeAttend | WholeRowAttend:
    """The fastest attention over a tree. `lengths` are those of whole rows, including padding."""
    kind = flash_kind(longest or max(lengths), device=device, dtype=dtype, head_dim=head_dim)
    if kind is None:
        return WholeRowAttend(PaddedAttend(lengths, device=device), plan, rows, device)
    return TreeAttend(plan, device=device, is_flash4=kind == "flash4")


class WholeRowAttend:
    """Tree attention that repeats each prefix and attends over whole rows: for devices and dtypes
    without a flash kernel."""

    def __init__(
        self, whole: PaddedAttend, plan: TreePlan, rows: Copies, device: torch.device
    ) -> None:
        self.whole, self.rows = whole, rows
        self.first_U = send(plan.first_U, device)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: Window = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        q, k, v = (spread(x, self.rows) for x in (q_THd, k_TKd, v_TKd))
        return self.whole(layer, q, k, v, window, sinks, cap).index_select(0, self.first_U)


class TreeAttend:
    """Tree attention by a flash kernel: sequences with more keys than queries."""

    def __init__(self, plan: TreePlan, *, device: torch.device, is_flash4: bool) -> None:
        self.is_flash4 = is_flash4
        self.keys = Copies(plan.keys_E, plan.num_tokens, device)
        self.bounds_q, self.bounds_k = (_bounds(n, device) for n in (plan.queries, plan.keys))
        self.max_q, self.max_k = (
            1 << (max(lengths) - 1).bit_length() for lengths in (plan.queries, plan.keys)
        )

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: Window = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        assert cap is None, "`core.fit.no_tree` rejects limited scores"
        bounds = (self.bounds_q, self.bounds_k, self.max_q, self.max_k)
        if not self.is_flash4 or sinks is not None:
            k_EKd, v_EKd = (spread(x, self.keys) for x in (k_TKd, v_TKd))
            return varlen(q_THd, k_EKd, v_EKd, *bounds, window, sinks)
        keys = (self.keys.source, self.keys.order, self.keys.bounds)
        result: Tensor = tree_flash4(q_THd, k_TKd, v_TKd, *keys, *bounds, window or 0)[0]
        return result


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return send(np.cumsum([0, *lengths]).astype(np.int32), device)


@torch.library.custom_op("pentad::tree_flash4", mutates_args=(), device_types="cuda")
def tree_flash4(
    q_UHd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    source_E: Tensor,
    order_E: Tensor,
    bounds_U: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4 over repeated keys, which are not saved: backward repeats them again."""
    k_EKd, v_EKd = (x.index_select(0, source_E) for x in (k_UKd, v_UKd))
    return flash4.attend(q_UHd, k_EKd, v_EKd, bounds_q, bounds_k, max_q, max_k, window)


@tree_flash4.register_fake
def _(q_UHd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return flash4.results_of(q_UHd)


@torch.library.custom_op("pentad::tree_flash4_backward", mutates_args=(), device_types="cuda")
def tree_flash4_backward(
    grad_UHd: Tensor,
    q_UHd: Tensor,
    k_UKd: Tensor,
    v_UKd: Tensor,
    out_UHd: Tensor,
    lse_HU: Tensor,
    source_E: Tensor,
    order_E: Tensor,
    bounds_U: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    k_EKd, v_EKd = (x.index_select(0, source_E) for x in (k_UKd, v_UKd))
    dq_UHd, *wide = flash4.attend_backward(
        grad_UHd,
        q_UHd,
        k_EKd,
        v_EKd,
        out_UHd,
        lse_HU,
        bounds_q,
        bounds_k,
        max_q,
        max_k,
        window,
    )
    dk_UKd, dv_UKd = (sum_copies(x_EKd, order_E, bounds_U) for x_EKd in wide)
    return dq_UHd, dk_UKd, dv_UKd


@tree_flash4_backward.register_fake
def _(
    grad_UHd: Tensor, q_UHd: Tensor, k_UKd: Tensor, v_UKd: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q_UHd, k_UKd, v_UKd))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_UHd: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_UHd is None:
        return (None,) * 11
    limits = (ctx.max_q, ctx.max_k, ctx.window)
    grads = tree_flash4_backward(grad_UHd.contiguous(), *ctx.saved_tensors, *limits)
    return (*grads, *(None,) * 8)


tree_flash4.register_autograd(_backward, setup_context=_save)
