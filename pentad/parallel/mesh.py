"""The meshes of a layout: the axes of all ranks, in two views.

For dense parameters the world is pp x dp_replicate x dp_shard x cp x tp, for experts pp x
dp_replicate x efsdp x ep x etp. Parameters are sharded over fsdp = dp_shard x cp or efsdp. In
device meshes the axes that split a tensor first come first (tp before fsdp), so that a stored shard
is plain nested sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pentad.core.errors import Problem, UserError
from pentad.core.layout import Coords, Layout


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks of one axis, and this rank's index among them."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """The process group; None if the axis has one rank."""

    @property
    def name(self) -> str:
        """Returns the name of the group for functional collectives."""
        assert self.group is not None, "an axis of one rank has no group"
        return self.group.group_name


ALONE = Axis()


@dataclass(frozen=True)
class Meshes:
    """All groups through which a rank communicates. Built by `build_meshes`."""

    layout: Layout
    coords: Coords
    rank: int
    device: torch.device
    pp: Axis = ALONE
    tp: Axis = ALONE
    cp: Axis = ALONE
    batch: Axis = ALONE
    """dp_replicate x dp_shard x cp: ranks with different tokens and the same tp part."""
    expert_group: Axis = ALONE
    """ep x etp: ranks that together have all experts once."""
    world: Axis = ALONE
    dense: DeviceMesh | None = None
    """pp x tp x dp_replicate x fsdp; None with one rank."""
    expert: DeviceMesh | None = None
    """pp x ep x etp x dp_replicate x efsdp."""
    copies: dict[int, tuple[DeviceMesh, Axis]] = field(default_factory=dict)
    factors: dict[bool, Axis] = field(default_factory=dict)

    @property
    def token_multiple(self) -> int:
        """Divisor of a microbatch's number of tokens."""
        return self.layout.cp * self.layout.tp

    @cached_property
    def dense_parts(self) -> DeviceMesh:
        """tp x fsdp: the axes that split a dense parameter. Cached: it takes milliseconds."""
        assert self.dense is not None, "a world of one cuts nothing"
        return self.dense["tp", "fsdp"]

    @cached_property
    def expert_parts(self) -> DeviceMesh:
        """ep x etp x efsdp: the axes that split experts."""
        assert self.expert is not None, "a world of one cuts nothing"
        return self.expert["ep", "etp", "efsdp"]

    def storage(self, experts: bool = False) -> DeviceMesh:
        """The axes that shard parameters: fsdp or efsdp, with dp_replicate before it if used."""
        mesh, last = (self.expert, "efsdp") if experts else (self.dense, "fsdp")
        if mesh is None:
            return solo_mesh(self.device)
        return mesh["dp_replicate", last] if self.layout.dp_replicate > 1 else mesh[last]

    def copied_heads(self, num_heads: int) -> tuple[DeviceMesh, Axis]:
        """With fewer kv heads than tp ranks: returns pp x tp_heads x tp_copies x dp_replicate x
        fsdp, and the ranks with the same head. Every rank must call it."""
        if num_heads not in self.copies:
            layout = self.layout
            ranks = _ranks(layout).view(-1, num_heads, layout.tp // num_heads)
            shape = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp)
            ranks = ranks.view(*shape, num_heads, -1).permute(0, 3, 4, 1, 2)
            names = ("pp", "tp_heads", "tp_copies", "dp_replicate", "fsdp")
            mesh = _device_mesh(self.device, ranks, names)
            self.copies[num_heads] = (mesh, _axis_of(mesh, "tp_copies"))
        return self.copies[num_heads]

    def factor_axes(self) -> dict[bool, Axis]:
        """Returns the ranks of one pipeline stage with the same factors of experts: True: factors
        that etp splits; False: others. Every rank must call it."""
        if not self.factors:
            at = self.layout
            outer = at.dp_replicate * at.efsdp
            ranks = _ranks(at).view(at.pp, outer, at.ep, at.etp).permute(0, 2, 3, 1)
            self.factors[True] = _axis_over(ranks.reshape(-1, outer), self.rank)
            whole = ranks.transpose(2, 3).reshape(-1, outer * at.etp)
            self.factors[False] = _axis_over(whole, self.rank)
        return self.factors


