"""Runs the generations of a run's learners: forms and starts each; after a transient failure the
next one continues from the newest checkpoint.

One `runtime.restarts` policy counts failures, generations and retired slots. Learners are separate
processes, or a thread of the scheduler's process; that thread is rebuilt in the process, or by
`trainer.processes.ranks` if a failure left the process unusable.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from traceback import clear_frames
from typing import Any

import torch

from pentad.checkpoint.folders import Unreadable, find_checkpoints
from pentad.config.resolve import with_absolute_paths
from pentad.config.schema import Config
from pentad.config.topology import facts_of, topology
from pentad.core.device import pick_device, unfreeze_gc
from pentad.core.errors import Crashed, RunError, Transient, UserError
from pentad.core.specs import load
from pentad.runtime import rank_host
from pentad.runtime.awake import awake_s
from pentad.runtime.group_calls import RankGroup
from pentad.runtime.launched import LaunchedRuntime
from pentad.runtime.learner_client import DirectCalls, LearnerClient, RankService
from pentad.runtime.local_roles import COMMAND, OF_A_RANK, LocalRuntime, environment_of
from pentad.runtime.rank import Rank
from pentad.runtime.rank_host import specs_of_ranks
from pentad.runtime.restarts import Lost, RestartPolicy, in_generation
from pentad.runtime.roles import BEAT_S, RoleSpec
from pentad.runtime.slots import Slots
from pentad.runtime.standby import IMPORTED_LATE, StandbyPool
from pentad.telemetry.log import NOTICE, log_to
from pentad.telemetry.steps import read_lines, reading_records
from pentad.trainer.context import RunSummary, noted_end
from pentad.trainer.preflight import kind_of
from pentad.trainer.processes.membership import Membership, RankGeneration
from pentad.trainer.processes.resources import Regroup, RunResources
from pentad.trainer.rank.service import FAILURES
from pentad.trainer.run_folders import checkpoint_path, describe_progress, take_folder
from pentad.trainer.sampling.samplers import open_runtime
from pentad.trainer.saving.recovery import RecoverHandler
from pentad.trainer.saving.saver import Saver
from pentad.trainer.stopping import stop_early

log = logging.getLogger(__name__)

MakeService = Callable[[Config, Rank, torch.device], RankService]
RunFunction = Callable[[LearnerClient, Config, Sequence[str], bool, "Supervisor"], RunSummary]
"""Runs the job with one generation of learners. Arguments: calls, config, notes, whether to start
from the beginning, and the supervisor."""


@dataclass(frozen=True, slots=True)
class RunJob:
    """The job of a supervisor; can be pickled."""

    run: RunFunction
    make_service: MakeService
    check: Callable[[Config, torch.device], Any]
    """Raises config problems before anything starts; its result is `Supervisor.checked`."""
    config: Config
    notes: Sequence[str] = ()
    device: str = "auto"

    @property
    def place(self) -> torch.device:
        return pick_device(self.device)

    @property
    def is_remote(self) -> bool:
        """Whether learners are separate processes."""
        return topology(self.config, facts_of(self.config, kind_of(self.place))).is_learner_apart


SPANS = ("detect_s", "fence_s", "spawn_s", "load_s", "first_step_s")
"""Names of the times between the marks of an outage."""


@dataclass(slots=True)
class Outage:
    """An outage, from the loss of learners to the end of the next step."""

    cause: str
    marks: list[float]
    """Times on the monotonic clock: the last sign of life of the rank that was lost first; the
    group was declared failed; its last process had ended; all ranks of the next group had
    connected; they had loaded the checkpoint."""
    num_losses: int


class Unusable(Exception):
    """The next generation of a one-process run needs a fresh process."""

    def __init__(self, policy: RestartPolicy) -> None:
        super().__init__("the process cannot be used any more")
        self.policy = policy


class Supervisor:
    def __init__(
        self,
        job: RunJob,
        launched: LaunchedRuntime | None = None,
        *,
        is_remote: bool = False,
        policy: RestartPolicy | None = None,
    ) -> None:
        """`launched`: the ranks that torchrun started, if it did; `policy`: the counts so far, from
        another process; None: no failure yet."""
        self.job, self.config = job, job.config
        self.resources = RunResources(launched)
        self.is_remote = is_remote
        self.policy = policy or policy_of(job.config)
        self.folder = job.config.run_path.absolute()
        self.members = Membership(
            job.config,
            Slots(self.folder / "slots"),
            self._why_unavailable,
            is_launched=launched is not None,
        )
        self.checked: Any = None
        """The result of `job.check`."""
        self.group: RankGroup | None = None
        """The learners, if they are separate processes."""
        self.is_loaded = False
        """Whether the learners have loaded the checkpoint, and are in a step or between two."""
        self.outage: Outage | None = None
        """The current outage: learners were lost and the next ones have not trained a step yet."""
        self.facts: dict[str, Any] = {}
        """Facts about the group for the record of an outage."""

    def _why_unavailable(self, slot: int) -> str | None:
        runtime = self.resources.runtime
        return runtime.why_unavailable(f"learner-{slot}") if runtime else None

    # Generations

    def run_checked(self, *, fresh: bool) -> RunSummary:
        """Runs the whole run after its checks passed. Raises `Unusable` if the next generation
        cannot start in this process."""
        job = self.job
        with self.resources:
            with in_generation(self.policy.generation):
                self.checked = job.check(job.config, job.place)
            if self.is_remote:
                with take_folder(job.config, fresh=fresh):
                    fresh = False
            return self.run_generations(fresh=fresh)

    def run_generations(self, *, fresh: bool) -> RunSummary:
        """Runs one generation after the other until the run ends."""
        job, resources = self.job, self.resources
        places = self.is_remote and resources.launched is None
        if places and self.config.scheduler.type == "ray":
            resources.runtime = open_runtime(self.config, job.place, is_remote=True)
            resources.stack.push_async_callback(resources.runtime.close)
        earlier = frozenset(threading.enumerate())
        while True:
            generation = self.form()
            try:
                if (summary := self._run_one(generation, fresh)) is not None:
                    return summary
            except Exception as error:
                self.note_lost(error)
                release(error)
            if resources.is_lent:
                resources.close_samplers()
            fresh = False
            unfreeze_gc()  # the ended generation leaves reference cycles
            gc.collect()
            if not self.is_remote and (why := why_unusable(earlier)):
                with log_to(self.folder / "log.txt"):
                    log.warning("the run is started again in a fresh process: %s", why)
                raise Unusable(self.policy)

    def _run_one(self, generation: RankGeneration, fresh: bool) -> RunSummary | None:
        """Runs one generation; returns None if a larger group follows."""
        job = self.job
        with in_generation(self.policy.generation), self.start(generation) as calls:
            try:
                return job.run(calls, generation.config, job.notes, fresh, self)
            except Regroup:
                self.policy.grow()
        return None

    def form(self) -> RankGeneration:
        """Forms the next group. If the run ends while waiting, the folder stays locked and
        `exit.json` has the reason."""
        if not (self.is_remote and self.members.is_on):
            return RankGeneration(self.config, tuple(range(self.members.count)))
        with (
            take_folder(self.config, fresh=False) as folder,
            log_to(folder.file("log.txt")),
            noted_end(folder, checkpoint_path(self.config), is_last=False),
            stop_early(partial(describe_progress, self.config)),
        ):
            return self.members.form(self.policy.generation)

    def start(self, generation: RankGeneration) -> RankGroup | DirectCalls:
        """Starts the learners: a process per rank, with its GPU if there are any; or a service of
        this process."""
        self.is_loaded = False
        if not self.is_remote:
            return DirectCalls(self.job.make_service(generation.config, Rank(), self.job.place))
        specs = self._specs(generation)
        placed = self.resources.launched or self.resources.runtime
        self.group = RankGroup(
            placed or LocalRuntime(self._standbys(specs)),
            specs,
            stall_s=self.config.stall_abort_s,
            errors=FAILURES,
            why_away=self.members.why_away,
            device=self.job.place,
        )
        self.facts = {
            "generation": self.policy.generation,
            "world": len(specs),
            "layout": generation.config.allocation_mode,
            "slots": list(generation.used),
        }
        return self.group

    def _specs(self, generation: RankGeneration) -> list[RoleSpec]:
        is_launched, number = self.resources.launched is not None, self.policy.generation
        is_spread = is_launched or self.resources.is_spread
        specs = specs_of_job(self.job, generation, number, is_spread=is_spread)
        for spec in specs:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            if not number:
                spec.log.write_bytes(b"")
        return specs

    def _standbys(self, specs: Sequence[RoleSpec]) -> StandbyPool | None:
        """Starts as many standbys as the first group has ranks, because all ranks are replaced if
        one is lost."""
        resources, elastic = self.resources, self.config.elastic
        if resources.standbys is None and elastic.enabled and elastic.standbys:
            modules = [rank_host.__name__, self.job.make_service.__module__, *IMPORTED_LATE]
            plain = {k: v for k, v in environment_of(specs[0]).items() if k not in OF_A_RANK}
            resources.standbys = StandbyPool(COMMAND, len(specs), modules, plain)
        return resources.standbys

    # Failures

    def note_lost(self, error: Exception) -> None:
        """Handles the failure that ended a generation; raises it if no other generation follows."""
        self._note_outage(error)
        if isinstance(error, RunError | UserError) and not isinstance(error, Transient):
            raise error
        try:
            lost = self._lost(error)
        except (Unreadable, OSError) as unreadable:
            log.warning("the run is not started again: %s", unreadable)
            raise error from None
        is_of_group = self.is_remote and isinstance(error, Transient)
        if lost.newest < 0 and not is_of_group:
            raise error
        decision = self.policy.decide(lost)
        with log_to(self.folder / "log.txt"):
            if decision.action in ("restart", "stop") and decision.why:
                log.warning("the run failed: %s; %s", first_line(error), decision.why)
            self.members.carry_out(decision, lost)
        if decision.action == "stop":
            if decision.diagnosis:
                raise RunError(f"{decision.diagnosis}; the last time: {error}") from error
            raise error
        if self.group is None or self.group.failure is None:  # something else failed
            self.resources.close_samplers()

    def _lost(self, error: Exception) -> Lost:
        cause = self.group.cause if self.group is not None else None
        newest, step = newest_step(self.config), step_under_way(self.config)
        if cause is None:
            is_code = not isinstance(error, RunError) or isinstance(error, Crashed)
            is_known = not self.is_remote or not isinstance(error, RunError)
            return Lost(
                kind="raised" if is_code and is_known else "died",
                cause=first_line(error),
                slot=None,
                step=step if is_known else None,
                newest=newest,
            )
        # From the records: the step last reported by a dead rank may be old.
        return self.members.lost(cause, step=step if self.is_loaded else None, newest=newest)

    def _note_outage(self, error: Exception) -> None:
        group, now, before = self.group, awake_s(), self.outage
        if group is None:
            return
        marks = [now, now] if group.failure is None else [group.seen_at, group.failed_at]
        if before is not None:  # lost again before the first step
            marks = [min(times) for times in zip(before.marks, marks, strict=False)]
        self.outage = Outage(
            first_line(error), [*marks, now], before.num_losses + 1 if before else 1
        )

    # Reports

    def note_loaded(self) -> None:
        """Records that the learners have loaded the checkpoint."""
        self.is_loaded = True
        if self.outage is not None and self.group is not None:
            self.outage.marks += [self.group.joined_at, awake_s()]

    def note_step(self) -> None:
        """Called after a trained step: ends the outage and logs its times."""
        if self.resources.standbys is not None:
            self.resources.standbys.fill()
        done, self.outage = self.outage, None
        if done is None:
            return
        marks = [*done.marks, awake_s()]
        split = {
            name: round(end - start, 3)
            for name, (start, end) in zip(SPANS, pairwise(marks), strict=True)
        }
        total = marks[-1] - marks[0]
        words = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f}"
            for name, value in split.items()
        )
        text = "training resumed: a step ended %.1f s after the failure (%s)"
        log.info(text, total, words, extra=NOTICE)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.facts,
            "cause": done.cause,
            "num_losses": done.num_losses,
            **split,
            "total_s": round(total, 3),
        }
        with (self.folder / "recoveries.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def regroup_if_due(self, recover: RecoverHandler, savers: Sequence[Saver], step: int) -> None:
        """Raises Regroup if ranks have returned and this step is committed. Waits for exports that
        these ranks write."""
        if self.members.has_returned() and recover.is_saved(step):
            for saver in savers:
                saver.collect(step, wait=True)
            text = "elastic: ranks have returned, the group is re-formed after step %d"
            log.info(text, step + 1, extra=NOTICE)
            raise Regroup


def specs_of_job(
    job: RunJob, generation: RankGeneration, number: int, *, is_spread: bool
) -> list[RoleSpec]:
    """Returns the specs of the processes of a generation of learners, by rank. `number`: that of
    the generation."""
    config, elastic = generation.config, job.config.elastic
    place, make = job.place, job.make_service
    folder = job.config.run_path.absolute() / "ranks"
    return specs_of_ranks(
        "learner",
        serve_rank,
        {
            "service": f"{make.__module__}:{make.__qualname__}",
            "config": with_absolute_paths(config).model_dump(mode="json"),
        },
        [folder / f"rank-{rank}.log" for rank in range(len(generation.used))],
        device=place.type,
        devices=generation.used if place.type == "cuda" else (),
        generation=number,
        deterministic=config.actor.archon.use_deterministic_algorithms,
        is_spread=is_spread,
        slots=generation.used,
        seed=config.seed,
        beat_s=elastic.heartbeat_interval_s if elastic.enabled else BEAT_S,
    )


def launched_spec(job: RunJob, rank: Rank) -> RoleSpec:
    """Returns the spec of a rank that torchrun started, in its process. It keeps a log beside its
    output, which is torchrun's."""
    generation = RankGeneration(job.config, tuple(range(rank.world)))
    spec = specs_of_job(job, generation, 0, is_spread=True)[rank.rank]
    payload = {**spec.payload, "local_rank": rank.local_rank, "log": str(spec.log)}
    return replace(spec, payload=payload)


