"""Aliases of keys: replaced by the keys they stand for when a recipe is read.

An alias given beside its key must have the same value; else both values are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pentad.config.describe import show
from pentad.config.recipe_file import Tree, put
from pentad.config.resolve import allocation_for_sizes, replaced
from pentad.config.schema import ALIASES, Config, ParallelismConfig, RecipeConfig
from pentad.core.errors import Problem
from pentad.core.layout import parse_allocation

DEFAULT_KL_COEF = 0.001


@dataclass(frozen=True, slots=True)
class KeySet:
    """A key that an alias sets, and the reason in words."""

    key: str
    value: object
    why: str

    @property
    def note(self) -> str:
        return f"{self.key} = {show(self.value)}: {self.why}"


Read = Callable[[RecipeConfig, bool], Iterator[KeySet | Problem]]


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    stands_for: tuple[str, ...]
    """The keys it sets."""
    read: Read


def normalise(recipe: RecipeConfig, tree: Tree, *, samples: bool) -> Iterator[str]:
    """Replaces the aliases of a tree by the keys they stand for and yields a note on each. If an
    alias could not be read, its keys count as bad, too."""
    for alias in TABLE:
        if any(key.partition(".")[0] == alias.name for key in tree.bad):
            tree.bad.update(alias.stands_for)
        for found in list(alias.read(recipe, samples)):
            if isinstance(found, Problem):
                tree.problems.append(found)
                continue
            put(tree.values, found.key, found.value)
            recipe = replaced(recipe, found.key, found.value)
            if found.why.startswith(f"{alias.name} = "):
                tree.written[f"{found.key} = {show(found.value)}"] = found.why
            yield found.note
    for name in ALIASES:
        tree.values.pop(name, None)


def config_from_record(values: Mapping[str, Any]) -> Config:
    """The config of a record; aliases, which records of older versions may contain, are ignored."""
    return Config.model_validate({key: values[key] for key in values if key not in ALIASES})


def _kl_switch(recipe: RecipeConfig, _: bool) -> Iterator[KeySet | Problem]:
    use, given = recipe.use_kl_loss, recipe.algorithm.given
    coef, place, where = given.get("kl_coef"), given.get("kl_in"), f"use_kl_loss = {show(use)}"
    if use and coef == 0:
        yield Problem(where, "algorithm.kl_coef = 0 switches it off", "leave one of the two out")
    elif use and place == "reward":
        rule = "algorithm.kl_in = reward takes the KL term out of the loss"
        yield Problem(where, rule, "leave one of the two out")
    elif use is False and coef and place != "reward":
        rule = f"algorithm.kl_coef = {coef:g} adds a KL term"
        yield Problem(where, rule, "set algorithm.kl_coef=0, or algorithm.kl_in=reward")
    if use and place is None:
        yield KeySet("algorithm.kl_in", "loss", where)
    if use and coef is None:
        yield KeySet("algorithm.kl_coef", DEFAULT_KL_COEF, where)
    if use is False and coef is None and recipe.algorithm.kl_in == "loss":
        yield KeySet("algorithm.kl_coef", 0.0, where)


def _tis_switch(recipe: RecipeConfig, _: bool) -> Iterator[KeySet | Problem]:
    use, correction = recipe.use_tis, recipe.algorithm.given.get("correction")
    where = f"use_tis = {show(use)}"
    if use is not None and correction is None:
        yield KeySet("algorithm.correction", "tis" if use else "none", where)
    elif use is not None and use != (correction == "tis"):
        rule = f"algorithm.correction = {correction} contradicts it"
        yield Problem(where, rule, "leave one of the two out")


def _parallelism(recipe: RecipeConfig, _: bool) -> Iterator[KeySet | Problem]:
    sizes, actor = recipe.parallelism, recipe.part("actor")
    if sizes is None:
        return
    text = _axes(sizes, "megatron" if recipe.actor.training_backend == "megatron" else "archon")
    (wanted,) = parse_allocation(text)
    if recipe.allocation_mode is None:
        yield KeySet("allocation_mode", text, "from parallelism")
    elif actor and wanted.layout() != actor.layout():
        rule = f"is {wanted} ({wanted.world} devices), but allocation_mode has {actor}"
        remedy = "leave parallelism out, or make the two agree"
        yield Problem(f"parallelism = {show(sizes.model_dump())}", rule, remedy)


def _axes(sizes: ParallelismConfig, backend: str) -> str:
    """The allocation of a run without a sampler."""
    d, e = sizes.data_parallel, sizes.expert_parallel
    rest = f"p{sizes.pipeline_parallel}t{sizes.tensor_parallel}"
    if e == 1:
        return f"{backend}:d{d}{rest}"
    return f"{backend}:(attn:d{d * e}{rest}|ffn:d{d}{rest}e{e})"


def _resource(recipe: RecipeConfig, samples: bool) -> Iterator[KeySet | Problem]:
    if recipe.resource is None:
        return
    sizes, names = recipe.resource.sizes(), {"ref": "reference"}
    if recipe.allocation_mode is None:
        join = "|" if recipe.mode == "colocate" else "+"
        text = allocation_for_sizes(recipe, sizes, join, samples=samples)
        yield KeySet("allocation_mode", text, "from resource")
        return
    allocation = recipe.parsed_allocation
    for role, wanted in sizes.items():
        component = allocation and allocation.find(role)
        if component and component.world != wanted:
            key = names.get(role, role)
            where = f"resource.{key} = {show(getattr(recipe.resource, key))}"
            rule = f"is {wanted} devices, but {component} has {component.world}"
            yield Problem(where, rule, "leave resource out, or make the two agree")


TABLE = (
    Alias("use_kl_loss", ("algorithm.kl_coef", "algorithm.kl_in"), _kl_switch),
    Alias("use_tis", ("algorithm.correction",), _tis_switch),
    Alias("parallelism", ("allocation_mode",), _parallelism),
    Alias("resource", ("allocation_mode",), _resource),
)
"""Aliases in the order in which they are replaced."""
