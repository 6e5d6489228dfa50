"""Rules on the start of a run: implemented features, and the limits of the device.

The start of a run rejects all of these problems. `plan`, which also shows layouts that are not
implemented, rejects them if it plans for this machine, else reports them as notes.
`trainer.preflight` adds rules that need loaded components. The last rules apply to open samplers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from pentad.config.rules.algorithm import longest_sample
from pentad.config.rules.environments import rewards_of
from pentad.config.rules.model import uncounted
from pentad.config.rules.rule import RUNS, Rules, RunFacts
from pentad.config.schema import SCORERS, Config
from pentad.config.topology import facts_of, find_topology, topology
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.core.layout import Allocation
from pentad.core.machine import GIB, free_disk, host_memory, installed, num_cores
from pentad.core.quantization import FP8_KEY, fp8_problems
from pentad.core.sizes import (
    BLOCK_TOKENS,
    EIGHT_BIT_CACHES,
    PROCESS_BYTES,
    DeviceKind,
    export_bytes,
    kv_token_bytes,
    latent_cache_problems,
)
from pentad.models.catalog import known_dims
from pentad.models.families import map_of
from pentad.rewards.section import REWARD_MODEL

RULES = Rules()
RANKS_PER_CORE = 16
"""A rank takes 5 s of a core to start; this many take over a minute and then run slowly."""


@RULES.add(commands=("train", "sft"), is_noted=True)
def what_trains_shares_ranks(config: Config) -> Iterator[Problem]:
    where, allocation = f"allocation_mode = {config.allocation_mode}", config.parsed_allocation
    actor = allocation.find("actor") if allocation else None
    if allocation is None or actor is None:
        return
    needed = config.frozen_models
    for part in [part for part in allocation if not part.is_inference]:
        if part.world == actor.world and allocation.shares_devices(actor, part):
            continue
        remedy = "give both equally many, joined with |"
        if part.role in SCORERS and allocation.stands_alone(part.role):
            if config.mode == "async" or part.role not in needed:
                continue
            remedy += ", or set mode: async, which scores on separate devices"
        rule = f"{part} and {actor} must use the same ranks, like all trained components"
        yield Problem(where, rule, remedy)


@RULES.add(commands=("train", "sft"), is_noted=True)
def packages_are_installed(config: Config, facts: RunFacts) -> Iterator[Problem]:
    if config.scheduler.type == "ray" and installed("ray") is None:
        rule = "needs the package ray, which is not installed"
        yield Problem("scheduler.type = ray", rule, "pip install 'pentad[ray]'")
    is_other = config.store == "transfer_queue" and facts.samples(config)
    if is_other and installed("TransferQueue") is None:
        rule = "needs the package TransferQueue, which is not installed"
        remedy = "pip install 'pentad[transfer-queue]'"
        yield Problem("store = transfer_queue", rule, remedy)


@RULES.add(commands=("train", "sft"), is_noted=True)
def scorers_have_devices(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Rule: in mode async, scorers have separate devices."""
    where, allocation = f"allocation_mode = {config.allocation_mode}", config.parsed_allocation
    if allocation is None or not facts.samples(config):
        return
    needed = config.frozen_models if config.only is None else ()
    alone = [role for role in SCORERS if allocation.stands_alone(role)]
    missing = [role for role in needed if role not in alone]
    if config.mode == "async" and missing:
        rule = f"{' and '.join(missing)} scores on its own devices there, and {where} has none"
        fix = reduce(Allocation.without, missing, allocation).with_own(dict.fromkeys(missing, 1))
        remedy = f"use {fix}, or mode: hybrid, which scores in the trainer"
        yield Problem("mode = async", rule, remedy)
    for role in alone:
        if role not in needed:
            why = "algorithm.kl_coef = 0" if role == "ref" else "no algorithm.name = distill"
            why = f"only = {config.only}" if config.only else why
            yield Problem(where, f"the run needs no {role}: {why}", "leave its component out")
    placed = topology(config)
    apart = [config.component(role) for role in placed.scorers]
    wide = [str(part) for part in apart if part.world > 1]
    if wide and not placed.is_learner_apart:
        rule = f"{' and '.join(wide)} has a process for each rank, and here it is a thread"
        yield Problem(where, rule, "use d1, or scheduler.processes=separate")


