"""Which processes a run has, on which machine and devices: what `plan` draws and a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pentad.config.derived import (
    allocation_of,
    as_run,
    component_of,
    count_devices,
    has_storage_units,
    is_learner_apart,
    is_one_process,
    scorers,
)
from pentad.config.schema import Config
from pentad.core.layout import Allocation, Component
from pentad.core.sizes import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """One process, or one server of several."""

    name: str
    """Such as learner-0 or rollout-1."""
    runs: tuple[str, ...]
    """The roles in it."""
    node: int | None = 0
    """Machine, counted from the one the command is typed on; None: Ray or its address says."""
    devices: tuple[int, ...] = ()
    """GPUs of that machine, where `node` is known; on a CPU none."""
    num_gpus: int = 0
    shares_with: tuple[str, ...] = ()
    """Processes on the same GPUs."""
    started_by: str = "pentad"


def run_processes(config: Config, kind: DeviceKind) -> list[RunProcess]:
    """Of a config that passed its rules."""
    learners, samplers, judges = _roles(config, kind)
    num_devices = count_devices(config) if kind == "cuda" else None
    is_alone = is_learner_apart(config, num_devices) and learners[0].started_by != "torchrun"
    if is_alone:
        trainers = [RunProcess(name="scheduler", runs=("scheduler",)), *learners]
    else:
        trainers = [replace(learners[0], runs=("scheduler", *learners[0].runs)), *learners[1:]]
    if config.only == "train" or allocation_of(config).find("rollout") is None:
        return trainers if is_alone else learners
    if config.only == "rollout":
        trainers = [RunProcess(name="scheduler", runs=("scheduler",))]
    pool = [RunProcess(name="rewards", runs=("reward pool",))] if config.reward.functions else []
    has_gpu = config.only == "rollout" and kind == "cuda"  # else those of its learner
    own = (0,) if has_gpu else ()
    rollout = RunProcess(name="rollout", runs=("rollout",), devices=own, num_gpus=len(own))
    threads = [] if samplers else [rollout]
    if not is_alone:
        threads, judges = [*threads, *judges], []
    trainers[0] = _holding(trainers[0], threads)
    units = [
        RunProcess(name=f"storage-{number}", runs=("storage unit",), node=None, started_by="ray")
        for number in range(config.num_data_storage_units if has_storage_units(config) else 0)
    ]
    return [*_sharing([*trainers, *samplers, *judges]), *units, *pool]


def scorer_devices(config: Config) -> dict[str, tuple[int, ...]]:
    """The GPUs of each scorer, by rank."""
    found: dict[str, tuple[int, ...]] = {}
    for one in _roles(config, "cuda")[2]:
        role = one.name.rpartition("-")[0]
        found[role] = (*found.get(role, ()), *one.devices)
    return found


def _roles(
    config: Config, kind: DeviceKind
) -> tuple[list[RunProcess], list[RunProcess], list[RunProcess]]:
    """Learners, samplers that are processes, and scorers."""
    num_devices = count_devices(config) if kind == "cuda" else None
    allocation = as_run(config, allocation_of(config), num_devices)
    rollout = allocation.find("rollout")
    learners = _learners(config, allocation, component_of(config, "actor"), kind)
    samplers = []
    if rollout is not None and not is_one_process(config, num_devices):
        samplers = _samplers(config, allocation, rollout, learners, kind)
    return learners, samplers, _scorers(config, allocation, [*learners, *samplers], kind)


def _learners(
    config: Config, allocation: Allocation, actor: Component, kind: DeviceKind
) -> list[RunProcess]:
    """One for each rank. Whatever trains is in it, the critic too."""
    nodes, is_placed = config.cluster.n_nodes, config.scheduler.type == "ray"
    each = -(-actor.world // nodes)
    apart = scorers(config)
    roles = [part.role for part in allocation if not part.is_inference and part.role not in apart]
    if config.algorithm.facts.needs_critic and "critic" not in roles:
        roles.append("critic")
    return [
        RunProcess(
            name=f"learner-{rank}",
            runs=tuple(f"{role} {rank}" if actor.world > 1 else role for role in roles),
            node=None if is_placed else rank // each,
            devices=(rank % each,) if kind == "cuda" and not is_placed else (),
            num_gpus=int(kind == "cuda"),
            started_by="ray" if is_placed else "torchrun" if nodes > 1 else "pentad",
        )
        for rank in range(actor.world)
    ]


def _samplers(
    config: Config,
    allocation: Allocation,
    rollout: Component,
    learners: list[RunProcess],
    kind: DeviceKind,
) -> list[RunProcess]:
    """One for each replica: on the devices of the learners, or on the next of the first machine."""
    size = rollout.world // rollout.size("d")
    actor = allocation.find("actor")
    is_shared = actor is not None and allocation.shares_devices(rollout, actor)
    first = 0 if is_shared else sum(one.node == 0 for one in learners)
    is_embedded = rollout.backend == "embedded"
    is_placed = is_embedded and config.scheduler.type == "ray"
    fits = first + rollout.world <= (config.cluster.n_gpus_per_node or first + rollout.world)
    found = []
    for index in range(rollout.size("d")):
        devices = tuple(range(first + index * size, first + (index + 1) * size))
        place = RunProcess(
            name=f"rollout-{index}" if is_embedded else f"{rollout.backend}-{index}",
            runs=("rollout",),
            devices=devices if kind == "cuda" and not is_placed else (),
            node=None if is_placed else 0,
            num_gpus=size if kind == "cuda" else 0,
            started_by="ray" if is_placed else "pentad",
        )
        if not is_embedded and (config.rollout.server.addresses or not fits):
            given = config.rollout.server.addresses
            by = given[index] if given else "you: rollout.server.addresses"
            place = replace(place, node=None, devices=(), num_gpus=0, started_by=by)
        found.append(place)
    return found


def _holding(lead: RunProcess, threads: list[RunProcess]) -> RunProcess:
    """With what runs as its threads."""
    return replace(
        lead,
        runs=(*lead.runs, *(role for one in threads for role in one.runs)),
        devices=tuple(sorted({*lead.devices, *(at for one in threads for at in one.devices)})),
        num_gpus=lead.num_gpus + sum(one.num_gpus for one in threads),
    )


def _scorers(
    config: Config, allocation: Allocation, others: list[RunProcess], kind: DeviceKind
) -> list[RunProcess]:
    """One for each rank: on the first GPUs that the others leave, or where all share on theirs."""
    actor = component_of(config, "actor")
    taken = max((device for one in others if one.node == 0 for device in one.devices), default=-1)
    is_placed = config.scheduler.type == "ray"
    found: list[RunProcess] = []
    for role in scorers(config):
        part = component_of(config, role)
        is_shared = allocation.shares_devices(part, actor)
        for rank in range(part.world):
            device = rank if is_shared else taken + 1 + len(found)
            found.append(
                RunProcess(
                    name=f"{role}-{rank}",
                    runs=(f"{role} {rank}" if part.world > 1 else role,),
                    node=None if is_placed else 0,
                    devices=(device,) if kind == "cuda" and not is_placed else (),
                    num_gpus=int(kind == "cuda"),
                    started_by="ray" if is_placed else "pentad",
                )
            )
    return found


def _sharing(processes: list[RunProcess]) -> list[RunProcess]:
    def others(one: RunProcess) -> tuple[str, ...]:
        return tuple(
            other.name
            for other in processes
            if other is not one and other.node == one.node and set(other.devices) & set(one.devices)
        )

    return [replace(one, shares_with=others(one)) for one in processes]
