"""Digests of weights: equal bytes under equal names give equal digests, on any device.

The checksum of a tensor is a 64-bit sum over its 32-bit words, each hashed together with its
position: integer arithmetic only, so it does not depend on device, batches or thread count, while
swapped rows, transposes and single flipped bits change it. Many tensors are hashed at once, on a
GPU with Triton in one pass over the bytes (`digest_kernel`), and the sums are fetched at the end.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pentad.core.sizes import DIGEST_WORDS

Box = Sequence[tuple[int, int]]
BATCH_WORDS = 1 << 24
"""Words hashed at once; the work space is about 40 bytes a word."""
FUSED_WORDS = 1 << 24
"""Words hashed at once by the kernel, which needs no work space."""
MASK = 0xFFFFFFFFFFFFFFFF
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
    kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
    hasher = Hasher()
    for name, tensor in weights:
        assert name not in kinds, f"{name} was given twice"
        kinds[name] = tensor.dtype, tensor.shape
        hasher.add(tensor)
    digest = WeightDigest()
    for (name, kind), checksum in zip(kinds.items(), hasher.finish(), strict=True):
        digest.entries[name] = entry_of(*kind, checksum)
    return digest


def entry_of(dtype: torch.dtype, shape: Sequence[int], checksum: int) -> str:
    """What a digest knows of one tensor."""
    return f"{dtype}/{'x'.join(map(str, shape))}/{checksum & MASK:016x}"


def tensor_checksum(tensor: Tensor) -> int:
    hasher = Hasher()
    hasher.add(tensor)
    return hasher.finish()[0]


class Hasher:
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
        limit = FUSED_WORDS if _is_fused(words) else _batch(words)
        size = max(words.numel(), 1) if _is_fused(words) else limit
        for start in range(0, words.numel(), size):
            piece = words[start : start + size]
            if self.pieces and self.pieces[0][2].device != piece.device:
                self._hash()
            self.pieces.append((self.num_tensors, start, piece))
            self.num_words += piece.numel()
            if self.num_words >= limit:
                self._hash()
        self.num_tensors += 1

    def add_block(self, block: Tensor, shape: Sequence[int], box: Box) -> None:
        """A block, of whole words, of a tensor of that shape: the sums of all its blocks, modulo
        2**64, are those of the tensor."""
        if tuple(block.shape) == tuple(shape):
            self.add(block)
            return
        firsts, length = _runs(block.dtype.itemsize, shape, box)
        words, first = words_of(block), torch.tensor(firsts, device=block.device) // 4
        length = -(-length // 4)
        size = DIGEST_WORDS["cuda" if block.is_cuda else "cpu"]
        for start in range(0, words.numel(), size):
            piece = words[start : start + size]
            at = torch.arange(start, start + piece.numel(), device=block.device)
            position = first[at // length] + at % length + 1
            total = _mix(piece.to(torch.int64), position).sum().view(1)
            self.sums.append(([self.num_tensors], total))
        self.num_tensors += 1

    def finish(self) -> list[int]:
        """By order of addition."""
        self._hash()
        totals = [0] * self.num_tensors
        for owners, sums in self.sums:
            for owner, value in zip(owners, sums.tolist(), strict=True):
                totals[owner] = (totals[owner] + value) & MASK
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


def _batch(words: Tensor) -> int:
    """On a CPU the work space should stay in the cache."""
    return min(DIGEST_WORDS["cpu"], BATCH_WORDS) if words.device.type == "cpu" else BATCH_WORDS


def is_of_words(itemsize: int, shape: Sequence[int], box: Box) -> bool:
    """Whether a block of a tensor begins and ends with a word wherever it does."""
    firsts, length = _runs(itemsize, shape, box)
    is_end = firsts[0] + length == math.prod(shape) * itemsize
    return not any(first % 4 for first in firsts) and (length % 4 == 0 or is_end)


def _runs(itemsize: int, shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    """The stretches of a tensor's memory that a block of it is: the first byte of each, and the
    bytes of each."""
    extents = [stop - start for start, stop in box]
    inner = len(shape)
    while inner and extents[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    firsts = [sum(start * stride for (start, _), stride in zip(box, strides, strict=True))]
    for extent, stride in zip(extents[:inner], strides[:inner], strict=True):
        firsts = [first + n * stride for first in firsts for n in range(extent)]
    return firsts, math.prod(extents[inner:]) * itemsize


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
