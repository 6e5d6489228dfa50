"""The service of every rank in a preference run: pairs or labelled answers, and the reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pentad.config.schema import Config
from pentad.core.section import chosen
from pentad.core.types import Row
from pentad.data.preferences import (
    LabelDataset,
)
from pentad.rl.losses import RewardLoss
from pentad.rl.preferences import (
    AnswerLogProbs,
    Preferred,
    label_loss,
    pair_loss,
    preference_metrics,
    reward_loss,
)
from pentad.rl.section import PreferenceConfig
from pentad.runtime.rank import Rank
from pentad.trainer.rank.example_service import (
    EVALUATED_AT_ONCE,
    ExampleCommand,
    ExampleService,
)


class PreferenceService(ExampleService):
    """Trains on preferences."""

    command: ClassVar[ExampleCommand] = "dpo"
    tags: Collection[str] = ("ref",)

    @property
    def settings(self) -> PreferenceConfig:
        return chosen(self.config.preference, "preference")

    def train(self, places: Sequence[int]) -> dict[str, Any]:
        rows, found = self._compare("train", places)
        engine = self.engines["actor"]
        engine.begin_step()
        engine.accumulate(weighted(rows, found), self.loss)
        result = replace(engine.end_step(), loss=float(found.losses.mean()))
        return {
            "result": asdict(result),
            "rows": rows,
            "preference": preference_metrics(found),
        }

    def evaluate(self) -> dict[str, float | int]:
        """Returns the loss on held-out preferences and the preferred answer's win rate."""
        total, parts = len(self.data["valid"]), []
        for start in range(0, total, EVALUATED_AT_ONCE):
            places = range(start, min(start + EVALUATED_AT_ONCE, total))
            index = [self.data["valid"].index(place) for place in places]
            parts.append(self._compare("valid", index)[1])
        found = Preferred.join(parts)
        given = {
            key: value for key, value in preference_metrics(found).items() if value is not None
        }
        return {"num_prompts": total, "loss": float(found.losses.mean()), **given}

    def _compare(self, part: str, places: Sequence[int]) -> tuple[list[Row], Preferred]:
        """Compares examples of a part, given by index in the data."""
        data, settings = self.data[part], self.settings
        rows = self._rows(part, places)
        if not isinstance(data, LabelDataset):
            return rows, pair_loss(self._score(rows), settings)
        others = mismatched(rows, data.source.max_tokens)
        is_desired = data.is_desired[np.array(places)]
        scored = self._score([*rows, *others])
        own, other = scored[: len(rows)], scored[len(rows) :]
        return rows, label_loss(own, is_desired, other, settings)

    def _rows(self, part: str, places: Sequence[int]) -> list[Row]:
        return [
            replace(row, group=number)
            for number, place in enumerate(places)
            for row in self.data[part].example(place)
        ]

    def _score(self, rows: list[Row]) -> AnswerLogProbs:
        engine, masks = self.engines["actor"], [row.columns["weights"] for row in rows]
        looked_at = unweighted(rows)
        return AnswerLogProbs(
            sums(engine.forward(looked_at), masks),
            sums(engine.forward(looked_at, "ref"), masks),
            np.array([float(mask.sum()) for mask in masks]),
        )


class RewardModelService(PreferenceService):
    """Trains a reward model to give preferred answers the higher reward."""

    command = "reward-model"
    tags = ()

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.loss = RewardLoss()

    def _compare(self, part: str, places: Sequence[int]) -> tuple[list[Row], Preferred]:
        rows = self._rows(part, places)
        found = self.engines["actor"].forward(unweighted(rows))
        return rows, reward_loss(np.array([float(one["values"][-1]) for one in found]))


def unweighted(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows for scoring, without training columns."""
    return [replace(row, columns={}, count=0.0) for row in rows]


def sums(outputs: Sequence[Mapping[str, Tensor]], masks: Sequence[Tensor]) -> np.ndarray:
    """Sums the log-probs of each sequence over its trained tokens."""
    pairs = zip(outputs, masks, strict=True)
    return np.array([float((out["logprobs"].double().cpu() * mask).sum()) for out, mask in pairs])


def weighted(rows: Sequence[Row], found: Preferred) -> list[Row]:
    """Returns the rows with their slopes as weights, scaled to give the gradient of the mean
    loss."""
    count = len(found.losses) / len(rows)
    return [
        replace(row, columns={"weights": row.columns["weights"] * -float(slope)}, count=count)
        for row, slope in zip(rows, found.slopes, strict=True)
    ]


def mismatched(rows: Sequence[Row], limit: int | None) -> list[Row]:
    """Pairs each prompt with the answer of the next row, truncated if too long."""
    found = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        begin, answer = first_trained(row), first_trained(other)
        ids = torch.cat([row.ids[:begin], other.ids[answer:]])[:limit]
        mask = torch.cat([row.columns["weights"][:begin], other.columns["weights"][answer:]])
        found.append(Row(ids, {"weights": mask[:limit]}))
    return found


def first_trained(row: Row) -> int:
    return int(row.columns["weights"].nonzero()[0])
