"""Model families by name: their specs, dimensions and weight maps.

A family is a file whose `SPEC` is its `ModelSpec`; those of this folder are found by `model_type`,
others by `mypackage.mymodel:SPEC` or `path/to/mymodel.py:SPEC`. No file loads torch, so that plans
can read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.folders import check_plain, read_object
from pentad.core.specs import import_named, why_not_loaded
from pentad.engine.section import LoraConfig
from pentad.models.config_reader import dims_from_hf
from pentad.models.spec import ModelSpec
from pentad.models.towers import (
    IN_MEMORY,
    in_tower,
    language_config,
    text_config,
    text_family,
    tower_names,
    tower_of,
)
from pentad.weights.lora_map import fused_words, lora_map, target_problems, target_words
from pentad.weights.map import WeightMap

FOLDER = Path(__file__).parent
MAX_NAME = 100
"""Maximum length of a family's name, which is a file name."""
REGISTERED: dict[str, str] = {}
"""model_type -> dotted path of its SPEC, for families from outside this package."""
_MAPS: dict[tuple[str, str], WeightMap] = {}


class HfConfig(Protocol):
    """A transformers config."""

    def to_dict(self) -> dict[str, Any]: ...


ConfigLike = str | Path | Mapping[str, Any] | HfConfig


def register(path: str) -> ModelSpec:
    """Registers the family of an external model file under its `model_type`."""
    spec, _ = _load(path)
    REGISTERED[spec.family] = path
    return spec


def known_families() -> list[str]:
    """The families of this folder, and registered ones."""
    own = {file.stem for file in FOLDER.glob("*.py") if file.name != "__init__.py"}
    return sorted(own | REGISTERED.keys())


def is_registered(path: str) -> bool:
    return path in REGISTERED.values()


def is_known(family: str) -> bool:
    return family in REGISTERED or has_file(family)


@cache
def has_file(family: str) -> bool:
    is_name = family.isidentifier() and family != "__init__" and len(family) <= MAX_NAME
    return is_name and (FOLDER / f"{family}.py").is_file()


def path_of(family: str) -> str:
    """The dotted path of a `model_type`'s spec; a dotted path is registered and returned
    unchanged."""
    if ":" in family:
        register(family)
        return family
    if family in REGISTERED:
        return REGISTERED[family]
    if has_file(family):
        return f"{__name__}.{family}:SPEC"
    raise UserError(no_such_family(family, known_families()))


def spec_of(family: str) -> ModelSpec:
    return _load(path_of(family))[0]


def class_of(family: str) -> Any:
    """The model class of a family's spec; in a model file given by its path, `stem:Class` is a
    class of that file."""
    path = path_of(family)
    spec, home = _load(path)
    where, _, name = spec.model.rpartition(":")
    file = Path(path.rpartition(":")[0])
    is_own = file.suffix == ".py" and where in (file.stem, file.name)
    said = f"model = {spec.model} (of {path})"
    module = home if is_own else _module(where, said, "Decoder")
    return _member(module, where, name, said)


@lru_cache
def _load(path: str) -> tuple[ModelSpec, ModuleType]:
    """The spec, and the module that holds it."""
    where, _, name = path.rpartition(":")
    module = _module(where, f"model = {path}", "SPEC")
    spec = _member(module, where, name, f"model = {path}")
    if not isinstance(spec, ModelSpec):
        raise UserError(Problem(f"model = {path}", f"is a {type(spec).__name__}, not a ModelSpec"))
    return spec, module


def _member(module: ModuleType, where: str, name: str, said: str) -> Any:
    if name not in vars(module):
        raise UserError(Problem(said, f"there is no {name or 'name'} in {where}"))
    return vars(module)[name]


def _module(where: str, said: str, kind: str) -> ModuleType:
    """A module by its dotted name or by its file."""
    try:
        return import_named(where, fresh=True)
    except (Exception, SystemExit) as error:  # a user's file raises anything
        rule = f"cannot be imported ({why_not_loaded(error)})"
        remedy = f"give package.module:{kind} or path/to/file.py:{kind}"
        raise UserError(Problem(said, rule, remedy)) from error


