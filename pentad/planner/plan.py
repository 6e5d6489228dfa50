"""Computes a plan from a checked config: placement, memory, tokens and files. No torch and no GPU.

`build_plan` computes figures; `pentad.cli.plan` prints them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pentad.config.rules.algorithm import longest_sample
from pentad.config.rules.layout import Placed, placed_components
from pentad.config.schema import Config
from pentad.config.topology import Topology, facts_of, topology
from pentad.core.dims import ModelDims
from pentad.core.fit import is_interleaved
from pentad.core.layout import Allocation, Layout
from pentad.core.machine import GIB, GpuQueryError, find_gpus, host_memory
from pentad.core.sizes import (
    COLOCATED_SHARE,
    EMBEDDED_CPU_BYTES,
    PROCESS_BYTES,
    SERVER_SHARE,
    PublishKind,
    default_microbatch_tokens,
)
from pentad.engine.section import EngineSettings, ModelConfig, captures
from pentad.models.catalog import dims_of
from pentad.planner.adapters import FACTOR_BYTES, JOINED_SHARE, num_factors
from pentad.planner.figures import Batch, Device, RunPlan, SamplePlan, TrainPlan
from pentad.planner.host import host_phases, plan_files, saves_async, staged_bytes
from pentad.planner.memory import (
    PHASES,
    Phase,
    Training,
    training_phases,
)
from pentad.planner.sampling import (
    Sampling,
    base_bytes,
    conversion_bytes,
    kv_token_bytes,
    sampler_weights,
)

DEFAULT_GPU_GIB = 80.0
ASSUMED_PROMPT_TOKENS = 1024


def choose_device(config: Config, gpu_memory_gib: float | None = None) -> Device:
    """The device of a plan: a GPU that is given, found or assumed; the CPU if none is needed."""
    if gpu_memory_gib is not None:
        return Device("cuda", int(gpu_memory_gib * GIB), "as given by --gpu-memory", False)
    why = "no GPU found here"
    try:
        gpus = find_gpus()
    except GpuQueryError as error:
        gpus, why = (), str(error)
    if gpus:
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return Device("cuda", smallest.memory_bytes, f"{len(gpus)} x {smallest.name} found")
    if config.cluster.n_gpus_per_node is None:
        return Device("cpu", host_memory()[1], f"{why}: planned for this machine's CPU and memory")
    source = f"{why}: {DEFAULT_GPU_GIB:.0f} GiB each are assumed, --gpu-memory changes it"
    return Device("cuda", int(DEFAULT_GPU_GIB * GIB), source, False)


def is_for_here(config: Config, gpu_memory_gib: float | None = None) -> bool:
    """Whether a plan is for a run on this machine, with local files."""
    is_local = config.scheduler.type == "local" and config.cluster.n_nodes == 1
    return is_local and choose_device(config, gpu_memory_gib).is_here


def build_plan(
    config: Config,
    device: Device,
    num_rows: int | None = None,
    in_use_bytes: float = 0.0,
    longest: int | None = None,
) -> RunPlan:
    """The plan of a config that passed all checks. `num_rows`: rows of its dataset, `longest`:
    tokens of the longest row, if known.

    `in_use_bytes` of host memory are already used by processes of the run. Weights are published
    through a GPU that learner and sampler share if it has room for them.
    """
    publish_kind = topology(config, facts_of(config, device.kind)).publish_kind
    plan = _build(config, device, num_rows, in_use_bytes, publish_kind, longest)
    if publish_kind == "ipc" and plan.peak_bytes > device.memory_bytes:
        return _build(config, device, num_rows, in_use_bytes, "shm", longest)
    return plan


def _build(
    config: Config,
    device: Device,
    num_rows: int | None,
    in_use_bytes: float,
    publish_kind: PublishKind,
    longest: int | None,
) -> RunPlan:
    dims = dims_of(config.model_folder())
    placed = topology(config, facts_of(config, device.kind))
    allocation = placed.allocation
    has_rollout = placed.written.find("rollout") is not None
    batch = plan_batch(config, dims, num_rows, has_rollout, longest)
    found = placed_components(config, allocation, dims)
    trainers = [
        plan_trainer(part, allocation, batch, device, publish_kind)
        for part in found
        if not part.component.is_inference
    ]
    samplers = [
        plan_sampler(part, placed, trainers, batch, device)
        for part in found
        if part.component.is_inference
    ]
    leaves = [resident(trainer.phases, "rollout") for trainer in trainers]
    for index, trainer in enumerate(trainers):
        others = [
            size
            for i, size in enumerate(leaves)
            if i != index and trainers[i].devices.start == trainer.devices.start
        ]
        add_neighbours(trainer, sum(others), samplers, config)
    files = plan_files(config, trainers, batch)
    hosts = host_phases(config, trainers, samplers, device)
    staged = staged_bytes(config, trainers)
    free = device.host_bytes + in_use_bytes - max(hosts.values())
    if is_async := saves_async(config, staged, free):
        hosts |= {name: hosts[name] + staged for name in PHASES[1:]}
    plan = RunPlan(
        config,
        allocation,
        dims,
        device,
        batch,
        trainers,
        samplers,
        files,
        hosts,
        is_async,
        publish_kind,
    )
    plan.notes += map(note_on_base, samplers if config.actor.lora is not None else ())
    if batch.prompt_is_assumed:
        what = "prompts" if batch.answer_tokens else "rows"
        text = f"{what} of {batch.prompt_tokens} tokens assumed"
        text += "" if batch.longest_read is None else ", as the longest that was read"
        plan.notes.append(f"train_dataset.max_length is unset: {text}")
    if batch.answer_tokens and not config.rollout.is_single_turn:
        plan.notes.append(several_turns(config, batch))
    if files.needed_bytes > files.free_bytes:
        need, have = files.needed_bytes / GIB, files.free_bytes / GIB
        text = f"{need:.1f} GiB of checkpoints, {have:.1f} GiB free at {files.folder}"
        plan.notes.append(f"warning: {text} on this machine; saver.keep_last bounds the exports")
    need, have = max(hosts.values()), device.host_bytes
    if device.kind == "cuda" and need > have:
        text = f"{need / GIB:.1f} GiB of host memory needed a node, {have / GIB:.1f} free here"
        plan.notes.append(f"warning: {text}")
    return plan


def plan_batch(
    config: Config,
    dims: ModelDims,
    num_rows: int | None,
    has_rollout: bool,
    longest_read: int | None,
) -> Batch:
    """The batch; without a rollout, it consists of rows of the dataset."""
    given = config.train_dataset.max_length
    if config.task == "pretrain":
        given = given or dims.max_position
    prompts = config.train_dataset.batch_size
    samples = config.rows_per_step
    turn = config.gconfig.max_new_tokens if has_rollout else 0
    assumed = longest_read or ASSUMED_PROMPT_TOKENS
    prompt = given or max(1, min(assumed, dims.max_position - turn))
    longest = longest_sample(config, prompt, dims.max_position) if has_rollout else prompt
    per_epoch = total = None
    if num_rows is not None:
        per_epoch = math.ceil(num_rows / prompts)
        total = per_epoch * config.total_train_epochs
    total = config.total_train_steps or total
    return Batch(
        prompts=prompts,
        samples=samples,
        prompt_tokens=prompt,
        prompt_is_assumed=given is None,
        longest_read=longest_read,
        answer_tokens=longest - prompt,
        num_rows=num_rows,
        steps_per_epoch=per_epoch,
        total_steps=total,
        flops=samples * dims.train_flops(longest),
    )


def note_on_base(sampler: SamplePlan) -> str:
    """Note on the frozen weights of an adapter: whether a sampler has a copy."""
    size = f"{base_bytes(sampler.sampling) / GIB:.1f} GiB of frozen weights"
    if sampler.sampling.shares_weights:
        return f"actor.lora: {size} counted once: the sampler uses the learner's"
    return f"actor.lora: {size} counted in the learner and in each sampler, which has a copy"


def several_turns(config: Config, batch: Batch) -> str:
    """Note on the assumed length of samples with several turns."""
    workflow, given = ", ".join(config.rollout.specs), config.gconfig.max_sampled_tokens
    if given is None:
        return (
            f"rollout.workflow = {workflow}: samples as long as the model's context assumed, "
            f"{batch.sequence_tokens} tokens; gconfig.max_sampled_tokens bounds what is sampled"
        )
    return (
        f"rollout.workflow = {workflow}: {given} tokens after the prompt "
        "(gconfig.max_sampled_tokens) assumed; texts of environments come in addition"
    )


def microbatches(part: Placed, layout: Layout, batch: Batch, device: Device) -> tuple[int, int]:
    """Number of microbatches of a data-parallel rank per accumulate call, and tokens of the
    largest."""
    config, spec = part.config, part.model.mb_spec
    calls = config.updates_per_batch * config.num_iters_per_train_update
    rows = math.ceil(batch.samples / calls / layout.dp)
    length = batch.sequence_tokens
    stages = part.model.archon.num_stages(layout.pp)
    budget = spec.max_tokens_per_mb or default_microbatch_tokens(length, device.kind, stages)
    each = min(max(1, budget // length), math.ceil(rows / spec.fewest))
    is_padded = part.model.pad_to_maximum is True
    number = max(math.ceil(rows / each), spec.fewest)
    if layout.pp > 1 and is_interleaved(part.model.archon.pp_schedule):
        number = -(-number // layout.pp) * layout.pp
    return number, max(budget, length) if is_padded else each * length


def plan_trainer(
    part: Placed, allocation: Allocation, batch: Batch, device: Device, publish_kind: PublishKind
) -> TrainPlan:
    config, model, component = part.config, part.model, part.component
    assert part.dims is not None, "unknown models are refused before"
    layout = component.layout(model.archon.dp_replicate)
    number, tokens = microbatches(part, layout, batch, device)
    trains = part.key == "critic" or component.role in ("actor", "critic")
    rollout = allocation.find("rollout")
    is_attached = bool(config.rollout.server.addresses)
    settings = EngineSettings(
        model=model,
        max_row_tokens=batch.sequence_tokens,
        strict=config.strict and part.key == "actor",
        offloads=bool(config.offload_train),
    ).settled(device.kind, layout)
    publishes = component.role == "actor" and part.key == "actor" and rollout is not None
    converted_bytes = 0.0
    if publishes and rollout is not None and config.rollout.weight_dtype == "fp8":
        converted_bytes = conversion_bytes(rollout, part.dims, model.bytes_on(device.kind))
    is_captured = captures(settings, part.dims, layout, component.backend, device.kind)
    training = Training(
        dims=part.dims,
        layout=layout,
        model=planned_keys(part, layout, device, keeps_logits=part.key == "actor" and trains),
        num_microbatches=number,
        microbatch_tokens=tokens,
        has_whole_tables=component.backend == "fsdp",
        has_buffers=component.backend == "megatron",
        num_tags=num_tags(config, allocation) if part.key == "actor" else 0,
        device=device.kind,
        with_optimizer=trains,
        publishes=publishes,
        converted_bytes=converted_bytes,
        overlaps=config.mode in ("hybrid", "async"),
        max_staleness=config.max_staleness,
        snapshot_on_host=config.snapshot_on_host(device.kind),
        publish_kind=publish_kind,
        keeps_newest=rollout is not None and not is_attached,
        captures=trains and is_captured,
    )
    phases = [training_phases(training, rank) for rank in range(layout.pp)]
    role = "critic" if part.key == "critic" else component.role
    devices = allocation.devices(component)
    per_rank = batch.tokens / config.updates_per_batch / layout.dp
    return TrainPlan(role, component, devices, training, per_rank, phases)


def planned_keys(
    part: Placed, layout: Layout, device: Device, *, keeps_logits: bool
) -> ModelConfig:
    """The keys of a role as settled by its engine; layers are compiled on CUDA only."""
    keys = EngineSettings(model=part.model).settled(device.kind, layout).model
    archon = keys.archon
    counted: dict[str, object] = {
        "enable_compile": archon.enable_compile is True and device.kind == "cuda",
        "keep_logits": archon.keep_logits is True and keeps_logits,
        "stages_per_rank": part.model.archon.stages,
    }
    if part.component.backend == "megatron":
        # Its layers are not compiled, and its selective recomputation frees what attention of
        # packed rows does not keep anyway.
        whole = archon.ac_mode if archon.ac_mode == "full" else "none"
        counted |= {"enable_compile": False, "ac_mode": whole}
    is_moe = part.dims is not None and part.dims.num_experts > 0
    if part.component.backend == "fsdp" and is_moe and layout.ep * layout.tp > 1:
        counted["enable_compile"] = False
    return keys.model_copy(update={"archon": archon.model_copy(update=counted)})


def num_tags(config: Config, allocation: Allocation) -> int:
    """Number of frozen models whose weights are swapped into the actor's model."""
    return sum(allocation.find(role) is None for role in config.frozen_models)


