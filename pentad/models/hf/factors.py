"""Adapters of transformers' models: the layers that can have factors, and their names.

Plain linear layers of the blocks have factors. Experts, which are stacked in parameters of three
dims, have none; nor have routers, embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.engine.section import LoraConfig
from pentad.weights.lora_map import OF_FSDP, factor_map, target_problems
from pentad.weights.map import Entry, Rule, WeightMap
from pentad.weights.peft import word_of


def linear_layers(model: nn.Module, blocks: Iterable[str]) -> dict[str, str]:
    """Name of each linear layer -> target word, or its last name if there is no word."""
    prefixes = tuple(f"{block}." for block in blocks)
    plain = (n for n, module in model.named_modules() if type(module) is nn.Linear)
    words = {name: word_of(name) for name in plain if name.startswith(prefixes)}
    return {name: word for name, word in words.items() if word is not None}


def words_of(
    body: nn.Module, linears: Mapping[str, str], lora: LoraConfig, family: str, role: str
) -> Sequence[str]:
    """The targets as words; UserError for those that the model lacks."""
    words = list(dict.fromkeys(linears.values()))
    stacked = ["experts"] if any(p.ndim == 3 for p in body.parameters()) else []
    name = family + OF_FSDP
    if lora.targets and not linears:
        rule = f"{name} has no linear layers in its blocks, to which factors could be added"
        raise UserError(Problem(f"{role}.lora", rule, f"leave {role}.lora out"))
    raise_problems(target_problems(lora, words, name, stacked, role))
    return words if lora.targets == "all-linear" else lora.targets


def factors_beside(
    matrices: Sequence[Entry], heads: Sequence[Entry], dims: ModelDims, lora: LoraConfig
) -> WeightMap:
    """The map of an adapter of these matrices, and of fully trained heads."""
    return factor_map(map(_as_rule, matrices), map(_as_rule, heads), dims, lora)


def _as_rule(entry: Entry) -> Rule:
    (region,) = entry.regions
    return replace(entry.rule, shape=" ".join(map(str, entry.shape)), source=region.source)