def read_config(source: ConfigLike) -> dict[str, Any]:
    """A HF config as a dict, from a folder, a json file, a dict or a transformers config."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        return source.to_dict()
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir():
        check_plain(path)
    try:
        return read_object(file)
    except FileNotFoundError:
        remedy = "give a folder with config.json"
        raise UserError(
            Problem(f"model folder = {source}", "no config.json there", remedy)
        ) from None


def dims_of(source: ConfigLike, model: str | None = None) -> ModelDims:
    """The dimensions of a folder or config; `model` names the spec in place of its model_type."""
    config = read_config(source)
    spec = spec_of(model or family_of(config))
    tower = tower_of(config)
    if tower is None:
        return replace(spec.read_dims(config), family=spec.family)
    folder = Path(source) if isinstance(source, str | Path) else None
    read = tower.read_dims or spec.read_dims
    text = text_config(config, tower)
    return replace(read(text), family=spec.family, tower_names=tower_names(folder))


def language_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a text tower as a language model; other configs unchanged. UserError if the
    family's config cannot express the tower."""
    tower = tower_of(config)
    if tower is None:
        return dict(config)
    found = language_config(config, tower)
    given, own = dims_of(config), dims_of(found)
    differing = [
        part.name
        for part in fields(ModelDims)
        if part.name != "tower_names" and getattr(given, part.name) != getattr(own, part.name)
    ]
    if differing:
        where = f"config.json: model_type = {config.get('model_type')}"
        rule = f"its text tower as {own.family} would differ in {', '.join(differing)}"
        raise UserError(Problem(where, rule, "give a language model"))
    return found


def family_of(config: Mapping[str, Any]) -> str:
    """The `model_type` of a config, or of its text tower. UserError for a path, which would allow a
    folder to run code."""
    tower = tower_of(config)
    family = str(config.get("model_type") if tower is None else text_family(config, tower))
    if not family.replace("-", "_").isidentifier() or len(family) > MAX_NAME:
        rule = "is not a name of a family"
        remedy = "name a model file of your own where the model is loaded, not in config.json"
        raise UserError(Problem(f"config.json: model_type = {family[:MAX_NAME]}", rule, remedy))
    return family


def planned_dims(source: ConfigLike) -> ModelDims:
    """Dimensions of a config whose family may have no model file (such models are trained by
    transformers)."""
    config = read_config(source)
    return dims_of(source) if is_known(family_of(config)) else dims_from_hf(config)


def public_configs() -> dict[str, dict[str, Any]]:
    """Public models by name, with the relevant keys of their config.json, for plans without a
    download."""
    return {
        name: {"model_type": family, **config}
        for family in known_families()
        for name, config in spec_of(family).public.items()
    }


def public_models() -> dict[str, ModelDims]:
    """The dimensions of public models by name."""
    found: dict[str, ModelDims] = {}
    for family in known_families():
        found |= _public(path_of(family))
    return found


@cache
def _public(path: str) -> dict[str, ModelDims]:
    spec = _load(path)[0]
    return {
        name: spec.read_dims({"model_type": spec.family, **config})
        for name, config in spec.public.items()
    }


def no_such_family(family: str, known: Iterable[str]) -> Problem:
    remedy = (
        f"use one of {', '.join(sorted(known))}, give a model file of your own, or train it "
        "with the backend fsdp"
    )
    return Problem(f"model_type = {family}", "no such model family", remedy)


def lora_words(dims: ModelDims, lora: LoraConfig, role: str = "actor") -> Sequence[str]:
    """Words of the targets of an adapter for the family; UserError for invalid ones."""
    rules = spec_of(dims.family).rules
    words = target_words(rules, dims)
    raise_problems(target_problems(lora, words, dims.family, fused_words(rules, dims), role))
    return words if lora.targets == "all-linear" else lora.targets


def lora_map_of(dims: ModelDims, lora: LoraConfig, *, value_head: bool = False) -> WeightMap:
    """The weight map of an adapter of the family; a critic's includes its head."""
    words = lora_words(dims, lora, "critic" if value_head else "actor")
    own = lora_map(spec_of(dims.family).rules, dims, lora, words, value_head=value_head)
    return in_tower(own, IN_MEMORY) if dims.tower_names else own


def map_of(dims: ModelDims) -> WeightMap:
    """The family's weight map at these dimensions; cached, as it is large for many experts."""
    path = path_of(dims.family)
    key = (path, repr(dims))
    if key not in _MAPS:
        _MAPS[key] = _load(path)[0].weight_map(dims)
    return _MAPS[key]
