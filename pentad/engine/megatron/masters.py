"""Master weights of Megatron's modules.

Data-parallel ranks shard the masters and the optimizer state, as in Megatron's distributed
optimizer. Unlike there, a share is a block of each tensor, so that every backend can read it from a
recovery checkpoint. Before a pass the shares are gathered into the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.parallel.mesh import Axis

GATHERED = 2**27
"""Number of elements gathered at once."""


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """The block of a weight with which a module of this rank computes."""

    used: Tensor
    """The module's memory."""
    gradient: Tensor
    """Accumulated by the backward pass."""
    dim: int
    """The dim along which data-parallel ranks split it."""
    axis: Axis
    """The mesh axis of those ranks."""

    def shares(self, block: Tensor) -> list[Tensor]:
        """Returns the shares of all ranks in a block, as views."""
        parts = list(block.chunk(self.axis.size, self.dim))
        empty = block.narrow(self.dim, 0, 0)
        return [*parts, *(empty for _ in range(self.axis.size - len(parts)))]

    def share(self, block: Tensor) -> Tensor:
        """Returns this rank's share of a block, as contiguous memory."""
        return self.shares(block)[self.axis.rank].contiguous()

    def master(self, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised master weights; the module's memory itself if it is not sharded and
        has the same dtype."""
        if self.axis.size == 1 and self.used.dtype == dtype:
            return self.used
        return torch.empty_like(self.share(self.used), dtype=dtype)


def follow_masters(weights: Mapping[str, SharedWeight], masters: Mapping[str, Tensor]) -> None:
    """Gathers the masters of all ranks into the modules."""
    copied = [name for name, weight in weights.items() if weight.axis.size == 1]
    copied = [name for name in copied if masters[name] is not weights[name].used]
    if copied:
        used = [weights[name].used for name in copied]
        torch._foreach_copy_(used, [masters[name] for name in copied])
    for group in _groups(weights):
        _gather(group, masters)


def _groups(weights: Mapping[str, SharedWeight]) -> Iterator[dict[str, SharedWeight]]:
    """Yields groups of weights with one axis and dtype, limited in size to bound memory. All ranks
    of an axis make the same groups."""
    kinds: dict[tuple[int, torch.dtype], dict[str, SharedWeight]] = {}
    for name, weight in weights.items():
        if weight.axis.size > 1:
            kinds.setdefault((id(weight.axis.group), weight.used.dtype), {})[name] = weight
    for of_kind in kinds.values():
        group: dict[str, SharedWeight] = {}
        num_elements = 0
        for name, weight in of_kind.items():
            if group and num_elements + weight.used.numel() > GATHERED:
                yield group
                group, num_elements = {}, 0
            group[name] = weight
            num_elements += weight.used.numel()
        yield group


def _gather(group: Mapping[str, SharedWeight], masters: Mapping[str, Tensor]) -> None:
    first = next(iter(group.values()))
    axis, like = first.axis, first.used
    largest = [weight.shares(weight.used)[0] for weight in group.values()]
    sizes = [share.numel() for share in largest]
    mine = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
    for place, name in zip(mine.split(sizes), group, strict=True):
        place[: masters[name].numel()].copy_(masters[name].reshape(-1))
    every = torch.empty(axis.size * mine.numel(), dtype=like.dtype, device=like.device)
    dist.all_gather_into_tensor(every, mine, group=axis.group)
    targets, sources = [], []
    for rank, gathered in enumerate(every.chunk(axis.size)):
        for place, weight in zip(gathered.split(sizes), group.values(), strict=True):
            target = weight.shares(weight.used)[rank]
            targets.append(target)
            sources.append(place[: target.numel()].view(target.shape))
    torch._foreach_copy_(targets, sources)
