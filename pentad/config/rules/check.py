"""Checks a resolved config: every rule between keys that matters to a command is asked.

Here are the rules on modes, sampling, batches and the engine; those on files, the algorithm and
the layout are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config import algorithm_rules
from pentad.config.derived import (
    are_apart,
    known_dims,
    num_running,
    parsed_allocation,
    pipeline_size,
    samples,
)
from pentad.config.rules import inputs, megatron
from pentad.config.rules.model import check_layout
from pentad.config.rules.rule import Command, Rule, Rules
from pentad.config.rules.start import (
    cache_problems,
    device_problems,
    process_problems,
)
from pentad.config.schema import GROUP_RELATIVE, WITH_CRITIC, Config, ModelConfig
from pentad.core.errors import Problem
from pentad.core.sizes import MIN_TEMPERATURE, DeviceKind
from pentad.core.stages import splits_backward

RULES = Rules()


def all_rules() -> list[Rule]:
    return [*inputs.RULES.all, *megatron.RULES.all, *RULES.all, *algorithm_rules.RULES.all]


def check(
    config: Config, command: Command = "plan", skip: frozenset[str] = frozenset()
) -> list[Problem]:
    """Every broken rule, except those that read a key in `skip`.

    A plan without a sampler is one of `sft`, and rules that only `train` has do not matter to it.
    """
    problems: list[Problem] = []
    is_sft = command == "plan" and not samples(config)
    for rule in all_rules():
        if command not in rule.commands or _is_skipped(rule, skip):
            continue
        if is_sft and "sft" not in rule.commands:
            continue
        found = rule.check(config) or []
        found = [found] if isinstance(found, Problem) else found
        problems += [problem for problem in found if problem.where.split(" = ")[0] not in skip]
    if command in ("eval", "reward"):  # in one process, whatever the layout of the run
        return problems
    return problems + check_layout(config, command, skip)


def check_planned(config: Config, kind: DeviceKind, skip: frozenset[str]) -> list[Problem]:
    """What a start on such a device would refuse; where it is a GPU, its number is the cluster's.

    What is not built is no problem of a plan: it is noted there (`rules.start.unbuilt_problems`).
    """
    problems = [
        *device_problems(config, kind, samples=samples(config)),
        *process_problems(config, kind),
    ]
    dims = None if "actor.path" in skip else known_dims(config.actor.path)
    return problems if dims is None else problems + cache_problems(config, dims, kind)


def _is_skipped(rule: Rule, bad: frozenset[str]) -> bool:
    """Whether a key that it reads, a block that key is in, or a key in it is among the bad ones."""
    for key in rule.keys:
        if any(key == other or key.startswith(f"{other}.") for other in bad):
            return True
        if not rule.is_by_key and any(other.startswith(f"{key}.") for other in bad):
            return True
    return False


# Modes and devices.


@RULES.add("mode", "allocation_mode", "resource")
def the_mode_fits_the_devices(config: Config) -> Problem | None:
    apart = are_apart(config)
    if apart is None or config.mode is None or apart == (config.mode != "colocate"):
        return None
    allocation = f"allocation_mode = {config.allocation_mode}"
    where = f"mode = {config.mode}"
    if apart:
        rule = f"rollout and training must share devices, but {allocation} separates them"
        return Problem(where, rule, "join them with | instead of +, or set mode: hybrid")
    rule = f"rollout and training need devices of their own, but {allocation} has them share"
    return Problem(where, rule, "join them with + instead of |, or set mode: colocate")


@RULES.add("max_staleness", "mode", "allocation_mode")
def colocation_is_on_policy(config: Config) -> Problem | None:
    if config.mode != "colocate" or config.max_staleness == 0:
        return None
    where = f"max_staleness = {config.max_staleness}"
    rule = "must be 0 in mode = colocate, where rollout waits for training"
    return Problem(where, rule, "set mode: hybrid and join the allocation with +")


@RULES.add("resource", "allocation_mode")
def resource_agrees_with_the_allocation(config: Config) -> list[Problem]:
    allocation = parsed_allocation(config)
    if config.resource is None or allocation is None:
        return []
    found = []
    for role, (nodes, devices) in (
        ("actor", config.resource.actor),
        ("rollout", config.resource.rollout),
    ):
        component = allocation.find(role)
        if component is not None and component.world != nodes * devices:
            where = f"resource.{role} = [{nodes}, {devices}]"
            rule = f"is {nodes * devices} devices, but {component} has {component.world}"
            found.append(Problem(where, rule, "leave resource out, or make the two agree"))
    return found


@RULES.add("strict", "allocation_mode")
def strict_needs_the_embedded_sampler(config: Config) -> Problem | None:
    allocation = parsed_allocation(config)
    rollout = allocation and allocation.find("rollout")
    if not config.strict or not rollout or rollout.backend == "embedded":
        return None
    rule = f"{rollout.backend} computes with other kernels than the trainer"
    return Problem("strict = true", rule, "use embedded in allocation_mode")


@RULES.add("rollout.replay_routes", "allocation_mode")
def replay_needs_a_sampler_that_tells(config: Config) -> Problem | None:
    allocation = parsed_allocation(config)
    rollout = allocation and allocation.find("rollout")
    if not config.rollout.replay_routes or not rollout or rollout.backend == "embedded":
        return None
    rule = f"{rollout.backend} does not tell which experts it used"
    return Problem("rollout.replay_routes = true", rule, "use embedded in allocation_mode")


@RULES.add("strict", "rollout.replay_routes", "allocation_mode")
def fsdp_trains_models_without_a_file(config: Config) -> list[Problem]:
    allocation = parsed_allocation(config)
    actor = allocation and allocation.find("actor")
    if not actor or actor.backend != "fsdp":
        return []
    rules = {
        "strict": (config.strict, "equal log-probs bit for bit need a model file"),
        "rollout.replay_routes": (config.rollout.replay_routes, "routes need a model file"),
    }
    remedy = "use archon, or leave it out"
    return [
        Problem(f"{key} = true", f"{rule}, and {actor} trains without one", remedy)
        for key, (is_set, rule) in rules.items()
        if is_set
    ]


@RULES.add("strict", "actor.archon.enable_compile")
def strict_is_not_compiled(config: Config) -> Problem | None:
    if not config.strict or config.actor.archon.enable_compile is not True:
        return None
    rule = "strict = true: compiled code adds up in an order of its own"
    return Problem("actor.archon.enable_compile = true", rule, "leave it out, or at auto")


@RULES.add("strict", "allocation_mode")
def strict_cuts_no_layer(config: Config) -> Problem | None:
    allocation = parsed_allocation(config)
    actor = allocation and allocation.find("actor")
    if not config.strict or not actor:
        return None
    layout = actor.layout()
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp}
    given = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1)
    if not given:
        return None
    rule = f"{actor} has {given}: layers cut over ranks add up in another order than the sampler"
    return Problem("strict = true", rule, "use data and pipeline parallelism only")


@RULES.add("rollout.server", "allocation_mode")
def servers_fit_the_allocation(config: Config) -> list[Problem]:
    allocation, server = parsed_allocation(config), config.rollout.server
    rollout = allocation and allocation.find("rollout")
    if allocation is None or not rollout:
        return []
    where = f"rollout.server.addresses = {list(server.addresses)}"
    told = f"allocation_mode = {config.allocation_mode}"
    if rollout.backend == "embedded":
        if server == type(server)():
            return []
        rule = f"{told} samples in this process, without a server"
        return [Problem("rollout.server", rule, "leave it out, or use vllm or sglang")]
    found = []
    if server.addresses and len(server.addresses) != rollout.size("d"):
        rule = f"{told} has {rollout.size('d')} replicas, each at an address of its own"
        found.append(Problem(where, rule, f"give {rollout.size('d')}"))
    bare = [a for a in server.addresses if not a.startswith(("http://", "https://"))]
    if bare:
        rule = "an address begins with http:// or https://"
        found.append(Problem(where, rule, f"write for instance http://{bare[0]}"))
    if len(set(server.addresses)) != len(server.addresses):
        found.append(Problem(where, "two replicas have the same address", "give each its own"))
    if server.weight_transport == "ipc" and are_apart(config):
        where = "rollout.server.weight_transport = ipc"
        rule = f"weights are handed over on the GPU that trains, but {told} separates them"
        found.append(Problem(where, rule, "use broadcast or disk"))
    return found


# Sampling and batches.


@RULES.add("gconfig.temperature")
def training_samples_at_random(config: Config) -> Problem | None:
    given = config.gconfig.temperature
    if given >= MIN_TEMPERATURE:
        return None
    if given > 0:
        rule = f"below {MIN_TEMPERATURE} logits leave the range of fp32"
        return Problem(f"gconfig.temperature = {given:g}", rule, "use 1.0")
    rule = "training needs samples that differ, and at 0 they are all the likeliest one"
    return Problem("gconfig.temperature = 0", rule, "use 1.0; evaluator.temperature may be 0")


@RULES.add("gconfig.top_p")
def training_draws_from_the_whole_distribution(config: Config) -> Problem | None:
    if config.gconfig.top_p == 1:
        return None
    rule = "must be 1 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_p = {config.gconfig.top_p}", rule, "leave it out")


@RULES.add("gconfig.top_k")
def training_draws_from_all_tokens(config: Config) -> Problem | None:
    if config.gconfig.top_k == 0:
        return None
    rule = "must be 0 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_k = {config.gconfig.top_k}", rule, "leave it out")


@RULES.add("gconfig.stop", commands=("train", "plan", "eval"))
def stop_texts_are_not_empty(config: Config) -> Problem | None:
    if "" not in config.gconfig.stop:
        return None
    where = f"gconfig.stop = {list(config.gconfig.stop)}"
    return Problem(where, "every text holds the empty one", "leave it out")


@RULES.add("gconfig.n_samples", "algorithm.name")
def groups_have_something_to_compare(config: Config) -> Problem | None:
    name = config.algorithm.name
    if config.gconfig.n_samples > 1 or name not in GROUP_RELATIVE:
        return None
    rule = f"{name} compares the samples of a prompt, so every advantage would be 0"
    remedy = "use at least 2, or an algorithm such as reinforce_plus_plus"
    return Problem("gconfig.n_samples = 1", rule, remedy)


@RULES.add("num_iters_per_train_update", "train_dataset.batch_size")
def chunks_are_not_empty(config: Config) -> Problem | None:
    chunks, prompts = config.num_iters_per_train_update, config.train_dataset.batch_size
    if chunks <= prompts:
        return None
    rule = f"a batch of train_dataset.batch_size = {prompts} prompts has no {chunks} chunks"
    return Problem(f"num_iters_per_train_update = {chunks}", rule, f"use at most {prompts}")


@RULES.add("updates_per_batch", "train_dataset.batch_size", "gconfig.n_samples")
def updates_are_of_equal_size(config: Config) -> Problem | None:
    updates = config.updates_per_batch
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    if samples % updates == 0:
        return None
    rule = f"must divide train_dataset.batch_size * gconfig.n_samples = {samples}"
    below = max(n for n in range(1, min(updates, samples) + 1) if samples % n == 0)
    return Problem(f"updates_per_batch = {updates}", rule, f"use for instance {below}")


@RULES.add("compute_advantages_and_returns", "rollout.workflow")
def someone_computes_advantages(config: Config) -> Problem | None:
    if config.compute_advantages_and_returns or config.rollout.workflow != "single_turn":
        return None
    where = "compute_advantages_and_returns = false"
    rule = "rollout.workflow = single_turn delivers no advantages"
    return Problem(where, rule, "set it to true, or give a workflow of your own")


@RULES.add("rollout.max_batch_tokens", "rollout.max_running")
def every_running_sequence_gets_its_token(config: Config) -> Problem | None:
    tokens, running = config.rollout.max_batch_tokens, num_running(config)
    if tokens >= running:
        return None
    rule = f"each of rollout.max_running = {running} sequences needs one token a step"
    remedy = f"give at least {running}, or lower max_running"
    return Problem(f"rollout.max_batch_tokens = {tokens}", rule, remedy)


# The engine, for the actor and the critic alike.


@RULES.add(
    "actor.archon",
    "actor.gradient_checkpointing",
    "actor.pad_to_maximum",
    "allocation_mode",
    commands=("train", "sft", "plan"),
)
def the_actor_engine_agrees(config: Config) -> list[Problem]:
    return list(_engine_problems(config, "actor", config.actor))


@RULES.add(
    "critic.archon",
    "critic.gradient_checkpointing",
    "critic.pad_to_maximum",
    "allocation_mode",
    "algorithm.name",
)
def the_critic_engine_agrees(config: Config) -> list[Problem]:
    if config.algorithm.name not in WITH_CRITIC:
        return []
    return list(_engine_problems(config, "critic", config.critic))


def _engine_problems(config: Config, role: str, model: ModelConfig) -> Iterator[Problem]:
    archon = model.archon
    where = f"{role}.archon.ac_mode = {archon.ac_mode}"
    is_zero_bubble = pipeline_size(config, role) > 1 and splits_backward(archon.pp_schedule)
    if archon.ac_mode not in ("auto", "none") and not model.gradient_checkpointing:
        rule = f"{role}.gradient_checkpointing = false switches checkpointing off"
        yield Problem(where, rule, "leave one of the two out")
    elif (
        archon.ac_mode == "memory_budget" and archon.enable_compile is False and not is_zero_bubble
    ):
        rule = f"needs compile, and {role}.archon.enable_compile = false"
        yield Problem(where, rule, "use ac_mode: selective or full, or leave enable_compile out")
    if archon.ac_debug and archon.enable_compile is True:
        needs = (
            ", which ac_mode = memory_budget needs," if archon.ac_mode == "memory_budget" else ""
        )
        rule = f"{role}.archon.enable_compile = true{needs} hides what it would look at"
        yield Problem(f"{role}.archon.ac_debug = true", rule, "leave one of the two out")
    own_losses = {
        "moe_aux_loss_coef": archon.moe_aux_loss_coef,
        "moe_z_loss_coef": archon.moe_z_loss_coef,
    }
    for key, value in own_losses.items():
        if model.pad_to_maximum is True and value:
            rule = f"{role}.archon.{key} = {value:g} would train the router on what is padded"
            yield Problem(f"{role}.pad_to_maximum = true", rule, "leave one of the two out")
