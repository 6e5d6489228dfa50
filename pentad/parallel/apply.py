"""How a model is laid out over ranks: every step, in the order in which they must come.

    build on meta          the caller; no rank holds what it will not keep
    (pipeline split)       the caller builds the layers of its stages only
    cut parameters         tp, ep, etp: each becomes the box this rank computes with
    seams                  tp and sequence parallelism: tokens gathered and dealt
    expert dispatch        ep, etp: pairs sent to the experts and back
    blocks                 activation checkpointing, then torch.compile
    storage                FSDP2 over fsdp and efsdp, replicas over dp_replicate, precision
    memory, weights        the caller; shards are filled straight from the source

Context parallelism is not among them: it lives in the attention core, which is made for each
microbatch (`context.UlyssesAttend`). Model files know none of this; they declare a plan (which
size is cut by which axis) and seams, both data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from pentad.core.seams import Seam
from pentad.core.settings import EngineSettings
from pentad.parallel.blocks import Parts, apply_to_blocks
from pentad.parallel.cuts import Cut, cut_parameters, plan_cuts
from pentad.parallel.experts import CellDispatch
from pentad.parallel.mesh import Meshes
from pentad.parallel.storage import apply_storage, is_cast_whole, needs_storage
from pentad.parallel.tensor import apply_seams
from pentad.weights.map import WeightMap


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model as the steps see it, on the meta device."""

    root: nn.Module
    """Whatever is called for a forward pass, heads included."""
    model: nn.Module
    """Parameters under their native names."""
    blocks: Mapping[int, nn.Module]
    """By layer."""
    mixtures: Mapping[int, Parts]
    """By layer, of the blocks that have experts."""
    set_dispatch: Callable[[CellDispatch], None]
    """Says to all mixtures how tokens come to their experts."""
    weight_map: WeightMap
    plan: Mapping[str, str]
    seams: tuple[Seam, ...]


def lay_out(parts: ModelParts, settings: EngineSettings, meshes: Meshes) -> dict[str, Cut]:
    """Everything up to memory; returns who holds what."""
    dims = parts.weight_map.dims
    named = dict(parts.model.named_parameters())
    cuts = plan_cuts(named, parts.weight_map, parts.plan, meshes)
    cut_parameters(parts.model, cuts)
    apply_seams(parts.model, parts.seams, dims, cuts, meshes.tp)
    if meshes.cell.size > 1:
        parts.set_dispatch(CellDispatch(meshes.cell, meshes.layout.etp, dims.num_experts))
    is_sharded = needs_storage(settings, meshes, cuts) and not is_cast_whole(settings, meshes)
    is_apart = meshes.cell.size > 1 or is_sharded
    mixtures = parts.mixtures if is_apart else {}
    apply_to_blocks(parts.blocks, settings, meshes.device, mixtures)
    entries = parts.weight_map.entries
    own_dtypes = {name: entries[name].rule.dtype for name in named if entries[name].rule.dtype}
    blocks = parts.blocks.values()
    apply_storage(parts.root, parts.model, blocks, cuts, own_dtypes, settings, meshes)
    return cuts
