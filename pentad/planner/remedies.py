"""Overrides that make a plan fit: the Archon tutorial's steps in its order, with their effect.

The steps, cheapest first: more microbatches, resharding after forward, more recomputation,
offloading, expert or tensor parallelism. Each is planned in addition to those before it. Steps that
do not help, or that a later step makes unnecessary, are left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pentad.config.resolve import replaced
from pentad.config.rules.elastic import fit_world
from pentad.config.rules.layout import layout_problems, placed_components
from pentad.config.rules.model import uncounted
from pentad.config.rules.rule import Command
from pentad.config.schema import Config
from pentad.config.topology import find_topology
from pentad.core.dims import ModelDims
from pentad.core.fit import splits_backward
from pentad.core.layout import Allocation, Component, Dims
from pentad.core.machine import GIB, installed
from pentad.engine.section import LoraConfig
from pentad.models.catalog import dims_of, known_dims
from pentad.planner.figures import Device, RunPlan
from pentad.planner.host import saves_async
from pentad.planner.plan import build_plan

MAX_TP = 64
RECOMPUTED, SELECTION = "actor.archon.ac_mode", "actor.archon.ac_selective"
MICROBATCHES, CRITICS = "actor.mb_spec.n_mbs", "critic.mb_spec.n_mbs"
KEEPING_SHARE = 0.8
"""Logits are kept and passes captured by default if the planned peak is then at most this share of
a GPU."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One step: the overrides it adds to those before it, and the resulting memory."""

    overrides: tuple[str, ...]
    peak_bytes: float
    fits: bool
    num_devices: int
    sampler_fits: bool
    """Whether every sampler then has room for a sequence."""
    host_bytes: float
    """Host memory of a machine at its peak."""


Changes = dict[str, Any]
Steps = Callable[[Config, ModelDims], Iterator[Changes]]
ADAPTER: Changes = {"actor.lora": LoraConfig()}


def propose(plan: RunPlan) -> list[Remedy]:
    """Steps until the plan fits or none is left, without those that later ones make unnecessary."""
    found, fits = _taken(plan, [], (*CHEAP, reshard_steps, recompute_steps, offload_steps, *AGAIN))
    return _remedies(plan, _needed(plan, found) if fits else found)


def propose_adapter(plan: RunPlan) -> list[Remedy]:
    """If training all weights does not fit these devices: LoRA with the further overrides it needs;
    empty if that does not fit either."""
    if plan.fits or not _takes_adapter(plan.config, plan.dims):
        return []
    found, fits = _taken(plan, [ADAPTER], (*CHEAP, recompute_steps))
    return _remedies(plan, found) if fits else []


def propose_host(plan: RunPlan) -> list[Remedy]:
    """If all weights do not fit these devices: weights and optimizer state in host memory, with
    further overrides it needs; empty if that does not suffice."""
    keys, backend = plan.config.actor, plan.config.component("actor").backend
    is_open = keys.lora is None and backend != "megatron" and not keys.archon.offload_params
    if plan.fits or plan.device.kind != "cuda" or not is_open:
        return []
    host: Changes = {f"{role}.archon.offload_params": True for role in plan.config.trained_models}
    found, fits = _taken(plan, [host], (*CHEAP, recompute_steps))
    has_room = fits and max(_planned(plan, found).host_bytes.values()) <= plan.device.host_bytes
    return _remedies(plan, found) if has_room else []


def _takes_adapter(config: Config, dims: ModelDims) -> bool:
    """Whether the rules of `actor.lora` allow an adapter for this run."""
    actor, rollout = config.component("actor"), config.part("rollout")
    is_served = rollout is None or rollout.backend in ("embedded", "vllm")
    keys = config.actor
    is_plain = not (keys.init_from_scratch or keys.checkpoint_load_path or config.only)
    is_split = actor.size("p") > 1 and splits_backward(keys.archon.pp_schedule)
    is_adapted = actor.backend == "archon" or (actor.backend == "fsdp" and not dims.num_experts)
    return keys.lora is None and is_adapted and is_served and is_plain and not is_split


