"""The scorers of a run: models on separate devices that score samples.

If the learner is separate processes, so is each scorer; else a scorer is a thread.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pentad.config.resolve import with_absolute_paths
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.device import freeze_gc
from pentad.core.errors import GivenUp, Problem, RunError, Transient, UserError, first_cause
from pentad.core.types import Group, Prompt
from pentad.data.store import GroupStore, MissingGroups, open_store
from pentad.engine.engine import Engine
from pentad.runtime.group_calls import RankGroup
from pentad.runtime.learner_client import DirectCalls, LearnerClient
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.rank import Rank
from pentad.runtime.rank_host import specs_of_ranks
from pentad.runtime.restarts import RestartPolicy
from pentad.telemetry.log import NOTICE, announced
from pentad.telemetry.timeline import timeline
from pentad.trainer.pumps.state import RunState
from pentad.trainer.rank.learners import build_scorer
from pentad.trainer.rank.update import chunk_slots, column_of, on_host, scored_rows
from pentad.trainer.run import Run
from pentad.trainer.sampling.samplers import topology_on

log = logging.getLogger(__name__)


async def open_scorers(
    run: Run, store: GroupStore, max_row_tokens: int, stack: AsyncExitStack
) -> dict[str, ScorerClient]:
    """Opens the scorers, by role, each with its weights and the store; `stack` closes them. If the
    learner is a process, so are they: on this machine, or placed by the learner's runtime."""
    found: dict[str, ScorerClient] = {}
    config, device = run.config, run.learner.device
    if not scorers(config):
        return found
    is_placed = run.supervisor.resources.runtime is not None  # it assigns their GPUs
    placed = topology_on(config, device)
    devices = {
        role: tuple(gpu for one in placed.scorer(role) for gpu in one.devices)
        for role in (() if is_placed else placed.scorers)
    }
    steps: dict[str, dict[str, Any]] = {"build": {"max_row_tokens": max_row_tokens}}
    if store.address["kind"] != "memory":
        steps["open_store"] = {"address": store.address}
    for role in scorers(config):
        start = start_ranks if run.learner.is_remote else start_thread
        found[role] = scorer = ScorerClient(
            role,
            partial(start, run, role, devices.get(role, ()), store),
            steps,
            restarts=config.rollout.restarts,
            stall_s=config.stall_abort_s,
        )
        stack.push_async_callback(scorer.close)
    with announced(log, f"making the models of {' and '.join(scorers(config))}"):
        try:
            async with asyncio.TaskGroup() as tasks:
                for scorer in found.values():
                    tasks.create_task(scorer.open())
        except BaseExceptionGroup as failure:
            raise first_cause(failure) from failure
    return found


def start_thread(
    run: Run, role: str, devices: tuple[int, ...], store: GroupStore, generation: int
) -> DirectCalls:
    """Makes the only rank of a scorer, in this process."""
    config, part = run.config, run.config.component(role)
    if part.world > 1:
        where, rule = f"allocation_mode = {config.allocation_mode}", "is a thread with one rank"
        raise UserError(Problem(where, f"{part} {rule}", "use d1, or scheduler.processes=separate"))
    device = torch.device("cuda", devices[0]) if devices else run.learner.device
    service = ScorerService(config, Rank(), device, role)
    if store.address["kind"] == "memory":
        service.store = store
    return DirectCalls(service, role)


def start_ranks(
    run: Run, role: str, devices: tuple[int, ...], store: GroupStore, generation: int
) -> RankGroup:
    """Starts the processes of a scorer's ranks."""
    config, runtime = run.config, run.supervisor.resources.runtime or LocalRuntime()
    folder = run.context.folder.file("ranks/").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    specs = specs_of_ranks(
        role,
        serve_scorer,
        {"config": with_absolute_paths(config).model_dump(mode="json"), "role": role},
        [folder / f"{role}-{rank}.log" for rank in range(config.component(role).world)],
        device=run.learner.device.type,
        devices=devices,
        generation=generation,
        deterministic=config.actor.archon.use_deterministic_algorithms,
        is_spread=runtime.is_spread,
        seed=config.seed,
    )
    return RankGroup(runtime, specs, stall_s=config.stall_abort_s, name=role)


def serve_scorer(given: dict[str, Any], rank: Rank, device: torch.device) -> ScorerService:
    """Runs one rank of a scorer in its process."""
    config = Config.model_validate(given["config"])
    config.register_models()
    return ScorerService(config, rank, device, given["role"])


