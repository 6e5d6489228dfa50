"""The dimensions of the models that a run names, by folder or public name: no torch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.folders import read_object
from pentad.models.families import planned_dims, public_configs, public_models, register

VARIANT = re.compile(r"(-(Base|Instruct|Thinking|Chat))?(-2507)?$")


def register_models(config: Config) -> None:
    """Makes the families of `model_files` known in this process; every rank calls it."""
    for path in config.model_files:
        register(path)


def models() -> dict[str, ModelDims]:
    """Public models by their names without the owner."""
    return {name.rpartition("/")[2]: dims for name, dims in public_models().items()}


def known_config(name: str) -> dict[str, Any] | None:
    """The config behind a public name, as far as it counts."""
    full = _full_name(name)
    return public_configs()[full] if full else None


def known_model(name: str) -> ModelDims | None:
    """The dimensions behind a public name."""
    full = _full_name(name)
    return public_models()[full] if full else None


def _full_name(name: str) -> str | None:
    """With its owner, and without -Instruct or -Base."""
    bare = VARIANT.sub("", name)
    return next((n for n in public_configs() if bare in (n, n.rpartition("/")[2])), None)


def dims_of(path: str, where: str = "actor.path") -> ModelDims:
    """Dimensions of a local folder with config.json, or of a public name of the catalog."""
    config = Path(path) / "config.json"
    if config.is_file():
        return planned_dims(read_object(config))
    known = known_model(path)
    if known is not None:
        return known
    near = difflib.get_close_matches(path.rsplit("/", 1)[-1], models(), 2, 0.7)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    rule = "there is no config.json in it" if Path(path).is_dir() else "no such folder"
    remedy = f"{guess}give a model folder, or a public name such as Qwen/Qwen3-8B to plan with"
    raise UserError(Problem(f"{where} = {path}", rule, remedy))


def model_type(path: str) -> str | None:
    """What config.json of a folder says; None if there is none that can be read."""
    try:
        return str(read_object(Path(path) / "config.json").get("model_type"))
    except (OSError, UserError):
        return None
