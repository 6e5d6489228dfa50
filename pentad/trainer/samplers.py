"""The samplers of a run, from its rollout component: in this process, or servers beside it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from pentad.config.derived import allocation_of, component_of
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.dtypes import DTYPES
from pentad.core.errors import Problem, UserError
from pentad.core.roles import Sampler
from pentad.core.seeds import derive_seed
from pentad.core.settings import into
from pentad.core.sizes import COLOCATED_SHARE
from pentad.data.tokenizer import Tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.registry import create_model
from pentad.samplers import sglang, vllm
from pentad.samplers.process import check_installed, server_python
from pentad.samplers.server_sampler import ServerSampler
from pentad.samplers.settings import ServerSettings
from pentad.trainer.translate import compute_dtype, sampler_settings

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
) -> dict[str, Sampler]:
    """By name; closed with `stack`. They hold weights of no use, so that only a real publish can
    make them agree with the trainer."""
    component = component_of(config, "rollout")
    if component.backend == "embedded":
        sampler = embedded_sampler(config, dims, tokenizer, device)
        stack.push_async_callback(sampler.close)
        return {"embedded": sampler}
    replicas = component.size("d")
    made = await gather_servers(
        [
            open_server(config, server_settings(config, dims, device, index), index, log_folder)
            for index in range(replicas)
        ],
        stack,
    )
    samplers: dict[str, Sampler] = {f"{component.backend}-{i}": s for i, s in enumerate(made)}
    problems = [
        problem
        for name, sampler in samplers.items()
        for problem in capability_problems(config, name, sampler.capabilities)
    ]
    if problems:
        raise UserError(problems)
    return samplers


async def gather_servers(
    openings: list[Coroutine[Any, Any, ServerSampler]], stack: AsyncExitStack
) -> list[ServerSampler]:
    """All at once; those that came up are closed also if another did not."""
    results = await asyncio.gather(*openings, return_exceptions=True)
    for result in results:
        if isinstance(result, ServerSampler):
            stack.push_async_callback(result.close)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, ServerSampler)]


async def open_server(
    config: Config, settings: ServerSettings, index: int, log_folder: Path
) -> ServerSampler:
    backend = component_of(config, "rollout").backend
    if config.rollout.server.addresses:
        return await ATTACH[backend](config.rollout.server.addresses[index], settings)
    name = f"{backend}-{index}"
    return await START[backend](settings, name, log_folder / f"{name}.log")


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
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
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
        transfer_folder=Path(server.transfer_folder) if server.transfer_folder else folder,
        can_sleep=bool(config.offload_rollout),
        memory_share=server.gpu_memory_share or (COLOCATED_SHARE if shares else None),
    )


def server_devices(config: Config) -> tuple[int, ...]:
    """Training has the first GPUs; servers the same ones or those after them."""
    allocation, component = allocation_of(config), component_of(config, "rollout")
    if allocation.shares_devices(component, component_of(config, "actor")):
        return tuple(range(component.world))
    first = sum(part.world for part in allocation if not part.is_inference)
    return tuple(range(first, first + component.world))


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
