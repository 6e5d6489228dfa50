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

from pentad.parallel.collectives import exchange
from pentad.parallel.mesh import Axis


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
        experts: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        num_chosen = chosen_Tk.shape[1]
        expert_N, order_N = chosen_Tk.flatten().sort(stable=True)
        token_N = order_N // num_chosen
        counts_R = torch.bincount(expert_N, minlength=self.num_experts)
        sent_PE = counts_R.view(self.num_ep, -1).repeat_interleave(self.etp, dim=0)
        got_PE = self._swap_counts(sent_PE)
        # The one wait for the device: splits of an exchange are numbers of the host.
        sent, got = torch.stack([sent_PE.sum(1), got_PE.sum(1)]).tolist()
        assert sum(sent) == len(order_N) * self.etp, "tokens were lost on the way to the experts"
        x_MD = exchange(self._for_cell(x_TD[token_N], sent), self.cell, got, sent)
        y_ND = self._from_cell(
            exchange(self._run(x_MD, got_PE, experts), self.cell, sent, got), sent
        )
        y_ND = y_ND * weights_Tk.flatten()[order_N, None]
        return torch.zeros_like(x_TD).index_add(0, token_N, y_ND.to(x_TD.dtype))

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
        return torch.cat(
            [
                torch.stack(parts[start : start + self.etp]).sum(0)
                for start in range(0, len(parts), self.etp)
            ]
        )

    def _run(
        self, x_MD: Tensor, got_PE: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Pairs lie by sender, then expert; the experts want them by expert."""
        num_senders, num_held = got_PE.shape
        expert_PE = torch.arange(num_held, device=x_MD.device).repeat(num_senders)
        expert_M = torch.repeat_interleave(expert_PE, got_PE.flatten(), output_size=len(x_MD))
        order_M = expert_M.argsort(stable=True)
        y_MD = experts(x_MD[order_M], got_PE.sum(0))
        back_M = torch.empty_like(order_M)
        back_M[order_M] = torch.arange(len(order_M), device=x_MD.device)
        return y_MD[back_M]
