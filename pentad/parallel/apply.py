"""Applies parallelism to a model: every step, in the required order.

    build on meta          the caller; no rank holds what it will not keep
    (pipeline split)       the caller builds the layers of its stages only
    cut parameters         tp, ep, etp: each becomes the box this rank computes with
    seams                  tp and sequence parallelism: tokens gathered and dealt
    expert dispatch        ep, etp: pairs sent to the experts and back
    blocks                 activation checkpointing, then torch.compile
    storage                FSDP2 over fsdp and efsdp, replicas over dp_replicate, precision
    memory, weights        the caller; shards are filled straight from the source

Context parallelism is not among them: it is part of the attention core, which is made for each
microbatch (`context.UlyssesAttend`). Model files contain no parallelism code; they declare a plan
(which size is split by which axis) and seams as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.swap import swap_class
from pentad.engine.section import ModelConfig
from pentad.parallel.blocks import Parts, apply_to_blocks, compiling
from pentad.parallel.collectives import gather_parts, scatter_sum, sum_ranks
from pentad.parallel.cuts import Cut, cut_parameters, plan_cuts
from pentad.parallel.experts import ExpertDispatch
from pentad.parallel.mesh import Axis, Meshes
from pentad.parallel.storage import apply_storage, is_cast_whole, needs_storage
from pentad.weights.cuts import Seam
from pentad.weights.map import WeightMap


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a model that the steps need, on the meta device."""

    root: nn.Module
    """The module of a forward pass, including heads."""
    model: nn.Module
    """Parameters under their native names."""
    blocks: Mapping[int, nn.Module]
    """Blocks by layer."""
    mixtures: Mapping[int, Parts]
    """Parts of the blocks with experts, by layer."""
    set_dispatch: Callable[[ExpertDispatch], None]
    """Sets the dispatch of all mixtures."""
    weight_map: WeightMap
    plan: Mapping[str, str]
    seams: tuple[Seam, ...]


def lay_out(parts: ModelParts, keys: ModelConfig, meshes: Meshes) -> dict[str, Cut]:
    """Parallelises the model, without allocating memory; returns the cut of each parameter."""
    dims = parts.weight_map.dims
    named = dict(parts.model.named_parameters())
    cuts = plan_cuts(named, parts.weight_map, parts.plan, meshes)
    cut_parameters(parts.model, cuts)
    apply_seams(parts.model, parts.seams, dims, cuts, meshes.tp)
    if meshes.expert_group.size > 1:
        parts.set_dispatch(ExpertDispatch(meshes.expert_group, meshes.layout.etp, dims.num_experts))
    is_sharded = needs_storage(keys, meshes, cuts) and not is_cast_whole(keys, meshes)
    is_apart = meshes.expert_group.size > 1 or is_sharded
    mixtures = parts.mixtures if is_apart else {}
    compiling.expect(dims, keys, meshes.layout, meshes.device)
    apply_to_blocks(parts.blocks, keys, meshes.device, mixtures)
    entries = parts.weight_map.entries
    own_dtypes = {
        name: entries[name].rule.dtype
        for name in named
        if entries[name].rule.dtype and not entries[name].rule.is_factor
    }
    blocks = parts.blocks.values()
    apply_storage(parts.root, parts.model, blocks, cuts, own_dtypes, keys, meshes)
    return cuts


def apply_seams(
    model: nn.Module,
    seams: Iterable[Seam],
    dims: ModelDims,
    cuts: Mapping[str, Cut],
    tp: Axis,
) -> None:
    """Replaces the forward of every module at a seam by one that gathers or splits tokens.

    Between the seams the residual stream is split over the tp ranks by tokens, so norms, biases and
    routers process only a share of the tokens: `gradients` sums their gradients over tp.
    """
    if tp.size == 1:
        return
    modules = dict(model.named_modules())
    for seam in seams:
        layers = range(dims.num_layers) if "{i}" in seam.module else [0]
        for i in layers:
            name = seam.module.format(i=i)
            if not seam.when(dims, i) or name not in modules:
                continue  # a pipeline stage has only some of the modules
            module = modules[name]
            start = {"start": cuts[f"{name}.weight"].box[0][0]} if seam.kind == "lookup" else {}
            swap_class(module, _MAKERS[seam.kind](type(module)), tp=tp, **start)


@cache
def _gathered(cls: Any) -> type[nn.Module]:
    class Gathered(cls):
        tp: Axis

        def forward(self, x_TD: Tensor, *args: Any) -> Tensor:
            result: Tensor = super().forward(gather_parts(x_TD, self.tp), *args)
            return result

    return Gathered


@cache
def _scattered(cls: Any) -> type[nn.Module]:
    assert issubclass(cls, nn.Linear), f"a scatter seam is a projection, not a {cls.__name__}"

    class Scattered(cls):
        tp: Axis

        def forward(self, x_TF: Tensor) -> Tensor:
            y_TD = F.linear(x_TF, self.weight)
            lora = getattr(self, "lora", None)
            if lora is not None and lora.is_on:
                y_TD = y_TD + lora(x_TF)
            y_TD = scatter_sum(y_TD, self.tp)
            return y_TD if self.bias is None else y_TD + self.bias

    return Scattered


@cache
def _looked_up(cls: Any) -> type[nn.Module]:
    assert issubclass(cls, nn.Embedding), f"a lookup seam is a table, not a {cls.__name__}"

    class LookedUp(cls):
        tp: Axis
        start: int

        def forward(self, ids_T: Tensor) -> Tensor:
            num_rows = self.weight.shape[0]
            padding = -1 if self.padding_idx is None else self.padding_idx - self.start
            padding_id = padding if 0 <= padding < num_rows else None
            local_T = ids_T - self.start
            is_away_T = (local_T < 0) | (local_T >= num_rows)
            x_TD = F.embedding(local_T.clamp(0, num_rows - 1), self.weight, padding_id)
            return scatter_sum(x_TD.masked_fill(is_away_T[:, None], 0), self.tp)

    return LookedUp


@cache
def _spread_norm(cls: Any) -> type[nn.Module]:
    class SpreadNorm(cls):
        tp: Axis

        def mean_square(self, wide: Tensor) -> Tensor:
            # Parts have equal widths, and all heads are on the same number of ranks.
            return sum_ranks(super().mean_square(wide), self.tp) / self.tp.size

    return SpreadNorm


_MAKERS: dict[str, Callable[[type], type[nn.Module]]] = {
    "gather": _gathered,
    "norm": _spread_norm,
    "scatter": _scattered,
    "lookup": _looked_up,
}
