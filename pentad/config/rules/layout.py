"""The rules of a layout: valid combinations of devices, model, schedule and memory settings.

Rules on a component receive it with its settings (`Placed`); each problem lists values that would
work. `layout_notes` reports valid settings that may be mistakes. Rules on engine settings apply to
actor and critic alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pentad.config.rules.model import unknown_families
from pentad.config.rules.rule import RUNS, Rules, RunFacts
from pentad.config.schema import SCORERS, Config, ModelConfig
from pentad.config.topology import Topology, facts_of, find_topology
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.core.fit import (
    balance_problems,
    delta_net_problems,
    expert_problems,
    head_problems,
    is_interleaved,
    list_of,
    no_tree,
    splits_backward,
    stage_problems,
    takes_microbatches,
    whole_kv_head_problems,
    width_problems,
)
from pentad.core.layout import Allocation, Component, divisors
from pentad.engine.section import EngineSettings, carrying_problems, no_graphs, uncompiled_problems
from pentad.models.catalog import known_dims

RULES = Rules()
TRAINING_ROLES = ("actor", "critic", *SCORERS)
ROLES = (*TRAINING_ROLES, "rollout")


@dataclass(frozen=True, slots=True)
class Placed:
    """One component of a run with the settings that apply to it."""

    config: Config
    component: Component
    dims: ModelDims | None
    """None if the model is unknown; rules that need it are then skipped."""
    key: str
    """Block of its settings: actor or critic."""
    model: ModelConfig

    @property
    def where(self) -> str:
        return f"allocation_mode = {self.config.allocation_mode}"


PlacedRule = Callable[[Placed], Iterator[Problem]]


@RULES.add(commands=("train",))
def there_is_a_sampler(config: Config) -> Problem | None:
    if config.only == "train" or config.has_sampler:
        return None
    remedy = f"use for instance embedded:d1|{config.allocation_mode}"
    where = f"allocation_mode = {config.allocation_mode}"
    return Problem(where, "there is no sampler, and train needs one", remedy)


@RULES.add(commands=RUNS, depends_on=("allocation_mode",))
def the_layout_is_valid(config: Config, facts: RunFacts) -> list[Problem]:
    is_unknown = bool(unknown_families(config, facts))
    dims = None if is_unknown else known_dims(config.actor.path)
    return layout_problems(config, dims, config.cluster.count_devices())


def layout_problems(
    config: Config, dims: ModelDims | None, num_devices: int | None = None
) -> list[Problem]:
    """The problems of all layout rules. `num_devices`: of all machines; None: no limit."""
    allocation, problems = config.read_allocation()
    if allocation is None:
        return problems
    problems += cluster_size(config, num_devices)
    problems += roles(config, allocation)
    for part in placed_components(config, allocation, dims):
        rules = SAMPLING if part.component.is_inference else TRAINING
        problems += [problem for rule in rules for problem in rule(part)]
    return problems


def placed_components(
    config: Config, allocation: Allocation, dims: ModelDims | None
) -> list[Placed]:
    """One `Placed` for each component; a critic without a component uses the actor's."""
    parts = [(component.role, component) for component in allocation]
    actor = allocation.find("actor")
    if config.algorithm.facts.needs_critic and actor and allocation.find("critic") is None:
        parts.append(("critic", actor))
    found = []
    for role, component in parts:
        key = "critic" if role == "critic" else "actor"
        own = getattr(config, role).path if role in ("critic", *SCORERS) else None
        known = dims if own in (None, config.actor.path) else known_dims(own)
        found.append(Placed(config, component, known, key, getattr(config, key)))
    return found


# Devices and roles.


def cluster_size(config: Config, num_devices: int | None) -> Iterator[Problem]:
    placed = placed_on(config, num_devices)
    if num_devices is None or placed is None:
        return
    allocation, nodes = placed.allocation, config.cluster.n_nodes
    needed = allocation.num_devices
    if needed <= num_devices:
        return
    per_node = num_devices // nodes
    parts = " + ".join(str(max(c.world for c in group)) for group in allocation.groups)
    total = f"{parts} = {needed}" if len(allocation.groups) > 1 else str(needed)
    rule = (
        f"needs {total} devices, and cluster.n_nodes = {nodes} x n_gpus_per_node = {per_node} "
        f"has {num_devices}"
    )
    remedy = f"set cluster.n_nodes={-(-needed // per_node)}, or make the axes smaller"
    cluster = config.cluster.model_copy(update={"share_gpus": True})
    joined = placed_on(config.model_copy(update={"cluster": cluster}), num_devices)
    if joined and joined.allocation != allocation and joined.allocation.num_devices <= num_devices:
        remedy += "; cluster.share_gpus=true lets rollout and training share theirs"
    yield Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)


