"""A sampler replica of a run: a sampler process that is restarted if it dies or hangs.

Requests of a lost process are sent again with the same seeds: by the executor to another replica,
or by this replica if no other can serve. On-policy a replica repeats all requests since it was last
idle, in order, to decode them together as before, with equal results. A new process pulls the
newest weights before it serves. Restarts without an answer are limited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pentad.core.errors import FlawedAnswer, GivenUp, InfraFailure, RunError, UserError
from pentad.core.roles import Installed, NamedTensors
from pentad.core.tasks import end
from pentad.core.types import Generation, Request
from pentad.runtime.restarts import RestartPolicy
from pentad.samplers.process import soon_lost
from pentad.telemetry.log import NOTICE

if TYPE_CHECKING:
    from pentad.samplers.remote import RoleSampler
    from pentad.samplers.started_server import StartedServer

log = logging.getLogger(__name__)

EXIT_WAIT_S = 0.1
"""Maximum seconds between the loss of a connection and the exit of its process."""
NO_STATS = ("tokens_drawn", "running", "waiting")


class NewestWeights(Protocol):
    """Source of the newest weights: `sync.weights_dir`, or for servers of this process
    `samplers.started_server`."""

    @property
    def newest(self) -> Any: ...

    async def publish(self, version: int, weights: Any) -> Any: ...


ProcessSampler: TypeAlias = "RoleSampler | StartedServer"
"""A sampler in one process of the replica; not usable once its future `lost` is done."""
Start: TypeAlias = "Callable[[int], Awaitable[ProcessSampler]]"
"""Starts the process of a generation and connects to it."""


class State(Enum):
    STARTING = "starting"
    """A process starts and receives the replica's state."""
    RUNNING = "running"
    ASLEEP = "asleep"
    """The process has freed the memory of its device."""
    LOST = "lost"
    """The process has ended; the next one starts unless another role uses the device."""
    CLOSED = "closed"
    """Closed by `close`, or by `failure`."""


@dataclass(eq=False)
class PendingRequest:
    """A request received since the replica was last idle."""

    request: Request
    future: asyncio.Future[list[Generation]]
    call: asyncio.Task[list[Generation]] | None = None


