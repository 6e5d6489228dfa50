"""Rows packed for one forward pass, and the turn between the two alignments.

Outside, entry t of a column belongs to token ids[t]. Inside, it belongs to the hidden state that
predicts: position t of a sequence says something about token t + 1. So everything moves one place
to the left on the way in and back on the way out; the last position of a sequence predicts nothing
(label -1, columns 0), and a sequence's first token gets 0 on the way out.

Shapes: T packed tokens, S sequences, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.types import Row

NO_LABEL = -1


class PackedSegments:
    """`core.types.Segments` over sequences that lie one after the other, whole."""

    def __init__(self, lengths_S: Tensor, num_tokens: int) -> None:
        self.lengths_S = lengths_S
        self.num_tokens = num_tokens

    @property
    def num(self) -> int:
        return len(self.lengths_S)

    def sum(self, x_T: Tensor) -> Tensor:
        result: Tensor = _SegmentSum.apply(x_T, self.lengths_S)
        return result

    def spread(self, x_S: Tensor) -> Tensor:
        result: Tensor = _SegmentSpread.apply(x_S, self.lengths_S, self.num_tokens)
        return result


# Both run in a fixed order on every device, unlike an indexed add on a GPU, and are each other's
# gradient. The number of tokens is given so that no device has to be asked for it.
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
    """One microbatch on the device. Everything but ids and positions is prediction-aligned."""

    lengths: list[int]
    ids_T: Tensor
    positions_T: Tensor
    labels_T: Tensor
    columns: dict[str, Tensor]
    segments: PackedSegments

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)


def check_rows(rows: Sequence[Row], columns: Sequence[str], vocab_size: int) -> None:
    """Names the first row that does not fit; the packed form could no longer tell."""
    for i, row in enumerate(rows):
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
        ids = torch.cat([row.ids for row in rows])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            i = next(i for i, row in enumerate(rows) if (row.ids == bad).any())
            raise RunError(f"row {i} holds token id {bad}, outside the vocabulary of {vocab_size}")


def pack_rows(rows: Sequence[Row], columns: Sequence[str], device: torch.device) -> PackedRows:
    lengths = [row.ids.numel() for row in rows]
    length_S = np.asarray(lengths, dtype=np.int64)
    ends_S = np.cumsum(length_S)
    positions = np.arange(ends_S[-1]) - np.repeat(ends_S - length_S, length_S)
    last_S = torch.from_numpy(ends_S - 1)
    ids_T = torch.cat([row.ids for row in rows])
    labels_T = shift_in(ids_T, last_S, NO_LABEL)
    flat = {
        name: shift_in(torch.cat([row.columns[name] for row in rows]), last_S) for name in columns
    }

    def send(x: Tensor) -> Tensor:
        return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)

    return PackedRows(
        lengths=lengths,
        ids_T=send(ids_T),
        positions_T=send(torch.from_numpy(positions)),
        labels_T=send(labels_T),
        columns={name: send(x_T) for name, x_T in flat.items()},
        segments=PackedSegments(send(torch.from_numpy(length_S)), len(ids_T)),
    )


def shift_in(x_T: Tensor, last_S: Tensor, fill: int = 0) -> Tensor:
    """Token-aligned to prediction-aligned."""
    out_T = torch.empty_like(x_T)
    out_T[:-1] = x_T[1:]
    out_T[last_S] = fill
    return out_T


def split_out(x_T: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Prediction-aligned to token-aligned, one tensor a row, on the CPU."""
    x_T = x_T.detach().cpu()
    out_T = torch.empty_like(x_T)
    out_T[1:] = x_T[:-1]
    first_S = np.cumsum(np.asarray([0, *lengths[:-1]], dtype=np.int64))
    out_T[torch.from_numpy(first_S)] = 0
    return out_T.split(list(lengths))