def plan_sampler(
    part: Placed, placed: Topology, trainers: list[TrainPlan], batch: Batch, device: Device
) -> SamplePlan:
    config, component, allocation = part.config, part.component, placed.allocation
    assert part.dims is not None, "unknown models are refused before"
    given, running = config.rollout.kv_cache_gb, config.num_running
    replicas, group = component.size("d"), config.answers_per_group
    sampling = Sampling(
        dims=part.dims,
        tp=component.size("t"),
        pp=component.size("p"),
        weight_bytes=config.actor.bytes_on(device.kind),
        weight_dtype=config.rollout.weight_dtype,
        cache_dtype=config.rollout.kv_cache_dtype,
        sequence_tokens=batch.sequence_tokens,
        num_sequences=min(running, math.ceil(config.groups_started * group / replicas)),
        max_running=running,
        max_batch_tokens=config.rollout.max_batch_tokens,
        device=device.kind,
        strict=config.strict,
    )
    near = [t for t in trainers if allocation.shares_devices(t.component, component)]
    if config.actor.lora is not None:
        factors: float = FACTOR_BYTES * num_factors(part.dims, config.actor.lora)
        if component.backend == "embedded" and device.kind == "cuda" and not config.strict:
            factors *= JOINED_SHARE[bool(part.dims.num_experts)]
        sampling = replace(sampling, adapter_bytes=factors, shares_weights=placed.shares_base)
    weights = sampler_weights(sampling)
    pass_tokens = 0
    if component.backend == "embedded":
        free = free_for_cache(sampling, [] if config.offload_train else near, device)
        cache = embedded_cache(sampling, free) if given is None else given * GIB
        rest = None if free is None else free - cache - sampling.largest.slots_bytes
        pass_tokens = sampling.largest.tokens(None if rest is None else max(rest, 0.0))
    elif given is not None:
        cache = given * GIB
    else:
        share = config.rollout.server.gpu_memory_share or (
            COLOCATED_SHARE if near else SERVER_SHARE
        )
        cache = share * device.memory_bytes - weights - PROCESS_BYTES[device.kind]
    devices = allocation.devices(component)
    return SamplePlan(
        component, devices, sampling, weights, max(cache, 0.0), pass_tokens, is_alone=not near
    )


