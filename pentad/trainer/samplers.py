"""The samplers of a run, from its rollout component: in this process, in processes of their own, or
servers beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pentad.config.derived import (
    allocation_of,
    as_run,
    component_of,
    count_devices,
    handoff_kind,
    is_one_process,
    scorers,
)
from pentad.config.schema import Config
from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.roles import Sampler
from pentad.core.seeds import derive_seed
from pentad.core.settings import into
from pentad.core.sizes import COLOCATED_SHARE, DeviceKind
from pentad.core.specs import absolute
from pentad.data.tokenizer import Tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.registry import create_model
from pentad.planner.plan import choose_device
from pentad.planner.remedies import shares_by_gpu
from pentad.runtime.environment import DETERMINISTIC
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.roles import RoleSpec, Runtime
from pentad.runtime.scratch import scratch_folder
from pentad.samplers import hosted, sglang, vllm
from pentad.samplers.hosted import HostedSettings
from pentad.samplers.process import check_installed, server_python
from pentad.samplers.remote import RemoteSampler
from pentad.samplers.replica import ReplicaSampler
from pentad.samplers.server_replica import KeptWeights, ServerRemote
from pentad.samplers.server_sampler import ServerSampler
from pentad.samplers.settings import ServerSettings
from pentad.sync.handoff import Handoff
from pentad.sync.tickets import Kind
from pentad.trainer.translate import compute_dtype, sampler_settings

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
ATTACH = {"vllm": vllm.attach, "sglang": sglang.attach}
START = {"vllm": vllm.start, "sglang": sglang.start}


async def open_samplers(
    config: Config,
    dims: ModelDims,
    tokenizer: Tokenizer,
    device: torch.device,
    log_folder: Path,
    stack: AsyncExitStack,
    handoff: Handoff | None = None,
    runtime: Runtime | None = None,
) -> dict[str, Sampler]:
    """By name; closed with `stack`. They hold weights of no use, so that only a real publish can
    make them agree with the trainer. `handoff`: how weights come from a learner elsewhere;
    `runtime`: that of the learner, which starts them too."""
    component = component_of(config, "rollout")
    if component.backend == "embedded":
        if not is_one_process(config, count_devices(config)):
            if runtime is None:
                runtime = open_runtime(config, device, is_apart=False)
                stack.push_async_callback(runtime.close)
            handoff = handoff or open_handoff(
                config, device, log_folder, stack, is_spread=runtime.is_spread
            )
            return await open_replicas(
                config, dims, tokenizer, device, log_folder, stack, handoff, runtime
            )
        sampler = embedded_sampler(config, dims, tokenizer, device)
        stack.push_async_callback(sampler.close)
        return {"embedded": sampler}
    samplers = await open_servers(config, dims, device, log_folder, stack)
    problems = [
        problem
        for name, sampler in samplers.items()
        for problem in capability_problems(config, name, sampler.capabilities)
    ]
    if problems:
        raise UserError(problems)
    return samplers


async def open_servers(
    config: Config,
    dims: ModelDims,
    device: torch.device,
    log_folder: Path,
    stack: AsyncExitStack,
) -> dict[str, Sampler]:
    """All at once. Those that the run starts it also starts again."""
    component, server = component_of(config, "rollout"), config.rollout.server
    settings = [server_settings(config, dims, device, i) for i in range(component.size("d"))]
    names = [f"{component.backend}-{index}" for index in range(len(settings))]
    if server.addresses:
        attach = ATTACH[component.backend]
        made: list[ServerSampler] = []
        for address, wanted in zip(server.addresses, settings, strict=True):
            made.append(await attach(address, wanted))
            stack.push_async_callback(made[-1].close)
        return dict(zip(names, made, strict=True))
    kept, replicas = KeptWeights(), []
    for name, wanted in zip(names, settings, strict=True):

        async def start(
            generation: int, name: str = name, wanted: ServerSettings = wanted
        ) -> ServerRemote:
            begin = START[component.backend]
            return ServerRemote(await begin(wanted, name, log_folder / f"{name}.log"), kept)

        replica = ReplicaSampler(name, start, kept, max_restarts=config.rollout.restarts)
        stack.push_async_callback(replica.close)
        replicas.append(replica)
    for replica in replicas:
        replica.siblings = replicas
    results = await asyncio.gather(*(one.open() for one in replicas), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return {replica.name: replica for replica in replicas}


def open_handoff(
    config: Config,
    device: torch.device,
    log_folder: Path,
    stack: AsyncExitStack,
    *,
    is_spread: bool,
) -> Handoff:
    """Where weights lie between processes: in memory, or in a folder that all machines see."""
    log_folder.mkdir(parents=True, exist_ok=True)
    place = log_folder if is_spread else shared_memory()
    folder = stack.enter_context(scratch_folder("pentad-weights-", place))
    kind: Kind = "file" if is_spread else "shm"
    on: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    if not is_spread and handoff_kind(config, on, count_devices(config)) == "ipc":
        fits, why = shares_by_gpu(config, choose_device(config))
        kind = "ipc" if fits else "shm"
        log.info("weights reach the sampler by %s: %s", kind, why)
    return Handoff(kind, folder, deltas=config.rollout.weight_deltas)


async def open_replicas(
    config: Config,
    dims: ModelDims,
    tokenizer: Tokenizer,
    device: torch.device,
    log_folder: Path,
    stack: AsyncExitStack,
    handoff: Handoff,
    runtime: Runtime,
) -> dict[str, Sampler]:
    """Embedded samplers as processes, each with its GPU, or with its cores where it decodes while
    others train."""
    num = component_of(config, "rollout").size("d")
    devices = server_devices(config) if device.type == "cuda" else ()
    is_ray = config.scheduler.type == "ray"
    on_policy = config.max_staleness == 0
    cores = [()] * num if devices or on_policy or is_ray else core_shares(num)
    replicas = []
    for index in range(num):
        name = f"rollout-{index}"
        spec = RoleSpec(
            name=name,
            target=hosted.TARGET,
            payload=asdict(hosted_settings(config, dims, tokenizer, device, len(cores[index]))),
            log=log_folder / f"{name}.log",
            num_gpus=1 if devices else 0,
            devices=devices[index : index + 1],
            cores=cores[index],
            environment=DETERMINISTIC if is_deterministic(config) else {},
        )

        async def start(generation: int, spec: RoleSpec = spec) -> RemoteSampler:
            process = await runtime.start(replace(spec, generation=generation))
            return await RemoteSampler.open(process, handoff)

        replica = ReplicaSampler(
            name, start, handoff, max_restarts=config.rollout.restarts, is_exact=on_policy
        )
        stack.push_async_callback(replica.close)
        replicas.append(replica)
    for replica in replicas:
        replica.siblings = replicas
    try:
        await asyncio.gather(*(replica.open() for replica in replicas))
    except InfraFailure as failure:
        raise RunError(str(failure)) from failure
    return {replica.name: replica for replica in replicas}


def open_runtime(config: Config, device: torch.device, *, is_apart: bool) -> Runtime:
    """What starts the processes of a run. On Ray it has a place for each, on nodes that have what
    they read; `is_apart`: the learners are among them."""
    if config.scheduler.type != "ray":
        return LocalRuntime()
    from pentad.runtime.ray_roles import RayRuntime

    path = config.actor.path
    folders = {"actor.path": str(Path(path).resolve())} if path else {}
    return RayRuntime(**ray_places(config, device, is_apart=is_apart), folders=folders)


def ray_places(config: Config, device: torch.device, *, is_apart: bool) -> dict[str, Any]:
    """What Ray is asked for: `bundles` by role, and `held`, the GPUs of this machine it must leave
    to processes that it does not place: torchrun's ranks."""
    allocation, actor = allocation_of(config), component_of(config, "actor")
    if config.only == "train":
        allocation = allocation.without("rollout")
    rollout, has_gpus = allocation.find("rollout"), device.type == "cuda"
    names = [f"learner-{rank}" for rank in range(actor.world if is_apart else 0)]
    is_shared = False
    if rollout is not None and rollout.backend == "embedded":
        names += [f"rollout-{index}" for index in range(rollout.size("d"))]
        is_shared = is_apart and allocation.shares_devices(rollout, actor)
    shares = dict.fromkeys(names, 0.5 if is_shared else 1.0)
    for role in scorers(config) if is_apart else ():
        shares |= {f"{role}-{rank}": 1.0 for rank in range(component_of(config, role).world)}
    bundles = {
        name: {"CPU": 1.0, "GPU": share} if has_gpus else {"CPU": 1.0}
        for name, share in shares.items()
    }
    held = tuple(range(actor.world)) if has_gpus and not is_apart else ()
    return {"bundles": bundles, "held": held}