@RULES.add(commands=RUNS, stage="start")
def the_device_compiles(config: Config, facts: RunFacts) -> Iterator[Problem]:
    models = config.trained_models if facts.is_rl(config) else {"actor": config.actor}
    for role, model in models.items() if facts.kind == "cpu" else ():
        rule = "blocks are compiled on CUDA only, and this run computes on cpu"
        if model.archon.ac_mode == "memory_budget":
            where = f"{role}.archon.ac_mode = memory_budget"
            rule = f"the compiler enforces it: {rule}"
            yield Problem(where, rule, "use selective or full")
        elif model.archon.enable_compile is True:
            yield Problem(f"{role}.archon.enable_compile = true", rule, "leave it out")


@RULES.add(commands=RUNS, stage="start")
def the_device_suits_the_servers(config: Config, facts: RunFacts) -> Iterator[Problem]:
    rollout = config.part("rollout")
    is_server = rollout is not None and rollout.backend != "embedded"
    if facts.kind == "cuda" or not rollout or not is_server or not facts.samples(config):
        return
    if config.offload_rollout:
        rule = f"{rollout.backend} cannot give back memory on a CPU"
        yield Problem("offload_rollout = true", rule, "leave it out")
    is_started = not config.rollout.server.addresses
    if config.rollout.replay_routes and rollout.backend == "vllm" and is_started:
        rule = "vLLM on a CPU cannot report the experts it used (its newer runner needs Triton)"
        remedy = "leave it out, or use embedded in allocation_mode"
        yield Problem("rollout.replay_routes = true", rule, remedy)
    if config.rollout.server.weight_transport == "ipc":
        where = "rollout.server.weight_transport = ipc"
        yield Problem(where, "there is no GPU to share", "use disk or broadcast")


@RULES.add(commands=RUNS, stage="start")
def ranks_have_a_machine(config: Config, facts: RunFacts) -> list[Problem]:
    """Rejects more ranks than this machine has devices for; torchrun has checked this already."""
    if facts.is_plan:
        return process_problems(config, facts.kind)
    return [] if facts.is_torchrun else rank_problems(config, facts)


def rank_problems(config: Config, facts: RunFacts) -> list[Problem]:
    """Checks for a GPU (if there are any) and a process per rank; on Ray the cluster checks it."""
    actor = config.part("actor")
    if not actor or config.scheduler.type == "ray":
        return []
    placed = topology(config, facts_of(config, facts.kind))
    apart = placed.samplers if placed.written.are_apart else []
    if facts.kind == "cuda" and config.elastic.enabled and (apart or placed.scorers):
        rule = "GPUs of samplers and scorers are numbered after those of training"
        remedy = "let the sampler share the trainer's devices (embedded:dN|archon:dN), or use Ray"
        return [Problem("elastic.enabled = true", rule, remedy)]
    count = facts.num_gpus
    if facts.kind == "cuda" and actor.world > count:
        rule = f"needs {actor.world} GPUs, and torch finds {count} on this machine"
        remedy = "make the axes smaller, or start it with torchrun on several machines"
        return [Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)]
    return process_problems(config, facts.kind)


def process_problems(config: Config, kind: DeviceKind) -> list[Problem]:
    """Checks that this machine can run a process for each rank if ranks share its cores."""
    actor = config.part("actor")
    if not actor or kind == "cuda":
        return []
    rule = too_many_ranks(actor.world)
    if rule is None:
        return []
    remedy = "make the axes smaller, start it with torchrun, or plan with cluster.n_gpus_per_node"
    return [Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)]