def free_for_cache(sampling: Sampling, near: list[TrainPlan], device: Device) -> float | None:
    """Free GPU memory when an embedded sampler is built, after the models in `near` are loaded;
    none of them if they are offloaded, except for frozen weights that the sampler uses."""
    if device.kind == "cpu":
        return None
    loaded = sum(max(row["load"].device_bytes for row in trainer.phases) for trainer in near)
    if sampling.shares_weights and not near:
        loaded = PROCESS_BYTES["cuda"] + base_bytes(sampling)
    free = device.memory_bytes - max(loaded, PROCESS_BYTES["cuda"]) - sampler_weights(sampling)
    return max(free, 0.0)


def embedded_cache(sampling: Sampling, free_bytes: float | None) -> float:
    """Default cache size of the embedded engine: all usable memory, within its share."""
    wanted = kv_token_bytes(sampling) * sampling.max_running * sampling.dims.max_position
    if free_bytes is None:
        return min(wanted, EMBEDDED_CPU_BYTES)
    return min(wanted, sampling.largest.cache_bytes(free_bytes))


def resident(phases: list[dict[str, Phase]], name: str) -> float:
    """Memory that a trainer keeps on the fullest pipeline rank while other roles use the device."""
    return max(row[name].device_bytes - row[name].device["overhead"] for row in phases)