def hosted_settings(
    config: Config, dims: ModelDims, tokenizer: Tokenizer, device: torch.device, num_cores: int
) -> HostedSettings:
    """Like `embedded_sampler` in this process: at staleness 0 both draw the same bits."""
    threads = torch.get_num_threads()
    return HostedSettings(
        dims=dims,
        sampler=sampler_settings(config, dims),
        device=device.type,
        dtype=compute_dtype(config.actor, device),
        seed=derive_seed(config.seed, "unpublished"),
        tokenizer=str(tokenizer.folder.resolve()),
        model_files=tuple(map(absolute, config.model_files)),
        deterministic=is_deterministic(config),
        num_threads=min(threads, num_cores or threads),
    )


def is_deterministic(config: Config) -> bool:
    return config.actor.archon.use_deterministic_algorithms


def core_shares(num: int) -> list[tuple[int, ...]]:
    """The cores of each replica; the first share is left to the trainer. Empty where there are
    not enough for all."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // (num + 1)
    return [tuple(cores[size * (i + 1) : size * (i + 2)]) for i in range(num)]


def shared_memory() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def embedded_sampler(
    config: Config, dims: ModelDims, tokenizer: Tokenizer, device: torch.device
) -> EmbeddedSampler:
    dtype = DTYPES[compute_dtype(config.actor, device)]
    seed = derive_seed(config.seed, "unpublished")
    return EmbeddedSampler(
        create_model(dims, device=device, dtype=dtype, seed=seed),
        sampler_settings(config, dims),
        decode=lambda ids: tokenizer.decode(ids, keep_special=True),
    )


def server_settings(
    config: Config, dims: ModelDims, device: torch.device, index: int
) -> ServerSettings:
    """Of the `index`-th replica."""
    component, server = component_of(config, "rollout"), config.rollout.server
    assert config.actor.path is not None, "checked with the config"
    tensor, pipeline = component.size("t"), component.size("p")
    devices = server_devices(config) if device.type == "cuda" else ()
    size = tensor * pipeline
    shares = allocation_of(config).shares_devices(component, component_of(config, "actor"))
    return into(
        ServerSettings,
        sampler_settings(config, dims),
        server,
        model_folder=str(Path(config.actor.path).resolve()),
        dims=dims,
        dtype=compute_dtype(config.actor, device),
        device=device.type,
        devices=devices[index * size : (index + 1) * size],
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        arguments=server.args,
        transport=server.weight_transport,
        transfer_folder=Path(server.transfer_folder) if server.transfer_folder else shared_memory(),
        can_sleep=bool(config.offload_rollout),
        weight_deltas=config.rollout.weight_deltas,
        memory_share=server.gpu_memory_share or (COLOCATED_SHARE if shares else None),
    )


def server_devices(config: Config) -> tuple[int, ...]:
    """Training has the first GPUs; samplers the same ones or those after them."""
    allocation = as_run(config, allocation_of(config), count_devices(config))
    component, actor = component_of(config, "rollout"), component_of(config, "actor")
    if allocation.shares_devices(component, actor):
        return tuple(n % actor.world for n in range(component.world))
    return tuple(range(actor.world, actor.world + component.world))


# What is checked before anything starts.


def server_problems(config: Config, device: torch.device) -> list[Problem | str]:
    """What keeps the servers of a run from starting, as far as can be known without them."""
    component, server = component_of(config, "rollout"), config.rollout.server
    if component.backend == "embedded":
        return []
    problems: list[Problem | str] = []
    if device.type == "cuda" and not server.addresses:
        problems += gpu_problems(config)
    if not server.addresses:
        problems += refused(lambda: find_server(config))
    return problems


def find_server(config: Config) -> None:
    backend, wanted = component_of(config, "rollout").backend, config.rollout.server.python
    check_installed(server_python(wanted, backend), backend, wanted)


def gpu_problems(config: Config) -> list[Problem]:
    needed, found = max(server_devices(config)) + 1, torch.cuda.device_count()
    if needed <= found:
        return []
    where = f"allocation_mode = {config.allocation_mode}"
    return [Problem(where, f"needs {needed} GPUs on this machine, which has {found}")]


def capability_problems(
    config: Config, name: str, capabilities: frozenset[str]
) -> list[Problem | str]:
    """What the run asks of a sampler that it declares it cannot do."""
    needs: dict[str, tuple[bool, str, str]] = {
        "pause": (True, f"rollout = {name}", "weights could not be replaced safely"),
        "sleep": (bool(config.offload_rollout), "offload_rollout = true", "leave it out"),
        "stop_strings": (
            bool(config.gconfig.stop),
            f"gconfig.stop = {list(config.gconfig.stop)}",
            "use stop_token_ids",
        ),
    }
    return [
        Problem(where, f"{name} cannot {need.replace('_', ' ')}", remedy)
        for need, (is_needed, where, remedy) in needs.items()
        if is_needed and need not in capabilities
    ]


def refused(step: Callable[[], None]) -> list[Problem | str]:
    try:
        step()
    except UserError as error:
        return error.problems
    return []
