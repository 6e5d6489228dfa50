"""Runs the recipes of this folder on a CPU and prints their curves: `make recipes`.

python recipes/run.py --prepare          model, teacher and data, in runs/recipes
python recipes/run.py [NAME ...]         those, then the recipes named (all), then the table
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from random import Random
from threading import Thread
from typing import Annotated, Any

import torch
import typer
from transformers.utils import get_json_schema

from pentad.cli.demo import NUM_SFT, NUM_TRAIN, NUM_VALID, recipe
from pentad.cli.errors import reporting
from pentad.data.toy import write_byte_model, write_model, write_task
from pentad.planner.prepare import prepare
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from judge import serve  # noqa: E402
from tools import Safe  # noqa: E402

NAMES = sorted(path.stem for path in HERE.glob("*.yaml"))
IMITATED = {"warm": 20, "teacher": 400, "tools": 400, "sums": 300}
"""Models by the steps of SFT they begin with: answers that are right by chance, nearly all of them,
calls of a tool with the right number in four of ten, and sums that are right by chance."""
SUMS = "min_terms=2&max_terms=2&min_digits=1&max_digits=1"
EXAMPLES = {
    "tools": ("bytes", "{root}/tools_sft.jsonl", ["train_dataset.messages_key=messages"]),
    "sums": (
        "bytes",
        f"reasoning_gym:chain_sum?size=2000&seed=3&{SUMS}",
        ["train_dataset.response_key=answer"],
    ),
}
"""The model, the rows and the keys where they are not those of the sorted digits."""
NUM_SAFES = {"train": 256, "valid": 64, "sft": 512}
JUDGE_PORT = 8117


def prepare_toys(fileroot: str, names: Collection[str] = NAMES) -> None:
    """The model folders and the data that the recipes name; those that are there stay."""
    root = Path(fileroot) / "recipes"
    if not (root / "valid.jsonl").exists():
        write_model(root / "model")
        write_task(root, seed=1, num_train=NUM_TRAIN, num_sft=NUM_SFT, num_valid=NUM_VALID)
        write_byte_model(root / "bytes", with_tools=True)
        write_safes(root)
    for name, steps in IMITATED.items():
        if (root / name).exists() or (name == "sums" and "reasoning_gym" not in names):
            continue
        model, rows, more = EXAMPLES.get(name, ("model", "{root}/sft.jsonl", []))
        config, notes = prepare(
            recipe("demo_sft.yaml"),
            [
                f"fileroot={fileroot}",
                f"experiment_name=recipes-{name}",
                f"actor.path={root / model}",
                f"train_dataset.path={rows.format(root=root)}",
                f"total_train_steps={steps}",
                *(["actor.optimizer.lr=3e-3", "train_dataset.batch_size=16"] if more else []),
                *more,
            ],
            "sft",
        )
        model = run_sft(config, notes, fresh=True, device="cpu").model
        shutil.copytree(model, root / f".{name}.aside", dirs_exist_ok=True)
        (root / f".{name}.aside").rename(root / name)


def write_safes(root: Path) -> None:
    """Rows of the recipe tools.yaml, and conversations whose calls are often wrong."""
    random = Random(1)
    tool = get_json_schema(Safe().press)
    for name, count in NUM_SAFES.items():
        lines = []
        for _ in range(count):
            wanted, other = random.randrange(10), random.randrange(10)
            pressed = wanted if random.random() < 0.4 else other
            row: dict[str, Any] = {"prompt": f"Open {wanted}.", "answer": str(wanted)}
            if name == "sft":
                call = json.dumps({"name": "press", "arguments": {"n": pressed}})
                said = "open" if pressed == wanted else "low" if pressed < wanted else "high"
                talk = [("user", row["prompt"]), ("assistant", f"<tool_call>{call}</tool_call>")]
                talk += [("tool", said), ("assistant", "done")]
                messages = [{"role": role, "content": content} for role, content in talk]
                row = {"messages": messages, "tools": [tool]}
            lines.append(json.dumps(row) + "\n")
        (root / f"tools_{name}.jsonl").write_text("".join(lines))


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
    overrides = [word for word in words or [] if "=" in word]
    names = [word for word in words or [] if "=" not in word] or NAMES
    if not words and find_spec("reasoning_gym") is None:
        print("reasoning_gym is left out: pip install 'pentad[reasoning-gym]'")
        names = [name for name in names if name != "reasoning_gym"]
    prepare_toys(fileroot, names)
    if prepare_only:
        return
    if "judge" in names:
        Thread(target=serve(JUDGE_PORT).serve_forever, daemon=True).start()
    rows = [run_recipe(name, fileroot, overrides) for name in names]
    print("\n| recipe | before | after | steps | CPU seconds | held-out accuracy by step |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    typer.run(main)
