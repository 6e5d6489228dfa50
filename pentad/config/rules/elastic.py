"""Rules on runs that go on with fewer ranks: whether they can, and whether the limits agree."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config.derived import parsed_allocation
from pentad.config.elastic import fit_world
from pentad.config.rules.rule import Command, Rules
from pentad.config.schema import Config
from pentad.core.errors import Problem

RULES: Rules[[Config]] = Rules()
COMMANDS: tuple[Command, ...] = ("train", "sft", "plan")


@RULES.add("elastic.enabled", "recover.mode", commands=COMMANDS)
def what_shrinks_has_checkpoints(config: Config) -> Problem | None:
    if not config.elastic.enabled or config.recover.is_on:
        return None
    rule = f"a smaller group goes on from a checkpoint, and recover.mode = {config.recover.mode}"
    return Problem("elastic.enabled = true", rule, "set recover.mode=auto")


@RULES.add("elastic", "allocation_mode", commands=COMMANDS)
def the_layout_can_shrink(config: Config) -> Iterator[Problem]:
    allocation, elastic = parsed_allocation(config), config.elastic
    actor = allocation and allocation.find("actor")
    if not elastic.enabled or not actor:
        return
    if actor.world == 1:
        rule = f"{actor} has one rank: nothing is left when it is gone"
        yield Problem("elastic.enabled = true", rule, "give it more ranks, or leave it out")
    elif elastic.min_ranks > actor.world:
        rule = f"{actor} has {actor.world} ranks"
        remedy = f"give at most {actor.world}, or make the axes larger"
        yield Problem(f"elastic.min_ranks = {elastic.min_ranks}", rule, remedy)
    elif (fitted := fit_world(config, elastic.min_ranks)) and fitted.world < elastic.min_ranks:
        rule = f"the largest layout of {actor} on so few uses {fitted.world}"
        remedy = f"give {fitted.world}: `plan --world N` shows which others are used whole"
        yield Problem(f"elastic.min_ranks = {elastic.min_ranks}", rule, remedy)


@RULES.add("elastic.drop_grace_s", "elastic.wait_timeout_s", commands=COMMANDS)
def grace_is_within_the_wait(config: Config) -> Problem | None:
    elastic = config.elastic
    if elastic.drop_grace_s <= elastic.wait_timeout_s:
        return None
    rule = f"the run has ended by then: elastic.wait_timeout_s = {elastic.wait_timeout_s:g}"
    return Problem(f"elastic.drop_grace_s = {elastic.drop_grace_s:g}", rule, "give fewer seconds")


@RULES.add("elastic.heartbeat_interval_s", "stall_abort_s", commands=COMMANDS)
def heartbeats_come_before_a_stall(config: Config) -> Problem | None:
    every, limit = config.elastic.heartbeat_interval_s, config.stall_abort_s
    if 4 * every <= limit:
        return None
    rule = f"stall_abort_s = {limit:g} must be four of them, or ranks that are well count as hung"
    remedy = f"give at most {limit / 4:g}"
    return Problem(f"elastic.heartbeat_interval_s = {every:g}", rule, remedy)
