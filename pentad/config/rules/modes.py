"""Rules on modes, devices and machines: the sampler, runs with `only`, limits of launchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pentad.config.rules.inputs import url_problem
from pentad.config.rules.rule import RUNS, Rules
from pentad.config.schema import Config
from pentad.config.topology import find_topology
from pentad.core.errors import Problem
from pentad.core.fit import list_of, strict_problems
from pentad.core.layout import Component, divisors
from pentad.samplers.section import ServerConfig

RULES = Rules()


def server_of(config: Config) -> Component | None:
    """The rollout component if it is a server; None for the embedded engine."""
    rollout = config.part("rollout")
    return None if not rollout or rollout.backend == "embedded" else rollout


@RULES.add()
def the_mode_fits_the_devices(config: Config) -> Problem | None:
    allocation = config.parsed_allocation
    apart = allocation and allocation.are_apart
    if apart is None or config.mode is None or apart == (config.mode != "colocate"):
        return None
    layout = f"allocation_mode = {config.allocation_mode}"
    where = f"mode = {config.mode}"
    if apart:
        rule = f"rollout and training must share devices, but {layout} separates them"
        return Problem(where, rule, "join them with | instead of +, or set mode: hybrid")
    rule = f"rollout and training need separate devices, but {layout} lets them share"
    return Problem(where, rule, "join them with + instead of |, or set mode: colocate")


@RULES.add()
def colocation_is_on_policy(config: Config) -> Problem | None:
    if config.mode != "colocate" or config.max_staleness == 0:
        return None
    where = f"max_staleness = {config.max_staleness}"
    rule = "must be 0 in mode = colocate, where rollout waits for training"
    return Problem(where, rule, "set mode: hybrid and join the allocation with +")


@RULES.add()
def oversampled_steps_wait_for_their_groups(config: Config) -> Iterator[Problem]:
    keys = config.rollout
    if not config.oversamples:
        return
    where, off = f"rollout.oversample = {keys.oversample:g}", "leave it out"
    if config.max_staleness:
        rule = f"max_staleness = {config.max_staleness} samples the next batch meanwhile"
        yield Problem(where, f"needs steps that wait for their groups: {rule}", f"{off}, or set 0")
    if not keys.is_single_turn:
        several = next(spec for spec in keys.specs if spec != "single_turn")
        rule = f"an unfinished {several} cannot continue in a later step: single answers can"
        yield Problem(where, rule, f"{off}, or use workflow: single_turn")
    most = keys.max_concurrent_groups
    if most is not None and most < config.groups_started:
        rule = f"a step starts {config.groups_started} groups at once ({where})"
        remedy = f"give at least {config.groups_started}, or leave it out"
        yield Problem(f"rollout.max_concurrent_groups = {most}", rule, remedy)


@RULES.add()
def offloaded_training_takes_turns(config: Config) -> Problem | None:
    if not config.offload_train:
        return None
    where, transport = "offload_train = true", config.rollout.server.weight_transport
    if config.mode != "colocate":
        rule = f"no other component uses the trainer's devices in mode = {config.mode}"
        return Problem(where, rule, "leave it out, or set mode: colocate")
    if config.offload_rollout is False:
        rule = "offload_rollout = false: the sampler would not free memory when training resumes"
        return Problem(where, rule, "set both, or neither")
    if server_of(config) is not None and transport != "disk":
        where = f"rollout.server.weight_transport = {transport}"
        rule = "offload_train = true: weights are not on the GPU when the server reads them"
        return Problem(where, rule, "use disk")
    return None


@RULES.add()
def one_process_holds_one_of_each(config: Config) -> Problem | None:
    allocation = config.parsed_allocation
    if config.scheduler.processes != "one" or allocation is None:
        return None
    wide = [str(part) for part in allocation if part.world > 1]
    found = {
        f"{' and '.join(wide)} has a process for each device": bool(wide),
        f"cluster.n_nodes = {config.cluster.n_nodes} has at least as many": (
            config.cluster.n_nodes > 1
        ),
        "scheduler.type = ray starts samplers as actors": config.scheduler.type == "ray",
        "cluster.share_gpus = true is for two processes on one GPU": config.cluster.share_gpus,
    }
    rules = [rule for rule, holds in found.items() if holds]
    if not rules:
        return None
    return Problem("scheduler.processes = one", "; ".join(rules), "leave it at auto")


@RULES.add()
def every_process_reaches_the_store(config: Config) -> Problem | None:
    actor, placed = config.part("actor"), find_topology(config)
    where = f"store = {config.store}"
    if placed is None:
        return None
    if placed.has_storage_units and config.scheduler.type != "ray":
        rule = f"scheduler.type = {config.scheduler.type} has no Ray cluster"
        return Problem(where, rule, "use scheduler.type=ray, or files")
    if config.store == "memory" and placed.is_learner_apart:
        rule = f"{actor} trains in other processes than the scheduler's, which cannot read it"
        return Problem(where, rule, "leave it at auto")
    return None


@RULES.add()
def embedded_samplers_share_gpus(config: Config) -> Problem | None:
    rollout = server_of(config)
    if not config.cluster.share_gpus or not rollout:
        return None
    rule = f"{rollout} shares a GPU by | and rollout.server.gpu_memory_share"
    return Problem("cluster.share_gpus = true", rule, "leave it out, or use embedded")


@RULES.add()
def strict_needs_the_embedded_sampler(config: Config) -> Problem | None:
    rollout = server_of(config)
    if not config.strict or not rollout:
        return None
    rule = f"{rollout.backend} computes with other kernels than the trainer"
    return Problem("strict = true", rule, "use embedded in allocation_mode")


@RULES.add()
def replay_needs_a_server_in_one_stage(config: Config) -> Problem | None:
    rollout = server_of(config)
    if not config.rollout.replay_routes or not rollout or rollout.size("p") == 1:
        return None
    rule = f"{rollout} has pipeline stages, and reports the experts of one stage's layers at most"
    return Problem("rollout.replay_routes = true", rule, "leave out p in allocation_mode")


@RULES.add()
def fsdp_trains_models_without_a_file(config: Config) -> list[Problem]:
    actor = config.part("actor")
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


@RULES.add()
def strict_is_not_compiled(config: Config) -> Problem | None:
    if not config.strict or config.actor.archon.enable_compile is not True:
        return None
    rule = "strict = true: compiled code sums in a different order"
    return Problem("actor.archon.enable_compile = true", rule, "leave it out, or at auto")


@RULES.add()
def strict_cuts_no_layer(config: Config) -> list[Problem]:
    actor = config.part("actor")
    return list(strict_problems(actor.layout(), str(actor))) if config.strict and actor else []


@RULES.add()
def servers_fit_the_allocation(config: Config) -> list[Problem]:
    placed, server = find_topology(config), config.rollout.server
    rollout = placed and placed.written.find("rollout")
    if placed is None or not rollout:
        return []
    where = f"rollout.server.addresses = {list(server.addresses)}"
    layout = f"allocation_mode = {config.allocation_mode}"
    if rollout.backend == "embedded":
        if server == ServerConfig():
            return []
        rule = f"{layout} samples without a server"
        return [Problem("rollout.server", rule, "leave it out, or use vllm or sglang")]
    found = []
    if server.addresses and len(server.addresses) != rollout.size("d"):
        rule = f"{layout} has {rollout.size('d')} replicas, each at its own address"
        found.append(Problem(where, rule, f"give {rollout.size('d')}"))
    for address in server.addresses:
        if why := url_problem(address):
            found.append(Problem(where, f"{address} {why}", "give http://HOST:PORT"))
    if len(set(server.addresses)) != len(server.addresses):
        found.append(Problem(where, "two replicas have the same address", "give each its own"))
    where = "rollout.server.weight_transport = ipc"
    is_ipc, is_vllm = server.weight_transport == "ipc", rollout.backend == "vllm"
    if is_ipc and is_vllm and placed.is_learner_apart:
        rule = "weights of ranks in separate processes are in host memory, which vllm"
        found.append(Problem(where, f"{rule} cannot take by reference", "use disk or broadcast"))
    elif is_ipc and placed.written.are_apart:
        rule = f"weights are passed on the training GPU, but {layout} separates them"
        found.append(Problem(where, rule, "use broadcast or disk"))
    return found


@RULES.add()
def groups_are_for_a_run_that_only_trains(config: Config) -> Problem | None:
    if config.only == "train" and config.groups_from is None:
        remedy = "give the folder of its records: {fileroot}/logs/USER/EXPERIMENT/TRIAL"
        return Problem("groups_from", "only = train trains the groups of another run", remedy)
    if config.only != "train" and config.groups_from is not None:
        where = f"groups_from = {config.groups_from}"
        return Problem(where, "is read only with only = train", "set only: train, or leave it out")
    return None


@RULES.add(commands=("train",))
def groups_are_there(config: Config) -> Problem | None:
    if config.only != "train" or config.groups_from is None:
        return None
    if any(Path(config.groups_from, "batches").glob("step*.groups")):
        return None
    return no_groups(config.groups_from)


def no_groups(folder: str) -> Problem:
    """The problem of a run that only trains and finds no groups, at the start or later."""
    rule = "has no groups: no step*.groups in its batches/"
    remedy = "give the folder of a run's records; telemetry.keep_batches sets what it keeps"
    return Problem(f"groups_from = {folder}", rule, remedy)


@RULES.add()
def groups_are_of_another_run(config: Config) -> Problem | None:
    """Rejects kept groups of the run's own folder: it removes untrained batches at its start."""
    if config.only != "train" or config.groups_from is None:
        return None
    if Path(config.groups_from).resolve() != config.run_path.resolve():
        return None
    rule = "is this run's own folder, whose batches/ it writes itself"
    return Problem(f"groups_from = {config.groups_from}", rule, "give it another trial_name")