def serve_rank(given: dict[str, Any], rank: Rank, device: torch.device) -> RankService:
    """Makes the service of one rank, in its process."""
    config = Config.model_validate(given["config"])
    config.register_models()
    service: RankService = load(given["service"])(config, rank, device)
    return service


# Inputs of the restart policy.


def policy_of(config: Config) -> RestartPolicy:
    recover, elastic = config.recover, config.elastic
    return RestartPolicy(
        retries=recover.retries if recover.is_on else 0,
        slot_failures=elastic.slot_failures if elastic.enabled and recover.is_on else None,
    )


def first_line(error: Exception) -> str:
    text, name = str(error).partition("\n")[0], type(error).__name__
    return text if text and isinstance(error, RunError | UserError) else f"{name}: {text}"


def step_under_way(config: Config) -> int:
    """Returns the step in progress: the one after the last recorded step."""
    path = config.run_path / "steps.jsonl"
    with reading_records(path):
        return max((line["step"] for line in read_lines(path)), default=0) + 1


def newest_step(config: Config) -> int:
    """Returns the step of the newest committed checkpoint; -1 without any."""
    found = find_checkpoints(checkpoint_path(config), report=log.debug)
    return found[0].step if found else -1


# Cleanup of this process after a failure.


def release(error: BaseException | None) -> None:
    """Clears the frames of exceptions, which keep tensors of a failed generation in memory."""
    seen: set[int] = set()
    found = [error]
    while found:
        one = found.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            clear_frames(one.__traceback__)
            found += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def why_unusable(earlier: Set[threading.Thread]) -> str | None:
    """Returns why no learner can be built in this process again. `earlier`: threads that existed
    before the run, so not of its learner."""
    if any(thread.name == "learner" for thread in set(threading.enumerate()) - earlier):
        return "a call of the learner does not return"
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return first_line(error)
    return None
