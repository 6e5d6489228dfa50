"""States of running sequences, for delta nets and for layers of transformers: a slot for each row
of the table.

A delta net's slot has the last inputs of its convolution and the states of its heads. A sequence at
position 0 reads nothing from its slot, so slots are never cleared; the next token starts from the
state after the step. Forward only. Shapes as in `ops.delta`; L layers with a delta net, R rows, w
tokens of a convolution's window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.models.language_model import StateKind
from pentad.ops.delta import ChunkPlan, recall_chunks, recall_token, widened


class StateSlots:
    """The memory of all rows, and of a scratch row for padding."""

    def __init__(
        self,
        dims: ModelDims,
        num_rows: int,
        has_kernels: bool = False,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`has_kernels`: single tokens are computed by Triton kernels."""
        self.has_kernels = has_kernels
        layers = [layer for layer in range(dims.num_layers) if dims.is_linear(layer)]
        self.index = {layer: n for n, layer in enumerate(layers)}
        self.scratch = num_rows
        self.look_back = dims.linear_conv - 1
        channels, places = 2 * dims.linear_k_dim + dims.linear_v_dim, (len(layers), num_rows + 1)
        state = (dims.linear_value_heads, dims.linear_key_dim, dims.linear_value_dim)
        self.inputs = torch.zeros((*places, self.look_back, channels), device=device, dtype=dtype)
        self.states = torch.zeros((*places, *state), device=device, dtype=torch.float32)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        for held in (self.inputs, self.states):
            held[:, targets] = held[:, sources]


class KindSlots:
    """The memory of all rows for the states of a model of transformers."""

    def __init__(self, kinds: Sequence[StateKind], num_rows: int, device: torch.device) -> None:
        self.held = [
            torch.zeros((num_rows, *kind.shape), device=device, dtype=kind.dtype) for kind in kinds
        ]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        for held in self.held:
            held[targets] = held[sources]

    def read(self, rows_S: Tensor) -> list[Tensor]:
        return [held.index_select(0, rows_S) for held in self.held]

    def write(self, rows_S: Tensor, states: Sequence[Tensor]) -> None:
        for held, state in zip(self.held, states, strict=True):
            held.index_copy_(0, rows_S, state.to(held.dtype))


class TokenMemory:
    """Implements `ops.delta.DeltaMemory` for one new token of each of some rows."""

    def __init__(self, slots: StateSlots, rows_S: Tensor, positions_S: Tensor) -> None:
        self.slots = slots
        self.rows_S = rows_S
        self.begins_S = positions_S == 0

    def taken(self, held_RX: Tensor) -> Tensor:
        found = held_RX.index_select(0, self.rows_S)
        begins = self.begins_S.view(-1, *[1] * (found.ndim - 1))
        return found.masked_fill(begins, 0.0)

    def convolve(self, layer: int, x_SX: Tensor, weight_XW: Tensor) -> Tensor:
        held_RwX = self.slots.inputs[self.slots.index[layer]]
        if self.slots.has_kernels:
            from pentad.ops.delta_kernel import convolve_rows

            return convolve_rows(held_RwX, self.rows_S, self.begins_S, x_SX, weight_XW)
        seen_SWX = torch.cat((self.taken(held_RwX), x_SX[:, None]), dim=1)
        held_RwX.index_copy_(0, self.rows_S, seen_SWX[:, 1:])
        return weighed(seen_SWX, weight_XW)

    def recall(
        self, layer: int, q_SHk: Tensor, k_SHk: Tensor, v_SHv: Tensor, g_SH: Tensor, b_SH: Tensor
    ) -> Tensor:
        held_RHkv = self.slots.states[self.slots.index[layer]]
        if self.slots.has_kernels:
            from pentad.ops.delta_kernel import recall_rows

            parts = (q_SHk, k_SHk, v_SHv, g_SH, b_SH)
            return recall_rows(held_RHkv, self.rows_S, self.begins_S, *parts)
        state_SHkv = self.taken(held_RHkv)
        out_SHv, state_SHkv = recall_token(q_SHk, k_SHk, v_SHv, g_SH, b_SH, state_SHkv)
        held_RHkv.index_copy_(0, self.rows_S, state_SHkv)
        return out_SHv


