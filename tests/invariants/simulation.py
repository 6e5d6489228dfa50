"""The real ledger, budget and pumps on a virtual clock, with simulated replicas and learner.

Nothing sleeps: when no task can go on, the clock jumps to the next timer, and where there is none
the schedule is deadlocked. A run may be killed, stopped or fail at any moment and goes on from its
last checkpoint, until all its batches are trained.
"""

import asyncio
import json
import random
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pentad.core.errors import DataFailure, GivenUp, InfraFailure, RunError, Transient
from pentad.core.roles import Installed
from pentad.core.tasks import end
from pentad.core.types import Generation, Group, Prompt, Sample
from pentad.data.ledger import Ledger
from pentad.data.prompts import RejectedPrompt
from pentad.data.store import MemoryStore
from pentad.rollout.drafts import Draft
from pentad.rollout.executor import GRACE_S
from pentad.sync.publisher import Publisher, Snapshot, take_snapshot
from pentad.trainer.pumps.oversampling import Oversampling
from pentad.trainer.pumps.rollout_pump import RolloutPump
from pentad.trainer.pumps.scheduler import Scheduler
from pentad.trainer.pumps.scorers import ScorePump
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.pumps.train_pump import BatchTrainer, PublishPump
from pentad.trainer.records import TrainedBatch
from pentad.trainer.run import Run
from pentad.trainer.sampling.placement import DeviceTurns, Placement

MAX_TURNS = 50_000
"""Turns of the event loop after which a schedule counts as one that does not end."""
FACTS = {
    "steps": [],
    "critic_steps": [],
    "lengths": [],
    "metrics": {},
    "rerouted_share": None,
    "signs": {"num_impossible": 0, "constant": None, "gap": None, "is_fresh": True},
}


class Deadlock(AssertionError):
    pass


class VirtualClock(selectors.DefaultSelector):
    """Time that passes only when there is nothing else to do."""

    now = 0.0
    num_turns = 0

    def select(self, timeout: float | None = None) -> list:
        self.num_turns += 1
        if self.num_turns > MAX_TURNS:
            raise Deadlock(f"it has not ended after {MAX_TURNS} turns of the event loop")
        if timeout is None:
            raise Deadlock("nothing is under way and no timer is set")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class SimulatedScorer:
    """In the place of the thread that calls a scorer."""

    def __init__(self, simulation: "Simulation", role: str) -> None:
        self.simulation = simulation
        self.role = role

    async def call(self, method: str, gids: list[int]) -> None:
        store = self.simulation.state.store
        self.simulation.lose_unit()
        while store.missing(gids):
            await asyncio.sleep(0.2)
        groups = store.get(gids)
        await self.simulation.pass_time(self.simulation.world.score_s)
        for group in groups:
            columns = {f"{self.role}_logprobs": [one.rollout_logprobs for one in group.samples]}
            store.write(group.gid, group.attempt, columns)


@dataclass
class World:
    """What a schedule is drawn from; durations in virtual seconds."""

    groups_per_batch: int = 2
    num_batches: int = 3
    max_staleness: int = 1
    num_replicas: int = 2
    num_chunks: int = 1
    max_groups: int | None = None
    is_shared: bool = False
    offload: bool = False
    rollout_s: float = 1.0
    train_s: float = 1.0
    publish_s: float = 0.2
    deadline_s: float = 20.0
    num_scorers: int = 0
    score_s: float = 0.5
    faults: dict[str, float] = field(default_factory=dict)
    """Kind -> probability, of a group unless said otherwise."""
    num_started: int | None = None
    """Groups that a step starts, where that is more than it trains."""
    max_carries: int = 1
    holds: bool = False
    """Whether samplers hold by themselves."""
    num_ends: int = 0
    """Times that the run is killed or asked to stop."""


