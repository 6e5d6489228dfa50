"""Reinforcement learning on GSM8K: `pentad train` with that data set and its reward filled in.

    python examples/math/gsm8k_rl.py --config examples/math/gsm8k_tiny.yaml
    python examples/math/gsm8k_rl.py --config RECIPE actor.path=FOLDER key=value ...

A recipe without data gets the piece of GSM8K that lies beside this file, and one without a reward
the built-in `gsm8k`: 1 if the number after "####" is right. It says what it filled in.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pentad.cli.errors import reporting
from pentad.cli.recipe import Recipe, takes_recipe
from pentad.config.load import read_config
from pentad.config.schema import Config

DATA = Path(__file__).parent / "data"
TINY_MODEL = "gsm8k-tiny-model"
"""A model folder of this name is made when it is missing."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
@reporting
@takes_recipe
def main(
    recipe: Recipe,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over in a folder that already holds a run.")
    ] = False,
) -> None:
    """Train a model on GSM8K with reinforcement learning."""
    written = read_config(recipe.path, recipe.overrides).config
    added = missing_overrides(written)
    make_tiny_model(written)
    filled = replace(recipe, overrides=[*recipe.overrides, *added])
    config, notes = filled.prepare("train")
    if added:
        typer.echo(f"not in the recipe, so filled in: {' '.join(added)}")
    from pentad.trainer.sources.rollouts import run_train

    summary = run_train(config, notes, fresh)
    typer.echo(f"records: {summary.records}\nmodel: {summary.model}")


def missing_overrides(config: Config) -> list[str]:
    """What makes the recipe one for GSM8K, as far as it says nothing of its own."""
    found: list[str] = []
    if config.train_dataset.path is None:
        found += data_overrides("train_dataset", "train.jsonl")
        if config.valid_dataset is None or config.valid_dataset.path is None:
            found += data_overrides("valid_dataset", "test.jsonl")
    if config.reward.fn is None:
        found.append("reward.fn=gsm8k")
    return found


def data_overrides(key: str, file: str) -> list[str]:
    values = {"path": DATA / file, "prompt_key": "question", "chat_template": "true"}
    return [f"{key}.{name}={value}" for name, value in values.items()]


def make_tiny_model(config: Config) -> None:
    folder = Path(config.actor.path or "")
    if folder.name != TINY_MODEL or folder.exists():
        return
    from pentad.data.toy import write_byte_model

    write_byte_model(folder)
    typer.echo(f"made {folder}: a tokenizer of bytes and a tiny Qwen3 config, weights at random")


if __name__ == "__main__":
    app()
