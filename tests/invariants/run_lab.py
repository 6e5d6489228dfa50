"""Runs of tiny recipes through the public interface, and what they left."""

import json
from pathlib import Path

from closeness import ROUNDING

from pentad.planner.prepare import prepare
from pentad.telemetry.record import comparable
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train

FLOAT32 = 10 * ROUNDING
"""Between log-probs of sampler and trainer: the logits of the tiny models are below 10."""


class Lab:
    """Runs recipes in a folder of their own. Saves are not beside training unless a test says so:
    a process that writes them is a quarter of a short run."""

    def __init__(self, task: Path, fileroot: Path, saver: str = "sync"):
        self.task = task
        self.fileroot = fileroot
        self.saver = saver
        self.count = 0

    def train(self, *overrides: str, trial: str | None = None, fresh: bool = False):
        self.count += 1
        words = self.words_for(trial or f"run{self.count}", *overrides)
        config, notes = prepare(None, words, "train")
        return run_train(config, notes, fresh=fresh, device="cpu")

    def words_for(self, trial: str, *overrides: str) -> list[str]:
        base = [
            f"fileroot={self.fileroot}",
            f"trial_name={trial}",
            f"actor.path={self.task / 'model'}",
            "actor.init_from_scratch=true",
            "actor.gradient_checkpointing=false",
            "actor.optimizer.lr=1e-3",
            f"train_dataset.path={self.task / 'train.jsonl'}",
            "train_dataset.batch_size=4",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=6",
            "reward.fn=sort_digits",
            "total_train_steps=3",
            f"saver.mode={self.saver}",
        ]
        names = {entry.partition("=")[0] for entry in overrides}
        kept = [entry for entry in base if entry.partition("=")[0] not in names]
        return [*kept, *overrides]

    def sft(self, *overrides: str, fresh: bool = False):
        self.count += 1
        config, notes = prepare(
            None,
            [
                f"fileroot={self.fileroot}",
                f"trial_name=sft{self.count}",
                f"actor.path={self.task / 'model'}",
                "actor.init_from_scratch=true",
                "actor.gradient_checkpointing=false",
                "actor.optimizer.lr=1e-2",
                f"train_dataset.path={self.task / 'sft.jsonl'}",
                "train_dataset.batch_size=8",
                f"saver.mode={self.saver}",
                *overrides,
            ],
            "sft",
        )
        return run_sft(config, notes, fresh=fresh, device="cpu")


def steps_of(summary):
    return read_lines(summary.records / "steps.jsonl")


def values_of(summary):
    """The records without timings and memory, as text: equal runs give equal text."""
    return [json.dumps(comparable(record), sort_keys=True) for record in steps_of(summary)]