def placed_on(config: Config, num_devices: int | None) -> Topology | None:
    """The topology on this many devices."""
    return find_topology(config, replace(facts_of(config), num_devices=num_devices))


@RULES.add(commands=RUNS)
def idle_devices(config: Config) -> Iterator[Problem]:
    """Rejects a layout that uses at most half of the given devices: it was probably meant for
    another cluster. Devices that are idle because of `only` count as used."""
    cluster, placed = config.cluster, find_topology(config.model_copy(update={"only": None}))
    if cluster.n_gpus_per_node is None or cluster.allow_idle or placed is None:
        return
    used, total = placed.allocation.num_devices, cluster.n_nodes * cluster.n_gpus_per_node
    if 2 * used > total:
        return
    rule = (
        f"uses {used} of the {total} devices of cluster.n_nodes = {cluster.n_nodes} x "
        f"n_gpus_per_node = {cluster.n_gpus_per_node}"
    )
    remedy = f"make the axes larger, give n_gpus_per_node={-(-used // cluster.n_nodes)}"
    remedy += ", or set cluster.allow_idle=true to leave the others idle"
    yield Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)


def roles(config: Config, allocation: Allocation) -> Iterator[Problem]:
    where = f"allocation_mode = {config.allocation_mode}"
    for component in allocation:
        role = component.role
        if role not in ROLES:
            yield Problem(where, f"{role} is not a role of a run", f"roles: {', '.join(ROLES)}")
        elif component.is_inference != (role == "rollout"):
            kind = "samples" if component.is_inference else "trains"
            fits = "rollout" if component.is_inference else ", ".join(TRAINING_ROLES)
            yield Problem(where, f"{component.backend} {kind} and cannot be {role}", f"use {fits}")
    if allocation.find("actor") is None and all(c.role in ROLES for c in allocation):
        yield Problem(where, "has no component that trains", "add for instance archon:d1")


# Sampling.


def embedded_is_whole(part: Placed) -> Iterator[Problem]:
    component = part.component
    if component.backend != "embedded":
        return
    for letter in "tp":
        if component.size(letter) > 1:
            rule = f"{letter}{component.size(letter)}: the embedded sampler is not split over GPUs"
            fix = f"embedded:d{component.world}"
            yield Problem(part.where, rule, f"use {fix}, or vllm or sglang")


def sampler_heads(part: Placed) -> Iterator[Problem]:
    tp = part.component.size("t")
    if part.component.backend == "embedded":
        return
    if part.dims is not None and part.dims.num_heads % tp:
        rule = f"t{tp} of {part.component.backend} must divide num_heads = {part.dims.num_heads}"
        yield Problem(part.where, rule, f"t can be {list_of(divisors(part.dims.num_heads))}")


def sampler_layers(part: Placed) -> Iterator[Problem]:
    pp = part.component.size("p")
    if part.dims is not None and pp > part.dims.num_layers:
        rule = f"p{pp} of {part.component.backend} exceeds num_layers = {part.dims.num_layers}"
        yield Problem(part.where, rule, f"p can be at most {part.dims.num_layers}")


# Training.


def backend_is_the_one_asked_for(part: Placed) -> Iterator[Problem]:
    wanted, used = part.model.training_backend, part.component.backend
    if wanted is not None and wanted != used and part.component.role in ("actor", "critic"):
        rule = f"{part.where} trains the {part.key} by {used}"
        remedy = f"write {wanted}: there, or leave training_backend out"
        yield Problem(f"{part.key}.training_backend = {wanted}", rule, remedy)


def heads_and_widths_divide(part: Placed) -> Iterator[Problem]:
    if part.dims is not None:
        yield from head_problems(part.component.layout(), part.dims, part.where)
        yield from width_problems(part.component.layout(), part.dims, part.where)
        yield from delta_net_problems(part.component.layout(), part.dims, part.where)


def experts_divide(part: Placed) -> Iterator[Problem]:
    component, dims = part.component, part.dims
    if dims is None:
        return
    ep = component.layout().ep
    if not dims.num_experts:
        if ep > 1 or component.ffn is not None:
            said = "an ffn side" if component.ffn is not None else f"e{ep}"
            plain = "".join(f"{x}{size}" for x, size in component.dims if x != "e")
            rule = f"{said} needs experts, and the model of the {component.role} has none"
            yield Problem(part.where, rule, f"use {component.backend}:{plain or 'd1'}")
    else:
        yield from expert_problems(component.layout(), dims, part.where)


