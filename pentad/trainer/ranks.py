"""On which processes a run runs: this one alone, those it starts for its ranks, or torchrun's.

Every rank has a service (`trainer.service`). The scheduler calls the services of all ranks: from a
process of its own (`runtime.group_calls`), or under torchrun from rank 0 (`runtime.calls`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pentad.config.catalog import register_models
from pentad.config.derived import (
    component_of,
    count_devices,
    is_learner_apart,
    known_dims,
    parsed_allocation,
)
from pentad.config.resolve import with_absolute_paths
from pentad.config.rules.start import cache_problems, process_problems, unbuilt_problems
from pentad.config.schema import Config
from pentad.core.device import pick_device
from pentad.core.errors import Problem, RunError, Transient, UserError
from pentad.runtime.calls import RankCalls, RankService, serve
from pentad.runtime.group_calls import GroupSettings, RankGroup
from pentad.runtime.join import device_of, join_group, leave_group
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.rank import Rank, rank_from_environment
from pentad.runtime.rank_host import JOIN_S, specs_of_ranks
from pentad.runtime.roles import RoleSpec
from pentad.runtime.worker import load_target
from pentad.trainer.crew import Crew
from pentad.trainer.learner_thread import Calls
from pentad.trainer.preflight import AGAIN, Collector, kind_of, start_problems
from pentad.trainer.retries import Retries
from pentad.trainer.run import RunSummary, take_folder
from pentad.trainer.samplers import open_runtime
from pentad.trainer.service import FAILURES

Run = Callable[[Calls, Config, Sequence[str], bool, Crew], RunSummary]
"""A whole run over one life of its learners: their calls, config, notes, whether to start anew, and
what outlives them."""
MakeService = Callable[[Config, Rank, torch.device], RankService]


def run_over_ranks(
    run: Run,
    make_service: MakeService,
    check: Callable[[Config, torch.device], object],
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    device: str,
) -> RunSummary:
    """Runs it on as many ranks as the layout has. `check` raises what is wrong before any starts.

    Under torchrun every rank comes here, and rank 0 alone returns.
    """
    world = component_of(config, "actor").world
    own = rank_from_environment()
    if own is not None and own.world != world:
        raise UserError(wrong_world(own.world, world))
    if own is not None and world > 1:
        return run_under_torchrun(run, make_service, config, notes, fresh, device, own)
    place = pick_device(device)
    if own is None and is_learner_apart(config, count_devices(config)):
        return run_beside_group(run, make_service, check, config, notes, fresh, device)
    with RankCalls(make_service(config, Rank(), place)) as calls, Crew() as crew:
        return run(calls, config, notes, fresh, crew)


def wrong_world(found: int, world: int) -> Problem:
    rule = f"the layout needs {world} ranks"
    remedy = f"start with torchrun --nproc-per-node {world}, or unset RANK and WORLD_SIZE"
    return Problem(f"WORLD_SIZE = {found}", rule, remedy)


def run_beside_group(
    run: Run,
    make_service: MakeService,
    check: Callable[[Config, torch.device], object],
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    device: str,
) -> RunSummary:
    """The scheduler in this process, the ranks of the learner in others. Those that are lost are
    started again from the newest checkpoint, while samplers stay up."""
    world, place = component_of(config, "actor").world, pick_device(device)
    asked = Collector()
    asked.problems += rank_problems(config, world, place)
    checked = asked.ask(lambda: check(config, place))
    asked.settle()
    with take_folder(config, fresh=fresh) as taken:
        folder = taken.file("ranks/").absolute()
    given = {
        "service": f"{make_service.__module__}:{make_service.__qualname__}",
        "config": with_absolute_paths(config).model_dump(mode="json"),
    }
    settings = GroupSettings(stall_s=config.stall_abort_s, timeout_s=JOIN_S, errors=FAILURES)
    retries = Retries.of_this_program(config)
    generation = 0
    with Crew(checked) as crew, again_restored():
        if config.scheduler.type == "ray":
            crew.runtime = open_runtime(config, place, is_apart=True)
            crew.stack.push_async_callback(crew.runtime.close)
        while True:
            try:
                specs = rank_specs(config, given, device, folder, generation, crew.is_spread)
                group = RankGroup(crew.runtime or LocalRuntime(), specs, settings, place)
                with group as calls:
                    return run(calls, config, notes, False, crew)
            except RunError as error:
                crew.note_lost()
                if isinstance(error, Transient) and retries.take(error):
                    os.environ[AGAIN] = str(retries)
                    generation += 1
                    if group.failure is None:  # what stood still is something else
                        crew.close_samplers()
                    continue
                raise (RunError(str(error)) if isinstance(error, Transient) else error) from error


@contextmanager
def again_restored() -> Iterator[None]:
    """That learners were started again is known to this run alone."""
    before = os.environ.get(AGAIN)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(AGAIN, None)
        else:
            os.environ[AGAIN] = before


def rank_specs(
    config: Config,
    given: dict[str, Any],
    device: str,
    folder: Path,
    generation: int,
    is_spread: bool,
) -> list[RoleSpec]:
    """A process for each rank of the learner, with its GPU, where there are any."""
    world, place = component_of(config, "actor").world, pick_device(device)
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    folder.mkdir(parents=True, exist_ok=True)
    if not generation:
        for log_file in logs:
            log_file.write_bytes(b"")
    return specs_of_ranks(
        "learner",
        serve_rank,
        given,
        logs,
        device=place.type,
        devices=tuple(range(world)) if place.type == "cuda" else (),
        generation=generation,
        deterministic=config.actor.archon.use_deterministic_algorithms,
        is_spread=is_spread,
    )


def serve_rank(given: dict[str, Any], rank: Rank, device: torch.device) -> RankService:
    """The service of one rank, in its process."""
    config = Config.model_validate(given["config"])
    register_models(config)
    make: Any = load_target(given["service"])
    service: RankService = make(config, rank, device)
    return service


def run_under_torchrun(
    run: Run,
    make_service: MakeService,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    device: str,
    rank: Rank,
) -> RunSummary:
    """One rank of a group that somebody else started; rank 0 is the scheduler too."""
    place = device_of(rank, device)
    join_group(rank, place, timeout_s=JOIN_S)
    try:
        summary = run_rank(run, make_service, config, notes, fresh, rank, place)
    except RunError as error:
        raise RunError(f"{rank}: {error}") from error
    leave_group()
    if summary is None:  # whatever comes next is rank 0's
        raise SystemExit(0)
    return summary


def run_rank(
    run: Run,
    make_service: MakeService,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    rank: Rank,
    device: torch.device,
) -> RunSummary | None:
    """Within a process group: rank 0 runs the trainer besides, the others make its calls."""
    service = make_service(config, rank, device)
    if rank.rank > 0:
        register_models(config)
        serve(service)
        return None
    with RankCalls(service) as calls, Crew() as crew:
        return run(calls, config, notes, fresh, crew)


def rank_problems(config: Config, world: int, device: torch.device) -> list[Problem]:
    """Each rank needs a GPU of its own where there are any, and a process in any case; on Ray the
    cluster says what it has."""
    if config.scheduler.type == "ray":
        return []
    count = torch.cuda.device_count()
    if device.type == "cuda" and world > count:
        rule = f"needs {world} GPUs, and torch finds {count} on this machine"
        remedy = "make the axes smaller, or start it with torchrun on several machines"
        return [Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)]
    return process_problems(config, kind_of(device))


def start_problems_here(config: Config, *, samples: bool) -> list[Problem | str]:
    """What a start would refuse of a config that has other problems, so that all come at once."""
    if config.scheduler.type == "slurm":  # another machine runs it
        return [*unbuilt_problems(config, samples=samples)]
    device, allocation = pick_device(), parsed_allocation(config)
    actor = allocation and allocation.find("actor")
    is_sampled = samples and allocation is not None and allocation.find("rollout") is not None
    problems = start_problems(config, device, samples=is_sampled)
    if actor and rank_from_environment() is None:
        problems += rank_problems(config, actor.world, device)
    dims = known_dims(config.actor.path)
    if is_sampled and dims is not None:
        problems += cache_problems(config, dims, kind_of(device))
    return problems
