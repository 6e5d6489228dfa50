"""Digests of weights: equal bytes under equal names give equal digests, on any device.

The checksum of a tensor is a 64-bit sum over its 32-bit words, each hashed together with its
position: integer arithmetic only, so it does not depend on device, batches or thread count, while
swapped rows, transposes and single flipped bits change it. Many tensors are hashed at once, on a
GPU with Triton in one pass over the bytes (`digest_kernel`), and the sums are fetched at the end.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor

BATCH_WORDS = 1 << 24
"""Words hashed at once; the work space is about 40 bytes a word."""


FUSED_WORDS = 1 << 26
"""Words hashed at once by the kernel, which needs no work space."""
HAS_TRITON = importlib.util.find_spec("triton") is not None


class WeightDigest:
    """What is known of a set of named tensors; `hex()` is the digest of the set."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        """Name -> dtype, shape and checksum."""

    def hex(self) -> str:
        lines = "\n".join(f"{name} {entry}" for name, entry in sorted(self.entries.items()))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> WeightDigest:
    """The digest of (name, tensor) pairs, in any order; every name once."""
    headers: dict[str, str] = {}
    hasher = _Hasher()
    for name, tensor in weights:
        assert name not in headers, f"{name} was given twice"
        headers[name] = f"{tensor.dtype}/{'x'.join(map(str, tensor.shape))}"
        hasher.add(tensor)
    digest = WeightDigest()
    for (name, header), checksum in zip(headers.items(), hasher.finish(), strict=True):
        digest.entries[name] = f"{header}/{checksum:016x}"
    return digest


def tensor_checksum(tensor: Tensor) -> int:
    hasher = _Hasher()
    hasher.add(tensor)
    return hasher.finish()[0]


class _Hasher:
    """Collects pieces of tensors into batches of about BATCH_WORDS."""

    def __init__(self) -> None:
        self.num_tensors = 0
        self.pieces: list[tuple[int, int, Tensor]] = []
        """(tensor, index of the first word in it, words) not hashed yet."""
        self.num_words = 0
        self.sums: list[tuple[list[int], Tensor]] = []
        """Of each batch: which tensor a piece belongs to, and the sum of each piece."""

    def add(self, tensor: Tensor) -> None:
        words = words_of(tensor)
        limit = FUSED_WORDS if _is_fused(words) else BATCH_WORDS
        size = max(words.numel(), 1) if _is_fused(words) else BATCH_WORDS
        for start in range(0, words.numel(), size):
            piece = words[start : start + size]
            if self.pieces and self.pieces[0][2].device != piece.device:
                self._hash()
            self.pieces.append((self.num_tensors, start, piece))
            self.num_words += piece.numel()
            if self.num_words >= limit:
                self._hash()
        self.num_tensors += 1

    def finish(self) -> list[int]:
        self._hash()
        totals = [0] * self.num_tensors
        for owners, sums in self.sums:
            for owner, value in zip(owners, sums.tolist(), strict=True):
                totals[owner] = (totals[owner] + value) & 0xFFFFFFFFFFFFFFFF
        return totals

    def _hash(self) -> None:
        """One sum per piece, all pieces in the same few operations."""
        if not self.pieces:
            return
        owners, starts, pieces = zip(*self.pieces, strict=True)
        self.pieces, self.num_words = [], 0
        if _is_fused(pieces[0]):
            from pentad.ops.digest_kernel import checksums

            with torch.cuda.device(pieces[0].device):
                self.sums.append((list(owners), checksums(pieces)))
            return
        device = pieces[0].device
        lengths = torch.tensor([piece.numel() for piece in pieces])
        ends = lengths.cumsum(0)
        # Position within its tensor: position in the batch, moved by a constant for each piece.
        shift = torch.tensor(starts) - (ends - lengths) + 1
        total = int(ends[-1])
        moved = torch.repeat_interleave(shift.to(device), lengths.to(device), output_size=total)
        position = torch.arange(total, device=device).add_(moved)
        words = torch.cat(pieces).to(torch.int64)
        running = _mix(words, position).cumsum(0)
        at_ends = running[(ends - 1).to(device)]
        self.sums.append((list(owners), torch.diff(at_ends, prepend=at_ends.new_zeros(1))))


def _is_fused(words: Tensor) -> bool:
    return words.is_cuda and HAS_TRITON


def words_of(tensor: Tensor) -> Tensor:
    """The bytes as 32-bit words, filled up with zeros."""
    if tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0:
        return tensor.detach().view(-1).view(torch.int32)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -flat.numel() % 4
    if flat.storage_offset() % 4:  # part of a tensor of 16-bit numbers may begin in mid-word
        flat = flat.clone()
    if rest:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    return flat.view(torch.int32)


def _mix(words: Tensor, position: Tensor) -> Tensor:
    """Hashes each word with its position: a bijection of the word in which every bit counts.

    h = (word ^ G * position) * C1;  h = (h ^ (h >> 32)) * C2, modulo 2**64. G is the golden ratio,
    C1 and C2 are those of splitmix64 (https://doi.org/10.1145/2714064.2660195), as signed integers
    since torch has no unsigned arithmetic; its shift keeps the sign, hence the mask. In place.
    """
    h = position.mul_(-7046029254386353131).bitwise_xor_(words).mul_(-4658895280553007687)
    return h.bitwise_xor_((h >> 32).bitwise_and_(0xFFFFFFFF)).mul_(-7723592293110705685)
