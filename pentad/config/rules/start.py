"""Rules on what a run can start: what is built, and what the device it computes on can do.

A start refuses by these what a plan only points out (`plan` draws layouts that are not built yet)
or refuses too, where it plans for the machine it is asked on. Both say the same sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from pentad.config.derived import (
    SCORERS,
    checkpoint_root,
    component_of,
    compute_bytes,
    frozen_models,
    parsed_allocation,
    part_of,
)
from pentad.config.rules.algorithm import longest_sample
from pentad.config.schema import Config
from pentad.config.topology import topology
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.core.layout import Allocation
from pentad.core.machine import GIB, free_disk, host_memory, installed, num_cores
from pentad.core.sizes import (
    BLOCK_TOKENS,
    EIGHT_BIT_CACHES,
    PROCESS_BYTES,
    DeviceKind,
    export_bytes,
    kv_token_bytes,
)

RANKS_PER_CORE = 16
"""A rank takes 5 s of a core to start; so many take over a minute and then crawl."""


def unbuilt_problems(config: Config, *, samples: bool) -> list[Problem]:
    """What the schema and `plan` know and this version cannot do: refused, never ignored."""
    problems: list[Problem] = []
    allocation = parsed_allocation(config)
    if allocation is not None:
        problems += _unbuilt_layouts(config, allocation)
    if config.scheduler.type == "ray" and installed("ray") is None:
        rule = "needs the package ray, which is not installed"
        problems.append(Problem("scheduler.type = ray", rule, "pip install 'pentad[ray]'"))
    if samples and config.store == "transfer_queue" and installed("TransferQueue") is None:
        rule = "needs the package TransferQueue, which is not installed"
        remedy = "pip install 'pentad[transfer_queue]'"
        problems.append(Problem("store = transfer_queue", rule, remedy))
    if allocation is not None and samples:
        problems += _scorer_problems(config, allocation)
    return problems


def _scorer_problems(config: Config, allocation: Allocation) -> Iterator[Problem]:
    """In mode async whatever judges the samples stands on devices of its own."""
    where = f"allocation_mode = {config.allocation_mode}"
    needed = frozen_models(config) if config.only is None else ()
    alone = [role for role in SCORERS if allocation.stands_alone(role)]
    missing = [role for role in needed if role not in alone]
    if config.mode == "async" and missing:
        rule = f"{' and '.join(missing)} scores on devices of its own there, and {where} has none"
        fix = reduce(Allocation.without, missing, allocation).with_own(dict.fromkeys(missing, 1))
        remedy = f"use {fix}, or mode: hybrid, which scores in the trainer"
        yield Problem("mode = async", rule, remedy)
    for role in alone:
        if role not in needed:
            why = "algorithm.kl_coef = 0" if role == "ref" else "no algorithm.name = distill"
            why = f"only = {config.only}" if config.only else why
            yield Problem(where, f"nobody asks for the {role}: {why}", "leave its component out")
    placed = topology(config)
    apart = [component_of(config, role) for role in placed.scorers]
    wide = [str(part) for part in apart if part.world > 1]
    if wide and not placed.is_learner_apart:
        rule = f"{' and '.join(wide)} has a process for each rank, and here it is a thread"
        yield Problem(where, rule, "use d1, or scheduler.processes=separate")


def _unbuilt_layouts(config: Config, allocation: Allocation) -> Iterator[Problem]:
    where, actor = f"allocation_mode = {config.allocation_mode}", allocation.find("actor")
    needed = frozen_models(config)
    for part in allocation:
        if not actor or part.is_inference:
            continue
        if part.world == actor.world and allocation.shares_devices(actor, part):
            continue
        remedy = "give both as many, joined with |"
        if part.role in SCORERS and allocation.stands_alone(part.role):
            if config.mode == "async" or part.role not in needed:
                continue
            remedy += ", or set mode: async, which scores on devices apart"
        rule = f"{part} and {actor} must stand on the same ranks, all that trains does"
        yield Problem(where, rule, remedy)


def device_problems(config: Config, kind: DeviceKind, *, samples: bool) -> list[Problem]:
    """What a run that computes on such a device cannot honour."""
    if kind == "cuda":
        return []
    models = {"actor": config.actor}
    if samples and config.algorithm.facts.needs_critic:
        models["critic"] = config.critic
    problems = []
    for role, model in models.items():
        rule = "blocks are compiled on CUDA only, and this run computes on cpu"
        if model.archon.ac_mode == "memory_budget":
            where = f"{role}.archon.ac_mode = memory_budget"
            rule = f"the compiler keeps to it: {rule}"
            problems.append(Problem(where, rule, "use selective or full"))
        elif model.archon.enable_compile is True:
            problems.append(Problem(f"{role}.archon.enable_compile = true", rule, "leave it out"))
    rollout = part_of(config, "rollout")
    if samples and rollout and rollout.backend != "embedded":
        if config.offload_rollout:
            rule = f"{rollout.backend} cannot give back memory on a CPU"
            problems.append(Problem("offload_rollout = true", rule, "leave it out"))
        is_started = not config.rollout.server.addresses
        if config.rollout.replay_routes and rollout.backend == "vllm" and is_started:
            rule = (
                "vLLM does not say on a CPU which experts it used (its newer runner needs Triton)"
            )
            remedy = "leave it out, or use embedded in allocation_mode"
            problems.append(Problem("rollout.replay_routes = true", rule, remedy))
        if config.rollout.server.weight_transport == "ipc":
            where = "rollout.server.weight_transport = ipc"
            problems.append(Problem(where, "there is no GPU to share", "use disk or broadcast"))
    return problems


def process_problems(config: Config, kind: DeviceKind) -> list[Problem]:
    """Whether this machine can hold a process for each rank where they share its cores.

    Where torchrun starts them, it is for whoever gave their number to know.
    """
    actor = part_of(config, "actor")
    if not actor or kind == "cuda":
        return []
    rule = too_many_ranks(actor.world)
    if rule is None:
        return []
    remedy = "make the axes smaller, start it with torchrun, or plan with cluster.n_gpus_per_node"
    return [Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)]


def too_many_ranks(world: int) -> str | None:
    """Why this machine cannot hold so many processes that compute on its cores; None if it can."""
    cores, (memory_bytes, _) = num_cores(), host_memory()
    most = max(1, min(RANKS_PER_CORE * cores, memory_bytes // PROCESS_BYTES["cpu"]))
    if world <= most:
        return None
    room = f"{cores} cores with {memory_bytes / GIB:.0f} GiB"
    return f"starts {world} processes here, and {room} hold at most {most}"


def disk_problems(config: Config, dims: ModelDims, kind: DeviceKind) -> list[Problem]:
    """Room for the model that is saved at the end: without it all training would be lost."""
    if not dims.is_whole:
        return []
    needed = export_bytes(dims, compute_bytes(config.actor, kind))
    free, folder = free_disk(checkpoint_root(config))
    if needed <= free:
        return []
    rule = f"the saved model takes {needed / GIB:.2g} GiB, and {folder} has {free / GIB:.2g} left"
    where = f"fileroot = {config.fileroot}"
    if config.checkpoint.local_dir is not None:
        where = f"checkpoint.local_dir = {config.checkpoint.local_dir}"
    return [Problem(where, rule, "make room, or give another folder")]


def cache_problems(config: Config, dims: ModelDims, kind: DeviceKind) -> list[Problem]:
    """The sampler has the format of its cache; where the size of an embedded one's is given, it
    holds the longest sequence."""
    rollout, size_gb = part_of(config, "rollout"), config.rollout.kv_cache_gb
    if not rollout:
        return []
    if problems := cache_format_problems(config, rollout.backend, kind):
        return problems
    if size_gb is None or rollout.backend != "embedded":
        return []
    prompt = config.train_dataset.max_length or 1  # a prompt has at least one token
    longest = longest_sample(config, prompt, dims.max_position)
    number_bytes = compute_bytes(config.actor, kind)
    block_bytes = BLOCK_TOKENS * kv_token_bytes(dims, number_bytes, config.rollout.kv_cache_dtype)
    num_blocks = size_gb * GIB // block_bytes - 1  # one is for scratch
    needed = -(-longest // BLOCK_TOKENS)
    if num_blocks >= needed:
        return []
    tokens = int(max(num_blocks, 0)) * BLOCK_TOKENS
    rule = f"holds {tokens} tokens, and prompt and answer may have {longest}"
    least_gb = 1.01 * (needed + 1) * block_bytes / GIB  # three digits are off by less
    return [Problem(f"rollout.kv_cache_gb = {size_gb:g}", rule, f"give at least {least_gb:.3g}")]


def cache_format_problems(config: Config, backend: str, kind: DeviceKind) -> list[Problem]:
    form, is_server = config.rollout.kv_cache_dtype, backend != "embedded"
    where = f"rollout.kv_cache_dtype = {form}"
    if form == "bf16" and compute_bytes(config.actor, kind) != 2:
        rule = "the model computes in float32 here, and its cache holds what it computes"
        return [Problem(where, rule, "leave it at auto, or set actor.dtype = bfloat16")]
    if form not in EIGHT_BIT_CACHES:
        return []
    if config.strict:
        rule = "strict = true: a cache in 8 bits gives other log-probs than training"
        return [Problem(where, rule, "leave one of them out")]
    if is_server and form == "int8":
        return [Problem(where, f"{backend} has no such cache", "use fp8, or the embedded sampler")]
    if is_server and kind == "cpu":
        return [Problem(where, f"{backend} has no such cache on a CPU", "leave it at auto")]
    return []
