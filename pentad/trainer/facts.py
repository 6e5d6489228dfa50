"""What a learner says of a step: JSON that travels, and the objects that records are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pentad.core.types import LayerBalance, StepResult, Work
from pentad.rl.bounds import Signs
from pentad.rl.metrics import Metrics


def step_from(value: Mapping[str, Any]) -> StepResult:
    """Of what `dataclasses.asdict` made."""
    balance = tuple(LayerBalance(**layer) for layer in value["balance"])
    work = {name: Work(**found) for name, found in value["work"].items()}
    return StepResult(**{**value, "balance": balance, "work": work})


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Of one trained batch: its optimizer steps, and what was measured on its tokens."""

    steps: list[StepResult]
    critic_steps: list[StepResult]
    lengths: list[int]
    """Tokens of each row."""
    metrics: Metrics
    rerouted_share: float | None
    """Where routes were replayed, how many the learner itself would have chosen otherwise."""
    signs: Signs

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> BatchFacts:
        steps, critic_steps = (
            [step_from(step) for step in value[key]] for key in ("steps", "critic_steps")
        )
        made = {"steps": steps, "critic_steps": critic_steps, "signs": Signs(**value["signs"])}
        return cls(**{**value, **made})