def _taken(
    plan: RunPlan, found: list[Changes], kinds: Iterable[Steps]
) -> tuple[list[Changes], bool]:
    """Adds the best step of each kind until the plan fits; returns (steps, whether it fits)."""
    best = _planned(plan, found)
    for step in kinds:
        if best.fits:
            break
        tried = _best_of(step(best.config, plan.dims), best)
        if tried is not None:
            found = _joined(plan, found, tried)
            best = _planned(plan, found)
    return found, best.fits


def _joined(plan: RunPlan, steps: list[Changes], last: Changes) -> list[Changes]:
    """The steps with one more, without what it overrides: keys that it sets again, and the
    selection of recomputed layers if all are."""
    void = {*last, *([SELECTION] if last.get(RECOMPUTED) == "full" else [])}
    kept: list[Changes] = []
    for step in steps:
        rest = {key: value for key, value in step.items() if key not in void}
        if rest != step and not _helps(plan, kept, rest):
            continue
        if _is_allowed(plan, [*kept, rest]):
            kept.append(rest)
        else:
            last = {**rest, **last}
    return [*kept, last]


def _helps(plan: RunPlan, steps: list[Changes], more: Changes) -> bool:
    before, after = _planned(plan, steps), _planned(plan, [*steps, more])
    return after.peak_bytes < 0.99 * before.peak_bytes or len(after.lacks) < len(before.lacks)


def _planned(plan: RunPlan, steps: Sequence[Changes]) -> RunPlan:
    batch = plan.batch
    config = _changed(plan, steps)
    return build_plan(config, plan.device, batch.num_rows, longest=batch.longest_read)


def _changed(plan: RunPlan, steps: Sequence[Changes]) -> Config:
    return reduce(with_values, steps, plan.config)


def _remedies(plan: RunPlan, steps: Sequence[Changes]) -> list[Remedy]:
    return [_remedy(plan, steps[: number + 1]) for number in range(len(steps))]


def _remedy(plan: RunPlan, steps: Sequence[Changes]) -> Remedy:
    """The last of these steps as a remedy, with the memory after all of them."""
    tried = _planned(plan, steps)
    shown = {**steps[-1]}
    if isinstance(lora := shown.pop("actor.lora", None), LoraConfig):
        shown["actor.lora.rank"] = lora.rank
    overrides = tuple(f"{key}={_text(value)}" for key, value in shown.items())
    host_bytes = max(tried.host_bytes.values(), default=0.0)
    needs = (tried.peak_bytes, tried.fits, tried.allocation.num_devices, tried.sampler_fits)
    return Remedy(overrides, *needs, host_bytes)


