"""Model families by name: their specs, dimensions and weight maps.

A family is one file whose `SPEC` is its `ModelSpec`; those of this package are found by their
`model_type`, others by a dotted path such as `mypackage.mymodel:SPEC`. Importing this module
loads no torch, so dimensions and maps can be had where torch is not wanted.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.models.spec import ModelSpec
from pentad.weights.map import WeightMap

FAMILIES = {"qwen3": "pentad.models.qwen3:SPEC"}
"""model_type -> where its SPEC lies; `register` adds to it."""


_MAPS: dict[tuple[str, str], WeightMap] = {}


class HfConfig(Protocol):
    """A transformers config."""

    def to_dict(self) -> dict[str, Any]: ...


ConfigLike = str | Path | Mapping[str, Any] | HfConfig


def register(path: str) -> ModelSpec:
    """Makes the family of `package.module:SPEC` known under its `model_type`."""
    spec = _load(path)
    FAMILIES[spec.family] = path
    return spec


def spec_of(family: str) -> ModelSpec:
    """The spec of a `model_type`, or of a dotted path, which is thereby registered."""
    if ":" in family:
        return register(family)
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        remedy = f"use one of {known}, or give a model file of your own as package.module:SPEC"
        raise UserError(Problem(f"model_type = {family}", "no such model family", remedy))
    return _load(FAMILIES[family])


@lru_cache
def _load(path: str) -> ModelSpec:
    module, _, name = path.partition(":")
    try:
        spec = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        remedy = "give package.module:SPEC of an importable module"
        raise UserError(
            Problem(f"model = {path}", f"cannot be imported ({error})", remedy)
        ) from error
    if not isinstance(spec, ModelSpec):
        raise UserError(Problem(f"model = {path}", f"is a {type(spec).__name__}, not a ModelSpec"))
    return spec


def read_config(source: ConfigLike) -> dict[str, Any]:
    """A HF config as a dict, from a folder, a json file, a dict or a transformers config."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        return source.to_dict()
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        remedy = "give a folder with config.json"
        raise UserError(
            Problem(f"model folder = {source}", "no config.json there", remedy)
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"{file}", f"is not JSON ({error})")) from error
    if not isinstance(config, dict):
        raise UserError(Problem(f"{file}", "holds no JSON object"))
    return config


def dims_of(source: ConfigLike, model: str | None = None) -> ModelDims:
    """The dimensions of a folder or config; `model` names the spec instead of its model_type."""
    config = read_config(source)
    return spec_of(model or str(config.get("model_type"))).read_dims(config)


def map_of(dims: ModelDims) -> WeightMap:
    """The family's weight map at these dimensions; built once, it is large for many experts."""
    spec = spec_of(dims.family)
    key = (FAMILIES[dims.family], repr(dims))
    if key not in _MAPS:
        _MAPS[key] = spec.weight_map(dims)
    return _MAPS[key]
