"""Opens the samplers of a run, from its rollout component: in this process, in separate processes,
or as servers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.config.rules.check import check
from pentad.config.rules.rule import RunFacts
from pentad.config.run_process import RunProcess
from pentad.config.schema import Config
from pentad.config.topology import Topology, facts_of, topology
from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, RunError, UserError, raise_problems
from pentad.core.roles import Sampler
from pentad.core.scratch import scratch_folder, shared_memory
from pentad.core.sizes import COLOCATED_SHARE
from pentad.core.specs import absolute
from pentad.data.tokenizer import Tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.planner.plan import choose_device
from pentad.planner.remedies import shares_by_gpu
from pentad.rollout.section import RolloutConfig
from pentad.runtime.environment import DETERMINISTIC
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.nodes import NodeRuntime
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.roles import RoleSpec, Runtime
from pentad.samplers import hosted_server, remote, server_key
from pentad.samplers.hosted_server import DIALECTS
from pentad.samplers.process import ServerSettings, check_installed, server_python
from pentad.samplers.remote import HostedSettings, Lend, RoleSampler
from pentad.samplers.replica import NewestWeights, Replica, Start
from pentad.samplers.started_server import HeldWeights, StartedServer, attach_server, start_server
from pentad.sync.published import Kind
from pentad.sync.weights_dir import WeightsDir

log = logging.getLogger(__name__)

PLACED = ("ray", "srun")
"""Starters of servers on other machines."""


@dataclass(frozen=True, slots=True)
class SamplerOpener:
    """Opens the samplers of a run; `stack` closes them. They start with unusable weights, so only a
    publish can make them agree with the trainer."""

    config: Config
    dims: ModelDims
    tokenizer: Tokenizer
    device: torch.device
    log_folder: Path
    stack: AsyncExitStack
    base: Mapping[str, Tensor] | None = None
    """The frozen weights, by native name, if a learner of this process trains an adapter."""
    lend: Lend | None = None
    """Lends the frozen weights of a learner in another process, if samplers are to use them."""

    @property
    def placed(self) -> Topology:
        return topology_on(self.config, self.device)

    async def open(
        self, weights_dir: WeightsDir | None = None, runtime: Runtime | None = None
    ) -> dict[str, Sampler]:
        """Opens all samplers, by name. `weights_dir`: transport of weights from a learner in
        another process; `runtime`: the learner's runtime, which also starts samplers."""
        config = self.config
        if config.rollout.server.addresses:
            samplers = await self._attach()
        elif self._is_embedded and self.placed.is_one_process:
            sampler = self._embedded()
            self.stack.push_async_callback(sampler.close)
            samplers = {"embedded": sampler}
        elif self._is_embedded or any(one.started_by in PLACED for one in self.placed.samplers):
            samplers = await self._open_processes(weights_dir, runtime)
        else:
            samplers = await self._open_servers()
        can = {name: sampler.capabilities for name, sampler in samplers.items()}
        raise_problems(check(config, RunFacts(command="train", samplers=can), stage="open"))
        return samplers

    @property
    def _is_embedded(self) -> bool:
        return self._backend == "embedded"

    @property
    def _backend(self) -> str:
        return self.config.component("rollout").backend

    def _embedded(self) -> EmbeddedSampler:
        """Makes a sampler of this process, over the tensors of `base` or with separate memory."""
        given = self._hosted(0).model_copy(update={"device": str(self.device)})
        if self.base is None:
            model = remote.own_model(given)
        else:
            model = remote.shared_model(self.base, given)
        decode = partial(self.tokenizer.decode, keep_special=True)
        return remote.sampler_over(model, given, decode)

    def open_weights_dir(self, *, is_spread: bool) -> WeightsDir:
        """Opens the transport of weights between processes: shared memory, or a folder on a shared
        disk."""
        config = self.config
        self.log_folder.mkdir(parents=True, exist_ok=True)
        place = self.log_folder if is_spread else shared_memory()
        folder = self.stack.enter_context(scratch_folder("pentad-weights-", place))
        kind: Kind = "file" if is_spread else "shm"
        if not is_spread and self.placed.publish_kind == "ipc":
            fits, why = shares_by_gpu(config, choose_device(config))
            kind = "ipc" if fits else "shm"
            log.info("weights reach the sampler by %s: %s", kind, why)
        return WeightsDir(kind, folder, deltas=config.rollout.weight_deltas)

    async def _attach(self) -> dict[str, Sampler]:
        """Connects to running servers."""
        made: dict[str, Sampler] = {}
        addresses = self.config.rollout.server.addresses
        for index, (one, address) in enumerate(zip(self.placed.samplers, addresses, strict=True)):
            settings = self._server_settings(index)
            server = await attach_server(DIALECTS[self._backend], address, settings)
            made[one.name] = server
            self.stack.push_async_callback(server.close)
        return made

    async def _open_servers(self) -> dict[str, Sampler]:
        """Starts servers from this process; they may read weights from tensors of this process."""

        async def start(name: str, settings: ServerSettings, generation: int) -> StartedServer:
            log_file = self.log_folder / f"{name}.log"
            return await start_server(DIALECTS[self._backend], settings, name, log_file)

        starts = {
            one.name: partial(start, one.name, self._server_settings(index))
            for index, one in enumerate(self.placed.samplers)
        }
        return await self._open_replicas(starts, HeldWeights())

    async def _open_processes(
        self, weights_dir: WeightsDir | None, runtime: Runtime | None
    ) -> dict[str, Sampler]:
        """Starts role processes with an embedded sampler or a server in each."""
        if runtime is None:
            runtime = open_runtime(self.config, self.device, is_remote=False)
            self.stack.push_async_callback(runtime.close)
        weights = weights_dir or self.open_weights_dir(is_spread=runtime.is_spread)

        async def start(spec: RoleSpec, generation: int) -> RoleSampler:
            process = await runtime.start(replace(spec, generation=generation))
            return await RoleSampler.open(process, weights, self.lend)

        specs = self._embedded_specs() if self._is_embedded else self._server_specs()
        starts = {spec.name: partial(start, spec) for spec in specs}
        return await self._open_replicas(starts, weights)

    async def _open_replicas(
        self, starts: Mapping[str, Start], weights: NewestWeights
    ) -> dict[str, Sampler]:
        config = self.config
        is_exact = config.max_staleness == 0 and self._is_embedded
        replicas = [
            Replica(name, start, weights, RestartPolicy(config.rollout.restarts), is_exact=is_exact)
            for name, start in starts.items()
        ]
        for replica in replicas:
            replica.siblings = replicas
            self.stack.push_async_callback(replica.close)
        results = await asyncio.gather(*(one.open() for one in replicas), return_exceptions=True)
        for result in results:
            if isinstance(result, InfraFailure):
                raise RunError(str(result)) from result
            if isinstance(result, BaseException):
                raise result
        return {replica.name: replica for replica in replicas}

    def _server_settings(self, index: int) -> ServerSettings:
        return server_settings(self.config, self.dims, self.device, index)

    def _embedded_specs(self) -> list[RoleSpec]:
        """Specs of embedded samplers, each with its GPU, or with its cores if it decodes during
        training."""
        environment = DETERMINISTIC if is_deterministic(self.config) else {}
        hosted = [self._hosted(len(one.cores)) for one in self.placed.samplers]
        return [
            self._spec(one, remote.TARGET, made.model_dump(mode="json"), environment)
            for one, made in zip(self.placed.samplers, hosted, strict=True)
        ]

    def _server_specs(self) -> list[RoleSpec]:
        """Specs of processes that start one server each, on the machine with its GPUs."""
        folder, specs = self.log_folder.absolute(), []
        for index, one in enumerate(self.placed.samplers):
            settings, log_file = self._server_settings(index), folder / f"{one.name}.log"
            payload = hosted_server.payload_of(one.name, self._backend, settings, log_file)
            specs.append(self._spec(one, hosted_server.TARGET, payload))
        return specs

    def _spec(
        self,
        one: RunProcess,
        target: str,
        payload: dict[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> RoleSpec:
        return RoleSpec(
            name=one.name,
            target=target,
            payload=payload,
            log=self.log_folder / f"{one.name}.log",
            num_gpus=one.num_gpus,
            devices=one.devices,
            cores=one.cores,
            environment=environment or {},
            seed=self.config.seed,
        )

    def _hosted(self, num_cores: int) -> HostedSettings:
        """Settings of an embedded sampler, in this process or another one: at staleness 0 both give
        bitwise equal samples."""
        config, threads = self.config, torch.get_num_threads()
        folder = str(Path(config.model_folder()).resolve())
        return HostedSettings(
            dims=self.dims,
            sampler=sampler_settings(config, self.dims),
            device=self.device.type,
            dtype=config.actor.compute_dtype(self.device.type),
            tokenizer=str(self.tokenizer.folder.resolve()),
            model_files=tuple(map(absolute, config.model_files)),
            deterministic=is_deterministic(config),
            num_threads=min(threads, num_cores or threads),
            base=folder if config.actor.lora and self.lend is None else "",
            is_lent=self.lend is not None,
            dequantize=config.actor.dequantize,
            unfiled="" if self.dims.is_whole else folder,
        )


def open_runtime(config: Config, device: torch.device, *, is_remote: bool) -> Runtime:
    """Opens the runtime that starts the processes of a run. On Ray it places each process on nodes
    that have its files. `is_remote`: whether it starts learners too."""
    placed = topology_on(config, device)
    if config.scheduler.type != "ray":
        places = {one.name: one.node or 0 for one in placed.samplers}
        return NodeRuntime(places) if placed.elsewhere else LocalRuntime()
    from pentad.runtime.ray_roles import RayRuntime

    path = config.actor.path
    folders = {"actor.path": str(Path(path).resolve())} if path else {}
    held = () if is_remote else placed.held_gpus
    return RayRuntime(placed.bundles(has_learners=is_remote), folders, held, **ray_options(config))


def ray_options(config: Config) -> dict[str, Any]:
    """Options for a Ray cluster that the run starts: CPUs for TransferQueue (its units and its
    controller), and the file of Ray's log."""
    spare = config.num_data_storage_units + 1 if config.store == "transfer_queue" else 0
    return {"spare_cpus": spare, "log_file": config.run_path / "ray.log"}


def topology_on(config: Config, device: torch.device) -> Topology:
    """Returns the topology on a device of this machine."""
    return topology(config, facts_of(config, "cuda" if device.type == "cuda" else "cpu"))


def is_deterministic(config: Config) -> bool:
    return config.actor.archon.use_deterministic_algorithms


def server_settings(
    config: Config, dims: ModelDims, device: torch.device, index: int
) -> ServerSettings:
    """Settings of the `index`-th replica."""
    component, server = config.component("rollout"), config.rollout.server
    placed = topology_on(config, device)
    share = server.gpu_memory_share or (COLOCATED_SHARE if placed.shares_gpus else None)
    folder = server.transfer_folder or str(shared_memory())
    chosen = {"gpu_memory_share": share, "transfer_folder": folder}
    return ServerSettings(
        rollout=rollout_keys(config, server=server.model_copy(update=chosen)),
        model_folder=str(Path(config.model_folder()).resolve()),
        dims=dims,
        dtype=config.actor.compute_dtype(device.type),
        device=device.type,
        devices=placed.samplers[index].devices,
        tensor_parallel=component.size("t"),
        pipeline_parallel=component.size("p"),
        max_context=dims.max_position,
        key=os.environ.get(server_key.VARIABLE),
        can_sleep=bool(config.offload_rollout),
        lora=config.actor.lora,
    )


def sampler_settings(config: Config, dims: ModelDims) -> SamplerSettings:
    """Settings of an embedded sampler."""
    keys = rollout_keys(config)
    lora = config.actor.lora
    return SamplerSettings(
        rollout=keys, max_context=dims.max_position, strict=config.strict, lora=lora
    )


def rollout_keys(config: Config, **chosen: object) -> RolloutConfig:
    """Returns the block `rollout` with the number of sequences that a sampler decodes together."""
    return config.rollout.model_copy(update={"max_running": config.num_running, **chosen})


# Checks before anything starts.


def server_problems(config: Config, facts: RunFacts) -> list[Problem | str]:
    """Returns problems that prevent the servers of a run from starting, as far as they can be found
    before."""
    rollout, server = config.part("rollout"), config.rollout.server
    if rollout is None or rollout.backend == "embedded" or server.addresses:
        return []
    backend = rollout.backend
    problems: list[Problem | str] = []
    placed = topology(config, facts_of(config, facts.kind))
    here = [one for one in placed.samplers if one.node == 0]
    if not here:  # the GPUs are on other machines
        return []
    needed = max((gpu for one in here for gpu in one.devices), default=-1) + 1
    found = facts.num_gpus
    if facts.kind == "cuda" and needed > found:
        where = f"allocation_mode = {config.allocation_mode}"
        problems.append(Problem(where, f"needs {needed} GPUs on this machine, which has {found}"))
    try:
        check_installed(server_python(server.python, backend), backend, server.python)
    except UserError as error:
        problems += error.problems
    return problems
