"""A clock that leaves out what a stopped program could not see."""

import asyncio
import time

from pentad.runtime import awake
from pentad.runtime.awake import HELD_S, AwakeClock, AwakeLoop


def test_a_gap_between_looks_does_not_count_and_a_wait_does():
    now = 100.0
    clock = AwakeClock(lambda: now)
    clock.ticker = object()  # the test looks at it
    for _ in range(10):
        now += HELD_S / 2
        clock()
    begun = clock()
    now += 1000.0
    assert clock() == begun
    now += 1.0
    assert clock() == begun + 1.0


def test_a_program_that_computes_is_not_taken_for_stopped(monkeypatch):
    now = used = 100.0
    monkeypatch.setattr(awake.time, "process_time", lambda: used)
    clock = AwakeClock(lambda: now)
    clock.ticker = object()
    begun = clock()
    now, used = now + 30.0, used + 29.0
    assert clock() == begun + 30.0
    now += 30.0
    assert clock() == begun + 30.0
    with clock.lock:  # a signal's handler asks while the clock is being read
        assert clock() == begun + 30.0


def test_timers_of_a_loop_wait_for_as_long_as_the_program_ran(monkeypatch):
    """As after SIGCONT: what has arrived is read before a deadline passes."""
    gap = 0.0
    clock = AwakeClock(lambda: time.monotonic() + gap)
    monkeypatch.setattr(awake, "awake_s", clock)

    async def scenario():
        nonlocal gap
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        loop.call_soon(lambda: loop.call_soon(lambda: loop.call_soon(answer.set_result, 7)))
        async with asyncio.timeout(60.0):
            gap += 1000.0
            return await answer

    with asyncio.Runner(loop_factory=AwakeLoop) as runner:
        assert runner.run(scenario()) == 7
