"""Rules on machines: what a launcher can spread over several of them."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config.derived import are_apart, parsed_allocation
from pentad.config.rules.rule import Command, Rules
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.fit import list_of
from pentad.core.layout import divisors

RULES: Rules[[Config]] = Rules()
COMMANDS: tuple[Command, ...] = ("train", "sft", "plan")


@RULES.add("scheduler.type", "cluster", "allocation_mode", commands=COMMANDS)
def slurm_nodes_hold_the_layout(config: Config) -> Iterator[Problem]:
    """Each node has as many ranks; what samples is started on the first."""
    allocation, nodes = parsed_allocation(config), config.cluster.n_nodes
    actor = allocation and allocation.find("actor")
    if config.scheduler.type != "slurm" or not (allocation and actor):
        return
    where = f"cluster.n_nodes = {nodes}"
    if actor.world % nodes:
        rule = f"scheduler.type = slurm gives each node as many ranks, and {actor} has"
        remedy = f"n_nodes can be {list_of(divisors(actor.world))}"
        yield Problem(where, f"{rule} {actor.world}", remedy)
        return
    per_node, rollout = config.cluster.n_gpus_per_node, allocation.find("rollout")
    if per_node is None:
        return
    ranks = actor.world // nodes
    beside = rollout.world if rollout and are_apart(config) else 0
    beside = 0 if config.rollout.server.addresses or config.cluster.share_gpus else beside
    if ranks + beside > per_node:
        samplers = f" and {rollout} {beside} on the first" if beside else ""
        rule = f"{actor} puts {ranks} ranks on each{samplers}, and"
        fix = f"use at least {-(-actor.world // max(1, per_node - beside))} nodes"
        remedy = fix if beside < per_node else "use rollout.server.addresses, or fewer replicas"
        yield Problem(where, f"{rule} cluster.n_gpus_per_node = {per_node}", remedy)


def machine_problems(config: Config) -> list[Problem]:
    """What a start without torchrun cannot spread: it starts processes on this machine alone."""
    nodes, kind = config.cluster.n_nodes, config.scheduler.type
    allocation = parsed_allocation(config)
    actor = allocation and allocation.find("actor")
    if nodes == 1 or kind != "local" or not actor or config.rollout.server.addresses:
        return []
    where = f"cluster.n_nodes = {nodes}"
    remedy = "start it with torchrun on each, use scheduler.type=ray or slurm, or set n_nodes=1"
    rule = "scheduler.type = local starts processes on this machine alone"
    return [Problem(where, rule, remedy)]
