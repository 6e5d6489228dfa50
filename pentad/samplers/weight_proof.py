"""Verifies a server's tensors after an install, by comparison with the published ones, and its
adapter: capacity for every target, and the factors.

vLLM and SGLang store q, k, v and gate, up fused, experts stacked, and vocabularies padded with zero
rows. The published tensors are converted to this form and their checksums compared, which detects
tensors that were dropped, transposed, loaded elsewhere or not updated.

A server that supports only some of an adapter's targets samples from another policy than the
trained one, without an error. So the modules with adapter layers are compared with the recipe's
targets at the start, and digests of the server's factors with the published ones at every install.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.core.roles import TensorPairs
from pentad.engine.section import LoraConfig
from pentad.models.families import lora_map_of, map_of
from pentad.models.registry import build_whole
from pentad.ops.digest import digest_of, words_of
from pentad.weights.block_fp8 import FP8
from pentad.weights.dequantize import SCALES
from pentad.weights.map import WeightMap
from pentad.weights.peft import FUSED, A, B, expanded, without_number, word_of

EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
VOCAB_MULTIPLE = 64


def prove(
    where: str,
    held: Mapping[str, str],
    weights: TensorPairs,
    dtype: torch.dtype,
    checksum: Callable[[Tensor], str],
) -> None:
    """Raises InfraFailure unless `held` (checksums by the server's names) match `weights` in the
    server's dtype, or in the higher precision of tensors such as routers."""
    used: set[str] = set()
    for name, tensor in as_held(where, held, dict(weights), used):
        dtypes = dict.fromkeys((dtype, tensor.dtype, torch.float32))
        if tensor.dtype == FP8 or name.endswith(SCALES):
            dtypes = {tensor.dtype: None}
        if all(held[name] != checksum(tensor.to(one)) for one in dtypes):
            expected = checksum(tensor.to(dtype))
            found = f"{name} has checksum {held[name]} where the published weights give {expected}"
            raise InfraFailure(f"{where}: {found}; its policy is not the trained one")
    missed = sorted({name for name, _ in weights} - used)
    if missed:
        found = f"{len(missed)} published tensors are in none of its tensors"
        raise InfraFailure(f"{where}: {found}, first {missed[0]}")


def as_held(
    where: str, names: Iterable[str], weights: Mapping[str, Tensor], used: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each server tensor as composed of published tensors; `used` collects their names."""
    for name in names:
        parts = sources(name, weights)
        if not parts:
            raise InfraFailure(f"{where}: it has {name}, which corresponds to no published tensor")
        used |= {part for group in parts for part in group}
        fused = [joined([weights[part] for part in group]) for group in parts]
        tensor = joined([one[None] for one in fused]) if is_expert(name) else fused[0]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor = pad(tensor, (0, 0, 0, -len(tensor) % VOCAB_MULTIPLE))
        yield name, tensor


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates; by bytes in fp8, for which not all devices can."""
    if len(tensors) == 1:
        return tensors[0]
    if tensors[0].dtype == FP8:
        return torch.cat([one.view(torch.uint8) for one in tensors]).view(FP8)
    return torch.cat(list(tensors))


def is_expert(name: str) -> bool:
    return name.rpartition(".")[2].removesuffix(SCALES) in EXPERTS


def sources(name: str, weights: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Returns the published names that form a tensor of the server: groups to concatenate, one for
    each expert. Empty if they are not published."""
    if name in weights:
        return [(name,)]
    if name == "lm_head.weight":  # a tied head that is stored twice
        return sources("model.embed_tokens.weight", weights)
    stem, _, last = name.rpartition(".")
    if is_expert(name):
        stem = stem.removesuffix(".routed_experts")  # an additional module of vLLM
        kind = "weight" + SCALES if last.endswith(SCALES) else "weight"
        parts = EXPERTS[last.removesuffix(SCALES)]
        groups: list[tuple[str, ...]] = []
        while f"{stem}.{len(groups)}.{parts[0]}.{kind}" in weights:
            at = f"{stem}.{len(groups)}"
            groups.append(tuple(f"{at}.{part}.{kind}" for part in parts))
        return groups
    parent, _, layer = stem.rpartition(".")
    group = tuple(f"{parent}.{part}.{last}" for part in FUSED.get(layer, ()))
    return [group] if group and all(part in weights for part in group) else []


# SGLang's checksums.

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
TILE = 8192
CHUNK = 512 * TILE
"""Words hashed at once; the workspace is about 60 bytes per word."""
SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & M32)
POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))


def sglang_checksum(tensor: Tensor, *, on_gpu: bool) -> str:
    """The checksum that `/weights_checker` returns for a tensor of SGLang in host or GPU memory."""
    return f"{tile_hash(tensor) if on_gpu else byte_hash(tensor):016x}"


def byte_hash(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.sha256(flat.numpy().tobytes()).digest()[:8], "big")


def tile_hash(tensor: Tensor) -> int:
    """SGLang's `gpu_tensor_hash`: hashes words with their positions, sums them by tiles, then
    hashes and adds the sums. Works on any device."""
    words = words_of(tensor)
    sums_of = _host_tiles if words.device.type == "cpu" else _device_tiles
    total = 0
    for start in range(0, words.numel(), CHUNK):
        high, low = (
            fmix32(tiles ^ (words.numel() * 4 & M32))
            for tiles in sums_of(words[start : start + CHUNK], start)
        )
        total += int(((high << 32) | low).sum()) & M64
    return splitmix64(total & M64) if words.numel() else 0


def _device_tiles(part: Tensor, start: int) -> list[Tensor]:
    """Returns the tile sums of some words of a tensor, per seed, modulo 2**32."""
    part = part.to(torch.int64) & M32
    at = torch.arange(start, start + part.numel(), device=part.device)
    sums = []
    for seed, (factor, turn) in zip(SEEDS, POSITIONS, strict=True):
        turned = ((at << turn) | (at >> (32 - turn))) & M32
        mixed = fmix32(part ^ ((at * factor + seed) & M32) ^ turned)
        sums.append(pad(mixed, (0, -mixed.numel() % TILE)).view(-1, TILE).sum(1) & M32)
    return sums


def _host_tiles(part: Tensor, start: int) -> list[Tensor]:
    """Like `_device_tiles` in host memory, one tile at a time: it fits the cache, and 32-bit
    numbers wrap without a modulo."""
    words = np.from_dlpack(part).view(np.uint32)
    sums = np.empty((len(SEEDS), -(-len(words) // TILE)), np.uint32)
    steps = np.arange(TILE, dtype=np.uint32)
    for number, first in enumerate(range(0, len(words), TILE)):
        tile = words[first : first + TILE]
        at = steps[: len(tile)] + np.uint32(start + first & M32)
        for which, (seed, (factor, turn)) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
            h = at * np.uint32(factor)
            h += np.uint32(seed)
            h ^= at << np.uint32(turn)
            h ^= at >> np.uint32(32 - turn)
            h ^= tile
            h ^= h >> np.uint32(16)
            h *= np.uint32(0x85EBCA6B)
            h ^= h >> np.uint32(13)
            h *= np.uint32(0xC2B2AE35)
            h ^= h >> np.uint32(16)
            sums[which, number] = h.sum(dtype=np.uint32)
    return list(torch.from_numpy(sums.astype(np.int64)))


def fmix32(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & M32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M32
    return x ^ (x >> 16)


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


ADAPTER = "adapter"
"""The adapter's name on the server."""
NO_FOLDER = "/held-by-the-workers"
"""Path of the adapter: workers that lost its factors fail instead of loading others."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as maximum rank; others crash its engine."""


def max_rank(rank: int) -> int:
    return next(one for one in RANKS if one >= rank)


def check_targets(
    where: str, modules: Iterable[str], dims: ModelDims, lora: LoraConfig, folder: str = ""
) -> None:
    """Raises UserError if the server has no adapter capacity for some target. Without a model file
    the targets come from transformers' model of the folder."""
    found = set(modules)
    factors, base = adapted_modules(dims, lora, folder)
    names = [name.removesuffix(".weight") for name in base.sources]
    skipped = [n for n in names if {n, without_number(n)} & factors and n not in found]
    if skipped:
        words = ", ".join(sorted({str(word_of(name)) for name in skipped}))
        rule = f"it would skip the factors of {len(skipped)} modules, first {skipped[0]}"
        remedy = f"leave {words} out of actor.lora.targets, or use the embedded sampler"
        raise UserError(Problem(where, rule, remedy))


def adapted_modules(
    dims: ModelDims, lora: LoraConfig, folder: str = ""
) -> tuple[set[str], WeightMap]:
    """Returns the names of the modules with factors, and the weights of the base."""
    if dims.is_whole:
        adapter, base = lora_map_of(dims, lora), map_of(dims)
    else:
        model = build_whole(folder, "fsdp")
        adapter, base = model.lora_map(lora), model.weight_map
    return {name.removesuffix(A) for name in adapter.sources if name.endswith(A)}, base


def prove_factors(
    where: str,
    held: Mapping[str, str],
    weights: TensorPairs,
    lora: LoraConfig,
    dtype: torch.dtype,
    scaled: str = "",
) -> None:
    """Raises InfraFailure unless `held` (checksums by names of factors) are those of `weights` in
    the server's dtype, and nothing else. B is scaled by alpha / rank in modules whose name contains
    `scaled`."""
    published = expanded(dict(weights))

    def as_stored() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in published.items():
            factor = tensor.detach().to(dtype)
            is_scaled = name.endswith(B) and scaled in name and lora.scale != 1
            yield name, (factor * lora.scale if is_scaled else factor).contiguous()

    for name, expected in digest_of(as_stored()).entries.items():
        if held.get(name) != expected:
            found = f"{name} has checksum {held.get(name)} where the published gives {expected}"
            raise InfraFailure(f"{where}: {found}; its policy is not the trained one")
    if extra := sorted(held.keys() - published.keys()):
        rule = f"it holds {len(extra)} factors that were not published, first {extra[0]}"
        raise InfraFailure(f"{where}: {rule}")
