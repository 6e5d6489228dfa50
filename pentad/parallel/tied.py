"""A head tied to the embedding where the two lie on different stages.

The embedding is the parameter: it has the optimizer's state, it is saved and published. The last
stage computes with a copy, which takes over the embedding's weights before each pass and gives it
its gradient at the end of a step. Under a V schedule both stages lie on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.parallel.cuts import local
from pentad.parallel.mesh import ALONE, Axis


@dataclass(slots=True)
class TiedHead:
    """Both ends of the tie, None where they are not on this rank (or nothing is tied)."""

    embedding: Tensor | None = None
    copy: Tensor | None = None
    pp: Axis = ALONE
    first: int = 0
    last: int = 0
    """Pipeline ranks of the two ends."""
    device: torch.device = torch.device("cpu")

    @torch.no_grad()
    def follow(self) -> None:
        """The copy takes over the embedding's weights; both are sharded alike."""
        if self.embedding is not None and self.copy is not None:
            local(self.copy).copy_(local(self.embedding))
        elif self.embedding is not None:
            self._send(local(self.embedding), self.last)
        elif self.copy is not None:
            local(self.copy).copy_(self._receive(local(self.copy), self.first))

    @torch.no_grad()
    def give_gradient(self) -> None:
        """The embedding's gradient becomes that of both its uses."""
        if self.embedding is not None and self.copy is not None:
            _gradient(self.embedding).add_(_gradient(self.copy))
        elif self.embedding is not None:
            gradient = _gradient(self.embedding)
            gradient.add_(self._receive(gradient, self.last).to(gradient.device))
        elif self.copy is not None:
            self._send(_gradient(self.copy), self.first)

    # By way of the device, which the group is made for; offloaded weights lie on the host.

    def _send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor.to(self.device).contiguous(), group=self.pp.group, group_dst=to)

    def _receive(self, like: Tensor, source: int) -> Tensor:
        got = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(got, group=self.pp.group, group_src=source)
        return got


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every pass uses the embedding and the head"
    return local(parameter.grad)
