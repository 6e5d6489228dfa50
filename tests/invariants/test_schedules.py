"""Many random schedules with faults: every gid ends exactly once, the lag stays within its bound,
memory within its own, and no schedule comes to a standstill. PENTAD_SCHEDULES=20000 tries more of
them, `make test-runs` 750; a seed that fails is in the message."""

import logging
import os
import random

import pytest
from simulation import Deadlock, Simulation, World

from pentad.core.errors import RunError

NUM_SCHEDULES = int(os.environ.get("PENTAD_SCHEDULES", "250"))
FIRST = int(os.environ.get("PENTAD_FIRST_SCHEDULE", "0"))
FAULTS = (
    *("death", "hang", "zombie", "slow"),
    *("data_failure", "infra_failure", "no_signal", "bad_row", "store_loss"),
)


def world_of(seed: int) -> World:
    draw = random.Random(f"world {seed}")
    size, staleness = draw.choice([1, 2, 2, 3, 4]), draw.choice([0, 0, 1, 2, 3])
    is_shared = staleness == 0 and draw.random() < 0.6
    faults = {what: draw.choice([0.0, 0.05, 0.2]) for what in FAULTS if draw.random() < 0.4}
    faults["infra_failure"] = min(faults.get("infra_failure", 0.0), 0.05)
    if "hang" in faults:
        faults["hang"] = draw.choice([0.1, 0.6])  # some groups never come to an end
    return World(
        groups_per_batch=size,
        num_batches=draw.randint(1, 5),
        max_staleness=staleness,
        num_replicas=draw.randint(1, 3),
        num_chunks=draw.randint(1, size),
        max_groups=draw.choice([None, None, 1, 2]),
        is_shared=is_shared,
        offload=is_shared and draw.random() < 0.5,
        rollout_s=draw.choice([0.1, 1.0, 5.0]),
        train_s=draw.choice([0.1, 1.0, 5.0]),
        publish_s=draw.choice([0.0, 0.2, 4.0]),
        faults=faults,
        num_ends=draw.choice([0, 0, 1, 3]),
        num_scorers=0 if is_shared else draw.choice([0, 1, 2]),
        score_s=draw.choice([0.1, 1.0, 5.0]),
        num_started=draw.choice([None, draw.randint(size, 2 * size)]) if staleness == 0 else None,
        max_carries=draw.randint(1, 3),
        holds=draw.random() < 0.5,
    )


@pytest.mark.parametrize(
    ("first", "num"),
    [(FIRST, NUM_SCHEDULES), pytest.param(FIRST + NUM_SCHEDULES, 750, marks=pytest.mark.full)],
)
def test_every_schedule_keeps_every_promise(caplog, first, num):
    caplog.set_level(logging.CRITICAL)
    seen: dict[str, int] = {}
    for seed in range(first, first + num):
        simulation = Simulation(world_of(seed), seed)
        try:
            simulation.run()
        except BaseException as failure:
            waits = simulation.state.waiting
            pytest.fail(f"seed {seed}: {failure!r}; {simulation.world}; {waits}")
        seen["lost"] = seen.get("lost", 0) + simulation.num_losses
        seen["resumed"] = seen.get("resumed", 0) + (simulation.num_starts > 1)
        is_full = simulation.most_live == simulation.capacity
        seen["carried"] = seen.get("carried", 0) + simulation.num_carried
        seen["full"] = seen.get("full", 0) + is_full
        for how in simulation.ended.values():
            seen[how] = seen.get(how, 0) + 1
    few = min(20, num // 50)  # what never happens is not tried
    for what in (
        "lost",
        "resumed",
        "full",
        "carried",
        "no_signal",
        "bad_row",
        "reward_error",
        "deadline",
    ):
        assert seen.get(what, 0) >= few, seen


def test_a_deadlock_is_seen():
    simulation = Simulation(World(faults={"hang": 1.0}), 0)
    simulation.world.deadline_s = None
    with pytest.raises(Deadlock, match="no timer is set"):
        simulation.run()


def test_a_broken_bound_is_seen(monkeypatch):
    world = World(num_batches=6, publish_s=4.0)
    simulation = Simulation(world, 0)
    build = simulation._build

    def loose():
        build()
        simulation.state.budget.max_staleness = 3

    monkeypatch.setattr(simulation, "_build", loose)
    with pytest.raises((AssertionError, RunError), match="lag|live"):
        simulation.run()
