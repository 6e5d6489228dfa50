"""Held-out evaluation: pinned to one weight version, with its uncertainty stated."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt
from pentad.rollout.executor import DataFailure, Executor
from pentad.trainer.frequency import Frequency

log = logging.getLogger(__name__)

MAX_GROUPS_IN_FLIGHT = 512


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation. `accuracy` is the mean of the reward part "correct"; None without one."""

    version: int
    num_prompts: int
    num_failed: int
    """Prompts whose generation or reward failed; they count in no mean."""
    accuracy: float | None
    accuracy_ci95: float | None
    """Half width of the normal 95% interval over prompts."""
    reward_mean: float
    length_mean: float
    truncated_share: float
    seconds: float

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def summarise(version: int, groups: Sequence[Group], num_failed: int, seconds: float) -> EvalResult:
    """Means over prompts of means over samples."""
    if not groups:
        raise RunError(f"evaluation of version {version}: all {num_failed} prompts failed")
    correct, rewards = [], []
    samples = [sample for group in groups for sample in group.samples]
    for group in groups:
        rewards.append(_mean([_reward(sample.reward) for sample in group.samples]))
        parts = [s.reward_parts["correct"] for s in group.samples if "correct" in s.reward_parts]
        if parts:
            correct.append(_mean(parts))
    accuracy = _mean(correct) if correct else None
    return EvalResult(
        version=version,
        num_prompts=len(groups),
        num_failed=num_failed,
        accuracy=accuracy,
        accuracy_ci95=None if accuracy is None else 1.96 * _standard_error(correct),
        reward_mean=_mean(rewards),
        length_mean=_mean([float(sample.num_sampled) for sample in samples]),
        truncated_share=_mean([float(sample.finish == "length") for sample in samples]),
        seconds=seconds,
    )


class Evaluator:
    """Runs the held-out prompts through an executor of its own sampling parameters."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        executor: Executor,
        frequency: Frequency,
        on_result: Callable[[EvalResult], None],
        last_version: int,
    ) -> None:
        self.prompts = prompts
        self.executor = executor
        self.frequency = frequency
        self.on_result = on_result
        self.last_version = last_version
        self.results: list[EvalResult] = []

    def is_due(self, version: int) -> bool:
        """The baseline before step 1, the end of the run, and whenever the frequency says so."""
        due = self.frequency.is_due(version)
        return due or version in (0, self.last_version)

    async def evaluate(self, version: int) -> EvalResult:
        started = time.monotonic()
        gate = asyncio.Semaphore(MAX_GROUPS_IN_FLIGHT)

        async def one(prompt: Prompt) -> Group | None:
            async with gate:
                try:
                    return await self.executor.rollout(prompt, 0)
                except DataFailure as failure:
                    log.warning("evaluation prompt %d failed: %s", prompt.gid, failure)
                    return None

        found = await asyncio.gather(*(one(prompt) for prompt in self.prompts))
        groups = [group for group in found if group is not None]
        result = summarise(version, groups, len(found) - len(groups), time.monotonic() - started)
        self.results.append(result)
        self.on_result(result)
        return result


def _reward(value: float | None) -> float:
    assert value is not None, "an evaluated sample has a reward"
    return value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
