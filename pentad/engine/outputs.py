"""Joins results of microbatches per row and as sums; the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.flat_rows import lengths_of
from pentad.core.types import Row
from pentad.engine.batch import fill_up, split_out
from pentad.engine.packing import MicrobatchPlan
from pentad.engine.predictor import Predicted
from pentad.parallel.collectives import gather_shared, reduce_ranks
from pentad.parallel.mesh import Meshes

NAMES = ("logprobs", "entropy", "values")
Sums = tuple[Tensor, dict[str, Tensor]]
"""The loss of one microbatch and its statistics."""


def check_agreement(rows: Sequence[Row], meshes: Meshes) -> None:
    """Checks that all ranks received the same rows."""
    if meshes.world.size == 1:
        return
    digest = hashlib.blake2b(digest_size=7)
    for row in rows:
        tensors = {"ids": row.ids, **row.columns}
        if row.routes is not None:
            tensors["routes"] = row.routes
        digest.update(repr((row.count, len(row.ids), sorted(tensors))).encode())
        for name in sorted(tensors):
            digest.update(tensors[name].contiguous().numpy().tobytes())
    number = int.from_bytes(digest.digest(), "little")
    pair = torch.tensor([number, -number], device=meshes.device)
    high, low = reduce_ranks(pair, meshes.world, "max").tolist()
    if high != -low:
        raise RunError("the ranks received different rows; every rank needs all rows")


def per_row(
    predicted: Sequence[Predicted],
    plan: MicrobatchPlan,
    rows: Sequence[Row],
    meshes: Meshes,
    at_least: int = 1,
) -> list[dict[str, Tensor]]:
    """Returns results by row, token-aligned, on the CPU; called after all kernels were launched.
    `predicted`: this rank's microbatches, with at least `at_least` tokens each; `plan`: the rows of
    all ranks."""
    outputs: list[dict[str, Tensor]] = [{} for _ in rows]
    first = predicted[0] if predicted else ()
    names = [name for name, x_T in zip(NAMES, first, strict=False) if x_T is not None]
    # In one array, for a single copy from the device.
    mine = [torch.stack([x_T for x_T in parts if x_T is not None], 1) for parts in predicted]
    for indices, lengths, x_TN in _of_all(mine, plan, rows, meshes, at_least):
        for name, x_T in zip(names, x_TN.unbind(1), strict=True):
            for i, piece in zip(indices, split_out(x_T, lengths), strict=False):
                outputs[i][name] = piece
    return outputs


def routes_per_row(
    recorded: Sequence[Tensor],
    plan: MicrobatchPlan,
    rows: Sequence[Row],
    meshes: Meshes,
    at_least: int = 1,
) -> list[Tensor]:
    """Returns the experts of each row's tokens, [L, MoE layers, k], on the CPU."""
    outputs: dict[int, Tensor] = {}
    for indices, lengths, routes_TLk in _of_all(recorded, plan, rows, meshes, at_least):
        pieces = routes_TLk.split(list(lengths))
        outputs |= {i: piece.clone() for i, piece in zip(indices, pieces, strict=False)}
    return [outputs[i] for i in range(len(rows))]


def _of_all(
    mine: Sequence[Tensor], plan: MicrobatchPlan, rows: Sequence[Row], meshes: Meshes, at_least: int
) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Yields (rows, padded lengths, values of all tokens) of every microbatch of every rank.
    `mine`: the values of this rank's microbatches."""
    if not mine:
        return
    cp = meshes.cp.size
    sizes_of = lengths_of(rows)
    lengths = [
        [fill_up([sizes_of[i] for i in mb], meshes.token_multiple, at_least) for mb in mbs]
        for mbs in plan
    ]
    totals = [sum(map(sum, mbs)) // cp for mbs in lengths]
    flat_t = torch.cat(list(mine)) if len(mine) > 1 else mine[0]
    if meshes.batch.size > 1:
        padded = flat_t.new_zeros(1, max(totals), *flat_t.shape[1:])
        padded[0, : len(flat_t)] = flat_t
        all_Bt = gather_shared(padded, meshes.batch).cpu()
    else:
        all_Bt = flat_t[None].cpu()
    for d, (mbs, sizes) in enumerate(zip(plan, lengths, strict=True)):
        shares = all_Bt[d * cp : (d + 1) * cp, : totals[d]]
        pieces = shares.split([sum(mb) // cp for mb in sizes], dim=1)
        for indices, padded_lengths, piece in zip(mbs, sizes, pieces, strict=True):
            yield indices, padded_lengths, piece.flatten(0, 1)


def add_up(sums: Sequence[Sums], meshes: Meshes) -> tuple[float, dict[str, float]]:
    """Sums loss and statistics over microbatches and ranks."""
    loss_total, totals = _add_up(sums)
    if meshes.batch.size == 1:
        return loss_total, totals
    gathered: list[tuple[float, dict[str, float]]] = [(0.0, {})] * meshes.batch.size
    dist.all_gather_object(gathered, (loss_total, totals), group=meshes.batch.group)
    names = {name: None for _, stats in gathered for name in stats}
    # In rank order and double precision: bitwise equal on all ranks.
    return (
        sum(loss for loss, _ in gathered),
        {name: sum(stats.get(name, 0.0) for _, stats in gathered) for name in names},
    )


def _add_up(sums: Sequence[Sums]) -> tuple[float, dict[str, float]]:
    """Sums over this rank's microbatches, with one copy from the device."""
    if not sums:
        return 0.0, {}
    flat = [x.detach().double() for loss_sum, stats in sums for x in (loss_sum, *stats.values())]
    fetched = iter(torch.stack(flat).tolist())
    loss_total = 0.0
    totals: dict[str, float] = {}
    for _, stats in sums:
        loss_total += next(fetched)
        for name in stats:
            totals[name] = totals.get(name, 0.0) + next(fetched)
    return loss_total, totals
