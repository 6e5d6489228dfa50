"""Expert parallelism: sends (token, expert) pairs, sorted by expert, to the expert's rank and back.

The ep x etp ranks of an expert group together have all experts once: ep distributes whole experts,
etp splits each. A pair is sent to all etp ranks of its expert, which return partial sums. Every
rank sends its own tokens, under any split by dense axes.

Shapes: T tokens, k experts per token, N = T * k pairs, R experts in total, E experts here, P ranks
of the group, M pairs that arrive here, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from pentad.core.fit import expert_range, experts_each
from pentad.ops.experts import sort_pairs, sum_rows, take_rows, take_weights
from pentad.ops.meter import timed
from pentad.parallel.collectives import exchange
from pentad.parallel.mesh import Axis

RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps (rows sorted by expert, number per expert, weight of each row) to their results."""


class ExpertDispatch:
    """Implements `models.moe.Dispatch` over the ranks of an expert group.

    On a GPU pairs are exchanged on a separate stream, concurrently with work that needs no other
    rank: its first half while they are sent, its second while they return. The same holds for
    gradients, because autograd runs a backward on the stream of its forward.
    """

    def __init__(self, group: Axis, etp: int, num_experts: int) -> None:
        self.group = group
        self.etp = etp
        self.num_ep = group.size // etp
        self.num_experts = num_experts
        start, stop = expert_range(num_experts, self.num_ep, group.rank // etp)
        assert stop > start, f"{num_experts} experts over ep = {self.num_ep}"
        self.num_held = stop - start
        self.num_each = experts_each(num_experts, self.num_ep)
        """Number of experts of each ep rank; the last ones may have one fewer."""

    def __call__(
        self,
        x_TD: Tensor,
        weights_Tk: Tensor,
        chosen_Tk: Tensor,
        experts: RunExperts,
        beside: Callable[[], Callable[[], Tensor]] | None = None,
    ) -> Tensor:
        side = SideStream(x_TD.device)
        pairs = sort_pairs(chosen_Tk, self.num_experts)
        sent_PE = self._by_rank(pairs.sizes_E).repeat_interleave(self.etp, dim=0)
        with side.after(sent_PE):
            got_PE = self._swap_counts(sent_PE)
            numbers = Numbers(torch.stack([sent_PE.sum(1), got_PE.sum(1)]))
        x_ND = take_rows(x_TD, pairs)
        weights_N = take_weights(weights_Tk, pairs)
        rest = side.after(x_ND, weights_N)
        finish = None if beside is None else beside()
        # The only device synchronisation: the splits of an exchange must be on the host. The device
        # already has work that needs no splits, and continues while the host waits.
        sent, got = numbers.read()
        assert sum(sent) == chosen_Tk.numel() * self.etp, "pairs were lost in the exchange"
        pair_bytes = x_TD.shape[1] * x_TD.element_size()
        sent_bytes, got_bytes = (self._num_leaving(n) * pair_bytes for n in (sent, got))
        with_weights = sent_bytes + self._num_leaving(sent) * weights_N.element_size()
        with rest, timed("dispatch", x_TD.device, with_weights):
            x_MD = exchange(self._for_group(x_ND, sent), self.group, got, sent)
            # A weight is sent with its pair and applied before the down product: results are
            # only summed, and not kept for the weights' gradients.
            weights_M = exchange(self._for_group(weights_N, sent), self.group, got, sent)
        side.join(got_PE, x_MD, weights_M)
        y_MD = _run_here(x_MD, weights_M, got_PE[:, : self.num_held], experts)
        with side.after(y_MD), timed("combine", x_TD.device, got_bytes, len(y_MD)):
            back_MD = exchange(y_MD, self.group, sent, got)
        beside_TD = None if finish is None else finish()
        side.join(back_MD)
        y_TD = sum_rows(self._from_cell(back_MD, sent), pairs).to(x_TD.dtype)
        return y_TD if beside_TD is None else y_TD + beside_TD

    def _by_rank(self, sizes_R: Tensor) -> Tensor:
        """Returns the number of pairs of each expert by rank; slots without an expert are 0."""
        lack = self.num_ep * self.num_each - self.num_experts
        if not lack:
            return sizes_R.view(self.num_ep, -1)
        full_R, rest_R = sizes_R.tensor_split([(self.num_ep - lack) * self.num_each])
        rows_PE = full_R.view(-1, self.num_each), pad(rest_R.view(lack, -1), (0, 1))
        return torch.cat(rows_PE)

    def _num_leaving(self, counts: list[int]) -> int:
        """Returns the number of pairs sent to other ranks, from the counts by rank of the group."""
        return sum(counts) - counts[self.group.rank]

    def _swap_counts(self, sent_PE: Tensor) -> Tensor:
        ones = [1] * self.group.size
        return exchange(sent_PE, self.group, ones, ones)

    def _for_group(self, x_ND: Tensor, sent: list[int]) -> Tensor:
        """Repeats each ep rank's pairs for every etp rank."""
        if self.etp == 1:
            return x_ND
        parts = x_ND.split(sent[:: self.etp])
        return torch.cat([part for part in parts for _ in range(self.etp)])

    def _from_cell(self, y_ND: Tensor, sent: list[int]) -> Tensor:
        """Sums the partial results of the etp ranks for each pair."""
        if self.etp == 1:
            return y_ND
        parts = y_ND.split(sent)
        starts = range(0, len(parts), self.etp)
        return torch.cat([torch.stack(parts[n : n + self.etp]).sum(0) for n in starts])


def _run_here(x_MD: Tensor, weights_M: Tensor, got_PE: Tensor, experts: RunExperts) -> Tensor:
    """Runs the experts on this rank: sorts pairs, which arrive by sender, by expert."""
    num_senders, num_held = got_PE.shape
    expert_PE = torch.arange(num_held, device=x_MD.device).repeat(num_senders)
    expert_M = torch.repeat_interleave(expert_PE, got_PE.flatten(), output_size=len(x_MD))
    order = sort_pairs(expert_M[:, None], num_held)
    sorted_M = take_weights(weights_M[:, None], order)
    return sum_rows(experts(take_rows(x_MD, order), order.sizes_E, sorted_M), order)


class Numbers:
    """An asynchronous copy of a few numbers from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self.there = numbers
        self.event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self.there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.there.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list[list[int]]:
        """Waits only for these numbers, not for later work on the device."""
        if self.event is not None:
            self.event.synchronize()
        found: list[list[int]] = self.there.tolist()
        return found


class SideStream:
    """The stream for the exchange of pairs: one per device, none on a CPU."""

    streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device not in self.streams:
            # High priority: other ranks wait for the exchange.
            self.streams[device] = torch.cuda.Stream(device, priority=-1)
        self.stream = self.streams.get(device)

    def after(self, *given: Tensor) -> AbstractContextManager[object]:
        """Returns a context on the stream, which waits only for work queued so far."""
        if self.stream is None:
            return nullcontext()
        event = torch.cuda.current_stream(self.stream.device).record_event()
        for tensor in given:
            tensor.record_stream(self.stream)
        return self._on(event)

    @contextmanager
    def _on(self, event: torch.cuda.Event) -> Iterator[None]:
        assert self.stream is not None
        self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield

    def join(self, *taken: Tensor) -> None:
        """Makes the current stream wait for results of the side stream."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        for tensor in taken:
            tensor.record_stream(current)
