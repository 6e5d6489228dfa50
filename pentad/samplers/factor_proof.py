"""Verifies the adapter of a server: capacity for every target, and its factors after an install.

A server that serves only some of the targets samples from another policy than the trained one,
without an error. So the modules with adapter layers are compared with the recipe's targets at the
start, and digests of the server's factors with those of the published ones at every install.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.core.roles import TensorPairs
from pentad.engine.section import LoraConfig
from pentad.models.families import lora_map_of, map_of
from pentad.models.registry import build_whole
from pentad.weights.peft import A, B, expanded, without_number, word_of

ADAPTER = "adapter"
"""The adapter's name on the server."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for its largest rank; others end its engine."""


def max_rank(rank: int) -> int:
    return next(one for one in RANKS if one >= rank)


def check_targets(
    where: str, modules: Iterable[str], dims: ModelDims, lora: LoraConfig, folder: str = ""
) -> None:
    """Rejects a server that has no room for the factors of some target. Without a model file
    transformers' model of the folder tells which those are."""
    found = set(modules)
    if dims.is_whole:
        adapter, base = lora_map_of(dims, lora), map_of(dims)
    else:
        model = build_whole(folder, "fsdp")
        adapter, base = model.lora_map(lora), model.weight_map
    factors = {name.removesuffix(A) for name in adapter.sources}
    names = [name.removesuffix(".weight") for name in base.sources]
    skipped = [n for n in names if {n, without_number(n)} & factors and n not in found]
    if skipped:
        words = ", ".join(sorted({str(word_of(name)) for name in skipped}))
        rule = f"it would skip the factors of {len(skipped)} modules, first {skipped[0]}"
        remedy = f"leave {words} out of actor.lora.targets, or use the embedded sampler"
        raise UserError(Problem(where, rule, remedy))


def prove_factors(
    where: str,
    held: Mapping[str, str],
    weights: TensorPairs,
    lora: LoraConfig,
    dtype: torch.dtype,
    checksum: Callable[[Tensor], str],
) -> None:
    """Raises InfraFailure unless `held`, checksums by names of factors, are those of `weights` in
    the server's dtype, with B scaled by alpha / rank, and nothing else."""
    published = expanded(dict(weights))
    for name, tensor in published.items():
        factor = tensor.to("cpu", dtype)
        expected = checksum(factor * lora.scale if name.endswith(B) else factor)
        if held.get(name) != expected:
            found = f"{name} has checksum {held.get(name)} where the published gives {expected}"
            raise InfraFailure(f"{where}: {found}; its policy is not the trained one")
    if extra := sorted(held.keys() - published.keys()):
        rule = f"it holds {len(extra)} factors that were not published, first {extra[0]}"
        raise InfraFailure(f"{where}: {rule}")
