"""On which processes a run runs: this one, those it starts for its ranks, or torchrun's.

Every rank has a service (`trainer.service`). Rank 0 runs the trainer besides, as if it were alone,
and calls the services of all ranks (`runtime.calls`).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pentad.config.catalog import register_models
from pentad.config.derived import component_of, known_dims, parsed_allocation
from pentad.config.rules.start import cache_problems, process_problems, unbuilt_problems
from pentad.config.schema import Config
from pentad.core.device import pick_device
from pentad.core.errors import Problem, RunError, Transient
from pentad.core.layout import Layout
from pentad.runtime.calls import RankCalls, RankService, serve
from pentad.runtime.join import device_of
from pentad.runtime.launch import LaunchSettings, run_ranks
from pentad.runtime.rank import Rank, rank_from_environment
from pentad.runtime.worker import load_target
from pentad.telemetry.log import log_to
from pentad.trainer.preflight import AGAIN, Collector, kind_of, start_problems
from pentad.trainer.retries import Retries, newest_step
from pentad.trainer.run import RunSummary, take_folder

log = logging.getLogger(__name__)

NAMES_A_RANK = re.compile(r"rank \d+ of ")
Run = Callable[[RankCalls, Config, Sequence[str], bool], RunSummary]
"""A whole run as rank 0 sees it: calls of its ranks, config, notes, whether to start anew."""
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
    if world == 1 and (own is None or own.world == 1):
        with RankCalls(make_service(config, Rank(), pick_device(device))) as calls:
            return run(calls, config, notes, fresh)
    folder = Path()
    if own is None:
        asked = Collector()
        asked.problems += rank_problems(config, world, pick_device(device))
        asked.ask(lambda: check(config, pick_device(device)))
        asked.settle()
        with take_folder(config, fresh=fresh) as taken:
            folder = taken.file("ranks/")
    payload = {
        "run": f"{run.__module__}:{run.__qualname__}",
        "service": f"{make_service.__module__}:{make_service.__qualname__}",
        "config": config.model_dump(mode="json"),
        "notes": list(notes),
        "fresh": fresh and own is not None,
        "device": device,
    }
    settings = LaunchSettings(
        device=device,
        deterministic=config.actor.archon.use_deterministic_algorithms,
        stall_s=config.stall_abort_s,
        is_led=True,
    )
    target = f"{__name__}:run_rank"
    retries = Retries(config, step=newest_step(config))
    while True:
        try:
            summary, *_ = run_ranks(
                target, payload, world=world, log_folder=folder, settings=settings
            )
            break
        except RunError as error:
            if own is not None:
                raise
            if isinstance(error, Transient) and retries.take(error):
                payload["again"] = str(retries)
                continue
            if NAMES_A_RANK.match(str(error)):  # of the other ends rank 0 wrote itself
                with log_to(folder.parent / "log.txt"):
                    log.info("the run ended: %s", error)
            raise (RunError(str(error)) if isinstance(error, Transient) else error) from error
    if summary is None:  # a follower under torchrun: whatever comes next is rank 0's
        raise SystemExit(0)
    paths = {key: Path(summary[key]) for key in ("records", "model")}
    return RunSummary(**{**summary, **paths})


def run_rank(rank: Rank, payload: dict[str, Any]) -> dict[str, Any] | None:
    """One rank of a run; rank 0's summary."""
    if "again" in payload:
        os.environ[AGAIN] = payload["again"]
    device = device_of(rank, payload["device"])
    config = Config.model_validate(payload["config"])
    register_models(config)
    make_service: Any = load_target(payload["service"])
    service = make_service(config, rank, device)
    if rank.rank > 0:
        if rank.board is not None:  # its log is a file of its own
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        serve(service)
        return None
    run: Any = load_target(payload["run"])
    with RankCalls(service) as calls:
        summary = run(calls, config, payload["notes"], payload["fresh"])
    return asdict(summary) | {"records": str(summary.records), "model": str(summary.model)}


def rank_problems(config: Config, world: int, device: torch.device) -> list[Problem]:
    """Each rank needs a GPU of its own where there are any, and a process in any case."""
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


def layout_of(config: Config, role: str) -> Layout:
    model = config.critic if role == "critic" else config.actor
    return component_of(config, role).layout(model.archon.dp_replicate)
