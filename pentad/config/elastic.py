"""The config of a run that has fewer ranks than its layout asks for: the rules say which fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pentad.config.derived import allocation_of, component_of, known_dims
from pentad.config.rules.layout import layout_problems
from pentad.config.schema import Config
from pentad.core.layout import Allocation, Component
from pentad.core.shrink import describe, shrink


@dataclass(frozen=True, slots=True)
class Fitted:
    config: Config
    """With the layout that fits; all else, the global batch and the order of data too, stays."""
    world: int
    """Ranks that it uses."""
    why: str
    """What changed, in words; empty: nothing."""


def fit_world(config: Config, world: int) -> Fitted | None:
    """For at most `world` ranks that train; None where no layout of so few is valid."""
    actor = component_of(config, "actor")
    if actor.world <= world:
        return Fitted(config, actor.world, "")
    for ranks in range(world, 0, -1):  # what else stands on the actor's ranks needs as many
        fitted: Config | None = config
        for part in sharing(allocation_of(config), actor):
            fitted = fitted and _shrunk(fitted, part, ranks)
        if fitted is None:
            continue
        now = component_of(fitted, "actor")
        if {part.world for part in sharing(allocation_of(fitted), now)} == {now.world}:
            return Fitted(fitted, now.world, describe(actor, now, world))
    return None


def sharing(allocation: Allocation, actor: Component) -> list[Component]:
    """What trains on the ranks of the actor, itself included."""
    return [
        part
        for part in allocation
        if not part.is_inference and allocation.shares_devices(actor, part)
    ]


def _shrunk(config: Config, before: Component, world: int) -> Config | None:
    """With this component alone made smaller."""
    allocation, dims = allocation_of(config), known_dims(config.actor.path)
    key = "critic" if before.role == "critic" else "actor"
    is_shared = key == "actor" and allocation.find("critic") is None

    def with_(after: Component, replicas: int) -> Config:
        groups = [
            tuple(after if one == before else one for one in group) for group in allocation.groups
        ]
        changes: dict[str, Any] = {
            "allocation_mode": str(Allocation(tuple(groups))),
            "parallelism": None,
            "resource": None,
        }
        for name in (key, "critic") if is_shared else (key,):
            model = config.critic if name == "critic" else config.actor
            cut: dict[str, Any] = {"dp_replicate": replicas}
            if after.size("p") != before.size("p"):  # balanced anew
                cut["layers_per_stage"] = None
            archon = model.archon.model_copy(update=cut)
            changes[name] = model.model_copy(update={"archon": archon})
        return config.model_copy(update=changes)

    def works(after: Component, replicas: int) -> bool:
        return not layout_problems(with_(after, replicas), dims)

    replicas = (config.critic if key == "critic" else config.actor).archon.dp_replicate
    found = shrink(before, world, works, replicas)
    return None if found is None else with_(*found)
