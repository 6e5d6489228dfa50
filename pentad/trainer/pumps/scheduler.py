"""The scheduler: runs the pumps and a watchdog on one event loop, and ends the run.

    prompts --(admit: budget)--> rollout pump --(commit)--> ledger + store
    [ledger + store --(columns)--> score pump --(score)--> ledger + store]   with scorers apart
    ledger + store --(lease)--> steps --(snapshot)--> publish pump --(install)--> samplers
    publish pump --(published)--> budget, which opens the next batch

| pump    | waits for                  | is unblocked by            |
|---------|----------------------------|----------------------------|
| rollout | a free slot the budget allows | publish, a dropped group |
| score   | sampled groups                | a committed group        |
| steps   | the next groups of the batch  | a committed or scored group |
| publish | a snapshot                    | a finished step          |
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pentad.core.errors import RunError, Transient, UserError, first_cause
from pentad.runtime.awake import awake_s
from pentad.runtime.process import frame_of
from pentad.runtime.rank import pulse
from pentad.trainer.pumps.state import RunState
from pentad.trainer.stopping import stop_on_signals

log = logging.getLogger(__name__)

GROUP_S = 30.0
"""Extra time of the watchdog over the rank group's own limit for a call on all ranks, in
seconds."""


class Watchdog:
    """If a run makes no progress, names the stuck component, the time and the condition it waits
    for. Long work (a training step, an evaluation, long answers) is no stall: it is logged, and a
    warning is logged only if no component works. The abort applies always.

    Warns after `warn_s` without progress, and again after each further `warn_s`; ends the run after
    `abort_s`. Progress is a change of the committed, dropped, trained or published counts, or a
    sign of work: a microbatch, a tensor, a sampled token.
    """

    def __init__(
        self,
        state: RunState,
        *,
        warn_s: float,
        abort_s: float,
        sampled: Callable[[], float] = float,
        is_watched: bool = False,
        check: Callable[[], None] = lambda: None,
        show: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = awake_s,
    ) -> None:
        self.state = state
        self.warn_s = warn_s
        self.abort_s = abort_s
        self.sampled = sampled
        """Tokens sampled so far."""
        self.is_watched = is_watched
        """Whether the group of ranks has its own monitor, which names the rank that hangs."""
        self.check = check
        """Raises the failure that ended the learner."""
        self.show = show
        """Called with a description of the work in progress."""
        self.clock = clock
        self.step_began = (-1, 0.0, clock())
        """Step in progress, tokens sampled before it, and the time it was first seen."""
        self.last_progress: tuple[object, ...] = ()
        self.last_change = clock()
        self.last_warning = clock()
        self.last_beat = clock()
        """Time of the event loop's last turn."""
        self.period_s = min(warn_s, abort_s, 5.0) / 4

    async def run(self) -> None:
        with self.watching_the_loop():
            while True:
                self.last_beat = self.clock()
                await asyncio.sleep(self.period_s)
                self.look()
                self.show(self.phase())

    @contextmanager
    def watching_the_loop(self) -> Iterator[None]:
        """Watches the event loop from a thread, because code that blocks the loop also blocks the
        watchdog."""
        owner, done = threading.get_ident(), threading.Event()
        is_main = owner == threading.main_thread().ident
        before = signal.signal(signal.SIGUSR2, self._give_up) if is_main else None
        watcher = threading.Thread(
            target=self._watch_loop, args=(owner, is_main, done), daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            if is_main:
                signal.signal(signal.SIGUSR2, before)

    def _watch_loop(self, owner: int, is_main: bool, done: threading.Event) -> None:
        warned_at = self.clock()
        while not done.wait(self.period_s):
            now = self.clock()
            held_s = now - self.last_beat
            if held_s >= self.abort_s and is_main:
                # The signal handler raises in the code that blocks the loop.
                signal.pthread_kill(owner, signal.SIGUSR2)
            if held_s >= self.warn_s and now - warned_at >= self.warn_s:
                warned_at = now
                log.warning("%s", held_loop(held_s, frame_of(owner)))

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        raise RunError(held_loop(self.clock() - self.last_beat, frame))

    def look(self) -> None:
        """Reads the counters once; raises RunError if the run has made no progress for too long."""
        self.check()
        now = self.clock()
        progress = self._progress()
        if progress != self.last_progress:
            self.last_progress, self.last_change, self.last_warning = progress, now, now
            return
        stalled_s = now - self.last_change
        working = self.state.working
        if stalled_s >= self.abort_s + (GROUP_S if working and self.is_watched else 0.0):
            raise Transient(f"no progress for {stalled_s:.0f} s: {self.report()}")
        if now - self.last_warning >= self.warn_s:
            self.last_warning = now
            level = logging.INFO if working else logging.WARNING
            log.log(level, "batch %d stalled for %.0f s: %s", self._batch, stalled_s, self.report())

    def phase(self) -> str:
        """Describes the step in progress: seconds, groups sampled, tokens, active components."""
        state, now, drawn = self.state, self.clock(), self.sampled()
        step, size = state.budget.trained + 1, state.budget.groups_per_batch
        if self.step_began[0] != step:
            self.step_began = (step, drawn, now)
        done = state.ledger.gids_at(step - 1, range(size), "sampled", "ready", "leased")
        _, before, since = self.step_began
        text = f"step {step}, {now - since:.0f} s: {len(done)} of {size} groups sampled, "
        return text + ", ".join([f"{drawn - before:,.0f} tokens", *state.working])

    def report(self) -> str:
        """Describes active components, the condition each pump waits for, and unfinished groups."""
        ledger = self.state.ledger
        waits = [f"{what} is in progress" for what in self.state.working]
        waits += [f"{pump} waits for {what}" for pump, what in sorted(self.state.waiting.items())]
        running = ledger.gids_in("running")
        if running:
            waits.append(
                f"{len(running)} groups running, oldest gid {running[0]}"
                + (f", newest {running[-1]}" if len(running) > 1 else "")
            )
        return "; ".join(waits) or "nothing is in progress and nothing waits"

    @property
    def _batch(self) -> int:
        return self.state.budget.trained

    def _progress(self) -> tuple[object, ...]:
        budget, funnel = self.state.budget, self.state.ledger.funnel()
        return (budget.trained, budget.published, funnel, pulse.count, self.sampled())


def held_loop(held_s: float, frame: FrameType | None) -> str:
    """Describes the innermost frame of the event loop's thread, if it blocks the loop."""
    place = "unknown code"
    if frame is not None:
        place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return (
        f"nothing else could run for {held_s:.0f} s: {place} blocks the event loop; a workflow "
        "must await slow calls, or run them in a thread"
    )


@dataclass(frozen=True, slots=True)
class HangWatch:
    """The watchdog of a run without pumps whose learner is in this process: ends the run after
    `abort_s` without a microbatch or tensor."""

    abort_s: float
    stacks: Path
    """File for the stacks of all threads at an abort."""

    async def run(self) -> None:
        seen, since = pulse.count, awake_s()
        while True:
            await asyncio.sleep(min(self.abort_s, 5.0) / 4)
            if pulse.count != seen:
                seen, since = pulse.count, awake_s()
            elif (still_s := awake_s() - since) >= self.abort_s:
                with self.stacks.open("a") as file:
                    faulthandler.dump_traceback(file)
                raise Transient(
                    f"no progress for {still_s:.0f} s: a call of the learner does not return; what "
                    f"was trained since the last save is lost; stacks are in {self.stacks}"
                )


class Pump(Protocol):
    async def run(self) -> None:
        """Watches until the run is over."""
        ...


class ClosablePump(Pump, Protocol):
    def close(self) -> None:
        """Ends the watchdog."""
        ...


@dataclass(slots=True)
class Scheduler:
    """Runs the steps of a run concurrently with the pumps that fill batches and publish weights."""

    request_stop: Callable[[str], None]
    """Called with the name of a signal."""
    watchdog: Pump | None
    rollout: Pump | None = None
    publish: ClosablePump | None = None
    score: Pump | None = None

    async def run(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs until all batches are trained and published, or a signal stops it. Raises the first
        failure, not wrapped in a group."""
        try:
            with stop_on_signals(self.request_stop):
                async with asyncio.TaskGroup() as tasks:
                    if self.watchdog is not None:
                        watching = tasks.create_task(self.watchdog.run(), name="watchdog")
                    named = {"publish": self.publish, "rollout": self.rollout, "score": self.score}
                    pumps = [
                        tasks.create_task(pump.run(), name=f"{name} pump")
                        for name, pump in named.items()
                        if pump is not None
                    ]
                    await tasks.create_task(steps, name="steps")
                    if self.publish is not None:
                        self.publish.close()
                    await asyncio.gather(*pumps)
                    if self.watchdog is not None:
                        watching.cancel()
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            if isinstance(cause, UserError):  # bad input, but found after the start
                cause = RunError(str(cause))
            raise cause from failures
