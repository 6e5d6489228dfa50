"""Stall warnings: where nothing works, never for work that takes long; an end in any case."""

import asyncio
import logging
from contextlib import suppress

import pytest

from pentad.core.errors import RunError, Transient
from pentad.data.ledger import Ledger
from pentad.data.store import MemoryStore
from pentad.runtime.rank import pulse
from pentad.trainer.pumps.scheduler import GROUP_S, Watchdog
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.sampling.selftest import FLOAT32, Prober


@pytest.fixture
def seen(caplog):
    caplog.set_level(logging.INFO)
    return caplog


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make(**more):
    clock = Clock()
    state = RunState(Ledger(2), MemoryStore(), Budget(2, max_staleness=0, num_batches=9))
    watchdog = Watchdog(state, warn_s=60, abort_s=600, clock=clock, **more)
    watchdog.look()
    return watchdog, state, clock


def look_at(watchdog, clock, now):
    clock.now = now
    watchdog.look()


def test_a_phase_that_works_is_named_in_the_log_and_no_warning(seen):
    watchdog, state, clock = make()
    state.waiting["rollout"] = "version 1"
    with state.doing("training of step 1"):
        look_at(watchdog, clock, 70.0)
    (record,) = seen.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith(
        "batch 0 stalled for 70 s: training of step 1 is in progress"
    )
    look_at(watchdog, clock, 140.0)
    assert [r.levelname for r in seen.records] == ["INFO", "WARNING"]


def test_microbatches_and_tokens_are_progress(seen):
    drawn = [0.0]
    watchdog, _, clock = make(sampled=lambda: drawn[0])
    for now in range(50, 2000, 50):
        if now % 100:
            pulse()
        else:
            drawn[0] += 1
        look_at(watchdog, clock, float(now))
    assert not seen.records


def test_nothing_for_too_long_ends_the_run_whatever_is_under_way():
    watchdog, state, clock = make()
    with state.doing("training of step 1"), pytest.raises(RunError, match="training of step 1"):
        look_at(watchdog, clock, 600.0)
    watchdog, state, clock = make(is_watched=True)
    with state.doing("training of step 1"):
        look_at(watchdog, clock, 601.0)  # the launcher comes first, and knows the rank
        with pytest.raises(RunError, match="training of step 1"):
            look_at(watchdog, clock, 600.0 + GROUP_S)


def test_a_long_step_says_how_far_it_is():
    tokens, shown = [100.0], []
    watchdog, state, clock = make(sampled=lambda: tokens[0], show=shown.append)
    assert watchdog.phase() == "step 1, 0 s: 0 of 2 groups sampled, 0 tokens"
    gid = state.ledger.admit(0)
    state.ledger.commit(gid, state.ledger.start(gid))
    clock.now, tokens[0] = 11.0, 4912.0
    assert watchdog.phase() == "step 1, 11 s: 1 of 2 groups sampled, 4,812 tokens"
    with state.doing("training of step 1"):
        assert watchdog.phase().endswith(", 4,812 tokens, training of step 1")
    state.budget.count_trained()
    assert watchdog.phase() == "step 2, 0 s: 0 of 2 groups sampled, 0 tokens"
    watchdog.period_s = 0.001

    async def watch():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await watchdog.run()

    asyncio.run(watch())
    assert shown and set(shown) == {"step 2, 0 s: 0 of 2 groups sampled, 0 tokens"}


def test_a_sampler_that_gives_no_answer_in_the_self_test_ends_the_run():
    class Silent:
        async def generate(self, request):
            await asyncio.Event().wait()

    given = {"samplers": [Silent()], "prompts": [(1, 2)], "learner": None}
    prober = Prober(**given, temperature=1.0, seed=1)
    with pytest.raises(Transient, match=r"sampler 0 gave no answer for stall_abort_s = 0.1 s"):
        asyncio.run(prober.selftest("", FLOAT32, stall_s=0.1))
