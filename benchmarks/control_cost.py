"""What the scheduler itself costs: CPU time of its event loop a step and a group, with simulated
samplers and ranks that take no time and thousands of groups in flight.

    python benchmarks/control_cost.py [--groups 4096] [--ranks 1 8 64] [--steps 32]

The ledger, the budget, the pumps, the store (memory) and the checkpoint snapshot are the real ones.
A rank is a stub that answers every call of the scheduler with the JSON that a rank sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "invariants"))

import simulation  # noqa: E402
from simulation import SimulatedLearner, Simulation, VirtualLoop, World  # noqa: E402

from pentad.core.types import Group, Prompt  # noqa: E402
from pentad.rollout.executor import Hold  # noqa: E402
from pentad.trainer.train_pump import TrainedBatch  # noqa: E402

BATCH = 256
"""Groups of a step."""


class Ranks(SimulatedLearner):
    """Every call travels to each rank as JSON, and each answers."""

    num_ranks = 1

    async def call(self, method: str, **arguments: Any) -> None:
        text = json.dumps({"method": method, "arguments": arguments})
        for _ in range(self.num_ranks):
            json.loads(text)
        await super().call(method, **arguments)


class Light(Simulation):
    """Groups cost nothing but their place in the scheduler."""

    async def rollout(self, prompt: Prompt, attempt: int, hold: Hold) -> Group:
        hold(self.world.lease_s)
        await asyncio.sleep(self.draw.random())
        hold(None)
        version = self.budget.published
        return Group(prompt, [simulation.sample(version, version)], attempt)

    def check_lags(self, gids: list[int]) -> None:
        self.most_live = max(self.most_live, self.state.ledger.funnel().in_flight)

    def after_step(self, trained: TrainedBatch) -> None:
        """A checkpoint's JSON is written beside the event loop."""


def measure(num_ranks: int, num_groups: int, num_steps: int) -> tuple[float, float]:
    """CPU seconds a step, and the most groups that were in flight."""
    Ranks.num_ranks = num_ranks
    simulation.SimulatedLearner = Ranks  # type: ignore[misc]
    simulation.MAX_TURNS = 10**9
    world = World(
        groups_per_batch=BATCH,
        num_batches=num_steps,
        max_staleness=num_groups // BATCH - 1,
        num_replicas=8,
        num_chunks=4,
        rollout_s=1.0,
        train_s=0.25,
    )
    run = Light(world, 0)
    loop = VirtualLoop()
    began = time.process_time()
    assert loop.run_until_complete(run._start(None))
    seconds = time.process_time() - began
    loop.close()
    return seconds / num_steps, run.most_live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=32)
    words = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| ranks | groups in flight | groups a step | ms a step | us a group | of a 1 s step |")
    print("|---|---|---|---|---|---|")
    for num_ranks in words.ranks:
        step_s, live = measure(num_ranks, words.groups, words.steps)
        row = (num_ranks, live, BATCH, f"{1e3 * step_s:.1f}", f"{1e6 * step_s / BATCH:.0f}")
        print("|", " | ".join(map(str, row)), f"| {step_s:.1%} |")


if __name__ == "__main__":
    main()
