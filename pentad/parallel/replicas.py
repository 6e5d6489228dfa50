"""Whether ranks that hold copies of a shard hold the same bits: memory fails in silence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from pentad.core.group_values import Group, gather_values
from pentad.ops.digest import digest_of
from pentad.parallel.cuts import local, stored_box


def differing_copies(tensors: Mapping[str, Tensor], group: Group) -> list[tuple[str, int, int]]:
    """(name, rank, other rank) of each shard that the other rank has other bits of, on every rank.

    Every rank of the group calls it, with the tensors that it holds shards of.
    """
    shards = ((name, one) for name, one in tensors.items() if isinstance(one, DTensor))
    mine = digest_of((f"{name} {stored_box(one)}", local(one)) for name, one in shards).entries
    first: dict[str, tuple[int, str]] = {}
    found = []
    for rank, held in enumerate(gather_values(mine, group)):
        for shard, digest in held.items():
            holder, known = first.setdefault(shard, (rank, digest))
            if digest != known:
                found.append((shard.partition(" ")[0], holder, rank))
    return found
