"""Calls of all ranks of a group of role processes, from the process that started the group.

    with RankGroup(runtime, specs, stall_s=300.0) as group:
        group.call_all("build", num_steps=8)

Every call goes to all ranks at once and returns rank 0's result. If a rank dies, hangs or fails,
the group ends with an error that names the first cause. The connections use a separate event loop
and thread, so calls can be made from any thread; the processes end with the group.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, TypeVar

from pentad.core.errors import InfraFailure, RunError, Transient
from pentad.core.scratch import scratch_folder
from pentad.runtime import roles
from pentad.runtime.awake import AwakeLoop, awake_s
from pentad.runtime.frames import revive_error
from pentad.runtime.learner_client import LearnerClient
from pentad.runtime.pace import Pace
from pentad.runtime.rank import NO_STEP, pulse
from pentad.runtime.report import (
    Failure,
    describe_hang,
    explain,
    failure_of,
    first_failure,
    save_stacks,
    size_of,
    tail,
)
from pentad.runtime.roles import RoleProcess, RoleSpec, Runtime
from pentad.runtime.wire import Connection
from pentad.telemetry.timeline import timeline

log = logging.getLogger(__name__)
T = TypeVar("T")

MEETING = "pentad-meeting-"
"""Prefix of the folders through which the ranks of one machine connect."""
POLL_S = 0.2
FOLLOW_S, SETTLE_S = 2.0, 0.3
"""Seconds to wait after a failure for reports of other ranks; less once a cause is known."""
DUMP_S = 1.0
"""Time limit for a stuck rank to write its stack, in seconds."""
START_S = 30.0
"""Minimum time without a message from a rank before its first step, in seconds."""
LEAVE_S = 15.0
"""While the run is being stopped: a rank that is silent for this many seconds counts as hung."""
END_S = 15.0
"""Time limit for ranks to exit after a failure, in seconds."""


@dataclass(slots=True, eq=False)
class Member:
    """One rank: its process, its connection, and its last report."""

    rank: int
    process: RoleProcess
    log: Any
    connection: Connection | None = None
    heard_at: float = field(default_factory=awake_s)
    step: int | None = None
    step_at: float = field(default_factory=awake_s)
    call: int = 0
    still_s: float = -1.0
    pulses: int = 0
    failure: Failure | None = None
    is_lost: bool = False
    """Whether its connection is lost but the exit of its process is not known yet."""

    def take_beat(self, beat: Mapping[str, float]) -> None:
        self.heard_at = awake_s()
        if not beat:  # the service is still being made
            return
        if beat["call"] > self.call or beat["pulses"] > self.pulses:
            pulse()  # shows the progress of the learner to the monitor of this process
        self.call, self.still_s = int(beat["call"]), beat["still_s"]
        self.pulses = int(beat["pulses"])
        self.take_step(None if beat["step"] == NO_STEP else int(beat["step"]))

    def take_step(self, step: int | None) -> None:
        if step != self.step:
            self.step, self.step_at = step, awake_s()


class Failed(Exception):
    """A rank failed; the failure is in its member."""


class RankGroup(LearnerClient):
    """Starts, monitors and ends the processes of a group, and makes calls on them."""

    is_remote = True
    service = None

    def __init__(
        self,
        runtime: Runtime,
        specs: Sequence[RoleSpec],
        *,
        stall_s: float,
        timeout_s: float = 600.0,
        errors: Mapping[str, type[Exception]] | None = None,
        why_away: Callable[[int], str | None] = lambda rank: None,
        device: Any = None,
        name: str = "learner",
    ) -> None:
        """`specs`: by rank. The group is ended if one of its processes sends nothing for `stall_s`,
        or a call on all ranks makes no progress; until the first step a call may take `timeout_s`,
        if that is longer. `errors`: classes that callers handle, by name; `why_away`: why the slot
        of a rank is unusable, None if it is usable; `device`: that of the ranks, for callers."""
        super().__init__(name)
        self.runtime = runtime
        self.specs = specs
        self.stall_s, self.timeout_s = stall_s, timeout_s
        self.errors: dict[str, type[Exception]] = {"OSError": OSError, **(errors or {})}
        self.why_away = why_away
        self.device = device
        self.world = len(specs)
        self.members: list[Member] = []
        self.lock = threading.Lock()
        self.failure: Exception | None = None
        """The error that ended it."""
        self.failed, self.noticed = asyncio.Event(), asyncio.Event()
        """Events: the failure is known; a rank failed and the cause is being determined."""
        self.is_ending = False
        """Whether ranks are expected to exit."""
        self.cause: Failure | None = None
        """The failure of the rank that failed first."""
        self.seen_at = self.failed_at = self.joined_at = awake_s()
        """Times of that rank's last message, of the group's failure, and when all ranks had
        connected."""
        self.pace = Pace(self.world)
        self.stack = ExitStack()
        """Resources that are removed after the ranks have ended."""
        self.loop = AwakeLoop()
        self.thread = threading.Thread(target=self._run_loop, name="rank group", daemon=True)

    # Starting

    def __enter__(self) -> RankGroup:
        """Starts the ranks. The first call waits until they are connected."""
        self.thread.start()
        self.opening = asyncio.run_coroutine_threadsafe(self._open(), self.loop)
        return self

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def _open(self) -> None:
        connecting = {}
        for rank, spec in enumerate(self.specs):
            try:
                member = Member(rank, await self.runtime.start(spec), spec.log)
            except InfraFailure as failure:
                text = f"could not be started: {failure}"
                raise self._explained([Failure(rank, None, "died", text, 0.0)]) from failure
            self.members.append(member)
            connecting[rank] = asyncio.create_task(self._connect(member))
        self.watching = asyncio.create_task(self._watch())
        self.watching.add_done_callback(self._note_watch_ended)
        await self._all(lambda one: connecting[one.rank])
        place = await self._choose_place()
        await self._all(lambda one: self._ask(one, "join", place=place))
        self.joined_at = awake_s()

    async def _choose_place(self) -> dict[str, Any]:
        """Returns the rendezvous of the ranks: that of the runtime; on one machine a folder that no
        other user can open, removed after they have ended; else a port that rank 0 opens."""
        if self.runtime.rendezvous is not None:
            return dict(self.runtime.rendezvous)
        host = self.members[0].process.address[0]
        if self.world > 1 and ip_address(host).is_loopback:
            return {"file": str(self.stack.enter_context(scratch_folder(MEETING)) / "store")}
        places = await self._all(lambda one: self._ask(one, "open_rendezvous", host=host))
        chosen: dict[str, Any] = places[0]["value"]
        return chosen

    async def _connect(self, member: Member) -> None:
        def on_event(event: str, value: Any) -> None:
            if event == "beat":
                member.take_beat(value)
            elif event == "log" and member.rank == 0:
                level, name, text, is_notice = value
                extra = {"is_notice": True} if is_notice else None
                logging.getLogger(name).log(level, "%s", text, extra=extra)

        try:
            member.connection = await roles.connect(member.process, on_event, patience_s=None)
        except InfraFailure as failure:
            self._note_lost(member, str(failure))
            raise Failed from failure

    # Calls

    def call_all(self, method: str, **arguments: Any) -> Any:
        with self.lock:
            self.check()
            try:
                self.opening.result()
                began = awake_s()
                answers = self._wait(
                    self._all(
                        lambda one: self._ask(one, "call", method=method, arguments=arguments)
                    )
                )
            except BaseException as error:
                self.is_broken = True
                if self.failure is None and isinstance(error, Exception):
                    self.failure = error
                raise
            waited = [answer.get("waited_s", 0.0) for answer in answers]
            self.pace.take(method, awake_s() - began, waited, self.members[0].step)
            self._note_spans(method, awake_s() - began, waited)
        return self._value(answers[0])

    def _note_spans(self, method: str, seconds: float, waited: Sequence[float]) -> None:
        """Records each rank's work in a call that has just ended."""
        end = timeline.clock()
        for member, wait in zip(self.members, waited, strict=True):
            lane, stop = member.process.name, end - min(wait, seconds)
            timeline.add(lane, method, end - seconds, stop)
            timeline.add(lane, "waits for other ranks", stop, end)

    def query(self, method: str, **arguments: Any) -> Any:
        self.check()
        self.opening.result()
        asking = self._ask(self.members[0], "ask", method=method, arguments=arguments)
        return self._value(self._wait(self._unless_failed(asking)))

    @property
    def straggler(self) -> int | None:  # type: ignore[override]
        return self.pace.straggler

    def check(self) -> None:
        """Raises the failure that ended the group."""
        if self.failure is not None:
            raise self.failure
        if self.is_broken:
            raise Transient("the ranks do not answer any more: a call failed before")

    def _value(self, answer: Mapping[str, Any]) -> Any:
        if "mild" not in answer:
            return answer["value"]
        described = answer["mild"]
        if described["kind"] in self.errors:
            raise self.errors[described["kind"]](described["text"])
        raise revive_error(self.members[0].process.name, described)

    async def _ask(self, member: Member, what: str, **arguments: Any) -> Any:
        """Returns the answer of one rank; notes its failure and raises Failed."""
        assert member.connection is not None, "all are connected"
        try:
            answer = await member.connection.call(what, **arguments)
        except InfraFailure as failure:
            self._note_lost(member, str(failure))
            raise Failed from failure
        except RunError as error:
            self._note(member, Failure(member.rank, member.step, "run", str(error), awake_s()))
            raise Failed from error
        if "failure" in answer:
            self._note(member, failure_of(answer["failure"], at=awake_s()))
            raise Failed
        if "step" in answer:
            member.take_step(answer["step"])
        return answer

    async def _all(self, action: Callable[[Member], Awaitable[T]]) -> list[T]:
        """Returns the answers of all ranks. Raises the first cause once a rank fails or hangs."""

        async def every() -> list[T]:
            return list(await asyncio.gather(*map(action, self.members)))

        return await self._unless_failed(every())

    async def _unless_failed(self, doing: Coroutine[Any, Any, T]) -> T:
        """Returns the result; raises the group's failure if it occurs first or a rank fails in the
        call."""
        task, failed = asyncio.create_task(doing), asyncio.create_task(self.failed.wait())
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not isinstance(task.exception(), Failed):
                return task.result()
            await failed
            assert self.failure is not None, "it is known"
            raise self.failure
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    def _wait(self, doing: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(doing, self.loop).result()

    # Watching

    async def _watch(self) -> None:
        """Watches the ranks during calls and between them; only this ends the group."""
        while self.failure is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.noticed.wait()
            if error := await self._find_failure():
                self._fail(error)

    async def _find_failure(self) -> Exception | None:
        for one in self.members:
            lost = one.connection and one.connection.lost
            if lost and lost.done() and not self.is_ending:
                self._note_lost(one, lost.result())
        if why := self.runtime.lost():
            return RunError(why)
        if any(one.failure is not None for one in self.members):
            return await self._cause()
        if gone := self._find_away():
            return self._explained(gone)
        if hung := self._find_hang():
            return await self._stuck(*hung)
        return None

    def _note_watch_ended(self, watching: asyncio.Task[None]) -> None:
        """Fails the group after an error in the watcher itself."""
        error = None if watching.cancelled() else watching.exception()
        if isinstance(error, Exception):
            log.error("the ranks are not monitored any more", exc_info=error)
            self._fail(RunError(f"the ranks are not monitored any more: {error!r}"))

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.is_broken = True
        self.failed.set()

    def _find_away(self) -> list[Failure]:
        """Returns failures of ranks whose slot was removed, even if their processes run."""
        found = [(one, self.why_away(one.rank)) for one in self.members]
        now = awake_s()
        return [
            Failure(one.rank, one.step, "away", f"its slot is gone ({why})", now)
            for one, why in found
            if why is not None
        ]

    def _find_hang(self) -> tuple[str, list[Member]] | None:
        """Returns the hung ranks and the evidence; None if none hangs."""
        now, limit = awake_s(), self.stall_s
        silence_s = min(limit, LEAVE_S) if self.is_stopping() else limit
        silent = [
            one
            for one in self.members
            if now - one.heard_at > (max(silence_s, START_S) if one.step is None else silence_s)
        ]
        if silent:
            return "does not run", silent
        if all(one.step is None for one in self.members):  # models are being loaded
            limit = max(limit, self.timeout_s)
        within = [one for one in self.members if one.still_s >= 0]
        if not within or min(one.still_s for one in within) <= limit:
            return None
        last = max(one.call for one in self.members)
        behind = [one for one in self.members if one.call < last]
        return "makes no progress in a call of all ranks", behind or within

    def _note(self, member: Member, failure: Failure) -> None:
        member.failure = failure
        self.noticed.set()

    def _note_lost(self, member: Member, why: str) -> None:
        if member.failure is None:
            lines, member.is_lost = tail(member.log), True
            text, now = f"does not answer any more ({why})", awake_s()
            self._note(member, Failure(member.rank, member.step, "died", text, now, lines=lines))

    async def _cause(self) -> Exception:
        """Returns the first of all failures, after a time for related ones to be reported."""
        waited = 0.0
        while waited < FOLLOW_S:
            await asyncio.sleep(SETTLE_S)
            waited += SETTLE_S
            self._look_at_ends()
            known = [one for one in self.members if one.failure and not one.is_lost]
            if any(one.failure and not one.failure.is_consequence for one in known):
                break
        failures = [one.failure for one in self.members if one.failure is not None]
        if all(failure.is_consequence for failure in failures):
            silent = [one for one in self.members if one.failure is None]
            if silent:  # they were waiting for another rank
                return await self._stuck("did not answer the others", silent, failures)
        return self._explained(failures)

    def _look_at_ends(self) -> None:
        """Checks for exited processes: an exit is more informative than a lost connection."""
        for one in self.members:
            if (ended := one.process.ended()) is None:
                continue
            one.is_lost = False
            at = one.failure.at if one.failure else awake_s()
            if one.failure is None or one.failure.kind == "died":
                lines = tail(one.log)
                one.failure = Failure(one.rank, one.step, "died", ended, at, lines=lines)

    async def _stuck(
        self, verb: str, members: Sequence[Member], others: Sequence[Failure] = ()
    ) -> Exception:
        """Describes the work of these ranks, slowest first. All ranks write their stacks, which
        show which rank waits for which."""
        sizes = [size_of(one.log) for one in self.members]
        for one in self.members:
            one.process.stacks()
        await asyncio.sleep(DUMP_S)
        save_stacks([(one.process.name, one.log) for one in self.members], sizes)
        now = awake_s()
        found = list(others)
        for one in members:
            is_stopped = one.process.is_stopped
            text = describe_hang(verb, one.step, now - one.step_at, is_stopped=is_stopped)
            order = -1.0 if one.step is None else float(one.step)
            found.append(Failure(one.rank, one.step, "stuck", text, order, lines=tail(one.log)))
        return self._explained(found)

    def _explained(self, failures: Sequence[Failure]) -> Exception:
        self.cause, self.failed_at = first_failure(list(failures)), awake_s()
        if self.cause.rank < len(self.members):
            self.seen_at = self.members[self.cause.rank].heard_at
        return explain(list(failures), self.world, [spec.log for spec in self.specs])

    # Ending

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and self.runtime.needs_end:
                self.opening.result()
            is_open = self.opening.done() and not self.opening.exception()
            is_busy = error is not None and self.lock.locked()  # the call in progress has priority
            if is_open and not self.is_broken and not is_busy:
                self._wait(self._end(is_failed=error is not None))
        finally:
            self._shut_down()

    async def _end(self, *, is_failed: bool) -> None:
        self.is_ending = True
        ending = self._all(lambda one: self._ask(one, "end", is_failed=is_failed))
        if not is_failed:
            await ending
            return
        try:
            async with asyncio.timeout(END_S):
                await ending
        except (RunError, TimeoutError) as failure:  # the first failure is raised
            log.debug("after the failure: %s", failure)

    def _shut_down(self) -> None:
        """Ends all processes of the group, and the threads that wait for them."""
        self.is_broken = True
        self._wait(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.stack.close()

    async def _close(self) -> None:
        for one in self.members:
            if one.connection is not None:
                await one.connection.close()
            one.process.kill()
        own = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not own]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
