"""Rewards that run in this process: a workflow that scores answers with a function of the
session."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.specs import accepted
from pentad.core.types import Prompt, Sample
from pentad.rollout.agents import give_reward
from pentad.rollout.workflows import Context, Generator, SingleTurn

REWARDS: dict[str, Callable[..., Any]] = {}
"""Rewards of this session, by name."""


class ScoredHere(SingleTurn):
    """One answer per sample, scored by `reward` in a thread."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        self.reward = reward
        self.name = getattr(reward, "__name__", "reward")

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]:
        samples = await super().run(prompt, sampler, context)
        for sample in samples:
            given = {"completion": sample.text, "prompt": prompt.text, **prompt.fields}
            reward = await asyncio.to_thread(self.reward, **accepted(self.reward, given))
            reward = await reward if inspect.isawaitable(reward) else reward
            if reward is None:
                rule = "returned None"
                raise UserError(Problem(f"reward = {self.name}", rule, "return a number"))
            give_reward(sample, reward, f"reward = {self.name}", self.name)
        return samples


def __getattr__(name: str) -> Callable[[], ScoredHere]:
    """Resolves `pentad.api.here:NAME` in `rollout.workflow`."""
    if name.startswith("__"):
        raise AttributeError(name)

    def make() -> ScoredHere:
        if name not in REWARDS:
            rule = f"{name} was a reward of a Python session that has ended"
            raise LookupError(f"{rule}; give reward= again, or reward.fn: FILE:FUNCTION")
        return ScoredHere(REWARDS[name])

    return make