def _needed(plan: RunPlan, steps: list[Changes]) -> list[Changes]:
    """Removes unnecessary steps, the costliest first, and reduces the number of microbatches to the
    smallest sufficient one."""
    for step in reversed(steps):
        others = [other for other in steps if other is not step]
        if others and _is_allowed(plan, others) and _planned(plan, others).fits:
            steps = others
    for number, step in enumerate(steps):
        while (count := step.get(MICROBATCHES, 1)) // 2 > plan.config.actor.mb_spec.fewest:
            fewer = [*steps[:number], with_count(step, count // 2), *steps[number + 1 :]]
            if not _is_allowed(plan, fewer) or not _planned(plan, fewer).fits:
                break
            steps, step = fewer, fewer[number]
    return steps


def _is_allowed(plan: RunPlan, steps: Sequence[Changes]) -> bool:
    changed = _changed(plan, steps)
    return not layout_problems(changed, plan.dims, changed.cluster.count_devices())


def _best_of(candidates: Iterator[Changes], plan: RunPlan) -> Changes | None:
    """The first candidate that fits, else the one with the lowest memory; None if none helps."""
    winner, least, num_lacks = None, plan.peak_bytes, len(plan.lacks)
    for changes in candidates:
        if not _is_allowed(plan, [changes]):
            continue
        tried = _planned(plan, [changes])
        if tried.fits:
            return changes
        if tried.allocation.num_devices > plan.allocation.num_devices:
            continue  # more devices are proposed only if they are enough
        if tried.peak_bytes < 0.99 * least or len(tried.lacks) < num_lacks:
            winner, least, num_lacks = changes, tried.peak_bytes, len(tried.lacks)
    return winner


def choose_microbatches(
    config: Config, device: Device, command: Command
) -> tuple[Config, list[str]]:
    """Chooses `n_mbs` if it is unset: 1 if that fits or no number does, else the fewest that fit a
    GPU with a margin: beside the sampler if possible, else without it."""
    if config.actor.mb_spec.n_mbs is not None:
        return config, []
    plain = with_values(config, with_count({}, 1, config))
    if not _is_chosen_for(config, device, command):
        return plain, []
    is_open = config.mode == "colocate" and config.offload_rollout is None
    found: list[tuple[Changes, RunPlan]] = []
    for leaves in [False, True] if is_open else [config.offload_rollout]:
        beside = with_values(plain, {"offload_rollout": leaves})
        whole = build_plan(beside, device)
        if whole.fits:
            return plain, []
        steps = microbatch_steps(beside, whole.dims)
        found += [(step, build_plan(with_values(beside, step), device)) for step in steps]
    fitting = [(step, plan) for step, plan in found if plan.fits]
    for step, _ in [*((s, p) for s, p in fitting if not p.is_tight), *fitting][:1]:
        need, have = whole.peak_bytes / GIB, device.memory_bytes / GIB
        why = f"in one microbatch a step needs {need:.1f} GiB, and the GPU has {have:.1f}"
        return with_values(plain, step), [f"{MICROBATCHES} = {step[MICROBATCHES]}: {why}"]
    return plain, []


def with_count(changes: Changes, count: int, config: Config | None = None) -> Changes:
    """Adds the number of microbatches of the actor to changes, and of a critic if there is one."""
    has_critic = CRITICS in changes or (config and config.algorithm.facts.needs_critic)
    counts = {MICROBATCHES: count, CRITICS: count} if has_critic else {MICROBATCHES: count}
    return {**changes, **counts}


def choose_offloading(config: Config, device: Device, command: Command) -> tuple[Config, list[str]]:
    """Chooses `offload_rollout` if it is unset: true if sampler and training do not fit a GPU
    together. A run uses the memory of its GPU, a plan that of the planned GPU."""
    is_open = config.mode == "colocate" and config.offload_rollout is None
    if not is_open or command not in ("plan", "train"):
        return config, []
    without = with_values(config, {"offload_rollout": False})
    if not _is_chosen_for(config, device, command):
        return without, []
    plan = build_plan(without, device)
    changed = with_values(config, {"offload_rollout": True})
    if plan.peak_bytes <= device.memory_bytes:
        return without, []
    if build_plan(changed, device).peak_bytes >= plan.peak_bytes:
        return without, []
    need, have = plan.peak_bytes / GIB, device.memory_bytes / GIB
    why = f"sampler and training need {need:.1f} GiB together, and the GPU has {have:.1f}"
    return changed, [f"offload_rollout = true: {why}"]


def choose_logits(config: Config, device: Device, command: Command) -> tuple[Config, list[str]]:
    """Chooses `actor.archon.keep_logits` if it is unset: true if a GPU without a sampler has ample
    memory, also with the fewest ranks of an elastic run. Microbatches are assumed to be full, and
    rows of unknown length as long as the context."""
    is_open = config.actor.archon.keep_logits is None
    if not is_open or not _is_chosen_for(config, device, command):
        return config, []
    if config.pipeline_size("actor") > 1:
        return config, []
    changed = with_values(config, {"actor.archon.keep_logits": True})
    length = config.train_dataset.max_length or dims_of(config.model_folder()).max_position
    largest = {"actor.pad_to_maximum": True, "train_dataset.max_length": length}
    plan = build_plan(with_values(changed, largest), device)
    if not all(sampler.is_alone for sampler in plan.samplers):
        return config, []
    if config.elastic.enabled and (fewest := fit_world(changed, config.elastic.min_ranks)):
        cut = build_plan(with_values(fewest.config, largest), device)
        plan = max(plan, cut, key=operator.attrgetter("peak_bytes"))
    if plan.peak_bytes > KEEPING_SHARE * device.memory_bytes:
        return config, []
    why = f"with the logits of full microbatches {plan.used} are planned"
    return changed, [f"actor.archon.keep_logits = true: {why}"]


def choose_graphs(config: Config, device: Device, command: Command) -> tuple[Config, list[str]]:
    """Switches `archon.cuda_graphs` off where it is auto if captured passes would fill the GPU, or
    if `offload_train` prevents captures."""
    if not _is_chosen_for(config, device, command):
        return config, []
    plan = build_plan(with_values(config, {"offload_train": False}), device)
    captured = {one.role for one in plan.trainers if one.training.captures}
    models = {"actor": config.actor, "critic": config.critic}
    roles = [role for role in captured & set(models) if models[role].archon.cuda_graphs == "auto"]
    is_offloaded, limit = config.offload_train, KEEPING_SHARE * device.memory_bytes
    if not roles or (plan.peak_bytes <= limit and not is_offloaded):
        return config, []
    why = f"with captured passes {plan.used} are planned"
    if is_offloaded:
        why = "offload_train = true moves the weights to other addresses"
    keys = [f"{role}.archon.cuda_graphs" for role in sorted(roles)]
    changed = with_values(config, dict.fromkeys(keys, False))
    return changed, [f"{key} = false: {why}" for key in keys]


def choose_layers(config: Config, device: Device) -> tuple[Config, list[str]]:
    """Settles `megatron.transformer_impl` for a run on this machine. It is recorded, so a later
    start that would choose other layers is refused."""
    backends = {part.backend for part in config.allocation}
    if "megatron" not in backends or config.megatron.transformer_impl != "auto":
        return config, []
    if not device.is_here:
        return config, []
    chosen, version = "local", installed("transformer-engine")
    why = "Transformer Engine is not installed"
    if version is not None and device.kind == "cuda":
        chosen, why = "transformer_engine", f"version {version} is installed"
    elif version is not None:
        why = "Transformer Engine needs a GPU"
    key = "megatron.transformer_impl"
    return with_values(config, {key: chosen}), [f"{key} = {chosen}: {why}"]


BY_MEMORY = (choose_microbatches, choose_offloading, choose_graphs, choose_logits)
"""Choices by the memory of the device, in order: each sees those before it."""


def _is_chosen_for(config: Config, device: Device, command: Command) -> bool:
    """Whether a choice can depend on memory: the GPU exists and all its contents are known."""
    is_known = device.kind == "cuda" and (command == "plan" or device.is_here)
    return is_known and not config.rollout.server.addresses and _is_counted(config)


def saves_beside(config: Config, device: Device, in_use_bytes: float) -> bool:
    """Whether a run writes its saves during training, according to its plan."""
    if config.saver.mode == "auto" and _is_counted(config):
        return build_plan(config, device, in_use_bytes=in_use_bytes).is_async
    return saves_async(config, 0.0, device.host_bytes)


def shares_by_gpu(config: Config, device: Device) -> tuple[bool, str]:
    """Whether a GPU shared by learner and sampler has room for published weights, and why."""
    if not _is_counted(config):
        return True, "the memory of the models is not known"
    plan = build_plan(config, device)
    if plan.publish_kind == "ipc":
        return True, f"all fits: {plan.used}"
    return False, f"a copy on the GPU does not fit its {device.memory_bytes / GIB:.1f} GiB"


def _is_counted(config: Config) -> bool:
    """Whether all models of a run are known, so that its memory can be computed."""
    allocation, dims = config.parsed_allocation, known_dims(config.actor.path)
    if allocation is None or uncounted(config):
        return False
    return all(part.dims is not None for part in placed_components(config, allocation, dims))


def cache_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    """Remedies that reduce the sampler's cache; on shared devices they come first."""
    if config.mode == "colocate":
        yield {"offload_rollout": True}


def logit_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    if config.actor.archon.keep_logits:
        yield {"actor.archon.keep_logits": False}


def microbatch_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    """Remedies that double n_mbs until a microbatch is a single sequence."""
    calls = config.updates_per_batch * config.num_iters_per_train_update
    rows = config.rows_per_step // calls // config.component("actor").size("d")
    count = config.actor.mb_spec.fewest
    while count < rows:
        count *= 2
        yield with_count({}, count, config)


CHEAP = (cache_steps, logit_steps, microbatch_steps)
"""Steps that only cost time, the cheapest first."""


def reshard_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    archon = config.actor.archon
    pp = config.component("actor").size("p")
    is_split = pp > 1 and splits_backward(archon.pp_schedule)
    if archon.reshard_after_forward_policy != "always" and not is_split:
        changes: Changes = {"actor.archon.reshard_after_forward_policy": "always"}
        yield changes
        yield {**changes, "actor.archon.ac_selective": 2}  # if op excludes it, with experts


def recompute_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    archon = config.actor.archon
    switch = {} if config.actor.gradient_checkpointing else {"actor.gradient_checkpointing": True}
    if archon.ac_mode == "none":
        yield {**switch, "actor.archon.ac_mode": "selective", "actor.archon.ac_selective": 2}
    if archon.ac_mode != "full":
        yield {**switch, "actor.archon.ac_mode": "full"}


def offload_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    """Remedies that offload training while the embedded sampler uses the GPU."""
    rollout = config.part("rollout")
    is_near = config.mode == "colocate" and rollout and rollout.backend == "embedded"
    if is_near and not config.offload_train:
        yield (
            {"offload_train": True}
            if config.offload_rollout
            else {
                "offload_train": True,
                "offload_rollout": True,
            }
        )


def cut_steps(config: Config, dims: ModelDims) -> Iterator[Changes]:
    """Remedies with more ep (mixtures) or tp, on the same number of devices, then on more."""
    actor = config.component("actor")
    nodes, per_node = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    for component in [*wider(actor, dims, grow=False), *wider(actor, dims, grow=True)]:
        allocation = _with_actor(config, component)
        changes: Changes = {"allocation_mode": str(allocation)}
        placed = find_topology(with_values(config, changes))
        needed = placed.allocation.num_devices if placed else 0  # a rule rejects it
        if per_node is not None and needed > nodes * per_node:
            changes["cluster.n_nodes"] = -(-needed // per_node)
        yield changes


AGAIN = (microbatch_steps, cut_steps)
"""Steps after offloading, which makes more microbatches useful again."""


def wider(actor: Component, dims: ModelDims, *, grow: bool) -> list[Component]:
    """The actor with its expert or tensor axis doubled repeatedly. Without `grow` data parallelism
    is reduced in return; with it devices are added."""
    found: list[Component] = []
    axis = "e" if dims.num_experts else "t"
    sizes = dict(actor.dims)
    if axis == "e" and actor.ffn is not None:
        ffn = dict(actor.ffn)
        while ffn.get("e", 1) < dims.num_experts:
            ffn["e"] = ffn.get("e", 1) * 2
            ffn.pop("d", None)
            if grow:
                sizes["d"] = sizes.get("d", 1) * 2
            found.append(_made(actor, sizes, ffn))
        return found
    top = dims.num_experts if axis == "e" else MAX_TP
    while sizes.get(axis, 1) < top:
        sizes[axis] = sizes.get(axis, 1) * 2
        if axis == "t" and not grow:
            if sizes.get("d", 1) % 2:
                break
            sizes["d"] //= 2
        if axis == "e" and grow:
            sizes["d"] = sizes.get("d", 1) * 2
        found.append(_made(actor, sizes, None))
    return found


def _made(actor: Component, sizes: dict[str, int], ffn: dict[str, int] | None) -> Component:
    def ordered(values: dict[str, int]) -> Dims:
        return tuple((letter, values[letter]) for letter in "dptce" if letter in values)

    return Component(actor.backend, actor.name, ordered(sizes), ordered(ffn) if ffn else None)


def _with_actor(config: Config, actor: Component) -> Allocation:
    groups = config.allocation.groups
    return Allocation(
        tuple(tuple(actor if c.role == "actor" else c for c in group) for group in groups)
    )


def with_values(config: Config, changes: Changes) -> Config:
    """The config with dotted keys replaced."""
    for key, value in changes.items():
        config = replaced(config, key, value)
    return config


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