class Replica:
    """A sampler that has a version, may die, and is restarted with the newest weights."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.version = simulation.budget.published
        self.is_serving = True
        self.death: asyncio.Event = asyncio.Event()

    async def install(self, version: int, weights: Any) -> Installed:
        await self.simulation.pass_time(self.simulation.world.publish_s)
        if self.death.is_set():
            raise RunError("the replica is dead")
        self.version, self.is_serving = max(version, self.version), True
        return Installed(version, len(list(weights)), snapshot_of(version).digest.hex())

    async def sleep(self) -> None:
        await self.simulation.pass_time(0.1)

    wake = sleep

    def die(self) -> None:
        self.is_serving = False
        self.death.set()
        self.simulation.beside(self._restart())

    async def _restart(self) -> None:
        await self.simulation.pass_time(2.0)
        self.death = asyncio.Event()
        self.version = self.simulation.newest_version
        self.is_serving = True
        self.simulation.state.changed.notify()


class LosingStore(MemoryStore):
    """One of its two storage units may die, and comes back empty."""

    def lose(self, unit: int) -> None:
        self.delete([gid for gid in self.groups if gid % 2 == unit])


class SimulatedLearner:
    """In the place of the thread that calls the ranks."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation

    async def call(self, method: str, **arguments: Any) -> None:
        if method == "add":
            self.simulation.lose_unit()
            while self.simulation.state.store.missing(arguments["gids"]):
                await asyncio.sleep(0.2)
            self.simulation.check_lags(arguments["gids"])
            self.simulation.check_scores(arguments["gids"])
            await self.simulation.pass_time(self.simulation.world.train_s)

    def call_all(self, method: str) -> None:
        pass

    def query(self, method: str, **arguments: Any) -> dict[str, Any]:
        return FACTS

    async def run(self, function: Callable[[], Any]) -> Any:
        await self.simulation.pass_time(0.1)
        return function()


class SimulatedSource:
    """Batches of groups, as `trainer.sources.rollouts` has them."""

    saves_first = False

    def __init__(self, trainer: BatchTrainer, take_weights: Callable[..., Any]) -> None:
        self.trainer = trainer
        self.doing = trainer.state.doing
        self.take_weights = take_weights
        self.publish = trainer.publish.submit

    async def train(self, step: int, timer: Any) -> TrainedBatch | None:
        trained = await self.trainer.train(step, timer)
        if trained is not None:
            self.trainer.state.budget.count_trained()
        return trained

    async def after_update(self, trained: TrainedBatch) -> None:
        pass


