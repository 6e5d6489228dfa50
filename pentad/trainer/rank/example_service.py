"""The service of every rank of a run on examples; the ranks also read the data and make the rows of
a step."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.types import Loss
from pentad.data.examples import Examples
from pentad.data.render import DataSource
from pentad.data.sft import SftDataset, open_sft
from pentad.data.tokenizer import Tokenizer
from pentad.data.tokens import TokenSequences, open_tokens
from pentad.rl.losses import SftLoss
from pentad.runtime.rank import Rank
from pentad.trainer.rank.learners import build_role, tokenizer_of, trained_dims
from pentad.trainer.rank.service import EngineService

ExampleCommand = Literal["sft", "pretrain", "dpo", "reward-model"]
EVALUATED_AT_ONCE = 1024
"""Number of examples evaluated together."""


class ExampleService(EngineService, ABC):
    """Trains on examples, and measures the loss on held-out ones."""

    command: ClassVar[ExampleCommand]
    tags: ClassVar[tuple[str, ...]] = ()
    """Frozen weights that score the examples."""

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.loss: Loss = SftLoss()
        self.data: dict[str, Examples] = {}
        """By "train" and "valid"; read by `build` unless given."""
        self.num_done = 0
        """Steps that the weights contain."""

    @staticmethod
    @abstractmethod
    def open_part(config: Config, part: str, dims: ModelDims, tokenizer: Tokenizer) -> Examples:
        """Opens a part of the data; UserError with its problems."""

    def build(self, num_steps: int, data: Mapping[str, Mapping[str, Any]]) -> None:
        """Builds the model. `data`: the state of each part as the caller read it; UserError if
        a part differs here, for example because its file was edited before this rank was
        restarted."""
        path = self.config.model_folder()
        if not self.data:
            dims, tokenizer = trained_dims(self.config, path), tokenizer_of(self.config)
            for part in parts_of(self.config):
                self.data[part] = self.open_part(self.config, part, dims, tokenizer)
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
        """Trains the examples of a step, counted from 0; returns its result and its rows."""
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
        """One optimizer step on examples, by their index in the data: its `result`, the trained
        `rows`, and further figures for the record."""
        rows = [row for place in places for row in self.data["train"].example(place)]
        engine = self.engines["actor"]
        engine.begin_step()
        engine.accumulate(rows, self.loss)
        return {"result": asdict(engine.end_step()), "rows": rows}

    def progress(self) -> dict[str, int]:
        return {"num_done": self.num_done, "num_moved": 0}

    def restore_state(self, role: str, root: str, step: int, folder: str) -> dict[str, Any]:
        counters = super().restore_state(role, root, step, folder)
        self.num_done = step + 1
        return counters

    def evaluate(self) -> dict[str, float | int]:
        """The loss on held-out examples."""
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

    @staticmethod
    def open_part(config: Config, part: str, dims: ModelDims, tokenizer: Tokenizer) -> SftDataset:
        return open_sft(source_of(config, part, dims.max_position), tokenizer)


class PretrainService(ExampleService):
    """Trains on plain text."""

    command = "pretrain"

    @staticmethod
    def open_part(
        config: Config, part: str, dims: ModelDims, tokenizer: Tokenizer
    ) -> TokenSequences:
        given = source_of(config, part).max_tokens or config.train_dataset.max_length
        length = given or dims.max_position
        if not 1 < length <= dims.max_position:
            rule = f"a sequence has 2 tokens or more, and the model's context {dims.max_position}"
            where = f"{part}_dataset.max_length = {length}"
            raise UserError(Problem(where, rule, f"give at most {dims.max_position}"))
        cache = Path(config.fileroot).expanduser() / "tokens"
        source = source_of(config, part, length)
        return open_tokens(source, tokenizer, dims.vocab_size, cache)


def source_of(config: Config, part: str, room: int | None = None) -> DataSource:
    """The rows of `train` or `valid`."""
    data = config.train_dataset if part == "train" else config.valid_dataset
    assert data is not None, "read where there is one"
    return DataSource(data=data, key=f"{part}_dataset", seed=config.seed, room=room)


def parts_of(config: Config) -> list[str]:
    return ["train"] if config.valid_dataset is None else ["train", "valid"]
