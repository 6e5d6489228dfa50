"""Placement of the processes of a run, shown by `plan` and used by the run that starts them.

Training uses the first GPUs, samplers the next, scorers the last. Components joined by | share GPUs
index by index: samplers use 0 to rollout.world - 1, training 0 to actor.world - 1. With `only`, the
component that does not run has no GPUs, and the other's start at 0.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pentad.config.run_process import RunProcess, holding, sharing
from pentad.config.schema import Config
from pentad.core.bundles import Bundle
from pentad.core.layout import Allocation, Component, divisors
from pentad.core.section import chosen
from pentad.core.sizes import DeviceKind, PublishKind

Spot = tuple[int, int]
"""Index of a machine (on Ray: of a bundle), and of a GPU on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Inputs of a topology besides the config."""

    kind: DeviceKind
    num_devices: int | None
    """GPUs of all machines; None: there are none, or their number is not known."""
    is_spread: bool = False
    """Whether processes may be on several machines."""
    cores: tuple[int, ...] = ()
    """CPU cores of this machine that the run may use."""


def facts_of(
    config: Config, kind: DeviceKind | None = None, *, is_spread: bool | None = None
) -> Facts:
    """The facts of this machine; `is_spread`: whether a Ray cluster has several nodes."""
    count = config.cluster.count_devices()
    if is_spread is None:
        is_spread = config.scheduler.type == "ray" or config.cluster.n_nodes > 1
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    kind = kind or ("cuda" if count else "cpu")
    return Facts(kind=kind, num_devices=count, is_spread=is_spread, cores=cores)


def topology(config: Config, facts: Facts | None = None) -> Topology:
    """The topology of a config that passed its rules."""
    return chosen(find_topology(config, facts), "allocation_mode")


def find_topology(config: Config, facts: Facts | None = None) -> Topology | None:
    """The topology; None if the allocation is unset or wrong, which the layout rules report."""
    written = config.parsed_allocation
    if written is None:
        return None
    facts = facts or facts_of(config)
    is_view = not isinstance(config, Config)  # every rule must read the keys itself
    return Topology(config, written, facts) if is_view else _stated(config, written, facts)


def scorers(config: Config) -> tuple[str, ...]:
    """Roles that score on separate devices, according to the config."""
    placed = find_topology(config, Facts(kind="cpu", num_devices=None))
    return placed.scorers if placed else ()


@lru_cache(maxsize=64)
def _stated(config: Config, written: Allocation, facts: Facts) -> Topology:
    return Topology(config, written, facts)


@dataclass(frozen=True)
class Topology:
    """The processes of a run, their devices, and how groups and weights travel between them."""

    config: Config
    written: Allocation
    facts: Facts

    # Placement.

    @cached_property
    def scorers(self) -> tuple[str, ...]:
        """Frozen models that score on separate devices. The others are weight tags of the actor;
        with `only`, all are."""
        if self.config.mode != "async" or self.config.only is not None:
            return ()
        return tuple(role for role in self.config.frozen_models if self.written.stands_alone(role))

    @cached_property
    def is_one_process(self) -> bool:
        """Whether scheduler, trainer and sampler are threads of one process."""
        scheduler, cluster, written = self.config.scheduler, self.config.cluster, self.written
        if scheduler.processes != "auto":
            return scheduler.processes == "one"
        rollout = written.find("rollout")
        if not (rollout and written.find("actor")) or rollout.backend != "embedded":
            return False
        if any(part.world > 1 for part in written) or cluster.n_nodes > 1:
            return False
        if scheduler.type == "ray" or cluster.share_gpus:
            return False
        return not written.are_apart or (self.facts.num_devices or 1) < 2

    @cached_property
    def is_learner_apart(self) -> bool:
        """Whether training ranks are separate processes from the scheduler."""
        rollout, actor = self.written.find("rollout"), self.written.find("actor")
        scheduler = self.config.scheduler
        if (actor and actor.world > 1) or scheduler.type == "ray":
            return True
        if scheduler.processes == "separate":
            return True
        is_embedded = rollout is not None and rollout.backend == "embedded"
        return is_embedded and not self.is_one_process

    @cached_property
    def allocation(self) -> Allocation:
        """The allocation of the components that run, with groups in the order of their devices.

        An embedded sampler joined to the actor by + still uses the actor's devices if both are one
        process, or if they may share GPUs and there are too few (+ then lets the two overlap in
        time). In the second case scorers do the same.
        """
        found, count = self.written, self.facts.num_devices
        sides = {"train": lambda part: part.is_inference, "rollout": lambda p: not p.is_inference}
        if self.config.only is not None:
            leaves = sides[self.config.only]
            for part in [part for part in found if leaves(part)]:
                found = found.without(part.role)
        rollout = found.find("rollout")
        if rollout is not None and rollout.backend == "embedded":
            lacks = count is not None and found.num_devices > count
            shares = self.config.cluster.share_gpus and lacks
            roles = ("rollout", *self.scorers) if shares else ("rollout",)
            for role in roles if shares or self.is_one_process else ():
                found = found.joined(role, "actor")
        return found.ordered("actor", "rollout")

    @property
    def shares_gpus(self) -> bool:
        """Whether samplers are on the devices that train."""
        rollout, actor = self.allocation.find("rollout"), self.allocation.find("actor")
        return bool(rollout and actor and self.allocation.shares_devices(rollout, actor))

    @property
    def num_idle(self) -> int:
        """GPUs of the cluster that no process uses."""
        return max(0, (self.facts.num_devices or 0) - self.allocation.num_devices)

    # How groups and weights travel.

    @property
    def has_storage_units(self) -> bool:
        """Whether groups are stored in separate processes on a Ray cluster."""
        if self.config.store == "auto":
            return self.config.scheduler.type == "ray" and self.config.num_data_storage_units > 1
        return self.config.store in ("ray", "transfer_queue")

    @property
    def store(self) -> str:
        """The kind of store that holds groups between sampling and training."""
        if self.config.store != "auto":
            return self.config.store
        is_ray = self.config.scheduler.type == "ray"
        if self.has_storage_units or (is_ray and self.facts.is_spread):
            return "ray"
        return "files" if self.is_learner_apart else "memory"

    @property
    def publish_kind(self) -> PublishKind:
        """How weights are published, if there is room: in the process, through a GPU shared with
        the sampler, by a file in shared memory, or by files that all machines can read."""
        rollout, actor = self.allocation.find("rollout"), self.allocation.find("actor")
        if rollout is None or actor is None or not self.is_learner_apart:
            return "none"
        if self.facts.is_spread:
            return "file"
        is_one = actor.world == rollout.world == 1 and rollout.backend == "embedded"
        is_here = self.config.scheduler.type != "ray" and self.facts.kind == "cuda"
        config = self.config  # no room for weights on a GPU that training frees
        is_short = bool(config.offload_train) or config.actor.archon.offload_params
        shares = self.shares_gpus and not is_short
        return "ipc" if is_here and is_one and shares else "shm"

    @property
    def shares_base(self) -> bool:
        """Whether embedded samplers use the learner's memory of the frozen weights of an adapter:
        in its process, or in others on its GPU or on its machine without GPUs. Others have a
        copy."""
        rollout, actor = self.allocation.find("rollout"), self.allocation.find("actor")
        if self.config.actor.lora is None or rollout is None or rollout.backend != "embedded":
            return False
        # Several ranks have shards; transformers' layers have other names than a sampler's.
        if actor is None or actor.backend != "archon" or actor.world > 1:
            return False
        if self.is_one_process:
            return True
        if self.config.scheduler.type == "ray" or self.facts.is_spread:
            return False
        if self.facts.kind == "cpu":
            return hasattr(os, "memfd_create")
        return rollout.world == 1 and self.shares_gpus  # the copy of A beside them is one sampler's

    # Machines.

    @property
    def num_per_node(self) -> int | None:
        count = self.facts.num_devices
        return None if count is None else count // self.config.cluster.n_nodes

    @cached_property
    def num_train_nodes(self) -> int:
        """Number of machines with training ranks; each has equally many."""
        return self._placed[0]

    @cached_property
    def _placed(self) -> tuple[int, list[Spot | None]]:
        """Number of training machines, and the spot of each device of the allocation, in order."""
        nodes, room = self.config.cluster.n_nodes, self.num_per_node
        if nodes == 1:
            return 1, [(0, index) for index in range(self.allocation.num_devices)]
        actor = self.allocation.find("actor")
        world = actor.world if actor else 0
        # With components on other devices, training fills whole machines; alone, it uses all.
        is_alone = len(self.allocation.groups) == 1 or room is None
        counts = [n for n in divisors(world) if n <= nodes] if world else [1]
        for count in sorted(counts, reverse=is_alone):
            places = self._over_nodes(count, world // count)
            if None not in places:
                break
        return count, places  # no number of machines fits everything: some devices have no spot

    def _over_nodes(self, num_train: int, each: int) -> list[Spot | None]:
        """Places `each` training ranks on each of the first machines, and the rest where there is
        room; the GPUs of a server are on one machine."""
        room, actor = self.num_per_node, self.allocation.find("actor")
        world = actor.world if actor else 0
        is_elsewhere = bool(self.config.rollout.server.addresses)  # servers take no room here
        beside = None if is_elsewhere else room
        used = [min(each, max(0, world - each * node)) for node in range(self.num_nodes)]
        fits = room is None or each <= room
        places: list[Spot | None] = [
            (rank // each, rank % each) if fits else None for rank in range(world)
        ]
        for group, chunk in self._chunks():
            wanted = [position for position in chunk if position >= world]
            if not wanted:
                continue
            # Agents start samplers on any machine; scorers run on the first.
            samples = any(part.role == "rollout" for part in group)
            size, nodes = len(wanted), range(self.num_nodes if samples else 1)
            node = next((n for n in nodes if beside is None or used[n] + size <= beside), None)
            for _ in wanted:
                places.append(None if node is None else (node, used[node]))
                if node is not None:
                    used[node] += 1
        return places

    @property
    def num_nodes(self) -> int:
        return self.config.cluster.n_nodes

    def _chunks(self) -> Iterator[tuple[tuple[Component, ...], range]]:
        """Yields (group, devices that must be on one machine): all of a server, else one device."""
        start = 0
        for group in self.allocation.groups:
            size = max(size_of(part) for part in group)
            end = start + max(part.world for part in group)
            for first in range(start, end, size):
                yield group, range(first, min(first + size, end))
            start = end

    @cached_property
    def _bundle_of(self) -> list[Spot]:
        """On Ray: bundle and GPU index in it, for every device of the allocation."""
        return [
            (index, within)
            for index, (_, chunk) in enumerate(self._chunks())
            for within in range(len(chunk))
        ]

    # Processes.

    @cached_property
    def processes(self) -> tuple[RunProcess, ...]:
        """Processes of the run, shown by `plan` and started by the run."""
        config, learners, judges = self.config, self.learners, self._scorers
        is_launched = config.cluster.n_nodes > 1 and not self._is_ray
        is_alone = len(learners) > 1 if is_launched else self.is_learner_apart
        if is_alone and is_launched:
            lead = RunProcess(name="scheduler", runs=("scheduler",), started_by="torchrun")
            trainers = [lead, replace(learners[0], started_by="pentad"), *learners[1:]]
        elif not learners or is_alone:
            trainers = [RunProcess(name="scheduler", runs=("scheduler",)), *learners]
        else:
            lead = replace(learners[0], runs=("scheduler", *learners[0].runs))
            trainers = [lead, *learners[1:]]
        if self.allocation.find("rollout") is None:
            return tuple(trainers if is_alone else learners)
        threads = [] if self.samplers else list(self._replicas())
        if not is_alone:
            threads, judges = [*threads, *judges], []
        trainers[0] = holding(trainers[0], threads)
        units = [
            RunProcess(name=f"storage-{n}", runs=("storage unit",), node=None, started_by="ray")
            for n in range(config.num_data_storage_units if self.has_storage_units else 0)
        ]
        pool = RunProcess(name="rewards", runs=("reward pool",))
        rewards = [pool] if config.reward.functions else []
        return (*sharing([*trainers, *self.samplers, *judges]), *units, *rewards)

    @property
    def learners(self) -> list[RunProcess]:
        """Learner processes: one per rank, with all trained models (also the critic)."""
        return self._parts[0]

    @property
    def samplers(self) -> list[RunProcess]:
        """Samplers that are separate processes."""
        return self._parts[1]

    @property
    def _scorers(self) -> list[RunProcess]:
        """Ranks of all scorers; they may be threads."""
        return self._parts[2]

    def scorer(self, role: str) -> list[RunProcess]:
        """Ranks of a scorer; they may be threads."""
        return [one for one in self._scorers if one.name.rpartition("-")[0] == role]

    @cached_property
    def _parts(self) -> tuple[list[RunProcess], list[RunProcess], list[RunProcess]]:
        """Learners, samplers that are processes, and ranks of scorers. Ray on a CPU places each in
        a bundle of its own."""
        rollout = self.allocation.find("rollout")
        is_thread = self.is_one_process and rollout and rollout.backend == "embedded"
        samplers = [] if is_thread else list(self._replicas())
        parts = list(self._learners()), samplers, list(self._scorer_ranks())
        if self._is_ray and self.facts.kind != "cuda":
            number = itertools.count()
            for part in parts:
                part[:] = [
                    replace(one, bundle=next(number)) if one.started_by == "ray" else one
                    for one in part
                ]
        return parts

    def _learners(self) -> Iterator[RunProcess]:
        actor = self.allocation.find("actor")
        if actor is None:
            return
        parts = [part for part in self.allocation if not part.is_inference]
        roles = [part.role for part in parts if part.role not in self.scorers]
        if self.config.algorithm.facts.needs_critic and "critic" not in roles:
            roles.append("critic")
        starter = "torchrun" if self.config.cluster.n_nodes > 1 else "pentad"
        for rank in range(actor.world):
            runs = tuple(f"{role} {rank}" if actor.world > 1 else role for role in roles)
            one = RunProcess(name=f"learner-{rank}", runs=runs, started_by=starter)
            yield self._at((rank,), one)

    def _replicas(self) -> Iterator[RunProcess]:
        rollout = self.allocation.find("rollout")
        if rollout is None:
            return
        positions, size = self.allocation.devices(rollout), size_of(rollout)
        word = "rollout" if rollout.backend == "embedded" else rollout.backend
        cores, addresses = self._core_shares(rollout), self.config.rollout.server.addresses
        for index in range(rollout.size("d")):
            one = RunProcess(name=f"{word}-{index}", runs=("rollout",), cores=cores[index])
            if rollout.backend != "embedded" and addresses:
                yield replace(one, node=None, started_by=addresses[index])
            else:
                yield self._at(positions[index * size : (index + 1) * size], one)

    def _core_shares(self, rollout: Component) -> list[tuple[int, ...]]:
        """CPU cores for each embedded sampler that decodes on a CPU during training; the first
        share is left to the trainer. Empty if there are too few cores."""
        num, facts = rollout.size("d"), self.facts
        has_own = rollout.backend == "embedded" and not self.is_one_process
        is_idle = self.config.max_staleness == 0
        if not has_own or facts.kind == "cuda" or is_idle or self._is_ray:
            return [()] * num
        size = len(facts.cores) // (num + 1)
        return [facts.cores[size * (i + 1) : size * (i + 2)] for i in range(num)]

    def _scorer_ranks(self) -> Iterator[RunProcess]:
        for role in self.scorers:
            part = chosen(self.allocation.find(role), f"{role} of allocation_mode")
            for rank, position in enumerate(self.allocation.devices(part)):
                runs = (f"{role} {rank}" if part.world > 1 else role,)
                yield self._at((position,), RunProcess(name=f"{role}-{rank}", runs=runs))

    @property
    def _is_ray(self) -> bool:
        return self.config.scheduler.type == "ray"

    def _at(self, positions: range | tuple[int, ...], one: RunProcess) -> RunProcess:
        """The process with its devices set."""
        has_gpus = self.facts.kind == "cuda"
        one = replace(one, num_gpus=len(positions) if has_gpus else 0, node=None)
        if self._is_ray:
            found = [self._bundle_of[position] for position in positions] if has_gpus else []
            devices = tuple(within for _, within in found)
            bundle = found[0][0] if found else None
            return replace(one, devices=devices, started_by="ray", bundle=bundle)
        places = [self._placed[1][position] for position in positions]
        nodes = {place[0] if place else None for place in places}
        node = nodes.pop() if len(nodes) == 1 else None
        if node is None:
            return replace(one, started_by=NO_MACHINE)
        is_far = node > 0 and one.started_by == "pentad"
        return replace(
            one,
            node=node,
            devices=tuple(place[1] for place in places if place) if has_gpus else (),
            started_by="srun" if is_far else one.started_by,
        )

    @property
    def unplaced(self) -> list[str]:
        """Names of processes, and of scorers that are threads, for which no machine has room."""
        known = {one.name: one for one in (*self.processes, *self._scorers)}
        return [name for name, one in known.items() if one.started_by == NO_MACHINE]

    @property
    def elsewhere(self) -> list[RunProcess]:
        """Processes other than learners that run on another machine than the first."""
        return [one for one in self.processes if one.started_by == "srun"]

    def bundles(self, *, has_learners: bool = True) -> tuple[Bundle, ...]:
        """The bundles to request from Ray. `has_learners`: with those of training ranks."""
        members: dict[int, dict[str, tuple[int, ...]]] = {}
        for one in self.processes:
            if one.bundle is not None and (has_learners or not one.name.startswith("learner-")):
                members.setdefault(one.bundle, {})[one.name] = one.devices
        has_gpus, chunks = self.facts.kind == "cuda", [chunk for _, chunk in self._chunks()]
        return tuple(
            Bundle(
                cpus=float(len(inside)),
                gpus=len(chunks[index]) if has_gpus else 0,
                members=inside,
            )
            for index, inside in sorted(members.items())
        )

    @property
    def held_gpus(self) -> tuple[int, ...]:
        """GPUs here that belong to torchrun's training ranks, so that Ray must not assign them."""
        if self.facts.kind != "cuda":
            return ()
        return tuple(range(-(-len(self.learners) // self.num_nodes)))


NO_MACHINE = "no machine has room"


def size_of(part: Component) -> int:
    """Number of GPUs of one process of a role."""
    return part.world // part.size("d") if part.is_inference else 1
