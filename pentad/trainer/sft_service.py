"""What every rank of a supervised run has: the data too, of which it makes the rows of a step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.data.sft import SftDataset, open_sft
from pentad.data.tokenizer import Tokenizer, load_tokenizer
from pentad.rl.losses import SftLoss
from pentad.runtime.rank import Rank
from pentad.trainer.learners import build_role
from pentad.trainer.service import EngineService
from pentad.trainer.start import trained_dims
from pentad.trainer.translate import data_settings


class SftService(EngineService):
    """Learns from examples, and measures the loss on held-out ones."""

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.loss = SftLoss()
        self.data: dict[str, SftDataset] = {}
        """By "train" and "valid"; read by `build`, where they were not given."""

    def build(self, num_steps: int) -> None:
        path = self.config.actor.path
        assert path is not None, "checked with the config"
        if not self.data:
            dims, tokenizer = trained_dims(self.config, path), load_tokenizer(path)
            for part in parts_of(self.config):
                self.data[part] = open_part(self.config, part, dims, tokenizer)
        self.engines["actor"] = build_role(
            self.config,
            "actor",
            device=self.device,
            temperature=1.0,
            total_steps=num_steps,
            max_row_tokens=max(len(example.ids) for example in self.data["train"].examples),
        )

    def step(self, step: int) -> dict[str, Any]:
        """Trains the examples of a step, counted from 0; its result and the lengths of its rows."""
        self.rank.report(step + 1)
        rows = self.data["train"].batch(step, self.config.train_dataset.batch_size)
        engine = self.engines["actor"]
        engine.begin_step()
        engine.accumulate(rows, self.loss)
        return {"result": asdict(engine.end_step()), "lengths": [len(row.ids) for row in rows]}

    def evaluate(self) -> dict[str, float | int]:
        """The loss on the examples that are not trained."""
        data = self.data["valid"]
        rows = data.batch(0, len(data))
        total, count = 0.0, 0.0
        for row, output in zip(rows, self.engines["actor"].forward(rows), strict=True):
            weights = row.columns["weights"]
            total -= float((output["logprobs"].cpu() * weights).sum())
            count += float(weights.sum())
        return {"num_prompts": len(rows), "loss": total / count}


def parts_of(config: Config) -> list[str]:
    return ["train"] if config.valid_dataset is None else ["train", "valid"]


def open_part(config: Config, part: str, dims: ModelDims, tokenizer: Tokenizer) -> SftDataset:
    """UserError with what is wrong with the data."""
    source = config.train_dataset if part == "train" else config.valid_dataset
    assert source is not None, "asked for where there is one"
    settings = data_settings(
        source, f"{part}_dataset", seed=config.seed, max_tokens=dims.max_position
    )
    return open_sft(settings, tokenizer)