class ScorerClient:
    """The client of a scorer. If one of its processes is lost, only this scorer is restarted, as a
    new generation; it has no state to restore."""

    def __init__(
        self,
        role: str,
        start: Callable[[int], RankGroup | DirectCalls],
        steps: Mapping[str, dict[str, Any]],
        *,
        restarts: int,
        stall_s: float,
    ) -> None:
        """`start`: starts the ranks of a generation; `steps`: calls that prepare them, with their
        arguments."""
        self.role, self.start, self.steps, self.stall_s = role, start, dict(steps), stall_s
        self.policy = RestartPolicy(retries=restarts)
        self.lost_at = 0.0
        """Time of the first loss since the last answer."""
        self.client: RankGroup | DirectCalls | None = None

    async def open(self) -> None:
        await self._make(None)

    async def call(self, method: str, **arguments: Any) -> Any:
        if method in self.steps:  # a restarted scorer is prepared in the same way
            self.steps[method] = arguments
        answer = await self._make((method, arguments))
        if self.policy.used:
            away_s = time.monotonic() - self.lost_at
            log.warning("the %s scores again %.1f s after it was lost", self.role, away_s)
        self.policy.note_progress()
        return answer

    async def _make(self, call: tuple[str, dict[str, Any]] | None) -> Any:
        """Makes the call on prepared ranks; retries after each loss of their processes."""
        while True:
            try:
                if self.client is None:
                    self.client = self.start(self.policy.generation).__enter__()
                    for method, arguments in self.steps.items():
                        await self.client.call(method, **arguments)
                return None if call is None else await self.client.call(call[0], **call[1])
            except Transient as error:
                if self.client is None or not self.client.is_remote:
                    raise
                self.lost_at = self.lost_at if self.policy.used else time.monotonic()
                if not self.policy.restarts_after(str(error)):
                    often = f"{self.policy.used + 1} times in a row without a result"
                    raise GivenUp(f"the {self.role} was lost {often}: {error}") from error
                text = "the %s is lost and restarted: %s"
                log.warning(text, self.role, error, extra=NOTICE)
                await self.close()

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            is_busy = client.is_remote and client.since is not None
            client.is_given_up = is_busy
            error = RunError(f"the {self.role} was still busy at the end") if is_busy else None
            await asyncio.to_thread(client.close, self.stall_s)
            await asyncio.to_thread(client.__exit__, type(error) if error else None, error, None)


class ScorerService:
    """The service of every rank of a scorer: a frozen model that writes log-probs of groups. It
    holds no state: after a restart it gives the same numbers."""

    mild: frozenset[str] = frozenset()

    def __init__(self, config: Config, rank: Rank, device: torch.device, role: str) -> None:
        self.config = config
        self.rank = rank
        self.device = device
        self.role = role
        self.store: GroupStore | None = None
        self.num_calls = 0

    def build(self, max_row_tokens: int, weights: str | None = None) -> None:
        """Builds the model, or replaces an earlier one. `max_row_tokens` follows from the data."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # set on the thread that makes all calls
        self.engine: Engine | None = None  # free the old model first
        folder = None if weights is None else Path(weights)
        self.engine = build_scorer(
            self.config, self.role, max_row_tokens, device=self.device, weights=folder
        )

    def open_store(self, address: dict[str, Any]) -> None:
        """Connects to the store of groups; scoring does not need their prompts."""
        self.store = open_store(address, lambda gid: Prompt(gid, (), {}))

    def score(self, gids: list[int]) -> None:
        """Writes the score column of these groups."""
        assert self.store is not None and self.engine is not None, "it is built and opened first"
        groups = self.store.get(gids)
        outputs = self.engine.forward(scored_rows(groups))
        column = on_host([output["logprobs"] for output in outputs])
        for group in groups if self.rank.rank == 0 else ():
            own, column = column[: len(group.samples)], column[len(group.samples) :]
            self.store.write(group.gid, group.attempt, {column_of(self.role): own})
        self.num_calls += 1
        freeze_gc(self.num_calls)

    def close(self, *, is_failed: bool) -> None:
        """Closes the store, except a store that belongs to the run."""
        if self.store is not None and self.store.address["kind"] != "memory":
            self.store.close()


@dataclass(eq=False)
class RefreshedReference:
    """A reference on separate devices, set to the actor's weights every `ref_update_interval`
    steps.

    Batch b is scored with the actor's weights after the last refresh step before b, as with a
    weight tag in the trainer. Groups sampled ahead of a refresh wait for it. Each reference is an
    HF folder named by its version, from which a lost scorer is restarted.
    """

    scorer: ScorerClient
    learner: LearnerClient
    folder: Path
    """An absolute path."""
    every: int
    max_row_tokens: int
    oldest: Callable[[], int]
    """Returns the steps in the oldest checkpoint from which the run may resume."""
    version: int = 0
    """Weight version of the scorer; 0: the initial weights."""

    def scores(self, batch: int) -> bool:
        """Whether the scorer has the reference of this batch."""
        return batch - batch % self.every == self.version

    async def resume(self, trained: int) -> None:
        """Restores the reference for a run resumed at this step."""
        version = trained - trained % self.every
        if version and not (self.folder / str(version)).is_dir():
            rule = f"the reference after step {version} is not in {self.folder}"
            remedy = "continue as the run began, or start over with --fresh"
            raise UserError(Problem(f"ref_update_interval = {self.every}", rule, remedy))
        if version:
            await self._install(version)

    async def refresh(self, version: int) -> None:
        """Sets the reference to the actor's weights of this version."""
        folder = str(self.folder / str(version))
        await self.learner.call("export", role="actor", folder=folder, is_async=False)
        await self._install(version)
        needed = self.oldest() - self.oldest() % self.every
        for old in self.folder.iterdir():
            if old.name.isdigit() and int(old.name) < min(needed, version):
                shutil.rmtree(old, ignore_errors=True)

    async def _install(self, version: int) -> None:
        weights = str(self.folder / str(version))
        await self.scorer.call("build", max_row_tokens=self.max_row_tokens, weights=weights)
        self.version = version


