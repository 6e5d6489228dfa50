"""Packs rows for one forward pass, and converts columns between token and label alignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.errors import RunError
from pentad.core.flat_rows import FlatRows, has_column, join_column, join_ids, lengths_of
from pentad.core.types import Row
from pentad.engine.buckets import TokenBucket, fill_bucket, has_bucket
from pentad.ops.tree import Copies, TreePlan, plan_tree, send, spread
from pentad.parallel.collectives import sum_ranks
from pentad.parallel.mesh import ALONE, Axis
from pentad.rl.ragged import cut

NO_LABEL = -1


class PackedSegments:
    """`core.types.Segments` of packed sequences, distributed over cp ranks. Each rank lists all S
    sequences, with the number of its own tokens in each, which is 0 for most."""

    def __init__(self, lengths_S: Tensor, num_tokens: int, cp: Axis = ALONE) -> None:
        self.lengths_S = lengths_S
        self.num_tokens = num_tokens
        self.cp = cp

    @property
    def num(self) -> int:
        return len(self.lengths_S)

    def sum(self, x_T: Tensor) -> Tensor:
        result: Tensor = _SegmentSum.apply(x_T, self.lengths_S)
        return sum_ranks(result, self.cp)

    def spread(self, x_S: Tensor) -> Tensor:
        result: Tensor = _SegmentSpread.apply(x_S, self.lengths_S, self.num_tokens)
        return result


# Both are deterministic on every device, unlike an indexed add on a GPU, and are each other's
# gradient. The number of tokens is an argument to avoid a device synchronisation.
def _sum(x_T: Tensor, lengths_S: Tensor) -> Tensor:
    return torch.segment_reduce(x_T.contiguous(), "sum", lengths=lengths_S, unsafe=True)


def _spread(x_S: Tensor, lengths_S: Tensor, num_tokens: int) -> Tensor:
    return torch.repeat_interleave(x_S, lengths_S, output_size=num_tokens)


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, lengths_S: Tensor) -> Tensor:
        ctx.lengths_S, ctx.num_tokens = lengths_S, len(x_T)
        return _sum(x_T, lengths_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _spread(grads[0], ctx.lengths_S, ctx.num_tokens), None


class _SegmentSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_S: Tensor, lengths_S: Tensor, num_tokens: int) -> Tensor:
        ctx.lengths_S = lengths_S
        return _spread(x_S, lengths_S, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum(grads[0], ctx.lengths_S), None, None


@dataclass(slots=True)
class PackedRows:
    """This rank's share of one microbatch, on the device. All columns but ids and positions are
    prediction-aligned."""

    num_rows: int
    """Number of rows; 0: padding only, computed so that all ranks make the same calls."""
    lengths: list[int]
    """Lengths of all rows of the microbatch, padding rows included."""
    ids_U: Tensor
    positions_U: Tensor
    labels_U: Tensor
    columns: dict[str, Tensor]
    segments: PackedSegments
    num_real: int = 0
    """Number of this share's U tokens that are not padding; they come first."""
    routes_TLk: Tensor | None = None
    """The experts of each token in each MoE layer, if the rows have them."""
    tree: RowTree | None = None
    bucket: TokenBucket | None = None
    """The sizes to which the microbatch is padded, if passes of these sizes may be captured."""
    num_given: int = 0
    """Number of tokens without the padding of the bucket, which comes last."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes for the whole microbatch."""
        return sum(self.lengths) if self.tree is None else self.tree.plan.num_tokens


class RowTree:
    """Rows with common prefixes, and the map from whole rows to computed tokens."""

    def __init__(self, plan: TreePlan, device: torch.device) -> None:
        self.plan = plan
        self.rows = Copies(plan.at_T, plan.num_tokens, device)

    def spread(self, x_U: Tensor | None) -> Tensor | None:
        return None if x_U is None else spread(x_U, self.rows)


