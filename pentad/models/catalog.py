"""Dimensions of models by folder or public name, without torch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.folders import read_object
from pentad.core.quantization import Quantization, quantization_of
from pentad.models.families import family_of, planned_dims, public_configs, public_models

VARIANT = re.compile(r"(-(Base|Instruct|Thinking|Chat))?(-2507)?$")


def public_dims() -> dict[str, ModelDims]:
    """Dimensions of public models by name without the owner."""
    return {name.rpartition("/")[2]: dims for name, dims in public_models().items()}


def known_config(name: str) -> dict[str, Any] | None:
    """The config of a public model, only the relevant keys; None for an unknown name."""
    full = full_name(name)
    return public_configs()[full] if full else None


def known_model(name: str) -> ModelDims | None:
    """The dimensions of a public model; None for an unknown name."""
    full = full_name(name)
    return public_models()[full] if full else None


def full_name(name: str) -> str | None:
    """OWNER/NAME of a public model, without -Instruct or -Base if only that is listed; or None."""
    known = public_configs()
    spelled = {full.rpartition("/")[2]: full for full in known} | {full: full for full in known}
    return spelled.get(name) or spelled.get(VARIANT.sub("", name))


def dims_of(path: str, where: str = "actor.path") -> ModelDims:
    """Dimensions of a local folder with config.json, or of a public name of the catalog."""
    config = Path(path) / "config.json"
    if config.is_file():
        return planned_dims(path)
    known = known_model(path)
    if known is not None:
        return known
    near = difflib.get_close_matches(path.rsplit("/", 1)[-1], public_dims(), 2, 0.7)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    rule = "there is no config.json in it" if Path(path).is_dir() else "no such folder"
    remedy = f"{guess}give a model folder, or a public name such as Qwen/Qwen3-8B to plan with"
    raise UserError(Problem(f"{where} = {path}", rule, remedy))


def known_dims(path: str | None) -> ModelDims | None:
    """Like `dims_of`; None for a model that the rules on models reject."""
    try:
        return dims_of(path) if path else None
    except UserError:
        return None


def quantization(path: str) -> Quantization | None:
    """How the weights of a folder are quantised; None where its config.json does not say."""
    try:
        return quantization_of(read_object(Path(path) / "config.json"))
    except (OSError, UserError):
        return None


def model_type(path: str) -> str | None:
    """The `model_type` of a folder's config.json (or of its text tower); None if unreadable."""
    try:
        return family_of(read_object(Path(path) / "config.json"))
    except (OSError, UserError):
        return None
