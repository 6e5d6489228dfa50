"""Sharding of parameters: the part with which a rank computes, and the shard that it stores.

A rank computes with plain tensors: its box under tp, ep and etp, by the model file's plan. FSDP2
shards the box over fsdp or efsdp. For callers a parameter is a DTensor of the whole tensor under
any layout (a `PartTensor` if ep does not divide the experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from pentad.core.fit import expert_range
from pentad.ops.rounding import Place
from pentad.parallel.mesh import ALONE, Axis, Meshes
from pentad.weights.boxes import placed_box
from pentad.weights.cuts import REPEATED, UNITS, CutPlan, cut_entry, split_dims
from pentad.weights.map import Entry, WeightMap
from pentad.weights.parts import AnyPlacement, BalancedShard, PartTensor
from pentad.weights.regions import Box, Shape, box_shape, full_box, slices

EXPERT_AXES = ("ep", "etp")


def local(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor | PartTensor) else tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """The partition of one parameter under a layout."""

    shape: Shape
    """The shape of the whole tensor."""
    box: Box
    """The box of the whole tensor with which this rank computes."""
    copies: Axis
    """Ranks of one microbatch that compute with the same box. Each has only some of the tokens or
    heads: gradients are summed over them, and counted once in the norm."""
    is_expert: bool
    stored_dim: int
    """The dim along which storage shards."""
    mesh: DeviceMesh | None
    placements: tuple[AnyPlacement, ...]
    """Placements of the stored shard within the whole."""
    sees_all: bool = False
    """Whether each of the copies has all tokens and heads: then gradients are equal, and not
    summed."""
    data: Axis = ALONE
    """Ranks of other microbatches with the same box, if storage does not shard it: gradients are
    summed over them too."""

    @property
    def local_shape(self) -> Shape:
        return box_shape(self.box)

    def present(self, local: Tensor) -> Tensor:
        """Returns a stored shard as a view of the whole tensor; shares memory."""
        if self.mesh is None:
            return local
        plain = tuple(one for one in self.placements if not isinstance(one, BalancedShard))
        if len(plain) < len(self.placements):
            return PartTensor(local.detach(), self.shape, self.stored, self.mesh, self.placements)
        whole = torch.empty(self.shape, device="meta")
        meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
        return DTensor(  # not from_local, which would move a shard kept on the host
            local.detach(), DTensorSpec(self.mesh, plain, meta), requires_grad=False
        )

    def take(self, whole: Tensor) -> Tensor:
        """Returns the stored shard of a whole tensor."""
        return whole[slices(self.stored)]

    @property
    def stored(self) -> Box:
        """The stored shard within the whole tensor."""
        if self.mesh is None:
            return full_box(self.shape)
        return placed_box(self.shape, self.mesh, self.placements)

    @property
    def place(self) -> Place:
        """Like `stored`, for operations that depend on an element's position."""
        return Place.of(self.shape, self.stored)


def plan_cuts(
    names: Mapping[str, Tensor], weight_map: WeightMap, plan: CutPlan, meshes: Meshes
) -> dict[str, Cut]:
    """The cut of every named parameter. Every rank must call it."""
    if any(entry.rule.is_factor for entry in weight_map.entries.values()):
        meshes.factor_axes()  # called on all ranks: a pipeline rank may have no experts
    return {name: _cut(weight_map.entries[name], plan, meshes) for name in names}