def too_many_ranks(world: int) -> str | None:
    """Why this machine cannot run this many computing processes; None if it can."""
    cores, (memory_bytes, _) = num_cores(), host_memory()
    most = max(1, min(RANKS_PER_CORE * cores, memory_bytes // PROCESS_BYTES["cpu"]))
    if world <= most:
        return None
    room = f"{cores} cores with {memory_bytes / GIB:.0f} GiB"
    return f"starts {world} processes here, and {room} hold at most {most}"


@RULES.add(commands=("train", "sft"), stage="start")
def the_saved_model_has_room(config: Config, facts: RunFacts) -> list[Problem]:
    dims = known_dims(config.actor.path)
    saves_all = config.only != "rollout" and config.actor.lora is None  # an adapter is small
    return disk_problems(config, dims, facts.kind) if dims is not None and saves_all else []


def disk_problems(config: Config, dims: ModelDims, kind: DeviceKind) -> list[Problem]:
    """Checks disk space for the final model: without it all training would be lost."""
    if not dims.is_whole:
        return []
    needed = export_bytes(dims, config.actor.bytes_on(kind))
    free, folder = free_disk(config.checkpoint_root)
    if needed <= free:
        return []
    rule = f"the saved model takes {needed / GIB:.2g} GiB, and {folder} has {free / GIB:.2g} left"
    where = f"fileroot = {config.fileroot}"
    if config.checkpoint.local_dir is not None:
        where = f"checkpoint.local_dir = {config.checkpoint.local_dir}"
    return [Problem(where, rule, "make room, or give another folder")]


@RULES.add(commands=RUNS, stage="start")
def the_cache_holds_a_sample(config: Config, facts: RunFacts) -> list[Problem]:
    dims = known_dims(config.actor.path)
    if dims is None or not facts.samples(config):
        return []
    return cache_problems(config, dims, facts.kind)


def cache_problems(config: Config, dims: ModelDims, kind: DeviceKind) -> list[Problem]:
    """The sampler must support the format of its cache; an embedded cache of given size must hold
    the longest sequence."""
    rollout, size_gb = config.part("rollout"), config.rollout.kv_cache_gb
    if not rollout:
        return []
    if problems := cache_format_problems(config, rollout.backend, kind):
        return problems
    if rollout.backend != "embedded":
        return []
    if problems := latent_cache_problems(dims, config.rollout.kv_cache_dtype):
        return problems
    if size_gb is None or uncounted(config):  # bytes per token are unknown
        return []
    prompt = config.train_dataset.max_length or 1  # a prompt has at least one token
    longest = longest_sample(config, prompt, dims.max_position)
    number_bytes = config.actor.bytes_on(kind)
    block_bytes = BLOCK_TOKENS * kv_token_bytes(
        dims, number_bytes, config.rollout.kv_cache_dtype, expanded=config.strict
    )
    num_blocks = size_gb * GIB // block_bytes - 1  # one is a scratch block
    needed = -(-longest // BLOCK_TOKENS)
    if num_blocks >= needed:
        return []
    tokens = int(max(num_blocks, 0)) * BLOCK_TOKENS
    rule = f"holds {tokens} tokens, and prompt and answer may have {longest}"
    least_gb = 1.01 * (needed + 1) * block_bytes / GIB  # 1%: rounding to three digits is less
    return [Problem(f"rollout.kv_cache_gb = {size_gb:g}", rule, f"give at least {least_gb:.3g}")]


def cache_format_problems(config: Config, backend: str, kind: DeviceKind) -> list[Problem]:
    form, is_server = config.rollout.kv_cache_dtype, backend != "embedded"
    where = f"rollout.kv_cache_dtype = {form}"
    if form == "bf16" and config.actor.bytes_on(kind) != 2:
        rule = "the model computes in float32 here, and its cache has the same dtype"
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


@RULES.add(commands=RUNS, stage="start")
def servers_hold_fp8_weights(config: Config, facts: RunFacts) -> list[Problem]:
    dims = known_dims(config.actor.path)
    is_asked = config.rollout.weight_dtype == "fp8" and facts.samples(config)
    return weight_format_problems(config, dims, facts.kind) if is_asked else []


def weight_format_problems(
    config: Config, dims: ModelDims | None, kind: DeviceKind
) -> list[Problem]:
    """The sampler must be a server on a GPU that can hold this model in fp8. `dims` None: the
    server's start checks them."""
    rollout, auto = config.part("rollout"), "leave it at auto"
    if not rollout:
        return []
    if rollout.backend == "embedded":
        rule = "the embedded sampler computes with the weights that are trained"
        return [Problem(FP8_KEY, rule, f"use vllm or sglang, or {auto}")]
    if config.actor.lora is not None:
        rule = "with actor.lora the weights come from the model folder and are never published"
        return [Problem(FP8_KEY, rule, auto)]
    if kind == "cpu":
        return [Problem(FP8_KEY, f"{rollout.backend} has no such weights on a CPU", auto)]
    if config.actor.bytes_on(kind) != 2:
        rule = "servers compute with such weights in 16 bits, and the model computes in float32"
        return [Problem(FP8_KEY, rule, "set actor.dtype = bfloat16")]
    if dims is None or not dims.is_whole:
        return []
    shapes = {name: source.shape for name, source in map_of(dims).sources.items()}
    return list(fp8_problems(shapes, dims, rollout.size("t")))


@RULES.add(commands=("train", "sft"), is_noted=True, stage="start")
def other_machines_are_reached(config: Config, facts: RunFacts) -> list[Problem]:
    """Rejects processes on other machines than the first without Ray or Slurm."""
    if not facts.is_plan and (not facts.is_torchrun or facts.has_agents):
        return []
    placed = find_topology(config)
    if placed is None or config.scheduler.type != "local":
        return []
    far = [*(one.name for one in placed.elsewhere), *placed.unplaced]
    if not far:
        return []
    names = far[0] if len(far) == 1 else f"{far[0]} to {far[-1]}"
    rule = f"scheduler.type = local starts {names} on no other machine than the first"
    remedy = "use scheduler.type=ray or slurm, which place them, or rollout.server.addresses"
    return [Problem(f"cluster.n_nodes = {config.cluster.n_nodes}", rule, remedy)]


@RULES.add(commands=("train", "sft"), stage="start")
def one_machine_is_enough(config: Config, facts: RunFacts) -> list[Problem]:
    """Rejects several machines without torchrun or another launcher."""
    nodes, kind = config.cluster.n_nodes, config.scheduler.type
    if nodes == 1 or kind != "local" or config.rollout.server.addresses:
        return []
    if facts.is_torchrun or not config.part("actor"):
        return []
    where = f"cluster.n_nodes = {nodes}"
    remedy = "start it with torchrun on each, use scheduler.type=ray or slurm, or set n_nodes=1"
    rule = "scheduler.type = local starts processes on this machine only"
    return [Problem(where, rule, remedy)]


@RULES.add(commands=("train",), stage="start")
def a_reward_model_has_a_device(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Requires a device for reward models if other processes use GPUs: auto then finds none."""
    for block, reward in rewards_of(config).items():
        is_open = REWARD_MODEL in reward.functions and reward.model.device == "auto"
        if is_open and facts.kind == "cuda" and topology(config).is_learner_apart:
            rule = "this run has processes on its GPUs, and none of them holds the reward model"
            remedy = "give cuda:N, a GPU with room for it, or cpu"
            yield Problem(f"{block}.model.device = auto", rule, remedy)


@RULES.add(commands=("train",), stage="open")
def samplers_can_do_what_the_run_needs(config: Config, facts: RunFacts) -> Iterator[Problem]:
    stop = list(config.gconfig.stop)
    for name, capabilities in (facts.samplers or {}).items():
        needs = {
            "pause": (True, f"rollout = {name}", "weights could not be replaced safely"),
            "sleep": (config.offload_rollout, "offload_rollout = true", "leave it out"),
            "stop_strings": (stop, f"gconfig.stop = {stop}", "use stop_token_ids"),
        }
        for need, (is_needed, where, remedy) in needs.items():
            if is_needed and need not in capabilities:
                yield Problem(where, f"{name} cannot {need.replace('_', ' ')}", remedy)
