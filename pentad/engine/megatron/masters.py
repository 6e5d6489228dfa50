"""Master weights beside what Megatron's modules compute with.

Data-parallel ranks share the masters, and with them the optimizer's state, as in Megatron's
distributed optimizer; unlike there a share is a block of each tensor, so that every backend reads
it from a recovery checkpoint. Before a pass the shares are gathered into the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.parallel.mesh import Axis

GATHERED = 2**27
"""Elements that are gathered at a time."""


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """The block of one weight that a module of this rank computes with."""

    used: Tensor
    """The module's memory."""
    gradient: Tensor
    """Where backward adds up its gradient."""
    dim: int
    """The dim that data-parallel ranks share it along."""
    axis: Axis
    """Those ranks."""

    def shares(self, block: Tensor) -> list[Tensor]:
        """What each of the ranks has of a block; shares memory."""
        parts = list(block.chunk(self.axis.size, self.dim))
        empty = block.narrow(self.dim, 0, 0)
        return [*parts, *(empty for _ in range(self.axis.size - len(parts)))]

    def share(self, block: Tensor) -> Tensor:
        """What this rank has of it, in one piece of memory."""
        return self.shares(block)[self.axis.rank].contiguous()

    def master(self, dtype: torch.dtype) -> Tensor:
        """Unfilled; the module's memory itself where that is whole and of the same dtype."""
        if self.axis.size == 1 and self.used.dtype == dtype:
            return self.used
        return torch.empty_like(self.share(self.used), dtype=dtype)


def follow_masters(weights: Mapping[str, SharedWeight], masters: Mapping[str, Tensor]) -> None:
    """Every module's memory takes over the masters of all ranks."""
    copied = [name for name, weight in weights.items() if weight.axis.size == 1]
    copied = [name for name in copied if masters[name] is not weights[name].used]
    if copied:
        used = [weights[name].used for name in copied]
        torch._foreach_copy_(used, [masters[name] for name in copied])
    for group in _groups(weights):
        _gather(group, masters)


def _groups(weights: Mapping[str, SharedWeight]) -> Iterator[dict[str, SharedWeight]]:
    """Those that ranks share, of one axis and dtype, so many that their memory is bounded. All
    ranks of an axis make the same groups."""
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