def check_rows(rows: Sequence[Row], columns: Sequence[str], vocab_size: int) -> None:
    """Raises for the first invalid row and names it, which is not possible after packing."""
    is_flat = isinstance(rows, FlatRows) and all(rows.lengths)
    is_sound = is_flat and all(has_column(rows, name) for name in columns)
    for i, row in () if is_sound else enumerate(rows):
        if row.ids.ndim != 1 or row.ids.numel() == 0:
            raise RunError(f"row {i} has ids of shape {tuple(row.ids.shape)}, expected [L], L > 0")
        for name in columns:
            if name not in row.columns:
                have = ", ".join(sorted(row.columns)) or "none"
                raise RunError(f"row {i} has no column {name}, which the loss reads; it has {have}")
            if row.columns[name].shape != row.ids.shape:
                shape = tuple(row.columns[name].shape)
                raise RunError(
                    f"row {i}: column {name} has shape {shape} for {row.ids.numel()} ids"
                )
    if rows:
        ids = join_ids(rows)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            i = next(i for i, row in enumerate(rows) if (row.ids == bad).any())
            raise RunError(f"row {i} holds token id {bad}, outside the vocabulary of {vocab_size}")


def check_routes(rows: Sequence[Row], dims: ModelDims) -> None:
    """Checks that all rows or none have routes, and that the model has these experts."""
    if isinstance(rows, FlatRows):
        return
    num_given = sum(row.routes is not None for row in rows)
    if num_given == 0:
        return
    num_layers = sum(dims.is_moe(layer) for layer in range(dims.num_layers))
    for i, row in enumerate(rows):
        if row.routes is None:
            raise RunError(f"row {i} has no routes, but {num_given} of {len(rows)} rows have")
        shape = (row.ids.numel(), num_layers, dims.num_experts_per_token)
        if tuple(row.routes.shape) != shape or row.routes.dtype != torch.int64:
            given = f"{row.routes.dtype} {tuple(row.routes.shape)}"
            raise RunError(f"row {i}: routes are {given}, expected torch.int64 {shape}")
        if num_layers == 0:
            raise RunError(f"row {i} has routes, but the model has no mixture layer")
        low, high = int(row.routes.min()), int(row.routes.max())
        if low < 0 or high >= dims.num_experts:
            bad = low if low < 0 else high
            raise RunError(f"row {i}: routes name expert {bad}, the model has {dims.num_experts}")
        ordered = row.routes.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise RunError(f"row {i}: routes give a token the same expert twice")


