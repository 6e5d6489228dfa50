"""Digests of weights: equal bytes under equal names give equal digests, on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22


def tensor_checksum(tensor: Tensor) -> int:
    """A position-sensitive 64-bit sum over the bytes, computed where the tensor lies.

    Integer arithmetic modulo 2**64 only, so the result does not depend on device or thread
    count; swapped rows, transposes and single flipped bits all change it.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        piece = flat[start : start + CHUNK_ELEMENTS].to(torch.int64)
        index = torch.arange(start, start + piece.numel(), device=piece.device)
        # An odd multiplier keeps the position mix invertible; 0x9E37... is the golden ratio.
        mixed = (piece + 1) * ((index + 1) * -7046029254386353131)
        mixed = mixed ^ (mixed >> 29)
        total += int(mixed.sum().item())
    return total & 0xFFFFFFFFFFFFFFFF


class WeightDigest:
    """Collects (name, tensor) pairs in any order; `hex()` is the digest of the set."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self.entries, f"{name} was given twice"
        shape = "x".join(map(str, tensor.shape))
        self.entries[name] = f"{tensor.dtype}/{shape}/{tensor_checksum(tensor):016x}"

    def hex(self) -> str:
        lines = "\n".join(f"{name} {entry}" for name, entry in sorted(self.entries.items()))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> WeightDigest:
    digest = WeightDigest()
    for name, tensor in weights:
        digest.add(name, tensor)
    return digest
