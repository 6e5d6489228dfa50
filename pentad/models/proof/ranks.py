"""The ranks of a layout on one device: their shards, put together again, and their sums.

A model is run as its ranks would run it, each with the part of the weights that the parallel plan
gives it; the result is differentiable in the whole weights. It proves maps and plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pentad.core.types import Attend
from pentad.models.decoder import Block, Decoder
from pentad.models.moe import Beside, Experts, Moe
from pentad.weights.cuts import Coords, Plan, cut_entry
from pentad.weights.flow import source_block, target_block
from pentad.weights.map import Entry, WeightMap
from pentad.weights.regions import flip, slices


class SumOverRanks(nn.Module):
    """A part of a layer on every rank of an axis; the results are summed as all-reduce would."""

    def __init__(self, part: nn.Module, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.parts = [part]  # in a list: its parameters are not this module's
        self.ranks = ranks

    def forward(self, *args: Any) -> Tensor:
        results = [functional_call(self.parts[0], dict(rank), args) for rank in self.ranks]
        return torch.stack(results).sum(0)


class EmbeddingOverRanks(nn.Module):
    """A table cut by rows: each rank looks up the ids it has, and zeros for the others."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids_T: Tensor) -> Tensor:
        total, start = torch.zeros(len(ids_T), self.tables[0].shape[1]), 0
        for table in self.tables:
            inside = (ids_T >= start) & (ids_T < start + len(table))
            if len(table):
                rows = F.embedding(torch.where(inside, ids_T - start, 0), table)
                total = total + torch.where(inside[:, None], rows, 0)
            start += len(table)
        return total


class ExpertsOverRanks:
    """A dispatch: each (ep, etp) rank runs the pairs that chose its experts, on its columns."""

    def __init__(self, ranks: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        self.ranks = ranks
        """(first expert, gate_up, down) of every rank."""

    def __call__(
        self,
        x_TD: Tensor,
        weights_Tk: Tensor,
        chosen_Tk: Tensor,
        experts: Experts,
        beside: Beside | None = None,
    ) -> Tensor:
        total = torch.zeros_like(x_TD) if beside is None else beside()()
        for first, gate_up, down in self.ranks:
            local = {"gate_up": gate_up, "down": down}
            for e in range(len(down)):
                token_N, slot_N = torch.where(chosen_Tk == first + e)
                sizes_E = torch.tensor([len(token_N) if n == e else 0 for n in range(len(down))])
                y_ND = functional_call(experts, local, (x_TD[token_N], sizes_E))
                total = total.index_add(0, token_N, y_ND * weights_Tk[token_N, slot_N, None])
        return total


@dataclass(frozen=True, slots=True)
class SimulatedLayout:
    """Whole weights, and the layout that cuts them."""

    weight_map: WeightMap
    plan: Plan
    weights: Mapping[str, Tensor]
    tp: int
    ep: int = 1
    etp: int = 1

    def part(self, name: str, **coords: tuple[int, int]) -> Tensor:
        """A rank's part of a native tensor, differentiable in the whole."""
        entry, whole = self.weight_map.entries[name], self.weights[name]
        local = cut_entry(entry, self.plan, coords, self.weight_map.sizes)
        if not local.boxes:
            return whole.new_zeros(local.shape)
        ((box, _),) = local.boxes
        return whole[slices(box)]

    def tp_parts(self, name: str) -> list[Tensor]:
        return [self.part(name, tp=(self.tp, rank)) for rank in range(self.tp)]

    def summed(self, prefix: str, module: nn.Module) -> SumOverRanks:
        parts = {name: self.tp_parts(f"{prefix}.{name}") for name, _ in module.named_parameters()}
        ranks = [
            {name: tensors[rank] for name, tensors in parts.items()} for rank in range(self.tp)
        ]
        for name in {"o.bias", "down.bias"} & parts.keys():  # added after the sum, so by one rank
            for rank in ranks[1:]:
                rank[name] = torch.zeros_like(rank[name])
        return SumOverRanks(module, ranks)

    def dispatch(self, prefix: str) -> ExpertsOverRanks:
        per_rank = -(-self.weight_map.dims.num_experts // self.ep)
        ranks = []
        for e, t in itertools.product(range(self.ep), range(self.etp)):
            at = {"ep": (self.ep, e), "etp": (self.etp, t)}
            both = [self.part(f"{prefix}.{name}", **at) for name in ("gate_up", "down")]
            ranks.append((e * per_rank, both[0], both[1]))
        return ExpertsOverRanks(ranks)

    def spread(self, model: Decoder) -> None:
        """Makes a model that was built on meta compute as the ranks do."""
        for i, block in model.layers.items():
            assert isinstance(block, Block), f"layer {i} is no Block: its ranks are not simulated"
            block.add_module("attn", self.summed(f"layers.{i}.attn", block.attn))
            if isinstance(block.ffn, Moe):
                block.ffn.dispatch = self.dispatch(f"layers.{i}.ffn.experts")
            else:
                block.add_module("ffn", self.summed(f"layers.{i}.ffn", block.ffn))
        model.add_module("embed", EmbeddingOverRanks(self.tp_parts("embed.weight")))

    def logits(self, model: Decoder, ids_T: Tensor, attend: Attend) -> Tensor:
        """The logits of one sequence as the ranks of the layout compute them."""
        self.spread(model)
        held = (*model.named_parameters(), *model.named_buffers())
        own = {name: self.weights[name] for name, _ in held if name in self.weights}
        hidden_TD = functional_call(model, own, (ids_T, torch.arange(len(ids_T)), attend))
        is_tied = self.weight_map.entries["head.weight"].is_copy
        heads = self.tp_parts("embed.weight" if is_tied else "head.weight")
        return torch.cat([F.linear(hidden_TD, rows) for rows in heads], dim=-1)


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