@dataclass(eq=False)
class Replica:
    """A `core.roles.Sampler`; one object for all successive processes of the replica."""

    name: str
    start: Start
    weight_source: NewestWeights
    policy: RestartPolicy
    """Counts the losses since the last answer (`rollout.restarts`)."""
    _: KW_ONLY
    is_exact: bool = False
    """Whether requests arrive in waves that are repeated as a whole after a loss."""
    siblings: Sequence[Replica] = ()
    """All replicas of the run, this one included."""
    capabilities: frozenset[str] = frozenset()
    state: State = State.STARTING
    sampler: ProcessSampler | None = None
    """Set while the state is RUNNING or ASLEEP."""
    is_put_to_sleep: bool = False
    """Whether it is between `sleep` and `wake`; also while the replica is LOST."""
    is_rewound: bool = False
    """Whether versions restart with the next install."""
    failure: GivenUp | None = None
    lost_because: str = ""
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    """Completed at the next change of the state."""
    num_drawn: float = 0.0
    """Tokens sampled by earlier processes."""
    supervisor: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts the first process. Raises the failure that prevents it from serving."""
        while self.sampler is None:
            try:
                self._serve(await self.start(self.policy.generation))
            except InfraFailure as failure:
                self.lost_because = str(failure)
                log.warning("%s is lost: %s", self.name, failure)
                self._count_restart()
        self.supervisor = asyncio.create_task(self._supervise(), name=f"supervisor of {self.name}")

    @property
    def version(self) -> int:
        return self.sampler.version if self.sampler is not None else -1

    # States.

    def _enter(self, state: State) -> None:
        self.state = state
        self._notify()

    def _notify(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter

    def _serve(self, sampler: ProcessSampler) -> None:
        self.sampler, self.capabilities = sampler, sampler.capabilities
        self._enter(State.ASLEEP if self.is_put_to_sleep else State.RUNNING)

    def _lose(self, why: str) -> None:
        self.sampler, self.lost_because = None, why
        self._enter(State.LOST)

    def _fail(self, failure: GivenUp) -> None:
        self.failure = failure
        self._end_pending(failure)
        self._enter(State.CLOSED)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.state is State.CLOSED:
            raise RunError("the sampler is closed")

    @property
    def has_siblings_serving(self) -> bool:
        return any(one is not self and one.sampler is not None for one in self.siblings)

    def _away(self) -> InfraFailure:
        return InfraFailure(f"{self.name} is restarted ({self.lost_because})")

    async def _serving(self) -> ProcessSampler:
        """Returns the serving process. Waits for it if no other replica serves."""
        while self.sampler is None or self.sampler.lost.done():
            self._check_open()
            if self.sampler is None and self.has_siblings_serving:
                raise self._away()
            await self._changed()
        return self.sampler

    # Requests.

    async def generate(self, request: Request) -> list[Generation]:
        self._check_open()
        if self.sampler is None and self.has_siblings_serving:
            raise self._away()
        if request.id in self.pending and not self.pending[request.id].future.done():
            assert self.sampler is not None, "request ids are unique"
            return await self.sampler.generate(request)  # the sampler rejects it
        future: asyncio.Future[list[Generation]] = asyncio.get_running_loop().create_future()
        entry = self.pending[request.id] = PendingRequest(request, future)
        if self.sampler is not None:
            self._send(entry, self.sampler)
        try:
            return await future
        finally:
            if future.cancelled() and entry.call is not None:
                entry.call.cancel()
            if future.cancelled() or not self.is_exact:
                self.pending.pop(request.id, None)
            if all(one.future.done() for one in self.pending.values()):
                self.pending.clear()

    def _send(self, entry: PendingRequest, sampler: ProcessSampler) -> None:
        entry.call = asyncio.create_task(sampler.generate(entry.request))
        entry.call.add_done_callback(lambda call: self._take_answer(entry, call))

    def _take_answer(self, entry: PendingRequest, call: asyncio.Task[list[Generation]]) -> None:
        failure = None if call.cancelled() else call.exception()
        if entry.future.done() or call is not entry.call:
            return
        if call.cancelled():
            entry.future.cancel()
        elif failure is None:
            self.policy.note_progress()
            entry.future.set_result(call.result())
        elif not self._sends_again(failure):
            entry.future.set_exception(failure)

    def _sends_again(self, failure: BaseException) -> bool:
        """Whether a request that failed this way is sent to the next process."""
        is_lost = isinstance(failure, InfraFailure) and not isinstance(failure, FlawedAnswer)
        return is_lost and self.state is not State.CLOSED and not self.has_siblings_serving

    def _end_pending(self, error: Exception) -> None:
        for entry in self.pending.values():
            if not entry.future.done():
                entry.future.set_exception(error)

    async def abort(self, request_id: str) -> None:
        self._check_open()
        await self._apply("abort", request_id=request_id)

    # Weights, memory, health.

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """Installs weights. Skips a replica that is lost while others serve: it pulls the newest
        weights before it serves again. If none serves, waits for it."""
        self._check_open()
        published = await self.weight_source.publish(version, weights)
        while True:
            sampler = await self._serving()
            try:
                if self.is_rewound and sampler.version > version:
                    await sampler.call("rewind")
                receipt = await sampler.pull(published)
                self.is_rewound = False
                return receipt
            except InfraFailure:
                if not await soon_lost(sampler.lost):
                    raise

    async def rewind(self) -> None:
        """Lets versions restart at the next install, because the process may be replaced before."""
        self._check_open()
        self.is_rewound = True

    async def sleep(self) -> None:
        """Puts the sampler to sleep. A lost replica is restarted at `wake`, because another role
        uses the device now."""
        self._check_open()
        self.is_put_to_sleep = True
        await self._apply("sleep")
        if self.state is State.RUNNING:
            self._enter(State.ASLEEP)

    async def wake(self) -> None:
        self._check_open()
        self.is_put_to_sleep = False
        self._notify()
        await self._apply("wake")
        if self.state is State.ASLEEP:
            self._enter(State.RUNNING)

    async def health(self) -> None:
        self._check_open()
        if self.sampler is None:
            raise self._away()
        await self.sampler.call("health")

    def stats(self) -> dict[str, float]:
        """Returns the stats; raises the failure that ended the replica, for the watchdog."""
        if self.failure is not None:
            raise self.failure
        now = self.sampler.stats() if self.sampler is not None else dict.fromkeys(NO_STATS, 0.0)
        return now | {"tokens_drawn": self.num_drawn + now.get("tokens_drawn", 0.0)}

    async def close(self) -> None:
        if self.state is State.CLOSED and self.failure is None:
            return
        self._enter(State.CLOSED)
        if self.supervisor is not None:
            await end(self.supervisor)
        if self.sampler is not None:
            await self.sampler.close()
        self._end_pending(RunError("the sampler was closed"))

    async def _apply(self, method: str, **arguments: Any) -> None:
        """Applies a setting. A lost process is ignored, because the next one receives the setting
        too; an error of a running process is raised."""
        if (sampler := self.sampler) is None:
            return
        try:
            await sampler.call(method, **arguments)
        except InfraFailure as failure:
            if not await soon_lost(sampler.lost):
                raise
            log.debug("%s: %s", self.name, failure)

    # Supervision.

    async def _supervise(self) -> None:
        try:
            while True:
                assert self.sampler is not None
                why = await asyncio.shield(self.sampler.lost)
                await self._restart(self.sampler, why)
        except asyncio.CancelledError:
            raise
        except GivenUp as failure:
            self._fail(failure)
        except Exception as error:
            self._fail(GivenUp(f"{self.name}: {error!r}"))

    async def _restart(self, sampler: ProcessSampler, why: str) -> None:
        began = time.monotonic()
        self.num_drawn += sampler.stats().get("tokens_drawn", 0.0)
        self._lose(why)
        await self._bury(sampler)
        log.warning("%s is lost: %s", self.name, self.lost_because)
        if self.has_siblings_serving:
            self._end_pending(self._away())
        while self.sampler is None:
            while self.is_put_to_sleep:
                await self._changed()
            self._count_restart()
            self._enter(State.STARTING)
            if (started := await self._start_again()) is not None:
                self._serve(started)
        for entry in list(self.pending.values()):
            self._send(entry, self.sampler)
        seconds = time.monotonic() - began
        text = "%s serves again %.1f s after it was lost, with weights of version %d"
        log.info(text, self.name, seconds, self.version, extra=NOTICE)

    async def _bury(self, sampler: ProcessSampler) -> None:
        """Ends the process and records how it ended."""
        sampler.process.stacks()  # a hung process writes its stacks to its log
        await asyncio.sleep(EXIT_WAIT_S)
        if ended := sampler.process.poll():
            self.lost_because = f"it {ended}"
        await sampler.close()

    def _count_restart(self) -> None:
        if not self.policy.restarts_after(self.lost_because):
            raise GivenUp(
                f"{self.name} was restarted {self.policy.used} times without an answer in between "
                f"(rollout.restarts = {self.policy.retries}); the last time {self.lost_because}"
            )

    async def _start_again(self) -> ProcessSampler | None:
        """Restarts the process with the newest weights; None if it failed before they were
        installed."""
        sampler = None
        try:
            sampler = await self.start(self.policy.generation)
            await self._bring_up_to_date(sampler)
            if not sampler.lost.done():
                return sampler
            self.lost_because = sampler.lost.result()
        except (InfraFailure, RunError, UserError, OSError) as failure:
            self.lost_because = str(failure)
            log.warning("%s could not be restarted: %s", self.name, failure)
        if sampler is not None:
            await sampler.close()
        return None

    async def _bring_up_to_date(self, sampler: ProcessSampler) -> None:
        """Applies the settings that the replica received meanwhile."""
        has = (None, False)
        while has != (wanted := (self.weight_source.newest, self.is_put_to_sleep)):
            published, is_asleep = wanted
            if published is not None and published is not has[0]:
                await sampler.pull(published)
            if is_asleep != has[1]:
                await sampler.call("sleep" if is_asleep else "wake")
            has = wanted