def fill_up(lengths: Sequence[int], multiple: int, at_least: int = 1) -> list[int]:
    """Adds padding sequences until the sum is a multiple and at least `at_least`. None is longer
    than the longest given one, to bound the cost of attention over padding."""
    total = sum(lengths)
    missing = -(-max(total, at_least) // multiple) * multiple - total
    longest = max(lengths, default=missing)
    pieces = [longest] * (missing // longest) if missing else []
    rest = missing - sum(pieces)
    return [*lengths, *pieces, *([rest] if rest else [])]


def pack_rows(
    rows: Sequence[Row],
    columns: Sequence[str],
    device: torch.device,
    *,
    multiple: int = 1,
    at_least: int = 1,
    cp: Axis = ALONE,
    shared: Sequence[int] = (),
    buckets: bool = False,
) -> PackedRows:
    """Packs one microbatch, padded by `fill_up`, and returns the share of this cp rank. `shared`:
    number of first tokens that each row has in common with others of its group. `buckets`: also
    pads to one of few sizes, unless rows share tokens or attention has a kernel for their length.
    """
    given = lengths_of(rows)
    lengths = fill_up(given, multiple, at_least)
    bucket, num_given = None, sum(lengths)
    if buckets and not any(shared) and has_bucket(lengths):
        lengths, bucket = fill_bucket(lengths)
    length_S = np.asarray(lengths, dtype=np.int64)
    ends_S = np.cumsum(length_S)
    num_tokens, num_real = int(ends_S[-1]), sum(given)
    positions_T = torch.from_numpy(np.arange(num_tokens) - np.repeat(ends_S - length_S, length_S))
    last_S = torch.from_numpy(ends_S - 1)

    def pad(x_T: Tensor) -> Tensor:
        return F.pad(x_T, (0, num_tokens - num_real))

    ids_T = pad(join_ids(rows))
    labels_T = shift_in(ids_T, last_S, NO_LABEL)
    labels_T[num_real:] = NO_LABEL
    flat = {name: shift_in(pad(join_column(rows, name)), last_S) for name in columns}
    is_flat = isinstance(rows, FlatRows)
    routes = [] if is_flat else [row.routes for row in rows if row.routes is not None]
    routes_TLk = None
    if routes:
        filling = torch.arange(routes[0].shape[2]).expand(
            num_tokens - num_real, *routes[0].shape[1:]
        )
        routes_TLk = torch.cat([*routes, filling])
    assert num_tokens % cp.size == 0, f"{num_tokens} tokens cannot be split over {cp.size} ranks"
    start, stop = (num_tokens // cp.size * r for r in (cp.rank, cp.rank + 1))
    here_S = np.clip(ends_S, start, stop) - np.clip(ends_S - length_S, start, stop)

    def deal(x_T: Tensor) -> Tensor:
        x_T = x_T[start:stop] if cp.size > 1 else x_T
        return x_T if device.type == "cpu" else x_T.pin_memory().to(device, non_blocking=True)

    tree, computed = None, (ids_T, positions_T, labels_T)
    if any(shared):
        assert cp.size == 1 and not routes, "a tree's tokens are not split over ranks"
        tree = RowTree(_plan_tree(rows, shared, num_tokens - num_real, multiple, at_least), device)
        first_U, num_real = torch.from_numpy(tree.plan.first_U), tree.plan.num_real
        ids_U, positions_U, labels_U = (x_T[first_U] for x_T in computed)
        labels_U[num_real:] = NO_LABEL
        computed = (ids_U, positions_U, labels_U)
    here = len(computed[0]) // cp.size
    ids_U, positions_U, labels_U = map(deal, computed)
    return PackedRows(
        num_rows=len(rows),
        lengths=lengths,
        ids_U=ids_U,
        positions_U=positions_U,
        labels_U=labels_U,
        columns={name: deal(x_T) for name, x_T in flat.items()},
        segments=PackedSegments(send(here_S, device), stop - start, cp),
        num_real=min(max(num_real - cp.rank * here, 0), here),
        routes_TLk=None if routes_TLk is None else deal(routes_TLk),
        tree=tree,
        bucket=bucket,
        num_given=num_given // cp.size,
    )


def _plan_tree(
    rows: Sequence[Row], shared: Sequence[int], num_filled: int, multiple: int, at_least: int
) -> TreePlan:
    """Plans shared prefixes; rows that are alone of their group in this microbatch stay whole."""
    keys = [
        (-1 if row.group is None else row.group, n) for row, n in zip(rows, shared, strict=True)
    ]
    num_alike = Counter(keys)
    prefixes = [key if num_alike[key] > 1 else (key[0], 0) for key in keys]
    lengths = [row.ids.numel() for row in rows]
    num_saved = sum(n * (num_alike[which, n] - 1) for which, n in set(prefixes) if n)
    num = sum(lengths) - num_saved
    filling = fill_up([num], multiple, at_least)[1:]
    return plan_tree(lengths, prefixes, filling=filling, num_filled=num_filled)


def shift_in(x_T: Tensor, last_S: Tensor, fill: int = 0) -> Tensor:
    """Converts from token-aligned to prediction-aligned."""
    out_T = torch.empty_like(x_T)
    out_T[:-1] = x_T[1:]
    out_T[last_S] = fill
    return out_T


def split_out(x_T: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Converts from prediction-aligned to token-aligned, one tensor per row, on the CPU."""
    x_T = x_T.detach().cpu()
    out_T = torch.empty_like(x_T)
    out_T[1:] = x_T[:-1]
    first_S = np.cumsum(np.asarray([0, *lengths[:-1]], dtype=np.int64))
    out_T[torch.from_numpy(first_S)] = 0
    return cut(out_T, lengths)
