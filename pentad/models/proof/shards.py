"""Shards of every rank of a layout, made from whole tensors and put together again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pentad.weights.cuts import Coords, Plan, cut_entry
from pentad.weights.flow import source_block, target_block
from pentad.weights.map import Entry, WeightMap
from pentad.weights.regions import flip, slices
from pentad.weights.reshard import Holding, plan_moves


def ranks_of(layout: Mapping[str, int]) -> list[Coords]:
    """The coordinates of every rank: tp, and (ep, etp), are two readings of one world."""
    tp, ep, etp = (layout.get(axis, 1) for axis in ("tp", "ep", "etp"))
    return [
        {"tp": (tp, rank % tp), "ep": (ep, rank // etp % ep), "etp": (etp, rank % etp)}
        for rank in range(math.lcm(tp, ep * etp))
    ]


def local_tensor(
    entry: Entry,
    weight_map: WeightMap,
    plan: Plan,
    coords: Coords,
    sources: Mapping[str, Tensor],
) -> Tensor:
    """A rank's part of a target, filled from source tensors; padding is zero."""
    local = cut_entry(entry, plan, coords, weight_map.sizes)
    out = torch.zeros(local.shape)
    for region in local.regions:
        target_block(out, region).copy_(source_block(sources[region.source], region))
    return out


def round_trip_fault(
    weight_map: WeightMap, plan: Plan, ranks: Sequence[Coords], disk: Mapping[str, Tensor]
) -> str | None:
    """The first source tensor that is not itself after it went through the ranks' shards."""
    back = {name: torch.full_like(tensor, float("nan")) for name, tensor in disk.items()}
    for entry in weight_map.entries.values():
        if entry.is_copy or entry.rule.optional:
            continue
        for coords in ranks:
            local = cut_entry(entry, plan, coords, weight_map.sizes)
            shard = local_tensor(entry, weight_map, plan, coords, disk)
            for region in local.regions:
                out = flip(region, entry.name, local.shape)
                target_block(back[region.source], out).copy_(source_block(shard, out))
    wrong = (n for n, t in disk.items() if n not in weight_map.tied and not torch.equal(back[n], t))
    return next(wrong, None)


def reshard_fault(
    weight_map: WeightMap,
    plan: Plan,
    before: Sequence[Coords],
    after: Sequence[Coords],
    natives: Mapping[str, Tensor],
) -> str | None:
    """The first tensor that a resharding plan does not bring to its new ranks unharmed."""
    shapes = {name: tuple(tensor.shape) for name, tensor in natives.items()}
    have = _held(weight_map, plan, before, natives)
    want = _held(weight_map, plan, after, natives)
    got = {key: torch.full_like(tensor, float("nan")) for key, tensor in want.items()}
    shard = {(rank, name): tensor for (rank, name, _), tensor in have.items()}
    put = {(rank, name): tensor for (rank, name, _), tensor in got.items()}
    for move in plan_moves(shapes, have, want):
        block = shard[move.source_rank, move.name][slices(move.source_box)]
        put[move.target_rank, move.name][slices(move.target_box)] = block
    return next((k[1] for k, tensor in want.items() if not torch.equal(got[k], tensor)), None)


def _held(
    weight_map: WeightMap, plan: Plan, ranks: Sequence[Coords], natives: Mapping[str, Tensor]
) -> dict[Holding, Tensor]:
    out = {}
    for rank, coords in enumerate(ranks):
        for name, tensor in natives.items():
            local = cut_entry(weight_map.entries[name], plan, coords, weight_map.sizes)
            for box, _ in local.boxes:
                out[rank, name, box] = tensor.detach()[slices(box)].clone()
    return out
