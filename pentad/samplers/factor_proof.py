"""What a server must hold of an adapter: room for every target, and after an install its factors.

A server that serves a part of the targets draws from another policy than the trained one, and says
nothing of it. So the modules with room for factors are compared with the recipe's targets at the
start, and at every install digests of the factors as they are held with those of the published.
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
from pentad.weights.peft import A, B, expanded, without_number, word_of

ADAPTER = "adapter"
"""What a server calls the one it is given."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for its largest rank; others end its engine."""


def max_rank(rank: int) -> int:
    return next(one for one in RANKS if one >= rank)


def check_targets(where: str, modules: Iterable[str], dims: ModelDims, lora: LoraConfig) -> None:
    """Refuses a server that has no room for the factors of some target."""
    found = set(modules)
    factors = {name.removesuffix(A) for name in lora_map_of(dims, lora).sources}
    names = [name.removesuffix(".weight") for name in map_of(dims).sources]
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
    the server's dtype, B scaled by alpha / rank, and nothing else is held."""
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
