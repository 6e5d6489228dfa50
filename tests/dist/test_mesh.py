"""Axes of a layout: each joins exactly the ranks that differ in it, in the order of coordinates."""

import dataclasses

import pytest

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist
DENSE, EXPERT = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("efsdp", "ep", "etp")
VARYING = {
    "tp": ("tp",),
    "cp": ("cp",),
    "batch": ("dp_replicate", "dp_shard", "cp"),
    "expert_group": ("ep", "etp"),
}
"""Axis -> the coordinates in which its ranks differ, the last one fastest."""


def members(layout: Layout) -> dict:
    """Of every axis and storage mesh of this rank, the ranks it joins, in order."""
    import torch
    import torch.distributed as dist

    from pentad.parallel.mesh import build_meshes

    meshes = build_meshes(layout, torch.device("cpu"))
    assert build_meshes(layout, torch.device("cpu")) is meshes
    out = {}
    for name in VARYING:
        axis = vars(meshes)[name]
        ranks = [meshes.rank] if axis.group is None else dist.get_process_group_ranks(axis.group)
        assert ranks[axis.rank] == meshes.rank and len(ranks) == axis.size
        out[name] = ranks
    out["storage"] = meshes.storage().mesh.tolist()
    out["expert storage"] = meshes.storage(experts=True).mesh.tolist()
    everyone = [None] * layout.world
    dist.all_gather_object(everyone, out)
    return {"ranks": everyone}


def differ_only_in(layout: Layout, rank: int, names: tuple[str, ...]) -> list[int]:
    side = (*DENSE[:2], *EXPERT) if set(names) & set(EXPERT) else DENSE
    mine = dataclasses.asdict(layout.coords(rank))
    found = [
        other
        for other in range(layout.world)
        if all(
            dataclasses.asdict(layout.coords(other))[key] == mine[key]
            for key in side
            if key not in names
        )
    ]
    return sorted(found, key=lambda r: [dataclasses.asdict(layout.coords(r))[n] for n in names])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, cp=2, tp=2, ep=4),
        Layout(dp_replicate=2, cp=2, tp=2, ep=2, etp=2),
        Layout(pp=2, dp_shard=2, tp=2, ep=2),
        Layout(pp=2, cp=2, tp=2, ep=4),
        Layout(dp_replicate=2, dp_shard=2, tp=2, etp=4),
    ],
    ids=str,
)
def test_axes_are_those_of_the_layout(pool, layout):
    seen = pool.run(layout.world, "test_mesh", "members", layout=layout)["ranks"]
    for rank, axes in enumerate(seen):
        for name, varying in VARYING.items():
            assert axes[name] == differ_only_in(layout, rank, varying), (rank, name)
        stored = {"storage": ("dp_shard", "cp"), "expert storage": ("efsdp",)}
        for name, varying in stored.items():
            ranks = axes[name] if layout.dp_replicate == 1 else axes[name][at(layout, rank)]
            assert ranks == differ_only_in(layout, rank, varying), (rank, name)


def at(layout: Layout, rank: int) -> int:
    return layout.coords(rank).dp_replicate


def test_a_world_of_another_size_is_refused(pool):
    assert "needs 4 processes, but this group has 2" in pool.run(2, "test_mesh", "too_many")


def too_many() -> str:
    import torch

    from pentad.core.errors import UserError
    from pentad.parallel.mesh import build_meshes

    try:
        build_meshes(Layout(tp=4), torch.device("cpu"))
    except UserError as error:
        return str(error)
    return ""
