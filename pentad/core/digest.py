"""Digests of weights: equal bytes under equal names give equal digests, on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_WORDS = 1 << 21


def tensor_checksum(tensor: Tensor) -> int:
    """A position-sensitive 64-bit sum over the bytes, computed where the tensor lies.

    Each 32-bit word is hashed together with its position and the hashes are added modulo 2**64:
    integer arithmetic only, so the result does not depend on device, chunks or thread count, while
    swapped rows, transposes and single flipped bits change it.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -flat.numel() % 4
    if rest:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    words = flat.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), CHUNK_WORDS):
        piece = words[start : start + CHUNK_WORDS].to(torch.int64)
        index = torch.arange(start + 1, start + 1 + piece.numel(), device=piece.device)
        total += int(_mix(piece + _mix(index)).sum().item())
    return total & 0xFFFFFFFFFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64: a bijection of 64-bit integers in which every bit counts.

    https://doi.org/10.1145/2714064.2660195; constants as signed integers, since torch has no
    unsigned arithmetic, and shifts masked, since torch's keep the sign.
    """
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


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