class RunMemory(TokenMemory):
    """Implements `ops.delta.DeltaMemory` for runs of several new tokens."""

    def __init__(
        self, slots: StateSlots, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> None:
        device = slots.states.device
        self.plan = ChunkPlan(counts.tolist(), device)
        # Slots are read in the order of the scan.
        order = self.plan.order
        rows_S, starts_S = (torch.from_numpy(x[order]).to(device) for x in (rows, starts))
        super().__init__(slots, rows_S, starts_S)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        back, num_held = slots.look_back, len(rows) * slots.look_back
        first = np.cumsum(counts) - counts

        def places(sequences: np.ndarray, at: np.ndarray) -> Tensor:
            """Index of each input in the run; earlier inputs are read from the slots."""
            held = rank[sequences] * back + back + at
            found = np.where(at < 0, held, num_held + first[sequences] + at)
            return torch.from_numpy(found).to(device)

        of_T = np.repeat(np.arange(len(rows)), counts)[:, None]
        at_T = np.arange(len(of_T))[:, None] - first[of_T]
        self.seen_TW = places(of_T, at_T + np.arange(-back, 1))
        self.kept_Sw = places(order[:, None], counts[order, None] + np.arange(-back, 0))

    def convolve(self, layer: int, x_TX: Tensor, weight_XW: Tensor) -> Tensor:
        held_RwX = self.slots.inputs[self.slots.index[layer]]
        inputs = torch.cat((self.taken(held_RwX).flatten(0, 1), x_TX))
        held_RwX.index_copy_(0, self.rows_S, inputs[self.kept_Sw])
        return weighed(inputs[self.seen_TW], weight_XW)

    def recall(
        self, layer: int, q_THk: Tensor, k_THk: Tensor, v_THv: Tensor, g_TH: Tensor, b_TH: Tensor
    ) -> Tensor:
        held_RHkv = self.slots.states[self.slots.index[layer]]
        state_SHkv = self.taken(held_RHkv)
        out_THv, last = recall_chunks(self.plan, q_THk, k_THk, v_THv, g_TH, b_TH, state_SHkv)
        held_RHkv.index_copy_(0, self.rows_S, last)
        return out_THv


class StepMemory:
    """Implements `ops.delta.DeltaMemory` for any step: single tokens and runs, handled
    separately."""

    def __init__(
        self, slots: StateSlots, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> None:
        device = slots.states.device
        self.parts: list[tuple[Tensor, TokenMemory]] = []
        is_single = counts == 1
        for is_in in (is_single, ~is_single):
            if not is_in.any():
                continue
            tokens_T = torch.from_numpy(np.flatnonzero(np.repeat(is_in, counts))).to(device)
            own = rows[is_in], starts[is_in]
            if is_in is is_single:
                memory = TokenMemory(slots, *(torch.from_numpy(x).to(device) for x in own))
            else:
                memory = RunMemory(slots, *own, counts[is_in])
            self.parts.append((tokens_T, memory))

    def convolve(self, layer: int, x_TX: Tensor, weight_XW: Tensor) -> Tensor:
        out_TX = torch.empty_like(x_TX)
        for tokens_T, memory in self.parts:
            found = memory.convolve(layer, x_TX.index_select(0, tokens_T), weight_XW)
            out_TX.index_copy_(0, tokens_T, found)
        return out_TX

    def recall(
        self, layer: int, q_THk: Tensor, k_THk: Tensor, v_THv: Tensor, g_TH: Tensor, b_TH: Tensor
    ) -> Tensor:
        out_THv = torch.empty_like(v_THv)
        for tokens_T, memory in self.parts:
            own = (x.index_select(0, tokens_T) for x in (q_THk, k_THk, v_THv, g_TH, b_TH))
            out_THv.index_copy_(0, tokens_T, memory.recall(layer, *own))
        return out_THv


def weighed(seen_TWX: Tensor, weight_XW: Tensor) -> Tensor:
    wide = widened(seen_TWX)
    return (wide * weight_XW.t().to(wide.dtype)).sum(1).to(seen_TWX.dtype)
