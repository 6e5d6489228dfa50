"""What the scheduler itself costs: CPU time of its event loop a step and a group, with simulated
samplers and ranks that take no time and thousands of groups in flight.

    python benchmarks/control_cost.py [--groups 4096] [--ranks 1 8 64] [--steps 32]

The ledger, the budget, the pumps, the store (memory) and the checkpoint snapshot are the real ones.
A rank is a stub: every call travels to it as JSON, and its answer comes back as JSON. What the
simulated samplers take, a task and a timer for each group, is measured alone and told apart. The
last row is no measurement: a straight line through those above it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "invariants"))

import simulation  # noqa: E402
from simulation import SimulatedLearner, Simulation, VirtualLoop, World  # noqa: E402

from pentad.core.types import Group, Prompt  # noqa: E402
from pentad.rollout.drafts import Draft  # noqa: E402
from pentad.trainer.records import TrainedBatch  # noqa: E402

BATCH = 256
"""Groups of a step."""
FAR = 1024
"""Ranks of the row that is extrapolated."""


class Ranks(SimulatedLearner):
    """Every call travels to each rank as JSON, and each answers."""

    num_ranks = 1

    async def call(self, method: str, **arguments: Any) -> None:
        for rank in range(self.num_ranks):
            text = json.dumps({"id": rank, "method": method, "arguments": arguments})
            json.loads(text)  # an answer is no longer
        await super().call(method, **arguments)


class Light(Simulation):
    """Groups cost nothing but their place in the scheduler."""

    async def rollout(self, prompt: Prompt, attempt: int, draft: Draft) -> Group:
        working = asyncio.ensure_future(asyncio.sleep(self.draw.random()))
        await asyncio.wait([working], timeout=self.world.deadline_s)
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


def measure_samplers(num_groups: int, num_steps: int) -> float:
    """CPU seconds a step of the simulated samplers alone."""
    draw = random.Random(0)

    async def group() -> None:
        await asyncio.sleep(draw.random())

    async def run() -> None:
        for _ in range(BATCH * num_steps // num_groups):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_groups):
                    tasks.create_task(group())

    loop = VirtualLoop()
    began = time.process_time()
    loop.run_until_complete(run())
    loop.close()
    return (time.process_time() - began) / num_steps


def show(ranks: str, live: float | str, whole_s: float, samplers_s: float) -> None:
    own_s = whole_s - samplers_s
    ms = [f"{1e3 * seconds:.1f}" for seconds in (whole_s, samplers_s, own_s)]
    cells = (ranks, live, BATCH, *ms, f"{1e6 * own_s / BATCH:.0f}", f"{own_s:.1%}")
    print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=32)
    words = parser.parse_args()
    logging.disable(logging.WARNING)
    head = ("ranks", "groups in flight", "groups a step", "ms a step", "of it simulated samplers")
    head += ("scheduler, ms a step", "us a group", "of a 1 s step")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    samplers_s = min(measure_samplers(words.groups, words.steps) for _ in range(3))
    found = {}
    for num_ranks in words.ranks:
        runs = [measure(num_ranks, words.groups, words.steps) for _ in range(3)]
        found[num_ranks], live = min(step_s for step_s, _ in runs), runs[0][1]
        show(str(num_ranks), live, found[num_ranks], samplers_s)
    if len(found) > 1:
        slope, base = np.polyfit(list(found), list(found.values()), 1)
        show(f"{FAR:,} (extrapolated)", "", base + slope * FAR, samplers_s)


if __name__ == "__main__":
    main()
