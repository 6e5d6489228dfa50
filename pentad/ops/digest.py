"""Digests of weights: equal bytes under equal names give equal digests, on any device.

The checksum of a tensor is a 64-bit sum over its 32-bit words, each hashed together with its
position: integer arithmetic only, so it does not depend on device, batches or thread count, while
swapped rows, transposes and single flipped bits change it. On a GPU many tensors are hashed at
once, with Triton in one pass over the bytes (`digest_kernel`), and the sums are fetched at the end;
on a CPU numpy hashes them in blocks that fit in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pentad.core.sizes import DIGEST_WORDS

BlockBounds = Sequence[tuple[int, int]]
BATCH_WORDS = 1 << 24
"""Words hashed at once; the workspace is about 40 bytes per word."""
FUSED_WORDS = 1 << 24
"""Words hashed at once by the kernel, which needs no workspace."""
JOINED_ELEMENTS = 1 << 26
"""Elements that are joined and compared at once."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of a dtype."""
HOST_WORDS = DIGEST_WORDS["cpu"]
MASK = 0xFFFFFFFFFFFFFFFF
GOLDEN, FIRST, SECOND = (
    -7046029254386353131,
    -4658895280553007687,
    -7723592293110705685,
)
"""G, C1 and C2 of `_mix`."""
HAS_TRITON = importlib.util.find_spec("triton") is not None


class WeightDigest:
    """Checksums of a set of named tensors; `hex()` is the digest of the set."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Registers tensors. They are hashed at the first query and must not change before it."""
        self.weights = weights

    @cached_property
    def entries(self) -> dict[str, str]:
        """Maps each name to dtype, shape and checksum."""
        return digest_of(self.weights).entries if self.weights else {}

    def hex(self) -> str:
        lines = "\n".join(f"{name} {entry}" for name, entry in sorted(self.entries.items()))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> WeightDigest:
    """The digest of (name, tensor) pairs, in any order; names are unique."""
    running = RunningDigest()
    for name, tensor in weights:
        running.add(name, tensor)
    return running.finish()


class RunningDigest:
    """Digest of tensors that arrive one by one. It synchronizes with the device once, at the end:
    one synchronization per tensor is slow on a busy GPU."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self.hasher = Hasher()

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one tensor, which must not change until the digest is finished."""
        assert name not in self.kinds, f"{name} was given twice"
        self.kinds[name] = tensor.dtype, tensor.shape
        self.hasher.add(tensor)

    def finish(self) -> WeightDigest:
        digest = WeightDigest()
        for (name, kind), checksum in zip(self.kinds.items(), self.hasher.finish(), strict=True):
            digest.entries[name] = entry_of(*kind, checksum)
        return digest