def replicas_divide(part: Placed) -> Iterator[Problem]:
    replicas, d = part.model.archon.dp_replicate, part.component.size("d")
    where = f"{part.key}.archon.dp_replicate = {replicas}"
    if d % replicas:
        rule = f"must divide d{d} of {part.component}"
        yield Problem(where, rule, f"it can be {list_of(divisors(d))}")
        return
    layout = part.component.layout()
    width = layout.ep * layout.etp
    if layout.stage_world // replicas % width:
        rule = f"leaves {layout.stage_world // replicas} ranks a replica, e*t of ffn = {width}"
        fits = [n for n in divisors(d) if layout.stage_world // n % width == 0]
        yield Problem(where, rule, f"it can be {list_of(fits)}")


def stages_suit_schedule_and_layers(part: Placed) -> Iterator[Problem]:
    pp = part.component.size("p")
    num_layers = None if part.dims is None else part.dims.num_layers
    if pp > 1:
        yield from part.model.archon.stage_problems(
            f"{part.key}.archon.", part.where, pp=pp, num_layers=num_layers
        )
    if part.dims is not None:
        yield from stage_problems(part.component.layout(), part.dims, part.where)


def schedule_goes_with_the_engine(part: Placed) -> Iterator[Problem]:
    archon, pp = part.model.archon, part.component.size("p")
    if pp > 1:
        yield from archon.schedule_problems(
            f"{part.key}.archon.",
            pp=pp,
            compiles=archon.enable_compile is True,
            keeps=part.model.gradient_checkpointing,
            reshards=archon.reshard_after_forward_policy == "always",
            moe=part.dims is not None and part.dims.num_experts > 0,
        )


def experts_are_balanced(part: Placed) -> Iterator[Problem]:
    archon = part.model.archon
    if part.dims is None or part.component.role not in ("actor", "critic"):
        return
    if part.component.backend == "fsdp":
        return
    given = {f"{part.key}.archon.{name}": value for name, value in archon.router_losses.items()}
    key = f"{part.key}.archon.moe_bias_rate"
    yield from balance_problems(part.dims, given, (key, archon.moe_bias_rate))


def trees_can_be_made(part: Placed) -> Iterator[Problem]:
    archon, component = part.model.archon, part.component
    if part.model.enable_tree_training is not True or component.role not in ("actor", "critic"):
        return
    is_strict = part.config.strict and component.role == "actor"
    layout, backend = component.layout(), component.backend
    balanced, dims = archon.balances, part.dims
    if why := no_tree(layout, backend, strict=is_strict, balanced=balanced, dims=dims):
        yield Problem(f"{part.key}.enable_tree_training = true", why, "leave it out")


def passes_can_be_captured(part: Placed) -> Iterator[Problem]:
    component, role = part.component, part.component.role
    if part.model.archon.cuda_graphs is not True or role not in ("actor", "critic"):
        return
    if part.dims is None:
        return
    is_strict = part.config.strict and role == "actor"
    layout = component.layout(part.model.archon.dp_replicate)
    settings = EngineSettings(
        model=part.model, strict=is_strict, offloads=bool(part.config.offload_train)
    ).settled("cuda", layout)
    if why := no_graphs(settings, part.dims, layout, component.backend):
        yield Problem(f"{part.key}.archon.cuda_graphs = true", why, "leave it out")


def transformers_own_models(part: Placed) -> Iterator[Problem]:
    """Features that the fsdp backend lacks for models without a model file."""
    if part.component.backend != "fsdp":
        return
    archon, tp = part.model.archon, part.component.size("t")
    given = archon.router_losses | {"moe_bias_rate": archon.moe_bias_rate}
    for key, value in given.items():
        if value and part.component.role in ("actor", "critic"):
            rule = "the fsdp backend does not balance experts: that needs a model file"
            where = f"{part.key}.archon.{key} = {value:g}"
            yield Problem(where, rule, "leave it out, or use archon")
    if part.dims is not None and part.dims.attn_sinks:
        rule = f"{part.dims.family} has attention sinks, for which fsdp cannot pack rows"
        yield Problem(f"{part.key}.path", rule, "use archon")
    if part.dims is not None and part.dims.linear_layers:
        yield from _gated_delta_nets(part, part.dims.family)
    if part.dims is not None:
        yield from whole_kv_head_problems(tp, part.dims, part.where)
        if part.dims.num_experts and part.component.role in ("actor", "critic"):
            layout = part.component.layout()
            yield from uncompiled_problems(part.dims.family, part.key, archon, layout)


def _gated_delta_nets(part: Placed, family: str) -> Iterator[Problem]:
    """fsdp computes their rows one by one."""
    if part.component.size("t") > 1 or part.component.size("c") > 1:
        rule = f"layers of {family} carry state from token to token: "
        rule += "fsdp splits them only by d and e"
        yield Problem(part.where, rule, "leave out t and c, or use archon")
    if part.component.role in ("actor", "critic"):
        compiles, lora = part.model.archon.enable_compile is True, part.model.lora
        yield from carrying_problems(family, part.key, has_lora=lora is not None, compiles=compiles)


def microbatches_fit_rounds(part: Placed) -> Iterator[Problem]:
    schedule, pp = part.model.archon.pp_schedule, part.component.size("p")
    count = part.model.mb_spec.fewest
    if pp == 1 or not is_interleaved(schedule) or count < part.model.archon.num_stages(pp):
        return
    if not takes_microbatches(schedule, pp, count):
        rule = f"{schedule} runs in rounds of p{pp} microbatches"
        below = count // pp * pp
        where = f"{part.key}.mb_spec.n_mbs = {count}"
        yield Problem(where, rule, f"use {below} or {below + pp}")


SAMPLING: tuple[PlacedRule, ...] = (embedded_is_whole, sampler_heads, sampler_layers)
TRAINING: tuple[PlacedRule, ...] = (
    backend_is_the_one_asked_for,
    heads_and_widths_divide,
    experts_divide,
    replicas_divide,
    stages_suit_schedule_and_layers,
    schedule_goes_with_the_engine,
    experts_are_balanced,
    trees_can_be_made,
    passes_can_be_captured,
    transformers_own_models,
    microbatches_fit_rounds,
)


def layout_notes(
    config: Config, dims: ModelDims | None, num_devices: int | None = None
) -> list[str]:
    """Notes on valid settings that may be mistakes."""
    placed = placed_on(config, num_devices)
    if placed is None:
        return []
    allocation, notes = placed.allocation, []
    if placed.shares_gpus and placed.written.are_apart:
        rule = "samples on the devices that train: the two share their memory"
        notes.append(f"allocation_mode = {config.allocation_mode}: embedded {rule}")
    if placed.num_idle:
        notes.append(f"{placed.num_idle} of {num_devices} devices stay idle")
    for part in placed_components(config, allocation, dims):
        notes += component_notes(part)
    return notes


def component_notes(part: Placed) -> Iterator[str]:
    component, config = part.component, part.config
    tp, cp = component.size("t"), component.size("c")
    per_node = config.cluster.n_gpus_per_node
    if per_node and tp > per_node:
        yield f"{component}: t{tp} spans nodes of {per_node} devices, which is slow"
    if component.is_inference:
        return
    kv_heads = [] if part.dims is None else [own.num_kv_heads for own in part.dims.kinds]
    if kv_heads and tp * cp > min(kv_heads):
        repeats = tp * cp // min(kv_heads)
        yield f"{component}: each kv head is held {repeats} times (t*c = {tp * cp})"
    rows = config.rows_per_step // config.updates_per_batch
    needed = component.size("d") * part.model.mb_spec.fewest
    if rows < needed:
        yield (
            f"{component}: a step has {rows} samples for d * n_mbs = {needed} microbatches, "
            "so some are empty"
        )


@RULES.add(commands=RUNS)
def the_actor_engine_agrees(config: Config) -> list[Problem]:
    return list(_engine_problems(config, "actor", config.actor))


@RULES.add()
def the_critic_engine_agrees(config: Config) -> list[Problem]:
    if not config.algorithm.facts.needs_critic:
        return []
    return list(_engine_problems(config, "critic", config.critic))


def _engine_problems(config: Config, role: str, model: ModelConfig) -> Iterator[Problem]:
    archon = model.archon
    where = f"{role}.archon.ac_mode = {archon.ac_mode}"
    is_zero_bubble = config.pipeline_size(role) > 1 and splits_backward(archon.pp_schedule)
    if archon.ac_mode not in ("auto", "none") and not model.gradient_checkpointing:
        rule = f"{role}.gradient_checkpointing = false switches checkpointing off"
        yield Problem(where, rule, "leave one of the two out")
    yield from archon.compile_problems(
        f"{role}.archon.",
        compiles=archon.enable_compile,
        keeps=model.gradient_checkpointing and not is_zero_bubble,
    )
    for key, value in archon.router_losses.items():
        if model.pad_to_maximum is True and value:
            rule = f"{role}.archon.{key} = {value:g} would train the router on padding"
            yield Problem(f"{role}.pad_to_maximum = true", rule, "leave one of the two out")
