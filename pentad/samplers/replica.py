"""One sampler replica of a run, started again whenever its process dies or hangs.

Requests that come while it is away wait, if no other replica serves, and are then sent again with
the same seeds; on-policy all requests since it was last idle, in their order, so that they are
decoded together as before and give the same numbers. A new process pulls the newest weights before
it serves. Starts without an answer gained are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from pentad.core.errors import FlawedAnswer, GivenUp, InfraFailure, RunError, UserError
from pentad.core.roles import Installed, NamedTensors
from pentad.core.types import Generation, Request
from pentad.samplers.dialect import OnToken
from pentad.samplers.remote import RemoteSampler
from pentad.samplers.server_replica import END_PATIENCE_S, ServerRemote
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)


class Offering(Protocol):
    """What keeps the newest weights: `sync.handoff`, or for servers `samplers.server_replica`."""

    @property
    def newest(self) -> Any: ...

    async def offer(self, version: int, weights: Any) -> Any: ...


OneProcess = RemoteSampler | ServerRemote
"""A sampler in one process of the replica; once that is lost the object is done."""
Start = Callable[[int], Awaitable[OneProcess]]
"""Starts the process of a generation and connects to it."""
EXIT_WAIT_S = 0.1
"""Between a lost connection and the end of its process."""
NO_STATS = ("tokens_drawn", "running", "waiting")


@dataclass(eq=False)
class Unanswered:
    """A request of the busy period under way."""

    request: Request
    future: asyncio.Future[list[Generation]]
    on_token: OnToken | None = None
    call: asyncio.Task[list[Generation]] | None = None


@dataclass(eq=False)
class ReplicaSampler:
    """`core.roles.Sampler`; the same object over all processes of the replica."""

    name: str
    start: Start
    handoff: Offering
    _: KW_ONLY
    max_restarts: int
    is_exact: bool = False
    """Requests come in waves, which are repeated whole."""
    siblings: Sequence[ReplicaSampler] = ()
    """All replicas of the run, this one included."""
    capabilities: frozenset[str] = frozenset()
    remote: OneProcess | None = None
    """What serves; None while the replica is away."""
    generation: int = 0
    num_restarts: int = 0
    """Since the last answer."""
    lost_because: str = ""
    failure: GivenUp | None = None
    turned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and made anew, when the replica serves again, is given up, woken or closed."""
    busy: dict[str, Unanswered] = field(default_factory=dict)
    is_paused: bool = False
    is_asleep: bool = False
    is_closed: bool = False
    is_rewound: bool = False
    num_drawn: float = 0.0
    """Tokens of processes that are gone."""
    supervisor: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts the first process. Raises what keeps it from serving."""
        while self.remote is None:
            try:
                self.remote = await self.start(self.generation)
            except InfraFailure as failure:
                self.lost_because = str(failure)
                log.warning("%s is lost: %s", self.name, failure)
                self._count_restart()
        self.capabilities = self.remote.capabilities
        self.supervisor = asyncio.create_task(self._supervise(), name=f"supervisor of {self.name}")

    @property
    def version(self) -> int:
        return self.remote.version if self.remote is not None else -1

    @property
    def has_siblings_serving(self) -> bool:
        return any(one is not self and one.remote is not None for one in self.siblings)

    # Requests.

    async def generate(self, request: Request, on_token: OnToken | None = None) -> list[Generation]:
        self._check_open()
        if self.remote is None and self.has_siblings_serving:
            raise InfraFailure(self._away())
        future: asyncio.Future[list[Generation]] = asyncio.get_running_loop().create_future()
        if request.id in self.busy and not self.busy[request.id].future.done():
            assert self.remote is not None, "requests have ids of their own"
            return await self.remote.generate(request, on_token)  # which refuses it
        entry = self.busy[request.id] = Unanswered(request, future, on_token)
        if self.remote is not None:
            self._submit(entry, self.remote)
        try:
            return await future
        finally:
            if future.cancelled() and entry.call is not None:
                entry.call.cancel()
            if future.cancelled() or not self.is_exact:
                self.busy.pop(request.id, None)
            if all(one.future.done() for one in self.busy.values()):
                self.busy.clear()

    def _submit(self, entry: Unanswered, remote: OneProcess) -> None:
        entry.call = asyncio.create_task(remote.generate(entry.request, entry.on_token))
        entry.call.add_done_callback(lambda call: self._settle(entry, call))

    def _settle(self, entry: Unanswered, call: asyncio.Task[list[Generation]]) -> None:
        failure = None if call.cancelled() else call.exception()
        if entry.future.done() or call is not entry.call:
            return
        if call.cancelled():
            entry.future.cancel()
        elif failure is None:
            self.num_restarts = 0
            entry.future.set_result(call.result())
        elif (
            not isinstance(failure, InfraFailure)
            or isinstance(failure, FlawedAnswer)
            or entry.on_token is not None
            or self.is_closed
            or self.has_siblings_serving
        ):
            entry.future.set_exception(failure)

    # Weights and state.

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """While the replica is away and others serve it is left out: it pulls what is newest
        before it comes back. Where none serves it is waited for."""
        self._check_open()
        offer = await self.handoff.offer(version, weights)
        while True:
            remote = await self._serving()
            try:
                if self.is_rewound and remote.version > version:
                    await remote.rewind()
                receipt = await remote.pull(offer)
                self.is_rewound = False
                return receipt
            except InfraFailure:
                if not remote.lost.done():
                    raise
                await self._until_away(remote)

    async def rewind(self) -> None:
        """Done by the next install: the process of that moment may be another one."""
        self._check_open()
        self.is_rewound = True

    async def abort(self, request_id: str) -> None:
        self._check_open()
        await self._apply(lambda remote: remote.abort(request_id))

    async def pause(self) -> None:
        self._check_open()
        self.is_paused = True
        await self._apply(lambda remote: remote.pause())

    async def resume(self) -> None:
        self._check_open()
        self.is_paused = False
        await self._apply(lambda remote: remote.resume())

    async def sleep(self) -> None:
        """One that is away is started when it is woken, since another has the device now."""
        self._check_open()
        self.is_asleep = True
        await self._apply(lambda remote: remote.sleep())

    async def wake(self) -> None:
        self._check_open()
        self.is_asleep = False
        self._turn()
        await self._apply(lambda remote: remote.wake())

    async def health(self) -> None:
        self._check_open()
        if self.remote is None:
            raise InfraFailure(self._away())
        await self.remote.health()

    def stats(self) -> dict[str, float]:
        """Raises what ended the replica for good: whoever watches the run gets it here."""
        if self.failure is not None:
            raise self.failure
        now = self.remote.stats() if self.remote is not None else dict.fromkeys(NO_STATS, 0.0)
        return now | {"tokens_drawn": self.num_drawn + now.get("tokens_drawn", 0.0)}

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self.supervisor is not None:
            self.supervisor.cancel()
            await asyncio.wait([self.supervisor])
        if self.remote is not None:
            await self.remote.close()
        self._end_open(RunError("the sampler was closed"))
        self._turn()

    async def _apply(self, change: Callable[[OneProcess], Awaitable[None]]) -> None:
        """For a state that a new process is given too: a lost one needs it no more. One that is
        alive and did not take it is an error."""
        if (remote := self.remote) is None:
            return
        try:
            await change(remote)
        except InfraFailure as failure:
            await asyncio.wait([remote.lost], timeout=END_PATIENCE_S)
            if not remote.lost.done():
                raise
            log.debug("%s: %s", self.name, failure)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.is_closed:
            raise RunError("the sampler is closed")

    def _away(self) -> str:
        return f"{self.name} is started again ({self.lost_because})"

    def _turn(self) -> None:
        self.turned.set()
        self.turned = asyncio.Event()

    async def _serving(self) -> OneProcess:
        while self.remote is None:
            self._check_open()
            if self.has_siblings_serving:
                raise InfraFailure(self._away())
            await self.turned.wait()
        return self.remote

    async def _until_away(self, remote: OneProcess) -> None:
        while self.remote is remote:
            await asyncio.sleep(0.01)

    # Supervision.

    async def _supervise(self) -> None:
        try:
            while True:
                assert self.remote is not None
                why = await asyncio.shield(self.remote.lost)
                await self._recover(self.remote, why)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failure = error if isinstance(error, GivenUp) else GivenUp(f"{self.name}: {error!r}")
            self.failure = failure
            self._end_open(failure)
            self._turn()

    async def _recover(self, remote: OneProcess, why: str) -> None:
        began = time.monotonic()
        self.num_drawn += remote.stats().get("tokens_drawn", 0.0)
        remote.process.stacks()  # of one that hangs, into its log
        await asyncio.sleep(EXIT_WAIT_S)
        ended = remote.process.poll()
        await remote.close()
        self.remote, self.lost_because = None, f"it {ended}" if ended else why
        log.warning("%s is lost: %s", self.name, self.lost_because)
        if self.has_siblings_serving:
            self._end_open(InfraFailure(self._away()))
        while self.remote is None:
            while self.is_asleep:
                await self.turned.wait()
            self._count_restart()
            self.remote = await self._start_again()
        for entry in list(self.busy.values()):
            self._submit(entry, self.remote)
        self._turn()
        seconds = time.monotonic() - began
        text = "%s serves again %.1f s after it was lost, with weights of version %d"
        log.info(text, self.name, seconds, self.version, extra=NOTICE)

    def _count_restart(self) -> None:
        if self.num_restarts >= self.max_restarts:
            raise GivenUp(
                f"{self.name} was started again {self.num_restarts} times without an answer gained "
                f"(rollout.restarts = {self.max_restarts}); the last time {self.lost_because}"
            )
        self.num_restarts += 1
        self.generation += 1

    async def _start_again(self) -> OneProcess | None:
        """A process with the newest weights; None where it did not come so far."""
        remote = None
        try:
            remote = await self.start(self.generation)
            await self._bring_up_to_date(remote)
            if not remote.lost.done():
                return remote
            self.lost_because = remote.lost.result()
        except (InfraFailure, RunError, UserError, OSError) as failure:
            self.lost_because = str(failure)
            log.warning("%s could not be started again: %s", self.name, failure)
        if remote is not None:
            await remote.close()
        return None

    async def _bring_up_to_date(self, remote: OneProcess) -> None:
        """Until it has the state that the replica was given meanwhile."""
        has = (None, False, False)
        while has != (wanted := (self.handoff.newest, self.is_paused, self.is_asleep)):
            offer, is_paused, is_asleep = wanted
            if offer is not None and offer is not has[0]:
                await remote.pull(offer)
            if is_paused != has[1]:
                await (remote.pause() if is_paused else remote.resume())
            if is_asleep != has[2]:
                await (remote.sleep() if is_asleep else remote.wake())
            has = wanted

    def _end_open(self, error: Exception) -> None:
        for entry in self.busy.values():
            if not entry.future.done():
                entry.future.set_exception(error)
