"""Workloads of `pentad chaos`: small built-in runs, or that of a recipe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pentad.config.rules.rule import RunCommand
from pentad.config.schema import Config
from pentad.data.toy import write_byte_model, write_model, write_task

STEPS = 5
WORLD = 4
WorkloadKind = Literal["ranks", "rl", "any"]
"""Requirement of a scenario: several ranks, samplers, or none."""

REWARD = """\
import os, time

def score(completion, answer):
    return sum(a == b for a, b in zip(completion, answer)) / 5

def hang(completion, answer):
    if answer == "BAD": time.sleep(3600)
    return score(completion, answer)

def crash(completion, answer):
    if answer == "BAD": os._exit(3)
    return score(completion, answer)
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """A training command with few steps and a checkpoint after each."""

    name: str
    command: RunCommand
    words: tuple[str, ...]
    steps: int
    world: int
    """Number of training ranks."""
    num_experts: int = 0
    top_k: int = 0
    folder: Path = Path()
    """Folder of its data, for built-in workloads."""


def built_in(folder: Path) -> dict[WorkloadKind, Workload]:
    """Built-in workloads: pretraining of a mixture over ranks and in one process, and RL."""
    write_byte_model(folder / "mixture", num_experts=4)
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=32, num_sft=4, num_valid=4)
    (folder / "rewards.py").write_text(REWARD)
    texts = [f"{n} comes after {n - 1} and before {n + 1}. " * (1 + n % 3) for n in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "docs.jsonl").write_text(lines)
    pretrain = (
        *(f"actor.path={folder / 'mixture'}", f"train_dataset.path={folder / 'docs.jsonl'}"),
        *("train_dataset.max_length=32", f"train_dataset.batch_size={WORLD}"),
        *("actor.optimizer.lr=3e-3", "guards.replica_check_steps=1", *COMMON),
    )
    train = (
        *(f"actor.path={folder / 'model'}", f"train_dataset.path={folder / 'train.jsonl'}"),
        *("train_dataset.batch_size=4", "gconfig.n_samples=2", "gconfig.max_new_tokens=8"),
        *(f"reward.fn={folder / 'rewards.py'}:score", "telemetry.samples_per_step=8"),
        *("allocation_mode=embedded:d1|archon:d2", "actor.optimizer.lr=1e-3", *COMMON),
    )
    ranks = (*pretrain, f"allocation_mode=archon:d{WORLD}e2")
    alone = (*pretrain, "allocation_mode=archon:d1")
    return {
        "ranks": Workload("mixture over 4 ranks", "pretrain", ranks, STEPS, WORLD, 4, 2, folder),
        "any": Workload("mixture in one process", "pretrain", alone, STEPS, 1, 4, 2, folder),
        "rl": Workload("RL, a sampler and 2 ranks", "train", train, STEPS, 2, folder=folder),
    }


COMMON = (
    *("actor.init_from_scratch=true", "actor.gradient_checkpointing=false"),
    f"total_train_steps={STEPS}",
)


def of_recipe(
    words: tuple[str, ...], command: RunCommand, config: Config
) -> dict[WorkloadKind, Workload]:
    """Replaces built-in workloads by the run of a recipe, limited to a few steps. Every sample is
    recorded, since groups per step are counted from the records."""
    world = config.component("actor").world
    words = (*words, f"total_train_steps={STEPS}")
    if command == "train":
        words = (*words, f"telemetry.samples_per_step={config.rows_per_step}")
    workload = Workload("the recipe", command, words, STEPS, world)
    found: dict[WorkloadKind, Workload] = {"any": workload}
    if world > 1:
        found["ranks"] = workload
    if command == "train":
        found["rl"] = workload
    return found
