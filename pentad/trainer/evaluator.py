"""Held-out evaluation within a run: when it is due, pinned to one weight version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pentad.core.types import Prompt
from pentad.rollout.evaluation import EvalResult, answer_prompts, summarise
from pentad.rollout.executor import Executor
from pentad.trainer.frequency import Frequency


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
        self.asked = 0
        """The last version that was asked about."""

    def is_due(self, version: int) -> bool:
        """The baseline before step 1, the end of the run, and whenever the frequency says so."""
        # Versions that a newer one overtook on their way are never asked about by themselves.
        due = [self.frequency.is_due(passed) for passed in range(self.asked + 1, version + 1)]
        self.asked = version
        return any(due) or version in (0, self.last_version)

    def state(self) -> dict[str, Any]:
        return {"frequency": self.frequency.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.frequency.restore(state["frequency"])

    async def evaluate(self, version: int) -> EvalResult:
        started = time.monotonic()
        answered = await answer_prompts(self.prompts, self.executor)
        result = summarise(version, answered, time.monotonic() - started)
        self.results.append(result)
        self.on_result(result)
        return result
