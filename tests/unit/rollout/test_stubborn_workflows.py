"""A workflow that does not end when it is cancelled: its group is sampled again, and what it brings
later is ignored."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from sections import make_executor

from pentad.core.seeds import derive_seed
from pentad.core.types import Prompt, SamplingParams
from pentad.data.ledger import Ledger
from pentad.data.store import MemoryStore
from pentad.rollout import executor as executor_file
from pentad.rollout.workflows import SingleTurn
from pentad.trainer.pumps.rollout_pump import RolloutPump
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.sampling.placement import DeviceTurns, Placement


class Stubborn(SingleTurn):
    """Hangs in the attempts that are named, whatever the executor cancels; then goes on."""

    def __init__(self, hanging: set[tuple[int, int | str]]) -> None:
        super().__init__()
        self.hanging = hanging
        self.late: list[tuple[int, int | str]] = []
        self.brought: list[tuple[int, int | str]] = []

    async def run(self, prompt, sampler, context):
        key = prompt.gid, context.attempt
        while key in self.hanging and key not in self.late:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.late.append(key)
                await asyncio.sleep(1.0)  # longer than it is waited for
        samples = await super().run(prompt, sampler, context)
        self.brought.append(key)
        return samples


class Always:
    async def score(self, group):
        for i, sample in enumerate(group.samples):
            sample.reward = float(i)
        return group


def fill(samplers, tokenizer, workflow, monkeypatch):
    """One batch of two groups; the state of the run when it is ready."""
    monkeypatch.setattr(executor_file, "GRACE_S", 0.2)
    executor = make_executor(
        samplers,
        workflow,
        Always(),
        tokenizer,
        params=SamplingParams(max_new_tokens=8),
        num_samples=2,
        run_seed=5,
        vocab_size=40,
        deadline_s=0.5,
        replica_patience_s=0.2,
    )
    state = RunState(Ledger(2), MemoryStore(), Budget(2, max_staleness=1, num_batches=1))
    stream = SimpleNamespace(
        prompt=lambda gid: Prompt(gid, (1, 2, gid), {}), row_of=lambda gid: f"row {gid}"
    )
    placement = Placement(is_shared=False, max_staleness=1)
    device_turns = DeviceTurns(placement, [])
    pump = RolloutPump(state, stream, executor, device_turns, lambda group: None)

    async def run():
        filling = asyncio.create_task(pump.run())
        async with asyncio.timeout(120):
            await state.changed.until(lambda: state.ledger.are_ready(0))
            while not set(workflow.late) <= set(workflow.brought):
                await asyncio.sleep(0.1)
            state.request_stop("it is enough")
            await filling
        executor.close()

    asyncio.run(run())
    return state, pump


@pytest.fixture
def samplers(scripted):
    return {"r0": scripted(lambda request, i: [int(request.seeds[i]) % 40, 2, 3])}


def test_a_group_whose_workflow_hangs_gets_fresh_samples(
    samplers, plain_tokenizer, monkeypatch, caplog
):
    workflow = Stubborn({(0, 0)})
    state, pump = fill(samplers, plain_tokenizer, workflow, monkeypatch)
    assert workflow.late == [(0, 0)]
    assert "prompt 0 is sampled again: deadline: the group was not done after 0.5 s" in caplog.text
    assert "its workflow does not end when cancelled" in caplog.text
    zero, one = state.store.get([0, 1])
    seeds = {0: derive_seed(5, "sample", 0, "0.1", 0), 1: derive_seed(5, "sample", 1, 0, 0)}
    assert [group.samples[0].ids[3] for group in (zero, one)] == [seeds[0] % 40, seeds[1] % 40]
    assert state.ledger.funnel().dropped == {}
    assert pump.running == 0


def test_a_group_whose_workflow_always_hangs_is_dropped_and_replaced(
    samplers, plain_tokenizer, monkeypatch
):
    attempts = [0, "0.1", "0.2"]
    workflow = Stubborn({(1, attempt) for attempt in attempts})
    state, pump = fill(samplers, plain_tokenizer, workflow, monkeypatch)
    assert workflow.late == [(1, attempt) for attempt in attempts]
    funnel = state.ledger.funnel()
    assert (funnel.drawn, funnel.dropped, funnel.in_flight) == (3, {"deadline": 1}, 2)
    assert [group.gid for group in state.store.get([0, 2])] == [0, 2]
    assert np.array_equal(sorted(state.store.groups), [0, 2])
    assert "does not end when cancelled" in pump.last_failures["deadline"]
