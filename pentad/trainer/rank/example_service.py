"""The service of every rank of a run on examples; each rank also reads the data and makes the rows
of a step."""

from __future__ import annotations

import hashlib
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch

from pentad.config.schema import Config
from pentad.core.types import Loss
from pentad.data.examples import Examples
from pentad.rl.losses import SftLoss
from pentad.runtime.rank import Rank
from pentad.trainer.inputs import RowReader, open_examples, parts_of, tokenizer_of
from pentad.trainer.rank.learners import build_role, trained_dims
from pentad.trainer.rank.service import EngineService

ExampleCommand = Literal["sft", "pretrain", "dpo", "reward-model"]
EVALUATED_AT_ONCE = 1024
"""Number of examples evaluated together."""


class ExampleService(EngineService, ABC):
    """Trains on examples, and measures the loss on held-out ones."""

    command: ClassVar[ExampleCommand]

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.loss: Loss = SftLoss()
        self.data: dict[str, Examples] = {}
        """The parts "train" and "valid"; read by `build` unless given."""
        self.num_done = 0
        """Steps that the weights contain."""

    def build(self, num_steps: int, data: Mapping[str, Mapping[str, Any]]) -> None:
        """Builds the model. `data`: the state of each part as read by the caller. Raises UserError
        if a part differs here, for example because its file was edited before this rank
        restarted."""
        path = self.config.model_folder()
        if not self.data:
            reader = RowReader(trained_dims(self.config, path), tokenizer_of(self.config))
            for part in parts_of(self.config):
                self.data[part] = open_examples(self.command, self.config, part, reader)
                self.data[part].check_state(data[part])
        self.engines["actor"] = build_role(
            self.config,
            "actor",
            device=self.device,
            temperature=1.0,
            total_steps=num_steps,
            max_row_tokens=self.data["train"].max_row_tokens,
        )

    def step(self, step: int) -> dict[str, Any]:
        """Trains the examples of a step, counted from 0; returns its result and rows."""
        self.rank.report(step + 1)
        size = self.config.train_dataset.batch_size
        data = self.data["train"]
        found = self.train([data.index(step * size + place) for place in range(size)])
        self.num_done = step + 1
        self.after_step(step + 1)
        digest = hashlib.blake2b(digest_size=8)
        rows = found.pop("rows")
        for row in rows:
            digest.update(row.ids.numpy().tobytes())
            digest.update(b".")
        return {
            **found,
            "num_samples": size,
            "lengths": [len(row.ids) for row in rows],
            "rows_digest": digest.hexdigest(),
        }

    def train(self, places: Sequence[int]) -> dict[str, Any]:
        """Makes one optimizer step on examples, given by index in the data. Returns its `result`,
        the trained `rows`, and further figures for the record."""
        rows = [row for place in places for row in self.data["train"].example(place)]
        engine = self.engines["actor"]
        engine.begin_step()
        engine.accumulate(rows, self.loss)
        return {"result": asdict(engine.end_step()), "rows": rows}

    def progress(self) -> dict[str, int]:
        return {"num_done": self.num_done, "num_moved": 0}

    def restore_state(self, role: str, root: str, step: int) -> dict[str, Any]:
        counters = super().restore_state(role, root, step)
        self.num_done = step + 1
        return counters

    def evaluate(self) -> dict[str, float | int]:
        """Returns the loss on held-out examples."""
        data, total, count = self.data["valid"], 0.0, 0.0
        for start in range(0, len(data), EVALUATED_AT_ONCE):
            places = range(start, min(start + EVALUATED_AT_ONCE, len(data)))
            rows = [row for place in places for row in data.example(data.index(place))]
            for row, output in zip(rows, self.engines["actor"].forward(rows), strict=True):
                weights = row.columns["weights"]
                total -= float((output["logprobs"].cpu() * weights).sum())
                count += float(weights.sum())
        return {"num_prompts": len(data), "loss": total / count}


class SftService(ExampleService):
    """Trains on responses to prompts."""

    command = "sft"


class PretrainService(ExampleService):
    """Trains on plain text."""

    command = "pretrain"
