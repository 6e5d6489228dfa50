"""Gradients over ranks: sums that FSDP2 does not compute, the exact norm, and comparison of copies.

FSDP2 sums over the ranks that shard a parameter. The others are parameters used by several ranks of
one microbatch (norms and routers under tp, repeated kv heads), each with some of the tokens or
heads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pentad.core.errors import RunError
from pentad.core.group_values import OptionalGroup, gather_values
from pentad.ops.digest import digest_of
from pentad.parallel.collectives import reduce_ranks
from pentad.parallel.cuts import Cut, local
from pentad.parallel.mesh import Axis, Meshes
from pentad.weights.boxes import as_spread, box_of

MAX_APART = 0.05
"""Largest relative difference of equal gradients: rounding in 16 bit is far below it, gradients of
different heads are far above."""


@torch.no_grad()
def sum_copies(
    gradients: Mapping[str, Tensor], cuts: Mapping[str, Cut], device: torch.device
) -> None:
    """Sums the gradients of ranks with the same parameter in place, once per step. All ranks of an
    axis must have gradients of the same parameters. Gradients on the host are summed on the
    device."""
    by_axis: dict[tuple[Axis, torch.dtype, bool], list[Tensor]] = {}
    for name, gradient in gradients.items():
        for axis, sees_all in ((cuts[name].data, False), (cuts[name].copies, cuts[name].sees_all)):
            if axis.size > 1:
                by_axis.setdefault((axis, gradient.dtype, sees_all), []).append(gradient)
    for (axis, _, sees_all), parts in by_axis.items():
        total = reduce_ranks(_flatten_dense_tensors(parts).to(device), axis).to(parts[0].device)
        if sees_all:  # the mean of equal values, so that rounding does not make the copies differ
            total = total / axis.size
            check_equal(parts, list(_unflatten_dense_tensors(total, parts)))
        torch._foreach_copy_(parts, list(_unflatten_dense_tensors(total, parts)))


def check_equal(mine: list[Tensor], means: list[Tensor]) -> None:
    """Raises if copies differ: one with only some tokens or heads would be averaged silently."""
    apart = torch.stack(torch._foreach_norm(torch._foreach_sub(mine, means)))
    size = torch.stack(torch._foreach_norm(means))
    if bool((apart > MAX_APART * size).any()):  # False for NaN
        raise RunError(
            "gradients of parameters that tp does not split differ between its ranks: the model's "
            "tensor-parallel plan does not name all that it should; use t1"
        )


def global_square(
    gradients: Mapping[str, Tensor], cuts: Mapping[str, Cut], meshes: Meshes
) -> Tensor:
    """Returns the square of the whole gradient's 2-norm from each rank's shards; keeps inf and NaN.

    Every element counts once: of equal shards only the first rank's. The result is bitwise equal on
    all ranks, so all make the same decision.
    """
    is_first = meshes.coords.dp_replicate == 0
    counted = [
        gradient
        for name, gradient in gradients.items()
        if is_first and cuts[name].copies.rank == cuts[name].data.rank == 0
    ]
    return reduce_ranks(sum_of_squares(counted, meshes.device), meshes.world)


def sum_of_squares(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    # In fp32: norms of 16-bit gradients would be 16-bit. Concatenated first, to save launches.
    wide = functools.reduce(torch.promote_types, {x.dtype for x in parts}, torch.float32)
    norms = torch.stack(torch._foreach_norm(list(parts), dtype=wide))
    return norms.double().square().sum().to(device)


def differing_copies(
    tensors: Mapping[str, Tensor], group: OptionalGroup
) -> list[tuple[str, int, int]]:
    """Returns (name, rank, other rank) of each shard that differs bitwise between the two, on every
    rank. Every rank of the group must call it, with the tensors of its shards."""
    shards = ((name, one) for name, one in tensors.items() if as_spread(one) is not None)
    mine = digest_of((f"{name} {box_of(one)}", local(one)) for name, one in shards).entries
    first: dict[str, tuple[int, str]] = {}
    found = []
    for rank, held in enumerate(gather_values(mine, group)):
        for shard, digest in held.items():
            holder, known = first.setdefault(shard, (rank, digest))
            if digest != known:
                found.append((shard.partition(" ")[0], holder, rank))
    return found
