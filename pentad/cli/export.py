"""`pentad export`: writes a model card into a model folder of a run, and uploads the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from pentad.config.aliases import config_from_record
from pentad.config.schema import Config
from pentad.core.errors import Problem, UserError
from pentad.core.files import write_atomic
from pentad.core.folders import read_object, step_of
from pentad.core.hub import HUB_NAME
from pentad.planner.hub_rows import CARD
from pentad.telemetry.model_card import model_card
from pentad.trainer.run_folders import checkpoint_path
from pentad.weights.hf import push_to_hub


def run_export(run: str, *, step: int | None, push: str | None, public: bool) -> None:
    found = HUB_NAME.fullmatch(push) if push is not None else None
    if push is not None and (found is None or found[2] or found[3]):
        raise UserError(Problem(f"--push = {push}", "a model of the hub is named OWNER/NAME"))
    folder = Path(run)
    manifest = read_manifest(folder)
    config = recorded(folder, manifest["config"])
    model = exported(folder, config, step)
    card = model / CARD
    if card.exists():
        typer.echo(f"Card: {card} (as it was)")
    else:
        defaults = Config().model_dump(mode="json")
        name = push or model.name
        text = model_card(name, folder, manifest, model, task=config.task, defaults=defaults)
        write_atomic(card, text.encode())
        typer.echo(f"Card: {card}")
    if push is not None:
        typer.echo(f"Pushed: {push_to_hub(model, push, private=not public)}")


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_object(folder / "manifest.json")
        _ = manifest["config"]["actor"]["path"], manifest["starts"]
    except (OSError, KeyError, TypeError) as error:
        remedy = "give the folder of a run's records, runs/logs/USER/EXPERIMENT/TRIAL"
        raise UserError(Problem(f"run = {folder}", "has no manifest of a run", remedy)) from error
    return dict(manifest)


def recorded(folder: Path, values: Mapping[str, Any]) -> Config:
    """The config of the run, with paths changed to the present location of its records."""
    place = folder.resolve()
    fileroot = {"fileroot": str(place.parents[3])} if place.parents[2].name == "logs" else {}
    return config_from_record({**values, **fileroot})


def exported(folder: Path, config: Config, step: int | None) -> Path:
    """The HF folder of a step (counted from 1), or the newest one. UserError if there is none."""
    root = checkpoint_path(config)
    steps = {
        found + 1: path
        for path in root.glob("default/epoch*globalstep*")
        if (found := step_of("globalstep" + path.name.rpartition("globalstep")[2])) is not None
    }
    if not steps or (step is not None and step not in steps):
        has = f"models of steps {', '.join(map(str, sorted(steps)))}" if steps else "no model"
        where = f"run = {folder}" if step is None else f"--step = {step}"
        remedy = "saver.freq_steps sets the steps of exports"
        raise UserError(Problem(where, f"{root} has {has}", remedy))
    return steps[max(steps) if step is None else step]
