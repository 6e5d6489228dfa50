"""On which processes a run runs: this one alone, those it starts for its ranks, or torchrun's.

Every rank has a service (`trainer.service`). The scheduler calls the services of all ranks: from a
process of its own (`runtime.group_calls`), or under torchrun from rank 0 (`runtime.calls`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch

from pentad.config.derived import (
    component_of,
    register_models,
)
from pentad.config.resolve import with_absolute_paths
from pentad.config.rules.elastic import fit_world
from pentad.config.schema import Config
from pentad.config.topology import facts_of, topology
from pentad.core.device import pick_device, unsettle
from pentad.core.errors import Problem, RunError, Transient, UserError
from pentad.core.seeds import seed_globals
from pentad.core.specs import load
from pentad.runtime import rank_host
from pentad.runtime.calls import RankCalls, RankService, serve
from pentad.runtime.group_calls import GroupSettings, RankGroup
from pentad.runtime.local_roles import COMMAND, OF_A_RANK, LocalRuntime, environment_of
from pentad.runtime.rank import Rank, is_one_machine, rank_from_environment
from pentad.runtime.rank_host import (
    JOIN_S,
    device_of,
    join_group,
    leave_group,
    shares_store,
    specs_of_ranks,
)
from pentad.runtime.report import Failure
from pentad.runtime.restarts import Lost
from pentad.runtime.roles import BEAT_S, RoleSpec
from pentad.runtime.slots import Slots
from pentad.runtime.standby import IMPORTED_LATE, StandbyPool
from pentad.telemetry.log import log_to
from pentad.trainer.context import RunSummary, noted_end
from pentad.trainer.crew import Crew, Regroup
from pentad.trainer.membership import Formed, Membership
from pentad.trainer.preflight import AGAIN, kind_of
from pentad.trainer.retries import first_line, newest_step, policy_of, step_under_way
from pentad.trainer.run import CheckInputs, lead
from pentad.trainer.run_folders import checkpoint_path, standing, take_folder
from pentad.trainer.samplers import open_runtime
from pentad.trainer.service import FAILURES
from pentad.trainer.stopping import stop_early

log = logging.getLogger(__name__)
MakeService = Callable[[Config, Rank, torch.device], RankService]


def run_over_ranks(
    check: CheckInputs,
    make_service: MakeService,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    device: str,
) -> RunSummary:
    """Runs it on as many ranks as the layout has. `check` raises what is wrong before any starts.

    Under torchrun every rank comes here, and rank 0 alone returns.
    """
    own = rank_from_environment()
    if own is not None and config.elastic.enabled:
        config, own, why = fit_torchrun(config, own)
        notes = [*notes, f"elastic: {why}"] if why else notes
    world = component_of(config, "actor").world
    if own is not None and own.world != world:
        remedy = f"start with torchrun --nproc-per-node {world}, or unset RANK and WORLD_SIZE"
        where, rule = f"WORLD_SIZE = {own.world}", f"the layout needs {world} ranks"
        raise UserError(Problem(where, rule, remedy))
    if own is not None and world > 1:
        return run_under_torchrun(check, make_service, config, notes, fresh, device, own)
    place = pick_device(device)
    if own is None and topology(config, facts_of(config, kind_of(place))).is_learner_apart:
        return run_beside_group(check, make_service, config, notes, fresh, device)
    with RankCalls(make_service(config, Rank(), place)) as calls, Crew() as crew:
        return lead(check, calls, config, notes, fresh, crew)


def fit_torchrun(config: Config, rank: Rank) -> tuple[Config, Rank, str]:
    """The layout for the ranks that torchrun's agents came together with, fewer than it asks for or
    not, and what changed, in words. A rank that it has no use for ends here."""
    if shares_store() and not is_one_machine():
        rule = "the agents keep one store over restarts, with the addresses of ranks that are gone"
        remedy = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines (scripts/launch.sh does)"
        raise UserError(Problem("elastic.enabled = true under torchrun", rule, remedy))
    fitted = fit_world(config, rank.world)
    least = config.elastic.min_ranks
    if fitted is None or fitted.world < least:
        rule = (
            f"elastic.min_ranks = {least}, and the layout can use {fitted.world if fitted else 0}"
        )
        remedy = "give torchrun --nnodes MIN:MAX with a larger MIN"
        raise UserError(Problem(f"WORLD_SIZE = {rank.world}", rule, remedy))
    if rank.rank >= fitted.world:
        raise SystemExit(0)
    if fitted.world < rank.world:
        os.environ["WORLD_SIZE"] = str(fitted.world)  # torch reads it when the group is made
        local = int(os.environ.get("LOCAL_WORLD_SIZE", fitted.world))
        os.environ["LOCAL_WORLD_SIZE"] = str(min(local, fitted.world))
        rank.world = fitted.world
    return fitted.config, rank, fitted.why


def run_beside_group(
    check: CheckInputs,
    make_service: MakeService,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    device: str,
) -> RunSummary:
    """The scheduler in this process, the ranks of the learner in others. Those that are lost are
    started again from the newest checkpoint, while samplers stay up; where some are lost for good,
    the others go on without them."""
    place = pick_device(device)
    checked = check(config, place)
    with take_folder(config, fresh=fresh) as taken:
        folder = taken.file("ranks/").absolute()
    with Crew(checked) as crew, again_restored():
        if config.scheduler.type == "ray":
            crew.runtime = open_runtime(config, place, is_apart=True)
            crew.stack.push_async_callback(crew.runtime.close)
        groups = LearnerGroups(config, make_service, device, folder, crew)
        while True:
            formed = groups.form()
            group = groups.start(formed)
            try:
                with group as calls:
                    try:
                        return lead(check, calls, formed.config, notes, False, crew)
                    except Regroup:
                        groups.policy.grow()
            except RunError as error:
                groups.note_lost(error)
                clear_frames(error.__traceback__)  # or samples of the lost life stay mapped
            os.environ[AGAIN] = str(groups.policy)
            unsettle()  # the life that ended leaves cycles


class LearnerGroups:
    """The groups of ranks that train one after the other, each a generation."""

    def __init__(
        self, config: Config, make_service: MakeService, device: str, folder: Path, crew: Crew
    ) -> None:
        self.config = config
        self.service = f"{make_service.__module__}:{make_service.__qualname__}"
        self.device = device
        self.folder = folder
        """Of the ranks' logs."""
        self.crew = crew
        self.policy = policy_of(config)
        slots = Slots(folder.parent / "slots")
        self.members = Membership(config, slots, self._lacks)
        crew.records = folder.parent / "recoveries.jsonl"
        crew.has_returned = self.members.has_returned

    def _lacks(self, slot: int) -> str | None:
        runtime = self.crew.runtime
        return runtime.why_unavailable(f"learner-{slot}") if runtime else None

    def form(self) -> Formed:
        """The next group. Waiting for it may be what the run ends with: the folder stays ours, and
        `exit.json` says how."""
        with (
            take_folder(self.config, fresh=False) as folder,
            log_to(folder.file("log.txt")),
            noted_end(folder, checkpoint_path(self.config), is_last=False),
            stop_early(partial(standing, self.config)),
        ):
            return self.members.form(self.policy.generation)

    def start(self, formed: Formed) -> RankGroup:
        """A process for each rank, with its GPU, where there are any."""
        config, place, crew = formed.config, pick_device(self.device), self.crew
        logs = [self.folder / f"rank-{rank}.log" for rank in range(len(formed.used))]
        self.folder.mkdir(parents=True, exist_ok=True)
        for log_file in () if self.policy.generation else logs:
            log_file.write_bytes(b"")
        values = with_absolute_paths(config).model_dump(mode="json")
        specs = specs_of_ranks(
            "learner",
            serve_rank,
            {"service": self.service, "config": values},
            logs,
            device=place.type,
            devices=formed.used if place.type == "cuda" else (),
            generation=self.policy.generation,
            deterministic=config.actor.archon.use_deterministic_algorithms,
            is_spread=crew.is_spread,
            slots=formed.used,
            seed=config.seed,
            beat_s=config.elastic.heartbeat_interval_s if config.elastic.enabled else BEAT_S,
        )
        settings = GroupSettings(
            stall_s=self.config.stall_abort_s,
            timeout_s=JOIN_S,
            errors=FAILURES,
            away=self.members.why_away,
        )
        runtime = crew.runtime or LocalRuntime(self._standbys(specs))
        crew.group = RankGroup(runtime, specs, settings, place)
        crew.is_loaded = False
        crew.facts = {
            "generation": self.policy.generation,
            "world": len(specs),
            "layout": config.allocation_mode,
            "slots": list(formed.used),
        }
        return crew.group

    def _standbys(self, specs: Sequence[RoleSpec]) -> StandbyPool | None:
        """As many as the first group has ranks: a group that lost one is replaced whole."""
        crew, elastic = self.crew, self.config.elastic
        if crew.standbys is None and elastic.enabled and elastic.standbys:
            modules = [rank_host.__name__, self.service.partition(":")[0], *IMPORTED_LATE]
            plain = {k: v for k, v in environment_of(specs[0]).items() if k not in OF_A_RANK}
            crew.standbys = StandbyPool(COMMAND, len(specs), modules, plain)
        return crew.standbys

    def note_lost(self, error: RunError) -> None:
        """Raises where a group that was lost is not followed by another one."""
        crew = self.crew
        assert crew.group is not None, "it was there to be lost"
        crew.note_lost(error)
        if not isinstance(error, Transient):
            raise error
        lost = self._lost(crew.group.cause, error)
        decision = self.policy.decide(lost)
        with log_to(self.folder.parent / "log.txt"):
            if decision.action in ("restart", "stop") and decision.why:
                log.warning("the run failed: %s; %s", first_line(error), decision.why)
            self.members.carry_out(decision, lost)
        if decision.action == "stop":
            after = f"{decision.diagnosis}; the last time: " if decision.diagnosis else ""
            raise RunError(f"{after}{error}") from error
        if crew.group.failure is None:  # what stood still is something else
            crew.close_samplers()

    def _lost(self, cause: Failure | None, error: RunError) -> Lost:
        kind, slot, can_shrink = self.members.loss_of(cause)
        # By the records: what a rank that died has last said of its step may be old.
        is_in_step = self.crew.is_loaded and cause is not None
        return Lost(
            kind=kind,
            cause=cause.message if cause else first_line(error),
            slot=slot,
            step=step_under_way(self.config) if is_in_step else None,
            newest=newest_step(self.config),
            can_shrink=can_shrink,
        )


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


def serve_rank(given: dict[str, Any], rank: Rank, device: torch.device) -> RankService:
    """The service of one rank, in its process."""
    config = Config.model_validate(given["config"])
    register_models(config)
    service: RankService = load(given["service"])(config, rank, device)
    return service


def run_under_torchrun(
    check: CheckInputs,
    make_service: MakeService,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    device: str,
    rank: Rank,
) -> RunSummary:
    """One rank of a group that torchrun started; rank 0 is the scheduler too."""
    place = device_of(rank, device)
    seed_globals(config.seed, f"learner-{rank.rank}")
    join_group(rank, place, timeout_s=JOIN_S)
    try:
        summary = run_rank(check, make_service, config, notes, fresh, rank, place)
    except RunError as error:
        raise RunError(f"{rank}: {error}") from error
    leave_group()
    if summary is None:  # whatever comes next is rank 0's
        raise SystemExit(0)
    return summary


def run_rank(
    check: CheckInputs,
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
        return lead(check, calls, config, notes, fresh, crew)
