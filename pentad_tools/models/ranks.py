"""Simulates the ranks of a layout on one device: their shards, and sums over ranks.

Each simulated rank computes with its shards from the parallel plan; the result is differentiable in
the whole weights. This verifies maps and plans. `MegatronForward` repeats Megatron-core's
arithmetic on its fused tensors (qkv rows group by group, a rank's fc1 as its gate rows over its up
rows) and so detects a wrong Megatron column.
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

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.models.decoder import Block, Decoder
from pentad.models.language_model import bent
from pentad.models.layer_inputs import SharingDecoder
from pentad.models.layers import Norm, Rotary, rotate
from pentad.models.moe import Beside, DenseMoe, Experts, Moe
from pentad.weights.cuts import CutPlan, RankCoords, cut_entry
from pentad.weights.map import Entry, WeightMap
from pentad.weights.regions import flip, slices
from pentad.weights.transfer import source_block, target_block


class SumOverRanks(nn.Module):
    """A layer's shards on every rank of an axis; results are summed as by all-reduce."""

    def __init__(self, part: nn.Module, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.parts = [part]  # in a list, so its parameters are not registered
        self.ranks = ranks

    def forward(self, *args: Any) -> Any:
        norms = [x for x in self.parts[0].modules() if isinstance(x, Norm) and self.is_cut(x)]
        for norm in norms:
            norm.mean_square = MeansOfRanks(len(self.ranks))  # type: ignore[method-assign]
        for _ in range(2 if norms else 1):  # a first pass collects each norm's local means
            results = [
                functional_call(self.parts[0], dict(rank), _of_rank(args, number))
                for number, rank in enumerate(self.ranks)
            ]
        if isinstance(results[0], Tensor):
            return torch.stack(results).sum(0)
        summed, *own = zip(*results, strict=True)  # keys and values stay on their ranks
        return torch.stack(summed).sum(0), *own

    def is_cut(self, norm: Norm) -> bool:
        name = next(n for n, x in self.parts[0].named_modules() if x is norm)
        return self.ranks[0][f"{name}.weight"].shape != norm.weight.shape


def _of_rank(args: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """The arguments, of keys and values those of one rank."""
    return tuple(tuple(x[rank] for x in arg) if isinstance(arg, tuple) else arg for arg in args)


class MeansOfRanks:
    """Mean squares of a norm whose width is sharded: the first pass collects them rank by rank, the
    second uses their mean."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.means: list[Tensor] = []

    def __call__(self, wide: Tensor) -> Tensor:
        if len(self.means) == self.num_ranks:
            return torch.stack(self.means).mean(0)
        self.means.append(wide.pow(2).mean(-1, keepdim=True))
        return self.means[-1]


class EmbeddingOverRanks(nn.Module):
    """An embedding sharded by rows: each rank looks up its own ids and returns zeros for others."""

    def __init__(self, tables: Sequence[Tensor], padding_id: int | None) -> None:
        super().__init__()
        self.tables = tables
        self.padding_id = padding_id

    def forward(self, ids_T: Tensor) -> Tensor:
        total, start = torch.zeros(len(ids_T), self.tables[0].shape[1]), 0
        for table in self.tables:
            inside = (ids_T >= start) & (ids_T < start + len(table))
            if len(table):
                rows = F.embedding(torch.where(inside, ids_T - start, 0), table)
                total = total + torch.where(inside[:, None], rows, 0)
            start += len(table)
        if self.padding_id is None:
            return total
        return torch.where((ids_T == self.padding_id)[:, None], total.detach(), total)


class ExpertsOverRanks:
    """Expert dispatch: each (ep, etp) rank computes its experts' pairs with its columns."""

    def __init__(self, ranks: Sequence[tuple[int, dict[str, Tensor]]]) -> None:
        self.ranks = ranks
        """(first expert, parts of the experts' parameters) of every rank."""

    def __call__(
        self,
        x_TD: Tensor,
        weights_Tk: Tensor,
        chosen_Tk: Tensor,
        experts: Experts,
        beside: Beside | None = None,
    ) -> Tensor:
        total = torch.zeros_like(x_TD) if beside is None else beside()()
        for first, local in self.ranks:
            num = len(local["down"])
            for e in range(num):
                token_N, slot_N = torch.where(chosen_Tk == first + e)
                sizes_E = torch.tensor([len(token_N) if n == e else 0 for n in range(num)])
                y_ND = functional_call(experts, local, (x_TD[token_N], sizes_E))
                total = total.index_add(0, token_N, y_ND * weights_Tk[token_N, slot_N, None])
        return total


@dataclass(frozen=True, slots=True)
class SimulatedLayout:
    """Whole weights, and a layout that shards them."""

    weight_map: WeightMap
    plan: CutPlan
    weights: Mapping[str, Tensor]
    tp: int
    ep: int = 1
    etp: int = 1

    def part(self, name: str, **coords: tuple[int, int]) -> Tensor:
        """A rank's shard of a native tensor, differentiable in the whole."""
        entry, whole = self.weight_map.entries[name], self.weights[name]
        local = cut_entry(entry, self.plan, coords)
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
        for name in {"o.bias", "down.bias"} & parts.keys():  # added once, after the sum
            for rank in ranks[1:]:
                rank[name] = torch.zeros_like(rank[name])
        return SumOverRanks(module, ranks)

    def dispatch(self, prefix: str, experts: Experts) -> ExpertsOverRanks:
        per_rank = -(-self.weight_map.dims.num_experts // self.ep)
        ranks = []
        for e, t in itertools.product(range(self.ep), range(self.etp)):
            at = {"ep": (self.ep, e), "etp": (self.etp, t)}
            names = [name for name, _ in experts.named_parameters()]
            ranks.append((e * per_rank, {n: self.part(f"{prefix}.{n}", **at) for n in names}))
        return ExpertsOverRanks(ranks)

    def spread(self, model: Decoder) -> None:
        """Replaces modules of a model on meta by simulated ranks."""
        for i, block in model.layers.items():
            assert isinstance(block, Block), f"layer {i} is no Block: its ranks are not simulated"
            block.add_module("attn", self.summed(f"layers.{i}.attn", block.attn))
            if isinstance(block.ffn, Moe):
                prefix = f"layers.{i}.ffn.experts"
                block.ffn.dispatch = self.dispatch(prefix, block.ffn.experts)
                if isinstance(block.ffn, DenseMoe):
                    dense = self.summed(f"layers.{i}.ffn.dense", block.ffn.dense)
                    block.ffn.add_module("dense", dense)
            else:
                block.add_module("ffn", self.summed(f"layers.{i}.ffn", block.ffn))
        dims = self.weight_map.dims
        model.add_module(
            "embed", EmbeddingOverRanks(self.tp_parts("embed.weight"), dims.padding_id)
        )
        if isinstance(model, SharingDecoder) and model.layer_embed is not None:
            rows = self.tp_parts("layer_embed.table.weight")
            model.layer_embed.add_module("table", EmbeddingOverRanks(rows, dims.padding_id))

    def logits(self, model: Decoder, ids_T: Tensor, attend: Attend) -> Tensor:
        """The logits of one sequence as the ranks of the layout compute them."""
        self.spread(model)
        held = (*model.named_parameters(), *model.named_buffers())
        own = {name: self.weights[name] for name, _ in held if name in self.weights}
        hidden_TD = functional_call(model, own, (ids_T, torch.arange(len(ids_T)), attend))
        is_tied = self.weight_map.entries["head.weight"].is_copy
        heads = self.tp_parts("embed.weight" if is_tied else "head.weight")
        product_TV = torch.cat([F.linear(hidden_TD, rows) for rows in heads], dim=-1)
        return bent(product_TV, model.logit_scale, model.logit_cap)


def ranks_of(layout: Mapping[str, int]) -> list[RankCoords]:
    """Coordinates of every rank; tp and (ep, etp) are two factorisations of one world."""
    tp, ep, etp = (layout.get(axis, 1) for axis in ("tp", "ep", "etp"))
    return [
        {"tp": (tp, rank % tp), "ep": (ep, rank // etp % ep), "etp": (etp, rank % etp)}
        for rank in range(math.lcm(tp, ep * etp))
    ]


def local_tensor(
    entry: Entry,
    weight_map: WeightMap,
    plan: CutPlan,
    coords: RankCoords,
    sources: Mapping[str, Tensor],
) -> Tensor:
    """A rank's shard of a target tensor, filled from source tensors; padding is zero."""
    local = cut_entry(entry, plan, coords)
    out = torch.zeros(local.shape)
    for region in local.regions:
        target_block(out, region).copy_(source_block(sources[region.source], region))
    return out


def round_trip_fault(
    weight_map: WeightMap, plan: CutPlan, ranks: Sequence[RankCoords], disk: Mapping[str, Tensor]
) -> str | None:
    """The first source tensor that changes in a round trip through the ranks' shards, or None."""
    back = {name: torch.full_like(tensor, float("nan")) for name, tensor in disk.items()}
    for entry in weight_map.entries.values():
        if entry.is_copy or entry.rule.optional:
            continue
        for coords in ranks:
            local = cut_entry(entry, plan, coords)
            shard = local_tensor(entry, weight_map, plan, coords, disk)
            for region in local.regions:
                out = flip(region, entry.name, local.shape)
                target_block(back[region.source], out).copy_(source_block(shard, out))
    wrong = (n for n, t in disk.items() if n not in weight_map.tied and not torch.equal(back[n], t))
    return next(wrong, None)


class MegatronForward:
    """Computes logits of one sequence from the Megatron tensors of all tp and etp ranks."""

    def __init__(
        self,
        dims: ModelDims,
        ranks: Sequence[Mapping[str, Tensor]],
        expert_ranks: Sequence[Mapping[str, Tensor]],
        attend: Attend,
    ) -> None:
        self.dims = dims
        self.ranks = ranks
        self.expert_ranks = expert_ranks
        self.attend = attend

    def logits(self, ids_T: Tensor) -> Tensor:
        turns = Rotary(self.dims)(torch.arange(len(ids_T)), torch.float32)
        x = torch.cat([rank["embedding.word_embeddings.weight"] for rank in self.ranks])[ids_T]
        for layer in range(self.dims.num_layers):
            at = f"decoder.layers.{layer}."
            turn = turns[self.dims.rope_kind(layer)]
            x = x + self.attention(x, at + "self_attention.", layer, turn)
            x = x + (self.mixture(x, at) if self.dims.is_moe(layer) else self.mlp(x, at))
        h = self.norm(x, "decoder.final_layernorm.weight")
        return self.columns(h, "output_layer")[:, : self.dims.vocab_size]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.dims.norm_eps)
        return x * scale * self.ranks[0][name]

    def columns(self, x: Tensor, name: str) -> Tensor:
        """A column-parallel layer whose outputs are gathered."""
        outs = [F.linear(x, r[name + ".weight"], r.get(name + ".bias")) for r in self.ranks]
        return torch.cat(outs, dim=-1)

    def rows(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """A row-parallel layer: partial results are summed, the bias is added once."""
        pairs = zip(parts, self.ranks, strict=True)
        total = torch.stack([F.linear(x, rank[name + ".weight"]) for x, rank in pairs]).sum(0)
        bias = self.ranks[0].get(name + ".bias")
        return total if bias is None else total + bias

    def attention(self, x: Tensor, at: str, layer: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        dims = self.dims
        h = self.norm(x, at + "linear_qkv.layer_norm_weight")
        per_group = dims.num_heads // dims.num_kv_heads
        fused = self.columns(h, at + "linear_qkv")
        fused = fused.unflatten(-1, (dims.num_kv_heads, per_group + 2, dims.head_dim))
        q, k, v = fused[:, :, :per_group].flatten(1, 2), fused[:, :, -2], fused[:, :, -1]
        if dims.qk_norm:
            q, k = self.norm(q, at + "q_layernorm.weight"), self.norm(k, at + "k_layernorm.weight")
        o = self.attend(layer, rotate(q, *turn), rotate(k, *turn), v, window=dims.window(layer))
        widths = [rank[at + "linear_proj.weight"].shape[1] for rank in self.ranks]
        return self.rows(o.flatten(1).split(widths, dim=-1), at + "linear_proj")

    def mlp(self, x: Tensor, at: str) -> Tensor:
        fc1 = at + "mlp.linear_fc1."
        h = self.norm(x, fc1 + "layer_norm_weight")
        parts = [gated(h, rank[fc1 + "weight"], rank.get(fc1 + "bias")) for rank in self.ranks]
        return self.rows(parts, at + "mlp.linear_fc2")

    def mixture(self, x: Tensor, at: str) -> Tensor:
        h = self.norm(x, at + "pre_mlp_layernorm.weight")
        weights, chosen = self.route(h, at + "mlp.router.")
        total = torch.zeros_like(h)
        for e in range(self.dims.num_experts):
            share = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
            for rank in self.expert_ranks:
                y = gated(h, rank[f"{at}mlp.experts.linear_fc1.weight{e}"])
                total = total + share * F.linear(y, rank[f"{at}mlp.experts.linear_fc2.weight{e}"])
        return total + self.shared(h, at + "mlp.shared_experts.")

    def route(self, h: Tensor, at: str) -> tuple[Tensor, Tensor]:
        dims, logits = self.dims, F.linear(h, self.ranks[0][at + "weight"])
        scores = logits.sigmoid() if dims.router_score == "sigmoid" else logits.softmax(-1)
        keys = scores + self.ranks[0][at + "expert_bias"] if dims.router_bias else scores
        chosen = keys.topk(dims.num_experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if dims.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * dims.router_scale, chosen

    def shared(self, h: Tensor, at: str) -> Tensor:
        if not self.dims.shared_expert_size:
            return torch.zeros_like(h)
        parts = [gated(h, rank[at + "linear_fc1.weight"]) for rank in self.ranks]
        y = self.rows(parts, at + "linear_fc2")
        if not self.dims.shared_expert_gate:
            return y
        return F.linear(h, self.ranks[0][at + "gate_weight"]).sigmoid() * y


def gated(x: Tensor, fc1: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = F.linear(x, fc1, bias).chunk(2, dim=-1)
    return F.silu(gate) * up
