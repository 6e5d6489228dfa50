"""Runs that continue with fewer ranks: the config for them, and rules on whether one exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pentad.config.rules.layout import layout_problems
from pentad.config.rules.rule import RUNS, Rules
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.layout import Allocation, Component
from pentad.core.shrink import describe, shrink
from pentad.models.catalog import known_dims


@dataclass(frozen=True, slots=True)
class Fitted:
    config: Config
    """The config with the new layout; all else is unchanged, also the global batch and the order of
    data."""
    world: int
    """Number of ranks in use."""
    why: str
    """Description of the changes; empty: none."""


def fit_world(config: Config, world: int) -> Fitted | None:
    """The config for at most `world` training ranks; None if no layout of that size is valid."""
    actor = config.component("actor")
    if actor.world <= world:
        return Fitted(config, actor.world, "")
    for ranks in range(world, 0, -1):  # other components on these ranks need as many
        fitted: Config | None = config
        for part in sharing(config.allocation, actor):
            fitted = fitted and _shrunk(fitted, part, ranks)
        if fitted is None:
            continue
        now = fitted.component("actor")
        if {part.world for part in sharing(fitted.allocation, now)} == {now.world}:
            return Fitted(fitted, now.world, describe(actor, now, world))
    return None


def sharing(allocation: Allocation, actor: Component) -> list[Component]:
    """Components on the ranks of the actor, itself included."""
    return [
        part
        for part in allocation
        if not part.is_inference and allocation.shares_devices(actor, part)
    ]


def _shrunk(config: Config, before: Component, world: int) -> Config | None:
    """The config with only this component reduced to fewer ranks; None if that is not valid."""
    allocation, dims = config.allocation, known_dims(config.actor.path)
    key = "critic" if before.role == "critic" else "actor"
    is_shared = key == "actor" and allocation.find("critic") is None

    def with_(after: Component, replicas: int) -> Config:
        groups = [
            tuple(after if one == before else one for one in group) for group in allocation.groups
        ]
        changes: dict[str, Any] = {"allocation_mode": str(Allocation(tuple(groups)))}
        for name in (key, "critic") if is_shared else (key,):
            model = config.critic if name == "critic" else config.actor
            cut: dict[str, Any] = {"dp_replicate": replicas}
            if after.size("p") != before.size("p"):  # rebalanced
                cut["layers_per_stage"] = None
            archon = model.archon.model_copy(update=cut)
            changes[name] = model.model_copy(update={"archon": archon})
        return config.model_copy(update=changes)

    def works(after: Component, replicas: int) -> bool:
        return not layout_problems(with_(after, replicas), dims)

    replicas = (config.critic if key == "critic" else config.actor).archon.dp_replicate
    found = shrink(before, world, works, replicas)
    return None if found is None else with_(*found)


RULES = Rules()


@RULES.add(commands=RUNS)
def what_shrinks_has_checkpoints(config: Config) -> Problem | None:
    if not config.elastic.enabled or config.recover.is_on:
        return None
    rule = f"a smaller group resumes from a checkpoint, and recover.mode = {config.recover.mode}"
    return Problem("elastic.enabled = true", rule, "set recover.mode=auto")


@RULES.add(commands=RUNS)
def the_layout_can_shrink(config: Config) -> Iterator[Problem]:
    allocation, elastic = config.parsed_allocation, config.elastic
    actor = allocation and allocation.find("actor")
    if not elastic.enabled or not actor:
        return
    if actor.world == 1:
        rule = f"{actor} has one rank: without it, none is left"
        yield Problem("elastic.enabled = true", rule, "give it more ranks, or leave it out")
    elif elastic.min_ranks > actor.world:
        rule = f"{actor} has {actor.world} ranks"
        remedy = f"give at most {actor.world}, or make the axes larger"
        yield Problem(f"elastic.min_ranks = {elastic.min_ranks}", rule, remedy)
    elif (fitted := fit_world(config, elastic.min_ranks)) and fitted.world < elastic.min_ranks:
        rule = f"the largest layout of {actor} on so few uses {fitted.world}"
        remedy = (
            f"give {fitted.world}: `plan --world N` shows which other numbers are used completely"
        )
        yield Problem(f"elastic.min_ranks = {elastic.min_ranks}", rule, remedy)


@RULES.add(commands=RUNS)
def grace_is_within_the_wait(config: Config) -> Problem | None:
    elastic = config.elastic
    if elastic.drop_grace_s <= elastic.wait_timeout_s:
        return None
    rule = f"the run has ended by then: elastic.wait_timeout_s = {elastic.wait_timeout_s:g}"
    return Problem(f"elastic.drop_grace_s = {elastic.drop_grace_s:g}", rule, "give fewer seconds")


@RULES.add(commands=RUNS)
def heartbeats_come_before_a_stall(config: Config) -> Problem | None:
    every, limit = config.elastic.heartbeat_interval_s, config.stall_abort_s
    if 4 * every <= limit:
        return None
    rule = f"stall_abort_s = {limit:g} must be at least four times that, or ranks count as hung"
    remedy = f"give at most {limit / 4:g}"
    return Problem(f"elastic.heartbeat_interval_s = {every:g}", rule, remedy)