def entry_of(dtype: torch.dtype, shape: Sequence[int], checksum: int) -> str:
    """Digest entry of one tensor: its dtype, shape and checksum."""
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
        """For each batch: tensor index of each piece, and sum of each piece."""
        self.on_host: dict[int, int] = {}
        """Sums of tensors in host memory."""

    def add(self, tensor: Tensor) -> None:
        words = words_of(tensor)
        if words.device.type == "cpu":
            self.on_host[self.num_tensors] = _host_sum(words, [0], words.numel())
            self.num_tensors += 1
            return
        limit = FUSED_WORDS if _is_fused(words) else BATCH_WORDS
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

    def add_block(self, block: Tensor, shape: Sequence[int], box: BlockBounds) -> None:
        """Adds a block (of whole words) of a tensor of that shape. The block sums of a tensor add
        up to its checksum modulo 2**64."""
        if tuple(block.shape) == tuple(shape):
            self.add(block)
            return
        firsts, length = _runs(block.dtype.itemsize, shape, box)
        words, length = words_of(block), -(-length // 4)
        if words.device.type == "cpu":
            at_words = [first // 4 for first in firsts]
            self.on_host[self.num_tensors] = _host_sum(words, at_words, length)
            self.num_tensors += 1
            return
        first = torch.tensor(firsts, device=block.device) // 4
        size = DIGEST_WORDS["cuda"]
        for start in range(0, words.numel(), size):
            piece = words[start : start + size]
            at = torch.arange(start, start + piece.numel(), device=block.device)
            position = first[at // length] + at % length + 1
            total = _mix(piece.to(torch.int64), position).sum().view(1)
            self.sums.append(([self.num_tensors], total))
        self.num_tensors += 1

    def finish(self) -> list[int]:
        """Returns the checksums in order of addition."""
        self._hash()
        totals = [self.on_host.get(number, 0) for number in range(self.num_tensors)]
        for owners, sums in self.sums:
            for owner, value in zip(owners, sums.tolist(), strict=True):
                totals[owner] = (totals[owner] + value) & MASK
        return totals

    def _hash(self) -> None:
        """Hashes all collected pieces in a few batched operations: one sum per piece."""
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
        # Position within its tensor: position in the batch plus an offset of each piece.
        shift = torch.tensor(starts) - (ends - lengths) + 1
        total = int(ends[-1])
        moved = torch.repeat_interleave(shift.to(device), lengths.to(device), output_size=total)
        position = torch.arange(total, device=device).add_(moved)
        words = torch.cat(pieces).to(torch.int64)
        running = _mix(words, position).cumsum(0)
        at_ends = running[(ends - 1).to(device)]
        self.sums.append((list(owners), torch.diff(at_ends, prepend=at_ends.new_zeros(1))))


def _host_sum(words: Tensor, firsts: Sequence[int], length: int) -> int:
    """Sum of the hashed words of a block in host memory. The block consists of runs of `length`
    words, which start at the words `firsts` of the tensor."""
    if not length:
        return 0
    golden, first = (np.uint64(value & MASK) for value in (GOLDEN, FIRST))
    # `numpy()` would mark the memory as not resizable permanently, but trainers resize it to free
    # memory.
    rows = np.from_dlpack(words).reshape(len(firsts), length)
    starts = np.array(firsts, np.uint64) * golden
    width = min(length, HOST_WORDS)
    steps = np.arange(1, width + 1, dtype=np.uint64) * golden  # position times G, from the start
    deep = min(max(HOST_WORDS // length, 1), len(rows))
    hashed, other = np.empty((deep, width), np.uint64), np.empty((deep, width), np.uint64)
    total = 0
    for top in range(0, len(rows), deep):
        for left in range(0, length, width):
            piece = rows[top : top + deep, left : left + width]
            h, t = (space[: piece.shape[0], : piece.shape[1]] for space in (hashed, other))
            moved = np.uint64(left * int(golden) & MASK)
            np.add((starts[top : top + deep] + moved)[:, None], steps[: piece.shape[1]], out=h)
            np.copyto(t.view(np.int64), piece)  # sign-extended, as torch does
            np.bitwise_xor(h, t, out=h)
            np.multiply(h, first, out=h)
            np.right_shift(h, np.uint64(32), out=t)
            np.bitwise_xor(h, t, out=h)
            total += int(h.sum(dtype=np.uint64))
    return total * (SECOND & MASK) & MASK  # modulo 2**64 the last product is one of the sum


def is_of_words(itemsize: int, shape: Sequence[int], box: BlockBounds) -> bool:
    """Whether all runs of a block start and end at a 32-bit word."""
    firsts, length = _runs(itemsize, shape, box)
    is_end = firsts[0] + length == math.prod(shape) * itemsize
    return not any(first % 4 for first in firsts) and (length % 4 == 0 or is_end)


def _runs(itemsize: int, shape: Sequence[int], box: BlockBounds) -> tuple[list[int], int]:
    """Contiguous runs of memory that a block of a tensor covers: the first byte of each, and the
    bytes per run."""
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


def are_same(one: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether both have the same names and bitwise equal tensors. False also if tensors are on
    different devices, where they are not compared. Synchronizes with a GPU once."""
    known = dict(other)
    found: list[Tensor] = []
    for name, tensor in one:
        twin = known.pop(name, None)
        if twin is None or any(
            getattr(twin, what) != getattr(tensor, what) for what in ("dtype", "shape", "device")
        ):
            return False
        mine, theirs = words_of(tensor), words_of(twin)
        if not (len(mine) % 2 or mine.storage_offset() % 2 or theirs.storage_offset() % 2):
            mine, theirs = mine.view(torch.int64), theirs.view(torch.int64)  # twice as fast
        if mine.is_cuda:
            found.append((mine != theirs).any())
        elif not torch.equal(mine, theirs):
            return False
    return not known and not (found and bool(torch.stack(found).any()))


def are_same_cast(one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, joins: bool) -> bool:
    """Whether the tensors of `one` have the bits of the equally named ones of `other`, of equal
    shape and device, cast to their dtype. `joins`: compares many at once, for a GPU, where kernels
    for each tensor take the host longer than they run."""
    if one.keys() != other.keys():
        return False
    if not joins:
        return are_same(((name, x.to(one[name].dtype)) for name, x in other.items()), one.items())
    differ: list[Tensor] = []
    parts: dict[torch.dtype, list[str]] = {}
    for name, tensor in one.items():
        parts.setdefault(tensor.dtype, []).append(name)
    for dtype, names in parts.items():
        word = WORDS[dtype.itemsize]
        for some in _chunks(names, [one[name].numel() for name in names]):
            mine = torch.cat([one[name].detach().reshape(-1) for name in some])
            cast = torch.empty_like(mine)
            theirs = [other[name].detach().reshape(-1) for name in some]
            torch._foreach_copy_(list(cast.split([len(x) for x in theirs])), theirs)
            differ.append((mine.view(word) != cast.view(word)).any())
    return not (differ and bool(torch.stack(differ).any()))


def _chunks(names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Splits names so that the sizes of a part with several sum to at most JOINED_ELEMENTS."""
    part: list[str] = []
    total = 0
    for name, size in zip(names, sizes, strict=True):
        if part and total + size > JOINED_ELEMENTS:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


def words_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as 32-bit words, padded with zeros."""
    if tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0:
        return tensor.detach().view(-1).view(torch.int32)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -flat.numel() % 4
    if flat.storage_offset() % 4:  # a slice of a 16-bit tensor may start inside a word
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
    h = position.mul_(GOLDEN).bitwise_xor_(words).mul_(FIRST)
    return h.bitwise_xor_((h >> 32).bitwise_and_(0xFFFFFFFF)).mul_(SECOND)
