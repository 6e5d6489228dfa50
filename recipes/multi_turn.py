"""The environment of the recipe multi_turn.yaml: sort five digits, and try again if wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pentad.rollout.environments import Step
from pentad.rollout.workflows import MultiTurn

MAX_TURNS = 3


class SortAgain:
    """Says how many digits are in place (`3>`) until all are. The model that learns here knows
    digits and `>` alone, so that is all it learns."""

    async def reset(self, fields: Mapping[str, Any]) -> None:
        self.answer = str(fields["answer"])
        self.best = 0

    async def step(self, text: str) -> Step:
        in_place = sum(a == b for a, b in zip(text, self.answer, strict=False))
        is_right = text == self.answer
        closer = max(0, in_place - self.best)
        self.best = max(in_place, self.best)
        parts = {"correct": float(is_right), "closer": 0.1 * closer}
        return Step(f"{in_place}>", is_done=is_right, reward_parts=parts)

    async def close(self) -> None:
        """Nothing is held open."""


def workflow() -> MultiTurn:
    return MultiTurn(SortAgain, max_turns=MAX_TURNS)