def add_neighbours(
    trainer: TrainPlan, others: float, samplers: list[SamplePlan], config: Config
) -> None:
    """Adds other components' memory on the same devices to every phase; `others`: bytes of models.

    An embedded sampler is on the device of rank 0 only, servers are on every one. On a GPU a
    separate process keeps the memory of its passes, unless it sleeps.
    """
    training = trainer.training
    keeps_passes = training.publish_kind != "none" and training.device == "cuda"
    near = [s for s in samplers if s.devices.start == trainer.devices.start]
    lends = trainer.role == "actor" and any(s.sampling.shares_weights for s in near)
    for pp_rank, row in enumerate(trainer.phases):
        for name, phase in row.items():
            if name == "load":
                continue
            if others:
                phase.device["other models"] = others
            if name in ("rollout", "publish") and config.offload_train:
                if training.device == "cuda":
                    phase.device.pop("other models", None)  # each moves its own
                kept = ["overhead", *(["weights"] if lends else [])]
                for part in [part for part in phase.device if part not in kept]:
                    phase.host[part] = phase.host.get(part, 0.0) + phase.device.pop(part)
            sleeps = config.offload_rollout and name not in ("rollout", "publish")
            for sampler in near:
                is_embedded = sampler.component.backend == "embedded"
                if is_embedded and pp_rank > 0:
                    continue
                if sleeps:
                    if is_embedded and sampler.sampling.adapter_bytes:  # they stay (infer.runner)
                        phase.device["sampler weights"] = sampler.weights_bytes
                    continue
                phase.device["sampler weights"] = sampler.weights_bytes
                phase.device["kv cache"] = sampler.kv_bytes
                held = sampler.weights_bytes + sampler.kv_bytes
                if sampler.slots_bytes:
                    phase.device["sampler states"] = sampler.slots_bytes
                    held += sampler.slots_bytes
                if is_embedded and (name == "rollout" or training.overlaps or keeps_passes):
                    phase.device["sampler pass"] = sampler.pass_bytes
                    held += sampler.pass_bytes
                if is_embedded and trainer.component.world > 1:
                    phase.lead_bytes += held