def _cut(entry: Entry, plan: CutPlan, meshes: Meshes) -> Cut:
    layout, at = meshes.layout, meshes.coords
    coords = {
        "tp": (layout.tp, at.tp),
        "ep": (layout.ep, at.ep),
        "etp": (layout.etp, at.etp),
    }
    axes = split_dims(entry, plan)
    part = cut_entry(entry, plan, coords)
    assert len(part.boxes) == 1, f"{entry.name} has {len(part.boxes)} pieces on this rank"
    (box, _), *_ = part.boxes
    is_expert = any(axis in axes for axis in EXPERT_AXES)
    num_stored = layout.efsdp if is_expert else layout.dp_shard * layout.cp
    sizes = list(part.shape)
    if "ep" in axes:
        sizes[axes["ep"]] = _common_size(entry.shape[axes["ep"]], layout.ep)
    dim = storage_dim(tuple(sizes), num_stored)
    copies, mesh, placements = _outside(entry, axes, meshes, is_expert)
    if entry.rule.is_factor:
        data = meshes.factor_axes()["etp" in axes] if is_expert else meshes.batch
        last = (*placements, Replicate())
        return Cut(entry.shape, box, copies, is_expert, dim, mesh, last, data=data)
    return Cut(
        shape=entry.shape,
        box=box,
        copies=copies,
        is_expert=is_expert,
        stored_dim=dim,
        mesh=mesh,
        placements=(*placements, Shard(dim)),
    )


def cut_stack(shape: Shape, meshes: Meshes) -> Cut:
    """The cut of a parameter whose first dim is the expert: ep splits it, etp does not."""
    ep, num = meshes.layout.ep, shape[0]
    box = (expert_range(num, ep, meshes.coords.ep), *full_box(shape[1:]))
    dim = storage_dim((_common_size(num, ep), *shape[1:]), meshes.layout.efsdp)
    whole = BalancedShard(0) if num % ep else Shard(0)
    placements = (whole, Replicate(), Shard(dim))
    return Cut(shape, box, ALONE, True, dim, meshes.expert_parts, placements)


def _common_size(num_experts: int, ep: int) -> int:
    """A number of experts by which all ranks choose the same dim, even with different numbers."""
    each, more = divmod(num_experts, ep)
    return 1 if more else each


def _outside(
    entry: Entry, axes: Mapping[str, int], meshes: Meshes, is_expert: bool
) -> tuple[Axis, DeviceMesh | None, tuple[AnyPlacement, ...]]:
    """Returns (copies, mesh, placements but the last) of a parameter."""
    if meshes.dense is None or meshes.expert is None:
        return ALONE, None, ()

    def at(axis: str) -> AnyPlacement:
        if axis == "ep" and axis in axes and entry.shape[axes[axis]] % meshes.layout.ep:
            return BalancedShard(axes[axis])
        return Shard(axes[axis]) if axis in axes else Replicate()

    if is_expert:
        return ALONE, meshes.expert_parts, (at("ep"), at("etp"))
    if "tp" not in axes:
        return meshes.tp, meshes.dense_parts, (Replicate(),)
    symbol = entry.rule.shape.split()[axes["tp"]]
    if symbol in REPEATED:
        num_units = entry.sizes[symbol] // entry.sizes[UNITS[symbol]]
        if num_units < meshes.layout.tp:
            mesh, copies = meshes.copied_heads(num_units)
            return copies, mesh["tp_heads", "tp_copies", "fsdp"], (at("tp"), Replicate())
    return ALONE, meshes.dense_parts, (at("tp"),)


def storage_dim(shape: Shape, num: int) -> int:
    """Returns the dim of a rank's box along which storage shards: the first that divides evenly,
    else the first, because FSDP2 supports uneven shards only on dim 0. A gate and up pair has a
    first dim of 2, so all but two ranks would have no shard."""
    even = [dim for dim, size in enumerate(shape) if size % num == 0]
    return even[0] if even else 0


def cut_parameters(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Replaces meta parameters by ones with this rank's shapes."""
    for name, parameter in list(model.named_parameters()):
        if parameter.shape == torch.Size(cuts[name].local_shape):
            continue
        assert parameter.is_meta, "parameters are split before they have memory"
        path, _, key = name.rpartition(".")
        local = torch.empty(cuts[name].local_shape, dtype=parameter.dtype, device="meta")
        cut = nn.Parameter(local, requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(path), key, cut)