_BUILT: dict[tuple[Layout, str], tuple[dist.ProcessGroup | None, Meshes]] = {}


def build_meshes(layout: Layout, device: torch.device) -> Meshes:
    """Returns the meshes of this process in the present process group; cached, because groups are
    expensive. With one rank, needs and makes no process group."""
    world = dist.group.WORLD if dist.is_initialized() else None
    size = dist.get_world_size() if world is not None else 1
    if size != layout.world:
        rule = f"needs {layout.world} processes, but this group has {size}"
        raise UserError(Problem(f"layout = {layout}", rule, "start as many as the layout has"))
    known = _BUILT.get((layout, device.type))
    if known is not None and known[0] is world:
        return known[1]
    if any(group is not world for group, _ in _BUILT.values()):
        # A new world of the same shape: DTensor would reuse the meshes of the old one.
        _BUILT.clear()
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # slow to import

        _clear_sharding_prop_cache()
    if world is None or size == 1:
        meshes = Meshes(layout, layout.coords(0), 0, device)
    else:
        meshes = _build(layout, device, dist.get_rank())
    _BUILT[layout, device.type] = (world, meshes)
    return meshes


def _ranks(layout: Layout) -> Tensor:
    return torch.arange(layout.world, device="cpu")


def _build(layout: Layout, device: torch.device, rank: int) -> Meshes:
    pp, rep, fsdp = layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp
    dense = _device_mesh(
        device,
        _ranks(layout).view(pp, rep, fsdp, layout.tp).permute(0, 3, 1, 2),
        ("pp", "tp", "dp_replicate", "fsdp"),
    )
    expert = _device_mesh(
        device,
        _ranks(layout).view(pp, rep, layout.efsdp, layout.ep, layout.etp).permute(0, 3, 4, 1, 2),
        ("pp", "ep", "etp", "dp_replicate", "efsdp"),
    )
    inner = _ranks(layout).view(-1, layout.cp, layout.tp)
    batch = _ranks(layout).view(pp, rep * fsdp, layout.tp).transpose(1, 2)
    expert_group = _ranks(layout).view(-1, layout.ep * layout.etp)
    return Meshes(
        layout,
        layout.coords(rank),
        rank,
        device,
        pp=_axis_of(dense, "pp"),
        tp=_axis_of(dense, "tp"),
        cp=_axis_over(inner.transpose(1, 2).reshape(-1, layout.cp), rank),
        batch=_axis_over(batch.reshape(-1, rep * fsdp), rank),
        expert_group=_axis_over(expert_group, rank),
        world=Axis(layout.world, rank, dist.group.WORLD),
        dense=dense,
        expert=expert,
    )


def _device_mesh(device: torch.device, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    # Made contiguous: torch 2.11 slices no dims with increasing strides, even of size 1.
    ranks = ranks.flatten().view(ranks.shape)
    return DeviceMesh(device.type, ranks, mesh_dim_names=names)


def _axis_of(mesh: DeviceMesh, name: str) -> Axis:
    size = mesh[name].size()
    return Axis(size, mesh.get_local_rank(name), mesh.get_group(name)) if size > 1 else ALONE


def _axis_over(rows: Tensor, rank: int) -> Axis:
    """Returns the axis whose groups are the rows; an axis of the whole world needs no new group."""
    lists: Sequence[list[int]] = rows.tolist()
    if len(lists[0]) == 1:
        return ALONE
    mine = next(row for row in lists if rank in row)
    if len(lists) == 1 and mine == sorted(mine):
        return Axis(len(mine), rank, dist.group.WORLD)
    group, _ = dist.new_subgroups_by_enumeration(list(lists))
    return Axis(len(mine), mine.index(rank), group)


def solo_mesh(device: torch.device) -> DeviceMesh:
    """Returns a mesh of this process alone; makes a process group of one if there is none."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