class SimulatedRun(Run):
    """The steps of a run, without folders and checkpoints."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.learner = SimulatedLearner(simulation)
        self.supervisor = SimpleNamespace(
            note_step=lambda: None, regroup_if_due=lambda *given: None
        )
        self.bounds = SimpleNamespace(past=lambda steps, signs: "")
        self.recover = self.timer = self.unrecorded = None
        self.savers = {}
        self.stop = simulation.state.stop
        self.trained = simulation.budget.trained
        self.num_steps = simulation.world.num_batches

    def save_and_record(self, source: SimulatedSource, trained: TrainedBatch) -> None:
        self.simulation.after_step(trained)


class Simulation:
    """One run over all its starts."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)
        self.budget = self._budget()
        self.saved: tuple[str, list[Group], int] | None = None
        """Ledger, groups and trained batches of the last checkpoint."""
        self.ended: dict[int, str] = {}
        """gid -> how it ended, as of now; goes back with a checkpoint."""
        self.ended_when_saved: dict[int, str] = {}
        self.num_starts = 0
        self.num_losses = 0
        self.most_live = 0
        self.num_carried = 0

    def _budget(self) -> Budget:
        world = self.world
        return Budget(
            *(world.groups_per_batch, world.max_staleness, world.num_batches),
            max_carries=world.max_carries if world.num_started else 0,
        )

    @property
    def capacity(self) -> int:
        return self.world.num_started or self.budget.capacity_groups

    @property
    def max_lag(self) -> int:
        return self.world.max_staleness + (self.world.max_carries if self.world.num_started else 0)

    # -- a run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Starts the run again until it is over; AssertionError where it breaks a promise."""
        for end_s in [*(self.draw.uniform(0.5, 15) for _ in range(self.world.num_ends)), None]:
            while True:  # what ended by itself is started again
                loop = VirtualLoop()
                try:
                    is_over = loop.run_until_complete(self._start(end_s))
                finally:
                    self._close(loop)
                if is_over:
                    self._check_end()
                    return
                if end_s is not None:
                    break

    def _close(self, loop: VirtualLoop) -> None:
        """Ends what is left of a deadlock or a kill."""
        loop.clock.num_turns = 0
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.close()

    async def _start(self, end_s: float | None) -> bool:
        self.num_starts += 1
        assert self.num_starts < 200, "the run does not get on"
        self._build()
        running = asyncio.create_task(self.scheduler.run(self.run_of_steps.steps(self.source)))
        loop = asyncio.get_running_loop()
        if end_s is not None:
            stop = self.draw.random() < 0.5
            loop.call_later(
                end_s, self.state.request_stop if stop else running.cancel, "asked to stop"
            )
        try:
            await running
        except asyncio.CancelledError:
            return False
        except RunError as failure:  # a Transient, or no replica took the weights
            is_end = isinstance(failure, Transient | GivenUp)
            if not is_end and "replica is dead" not in str(failure):
                raise
            return False
        finally:
            for task in self.tasks:
                task.cancel()
        return self.state.budget.trained == self.world.num_batches

    def _build(self) -> None:
        world = self.world
        self.budget = self._budget()
        ledger = Ledger(world.groups_per_batch, has_scorers=world.num_scorers > 0)
        self.state = RunState(ledger, LosingStore(), self.budget)
        if self.saved is not None:
            saved, groups, trained = self.saved
            self.state.resume(json.loads(saved), groups, trained)
        self.ended = dict(self.ended_when_saved)
        self._watch_ends(self.state.ledger)
        self.tasks: list[asyncio.Task[None]] = []
        self.zombies: set[asyncio.Task[None] | None] = set()
        self.newest_version = self.budget.published
        self.replicas = [Replica(self) for _ in range(world.num_replicas)]
        placement = Placement(
            is_shared=world.is_shared,
            max_staleness=world.max_staleness,
            offload_rollout=world.offload,
        )
        device_turns = DeviceTurns(placement, self.replicas)
        publish = PublishPump(self.state, Publisher(self.replicas), None, device_turns)
        rollout = RolloutPump(
            self.state,
            SimpleNamespace(prompt=self.prompt, row_of=lambda gid: f"row {gid}"),
            self,
            device_turns,
            lambda group: "no_signal" if self.happens("no_signal") else None,
            max_groups=None if world.num_started else world.max_groups,
            oversampling=self._oversampling(),
        )
        self.run_of_steps = SimulatedRun(self)
        trainer = BatchTrainer(
            self.state,
            self.run_of_steps.learner,
            publish,
            device_turns,
            world.num_chunks,
        )
        self.source = SimulatedSource(trainer, self.fetch)
        forever = SimpleNamespace(run=asyncio.Event().wait)
        roles = ("ref", "teacher")[: world.num_scorers]
        self.scorers = {role: SimulatedScorer(self, role) for role in roles}
        score = ScorePump(self.state, self.scorers, num_chunks=world.num_chunks)
        self.scheduler = Scheduler(
            self.state.request_stop,
            forever,
            rollout,
            publish,
            score if self.scorers else None,
        )

    def _oversampling(self) -> Oversampling | None:
        self.num_allowed: int | None = None
        if self.world.num_started is None:
            return None
        oversampling = Oversampling(self.state, self.world.num_started)
        if self.world.holds:
            oversampling.hold = self.hold_after
        return oversampling

    def hold_after(self, num: int | None) -> None:
        self.num_allowed = num

    def _watch_ends(self, ledger: Ledger) -> None:
        """Notes the end of every gid. A second end is the ledger's to refuse."""
        drop, ack = ledger.drop, ledger.ack

        def dropping(gid: int, reason: str) -> None:
            drop(gid, reason)
            self._end(gid, reason)

        def acking(gids: list[int]) -> None:
            ack(gids)
            for gid in gids:
                self._end(gid, "trained")

        ledger.drop, ledger.ack = dropping, acking

    def _end(self, gid: int, how: str) -> None:
        assert gid not in self.ended, f"group {gid} ended twice: {self.ended[gid]}, {how}"
        self.ended[gid] = how

    # -- chance ---------------------------------------------------------------------------------

    def happens(self, what: str) -> bool:
        return self.draw.random() < self.world.faults.get(what, 0.0)

    def lose_unit(self) -> None:
        if self.happens("store_loss"):
            self.num_losses += 1
            self.state.store.lose(self.draw.randrange(2))

    async def pass_time(self, mean_s: float) -> None:
        long = 20.0 if self.happens("slow") else 1.0
        await asyncio.sleep(long * self.draw.expovariate(1 / mean_s) if mean_s else 0)

    def beside(self, work: Awaitable[None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    # -- the executor ---------------------------------------------------------------------------

    def prompt(self, gid: int) -> Prompt:
        if self.happens("bad_row"):
            raise RejectedPrompt(gid, "bad_row", "no prompt")
        return Prompt(gid, (1, 2), {})

    async def rollout(self, prompt: Prompt, attempt: int, draft: Draft) -> Group:
        self.check_memory()
        begun = [version for answer in draft.answers for version in answer.versions]
        num_left = 3
        while True:
            serving = [replica for replica in self.replicas if replica.is_serving]
            if not serving:
                await asyncio.sleep(0.5)
                continue
            draft.note_sent()
            replica = self.draw.choice(serving)
            working = asyncio.ensure_future(self._on(replica))
            try:
                await asyncio.wait([working], timeout=self.world.deadline_s)
            except asyncio.CancelledError:
                if draft.is_cut and self.draw.random() < 0.8:  # else the tokens are lost
                    drawn = [*begun[:1], replica.version]
                    draft.answers = [
                        Generation([3] * len(drawn), [0.0] * len(drawn), drawn, "abort")
                    ]
                    self.num_carried += 1
                raise
            finally:
                await end(working, timeout_s=GRACE_S)
            if working.done() and not working.cancelled():
                if (versions := working.result()) is not None:
                    break
                continue
            num_left -= 1
            if not num_left:
                raise DataFailure("deadline", "it hangs")
            draft.answers, begun = (), []
        draft.note_answered()
        self.lose_unit()
        await self.pass_time(0.1)  # rewards
        if self.happens("data_failure"):
            raise DataFailure("reward_error", "no reward", is_final=True)
        if self.happens("infra_failure"):
            raise InfraFailure("no replica is left")
        return Group(
            prompt, [replace(sample(*(begun or versions)[:1], versions[1]), columns={})], attempt
        )

    async def _on(self, replica: Replica) -> list[int] | None:
        """Versions of the tokens; None if the replica died meanwhile."""
        first, death = replica.version, replica.death
        if self.happens("death"):
            replica.die()
        if self.happens("hang"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # one that never obeys would keep any run from its end
                if asyncio.current_task() in self.zombies or not self.happens("zombie"):
                    raise
                self.zombies.add(asyncio.current_task())
                asyncio.current_task().uncancel()
        await self.pass_time(self.world.rollout_s)
        while self.num_allowed == 0:
            await asyncio.sleep(0.1)
        if death.is_set():
            return None
        if self.num_allowed:
            self.num_allowed -= 1
        return [first, replica.version]

    def check_memory(self) -> None:
        live = self.state.ledger.funnel().in_flight
        assert live <= self.capacity, f"{live} groups live"
        assert len(self.state.store.groups) <= live
        self.most_live = max(self.most_live, live)

    # -- the learner ----------------------------------------------------------------------------

    def check_lags(self, gids: list[int]) -> None:
        self.check_memory()
        for group in self.state.store.get(gids):
            versions = group.samples[0].versions[group.samples[0].mask]
            trained = self.budget.trained
            assert versions.max() <= trained, "a token of the future"
            lag = trained - versions.min()
            assert lag <= self.max_lag, f"group {group.gid} has lag {lag}"

    def check_scores(self, gids: list[int]) -> None:
        wanted = {f"{role}_logprobs" for role in self.scorers}
        for group in self.state.store.get(gids):
            assert wanted == group.samples[0].columns.keys(), "it is trained without its scores"

    async def fetch(self, version: int, timer: Any) -> Snapshot:
        self.newest_version = version
        return snapshot_of(version)

    def after_step(self, trained: TrainedBatch) -> None:
        if self.draw.random() < 0.7:
            progress = trained.progress
            self.saved = json.dumps(progress.ledger), progress.ready, trained.batch + 1
            gone = progress.ledger["next_gid"]
            live = {gid for gid, *_ in progress.ledger["live"]}
            self.ended_when_saved = {
                gid: how for gid, how in self.ended.items() if gid < gone and gid not in live
            }

    # -- the end --------------------------------------------------------------------------------

    def _check_end(self) -> None:
        funnel = self.state.ledger.funnel()
        assert funnel.in_flight == 0 and not self.state.store.groups
        assert sorted(self.ended) == list(range(funnel.drawn)), "a gid has not ended"
        trained = [gid for gid, how in self.ended.items() if how == "trained"]
        wanted = self.world.num_batches * self.world.groups_per_batch
        assert len(trained) == funnel.trained == wanted
        assert funnel.drawn == funnel.trained + sum(funnel.dropped.values())


@cache
def snapshot_of(version: int) -> Snapshot:
    return take_snapshot(version, [("w", torch.tensor([float(version)]))], copy=False)


@cache
def sample(first: int, last: int) -> Sample:
    return Sample(
        ids=np.array([1, 2, 3, 4]),
        mask=np.array([False, False, True, True]),
        rollout_logprobs=np.zeros(4, np.float32),
        versions=np.array([-1, -1, first, last]),
        finish="stop",
        reward=1.0,
    )
