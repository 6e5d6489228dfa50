"""Roles that share a device take turns, and the memory in use at each turn is known."""

import asyncio

from pentad.trainer.sampling.placement import DeviceTurns, Placement


class Sleeper:
    def __init__(self, used: list[int]) -> None:
        self.used = used

    async def sleep(self) -> None:
        self.used[0] -= 6_000_000_000

    async def wake(self) -> None:
        self.used[0] += 6_000_000_000


def test_memory_before_and_after_each_turn_is_noted():
    used = [10_000_000_000]
    placement = Placement(is_shared=True, max_staleness=0, offload_rollout=True)
    device_turns = DeviceTurns(placement, [Sleeper(used)], memory_used=lambda: used[0])

    async def step() -> dict[str, float]:
        await device_turns.enter("actor")
        used[0] += 1_000_000_000  # what training takes, and keeps
        await device_turns.enter("rollout")
        return dict(device_turns.turns_gb)

    assert asyncio.run(step()) == {
        "before_sleep": 10.0,
        "asleep": 4.0,
        "before_wake": 5.0,
        "awake": 11.0,
    }


def test_where_nobody_knows_the_memory_nothing_is_noted():
    placement = Placement(is_shared=True, max_staleness=0, offload_rollout=True)
    device_turns = DeviceTurns(placement, [Sleeper([0])])
    asyncio.run(device_turns.enter("actor"))
    assert device_turns.turns_gb == {} and device_turns.holder == "actor"
