"""Runs the recipes of this folder on a CPU and prints their curves: `make recipes`.

python recipes/run.py --prepare          model, teacher and data, in runs/recipes
python recipes/run.py [NAME ...]         those, then the recipes named (all), then the table
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer

from pentad.cli.demo import NUM_SFT, NUM_TRAIN, NUM_VALID, recipe
from pentad.cli.errors import reporting
from pentad.data.toy import write_model, write_task
from pentad.planner.prepare import prepare
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.yaml"))
IMITATED = {"warm": 20, "teacher": 400}
"""Models by the steps of SFT they begin with: answers that are right by chance, and nearly
all of them."""


def prepare_toys(fileroot: str) -> None:
    """The model folders and the data that the recipes name; those that are there stay."""
    root = Path(fileroot) / "recipes"
    if not (root / "valid.jsonl").exists():
        write_model(root / "model")
        write_task(root, seed=1, num_train=NUM_TRAIN, num_sft=NUM_SFT, num_valid=NUM_VALID)
    for name, steps in IMITATED.items():
        if (root / name).exists():
            continue
        config, notes = prepare(
            recipe("demo_sft.yaml"),
            [
                f"fileroot={fileroot}",
                f"experiment_name=recipes-{name}",
                f"actor.path={root / 'model'}",
                f"train_dataset.path={root / 'sft.jsonl'}",
                f"total_train_steps={steps}",
            ],
            "sft",
        )
        model = run_sft(config, notes, fresh=True, device="cpu").model
        shutil.copytree(model, root / f".{name}.aside", dirs_exist_ok=True)
        (root / f".{name}.aside").rename(root / name)


def run_recipe(name: str, fileroot: str, overrides: list[str]) -> str:
    """Its row of the table: held-out accuracy by version."""
    begun = cpu_s()
    words = [f"fileroot={fileroot}", *overrides]
    config, notes = prepare(HERE / f"{name}.yaml", words, "train")
    found = run_train(config, notes, fresh=True, device="cpu")
    points = {line["version"]: line["accuracy"] for line in found.evals}
    curve = ", ".join(f"{version}: {accuracy:.3f}" for version, accuracy in points.items())
    first, *_, last = points.values()
    row = (name, f"{first:.3f}", f"{last:.3f}", found.num_steps, f"{cpu_s() - begun:.0f}", curve)
    return "| " + " | ".join(map(str, row)) + " |"


def cpu_s() -> float:
    """Processor time of this program and what it started and ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


@reporting
def main(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="NAME KEY=VALUE", help="Recipes, overrides.")
    ] = None,
    prepare_only: Annotated[bool, typer.Option("--prepare", help="Stop after that.")] = False,
    fileroot: Annotated[str, typer.Option(help="Folder for everything.")] = "runs",
) -> None:
    """Run recipes and print what they learned."""
    torch.set_num_threads(1)  # the model is too small to share between cores
    prepare_toys(fileroot)
    if prepare_only:
        return
    overrides = [word for word in words or [] if "=" in word]
    names = [word for word in words or [] if "=" not in word] or NAMES
    rows = [run_recipe(name, fileroot, overrides) for name in names]
    print("\n| recipe | before | after | steps | CPU seconds | held-out accuracy by step |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    typer.run(main)