@RULES.add()
def one_side_is_no_job(config: Config) -> Problem | None:
    if config.only is None or config.scheduler.type != "slurm":
        return None
    rule = "the job runs both training and sampling"
    return Problem(f"only = {config.only}", rule, "leave it out, or use scheduler.type: local")


@RULES.add(commands=RUNS)
def slurm_nodes_hold_the_layout(config: Config) -> Iterator[Problem]:
    """Training nodes must have equally many ranks; every other component must fit on one node."""
    nodes, per_node = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    placed = find_topology(config)
    actor = placed and placed.allocation.find("actor")
    if config.scheduler.type != "slurm" or not (placed and actor):
        return
    where = f"cluster.n_nodes = {nodes}"
    if len(placed.allocation.groups) == 1 and actor.world % nodes:
        rule = f"scheduler.type = slurm gives each node as many ranks, and {actor} has"
        remedy = f"n_nodes can be {list_of(divisors(actor.world))}"
        yield Problem(where, f"{rule} {actor.world}", remedy)
    elif placed.unplaced and per_node is not None:
        names = ", ".join(placed.unplaced[:4]) + (", ..." if len(placed.unplaced) > 4 else "")
        rule = f"no node with cluster.n_gpus_per_node = {per_node} has room for {names}"
        remedy = "use more nodes, smaller axes, or rollout.server.addresses"
        if any(name.rpartition("-")[0] in placed.scorers for name in placed.unplaced):
            rule = f"{rule}: models that score run on the first node,"
            remedy = "use more nodes to train on, smaller axes, or join it to the actor with |"
        yield Problem(where, f"{rule} beside {actor}", remedy)
