"""Expert parallelism: (token, expert) pairs sorted by expert, sent to who holds it, and back.

The ep x etp ranks of a cell hold all experts once: ep deals whole experts, etp cuts each of them.
A pair goes to all etp ranks of its expert and comes back as parts of a sum. Every rank brings its
own tokens, whatever dense axis dealt them.

Shapes: T tokens, k experts per token, N = T * k pairs, R experts in all, E experts held here,
P ranks of the cell, M pairs that arrive here, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pentad.ops.experts import sort_pairs, sum_rows, take_rows, take_weights
from pentad.parallel.collectives import exchange
from pentad.parallel.mesh import Axis

Experts = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by expert, how many each has) to their results."""


class CellDispatch:
    """Implements `models.moe.Dispatch` over the ranks of a cell."""

    def __init__(self, cell: Axis, etp: int, num_experts: int) -> None:
        self.cell = cell
        self.etp = etp
        self.num_ep = cell.size // etp
        assert num_experts % self.num_ep == 0, f"{num_experts} experts over ep = {self.num_ep}"
        self.num_experts = num_experts

    def __call__(
        self,
        x_TD: Tensor,
        weights_Tk: Tensor,
        chosen_Tk: Tensor,
        experts: Experts,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        pairs = sort_pairs(chosen_Tk, self.num_experts)
        sent_PE = pairs.sizes_E.view(self.num_ep, -1).repeat_interleave(self.etp, dim=0)
        got_PE = self._swap_counts(sent_PE)
        on_its_way = _fetch(torch.stack([sent_PE.sum(1), got_PE.sum(1)]))
        x_ND = take_rows(x_TD, pairs)
        beside_TD = None if beside is None else beside()
        # The one wait for the device: splits of an exchange are numbers of the host. It has been
        # given what needs no numbers first, and goes on with that while the host waits.
        sent, got = _arrived(*on_its_way)
        assert sum(sent) == chosen_Tk.numel() * self.etp, "pairs were lost on the way to experts"
        x_MD = exchange(self._for_cell(x_ND, sent), self.cell, got, sent)
        y_MD = _run_here(x_MD, got_PE, experts)
        y_ND = self._from_cell(exchange(y_MD, self.cell, sent, got), sent)
        y_ND = y_ND * take_weights(weights_Tk, pairs)[:, None]
        y_TD = sum_rows(y_ND, pairs).to(x_TD.dtype)
        return y_TD if beside_TD is None else y_TD + beside_TD

    def _swap_counts(self, sent_PE: Tensor) -> Tensor:
        ones = [1] * self.cell.size
        return exchange(sent_PE, self.cell, ones, ones)

    def _for_cell(self, x_ND: Tensor, sent: list[int]) -> Tensor:
        """Each ep rank's pairs once for every etp rank."""
        if self.etp == 1:
            return x_ND
        parts = x_ND.split(sent[:: self.etp])
        return torch.cat([part for part in parts for _ in range(self.etp)])

    def _from_cell(self, y_ND: Tensor, sent: list[int]) -> Tensor:
        """The sum of what the etp ranks computed of each pair."""
        if self.etp == 1:
            return y_ND
        parts = y_ND.split(sent)
        starts = range(0, len(parts), self.etp)
        return torch.cat([torch.stack(parts[n : n + self.etp]).sum(0) for n in starts])


@torch.compiler.disable  # events are the host's
def _fetch(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Starts the way of numbers to the host."""
    if not numbers.is_cuda:
        return numbers, None
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return there, event


@torch.compiler.disable
def _arrived(numbers: Tensor, event: torch.cuda.Event | None) -> list[list[int]]:
    """Waits for these numbers, not for what the device was given after them."""
    if event is not None:
        event.synchronize()
    found: list[list[int]] = numbers.tolist()
    return found


def _run_here(x_MD: Tensor, got_PE: Tensor, experts: Experts) -> Tensor:
    """Pairs lie by sender, then expert; the experts want them by expert."""
    num_senders, num_held = got_PE.shape
    expert_PE = torch.arange(num_held, device=x_MD.device).repeat(num_senders)
    expert_M = torch.repeat_interleave(expert_PE, got_PE.flatten(), output_size=len(x_MD))
    order = sort_pairs(expert_M[:, None], num_held)
    return sum_rows(experts(take_rows(x_MD, order), order.sizes_E), order)