@dataclass(eq=False)
class ScorePump:
    """Sends sampled groups to the scorers; a group with all columns is ready. Scorers run
    concurrently on the same groups.

    On-policy, the groups of a chunk are scored together, as in a learner with weight tags: the
    composition of the batch then depends on the data alone, so results are bitwise repeatable.
    Otherwise the oldest sampled groups are scored at once.
    """

    state: RunState
    scorers: Mapping[str, ScorerClient]
    """The scorers, by role."""
    _: KW_ONLY
    num_chunks: int
    is_open: Callable[[int], bool] = lambda batch: True
    """Whether the scorers have the weights for a batch."""

    @property
    def chunks(self) -> list[range]:
        return chunk_slots(self.state.budget.groups_per_batch, self.num_chunks)

    async def run(self) -> None:
        while not self.state.is_over:
            if gids := self._next_groups():
                await self._score(gids)
            else:
                await self.state.wait_for(
                    "score", "sampled groups", lambda: bool(self._next_groups())
                )

    def _next_groups(self) -> list[int]:
        ledger = self.state.ledger
        if not ledger.num_sampled:
            return []
        if not self.state.budget.is_on_policy:
            sampled = ledger.gids_in("sampled")
            judged = (gid for gid in sampled if self.is_open(ledger.batch_of(gid)))
            return list(islice(judged, max(map(len, self.chunks))))
        batch = self.state.budget.trained  # without staleness only this one is open
        if not self.is_open(batch):
            return []
        for slots in self.chunks:
            # A group that the store lost is scored again together with the ready ones of its chunk.
            gids = ledger.gids_at(batch, slots, "sampled", "ready")
            if len(gids) == len(slots) and ledger.gids_at(batch, slots, "sampled"):
                return gids
        return []

    async def _score(self, gids: list[int]) -> None:
        with self.state.doing(f"the scores of {len(gids)} groups, from gid {gids[0]} on,"):
            async with self.state.kept(gids):
                await asyncio.gather(*(self._call(role, gids) for role in self.scorers))
        columns = [column_of(role) for role in self.scorers]
        for group in self._read(gids):  # lost groups were put again without columns
            if all(column in one.columns for one in group.samples for column in columns):
                self.state.held[group.gid] = group
                self.state.ledger.score(group.gid, group.attempt)
        self.state.changed.notify()

    async def _call(self, role: str, gids: list[int]) -> None:
        with timeline.span(role, f"scores {len(gids)} groups"):
            await self.scorers[role].call("score", gids=gids)

    def _read(self, gids: list[int]) -> list[Group]:
        """Returns the groups that the store still has."""
        try:
            return self.state.store.get(gids)
        except MissingGroups as missing:
            return self._read([gid for gid in gids if gid not in missing.gids])
