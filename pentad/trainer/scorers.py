"""The scorers of a run: models on devices of their own that judge what was sampled.

Where the learner is processes beside the scheduler, so is each scorer; else it is a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from pentad.config.catalog import register_models
from pentad.config.derived import component_of, scorers
from pentad.config.processes import scorer_devices
from pentad.config.resolve import with_absolute_paths
from pentad.config.schema import Config
from pentad.core.errors import GivenUp, Problem, RunError, Transient, UserError, first_cause
from pentad.data.store import GroupStore
from pentad.runtime.calls import RankCalls
from pentad.runtime.group_calls import GroupSettings, RankGroup
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.rank import Rank
from pentad.runtime.rank_host import JOIN_S, specs_of_ranks
from pentad.runtime.roles import RoleSpec, Runtime
from pentad.telemetry.log import NOTICE, announced
from pentad.trainer.learner_thread import LearnerThread
from pentad.trainer.scorer_service import ScorerService

log = logging.getLogger(__name__)


class ScorerCalls(Protocol):
    async def call(self, method: str, **arguments: Any) -> Any: ...


async def open_scorers(
    config: Config,
    store: GroupStore,
    max_row_tokens: int,
    device: torch.device,
    stack: AsyncExitStack,
    *,
    log_folder: Path | None,
    runtime: Runtime | None = None,
) -> dict[str, ScorerCalls]:
    """By role, each with its weights and the store; closed with `stack`. Processes where there is a
    folder for their logs: of this machine, or of the learner's `runtime`, which has places for
    them."""
    found: dict[str, ScorerCalls] = {}
    is_placed = runtime is not None  # it says which GPUs they get
    devices = scorer_devices(config) if device.type == "cuda" and not is_placed else {}
    steps: dict[str, dict[str, Any]] = {"build": {"max_row_tokens": max_row_tokens}}
    if store.address["kind"] != "memory":
        steps["open_store"] = {"address": store.address}
    opening: list[Coroutine[Any, Any, None]] = []
    for role in scorers(config):
        if log_folder is None:
            own = torch.device("cuda", devices[role][0]) if devices else device
            found[role] = thread = scorer_thread(config, role, own, store, stack)
            opening.append(prepare(thread, steps))
        else:
            is_spread = runtime is not None and runtime.is_spread
            specs = scorer_specs(config, role, device.type, devices, log_folder, is_spread)
            scorer = ScorerProcesses(config, role, specs, steps, runtime or LocalRuntime())
            found[role] = scorer
            stack.push_async_callback(scorer.close)
            opening.append(scorer.open())
    with announced(log, f"making the models of {' and '.join(scorers(config))}"):
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in opening:
                    tasks.create_task(one)
        except BaseExceptionGroup as failure:
            raise first_cause(failure) from failure
    return found


async def prepare(scorer: ScorerCalls, steps: dict[str, dict[str, Any]]) -> None:
    for method, arguments in steps.items():
        await scorer.call(method, **arguments)


def scorer_thread(
    config: Config, role: str, device: torch.device, store: GroupStore, stack: AsyncExitStack
) -> LearnerThread:
    part = component_of(config, role)
    if part.world > 1:
        where, rule = f"allocation_mode = {config.allocation_mode}", "is a thread here, of one rank"
        raise UserError(Problem(where, f"{part} {rule}", "use d1, or scheduler.processes=separate"))
    service = ScorerService(config, Rank(), device, role)
    if store.address["kind"] == "memory":
        service.store = store
    thread = LearnerThread(stack.enter_context(RankCalls(service)), role)
    stack.callback(thread.close, config.stall_abort_s)
    return thread


def scorer_specs(
    config: Config,
    role: str,
    kind: str,
    devices: dict[str, tuple[int, ...]],
    log_folder: Path,
    is_spread: bool,
) -> Callable[[int], list[RoleSpec]]:
    """The processes of a generation, one for each rank."""
    world = component_of(config, role).world
    log_folder.mkdir(parents=True, exist_ok=True)
    given = {"config": with_absolute_paths(config).model_dump(mode="json"), "role": role}
    deterministic = config.actor.archon.use_deterministic_algorithms

    logs = [log_folder.absolute() / f"{role}-{rank}.log" for rank in range(world)]

    def specs(generation: int) -> list[RoleSpec]:
        return specs_of_ranks(
            role,
            serve_scorer,
            given,
            logs,
            device=kind,
            devices=devices.get(role, ()),
            generation=generation,
            deterministic=deterministic,
            is_spread=is_spread,
        )

    return specs


def serve_scorer(given: dict[str, Any], rank: Rank, device: torch.device) -> ScorerService:
    """One rank of a scorer, in its process."""
    config = Config.model_validate(given["config"])
    register_models(config)
    return ScorerService(config, rank, device, given["role"])


class ScorerProcesses:
    """A scorer whose ranks are processes. One that is lost is started again alone, with the next
    generation: it has no state."""

    def __init__(
        self,
        config: Config,
        role: str,
        specs: Callable[[int], list[RoleSpec]],
        steps: dict[str, dict[str, Any]],
        runtime: Runtime,
    ) -> None:
        self.role = role
        self.runtime = runtime
        self.specs = specs
        self.steps = dict(steps)
        """Calls that prepare it, with their arguments."""
        self.max_restarts = config.rollout.restarts
        self.settings = GroupSettings(stall_s=config.stall_abort_s, timeout_s=JOIN_S)
        self.generation = 0
        self.num_lost = 0
        """Times in a row that it was lost without an answer gained."""
        self.lost_at = 0.0
        """When the first of them was noticed."""
        self.group: RankGroup | None = None
        self.thread: LearnerThread | None = None

    async def open(self) -> None:
        await self._make(None)

    async def call(self, method: str, **arguments: Any) -> Any:
        answer = await self._make((method, arguments))
        if self.num_lost:
            self.num_lost, away_s = 0, time.monotonic() - self.lost_at
            log.warning("the %s scores again %.1f s after it was lost", self.role, away_s)
        return answer

    async def _make(self, call: tuple[str, dict[str, Any]] | None) -> Any:
        """Makes the call, of processes that are prepared for it, however often they are lost."""
        while True:
            try:
                if self.thread is None:
                    specs = self.specs(self.generation)
                    self.group = RankGroup(self.runtime, specs, self.settings)
                    self.thread = LearnerThread(self.group.__enter__(), self.role)
                    await prepare(self.thread, self.steps)
                return None if call is None else await self.thread.call(call[0], **call[1])
            except Transient as error:
                self.num_lost += 1
                self.lost_at = self.lost_at if self.num_lost > 1 else time.monotonic()
                if self.num_lost > self.max_restarts:
                    often = f"{self.num_lost} times in a row, without an answer gained"
                    raise GivenUp(f"the {self.role} was lost {often}: {error}") from error
                text = "the %s is lost, and started again: %s"
                log.warning(text, self.role, error, extra=NOTICE)
                await self.close()
                self.generation += 1

    async def close(self) -> None:
        thread, group, self.thread, self.group = self.thread, self.group, None, None
        if thread is not None and group is not None:
            thread.is_given_up = is_busy = thread.since is not None
            error = RunError(f"the {self.role} is not waited for") if is_busy else None
            await asyncio.to_thread(thread.close, self.settings.stall_s)
            await asyncio.to_thread(group.__exit__, type(error) if error else None, error, None)
