"""Copies elements along a weight map: from a reader into (shards of) tensors, and back by name.

It works on named tensors and a `WeightMap`, independent of the owner of the tensors and of the
reader (a folder, a list in memory, a random generator).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.seeds import derive_seed
from pentad.weights.map import Entry, Source, WeightMap
from pentad.weights.regions import Box, Region, Shape, box_shape, clip_all, full_box, slices

NUM_READERS = 4
"""Number of threads that read and sum files, or generate random weights."""
ALONE_BYTES = 4 << 20
"""Bytes below which one thread fills the tensors: starting others takes longer."""
WORDS = {
    torch.bfloat16: (numpy.int16, 0x7F80),
    torch.float16: (numpy.int16, 0x7C00),
    torch.float32: (numpy.int32, 0x7F800000),
    torch.float64: (numpy.int64, 0x7FF0000000000000),
}
"""Float dtype -> (integer dtype of its size, bits of infinity), above which only NaNs are."""
FINITE_BYTES = 1 << 18
"""Bytes that are checked at once, so that the second pass reads from the cache."""
TWIN_BYTES = 16 << 20
"""Bytes of two tied tables that are compared at once, since they are the largest tensors."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor, known without reading it."""

    shape: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Reader(Protocol):
    """Interface to source tensors by name; reads any block."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    @property
    def where(self) -> str:
        """Name of the reader in messages, such as the folder's path."""
        ...

    def read(self, name: str, box: Box) -> Tensor: ...


@runtime_checkable
class DirectReader(Reader, Protocol):
    """A reader that can read a block directly into given memory."""

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Fills `out` with the elements of the box, in its order."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The local part of a target tensor, and its memory."""

    tensor: Tensor
    box: Box


def whole_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    return {name: Shard(t, full_box(t.shape)) for name, t in tensors.items()}


def target_block(tensor: Tensor, region: Region) -> Tensor:
    """A view of the region's elements in the target, with one dim per run, in their order."""
    lengths = {run.target_dim: run.length for run in region.runs}
    order = [run.target_dim for run in region.runs]
    return _block(tensor, region.target_start, lengths, order)


def source_block(tensor: Tensor, region: Region) -> Tensor:
    lengths = {run.source_dim: run.length for run in region.runs}
    order = [run.source_dim for run in region.runs]
    return _block(tensor, region.source_start, lengths, order)


def _block(tensor: Tensor, start: Shape, lengths: Mapping[int, int], order: list[int]) -> Tensor:
    if order == list(range(tensor.ndim)) and [*lengths.values()] == [*tensor.shape]:
        return tensor  # shortcut for whole tensors, the most common case in a publish
    index = tuple(
        slice(s, s + lengths[dim]) if dim in lengths else s for dim, s in enumerate(start)
    )
    kept = sorted(order)
    return tensor[index].permute([kept.index(dim) for dim in order])


@torch.no_grad()
def fill(
    shards: Mapping[str, Shard],
    weight_map: WeightMap,
    reader: Reader,
    *,
    has_heads: bool = True,
    must_be_finite: bool = False,
) -> int:
    """Reads every shard's elements directly into its memory; returns the number of tensors read.

    Names and shapes are checked before the first element is copied. Peak extra memory is one
    region, or one for each thread where several read. Without the model's heads, unused heads of
    the reader are not an error.
    """
    read = partial(_read_block, reader, must_be_finite=must_be_finite)
    check(shards, weight_map, reader, has_heads=has_heads)
    check_tied(weight_map, reader)
    used: set[str] = set()
    blocks: list[tuple[Region, Tensor]] = []
    for name, entry in weight_map.entries.items():
        if name not in shards or _is_absent(entry, reader):
            continue
        tensor = shards[name].tensor.detach()
        for region in clip_all(entry.regions, shards[name].box):
            blocks.append((region, target_block(tensor, region)))
            used.add(region.source)
    is_large = sum(block.nbytes for _, block in blocks) >= ALONE_BYTES
    if is_large and isinstance(reader, DirectReader | RandomReader):
        # Reading, casting, copying to a GPU and generating random numbers use one core per thread.
        with ThreadPoolExecutor(NUM_READERS) as readers:
            for _ in readers.map(read, *zip(*blocks, strict=True)):
                pass
    elif isinstance(reader, PairsReader) and not must_be_finite:
        sources = [source_block(reader.read(r.source, r.source_box), r.alone) for r, _ in blocks]
        torch._foreach_copy_([block for _, block in blocks], sources)
    else:
        for region, block in blocks:
            read(region, block)
    return len(used)


def is_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite; integer and 8-bit types are not checked. On a CPU it
    allocates nothing and runs at memory bandwidth: it compares the largest bit patterns of positive
    numbers and, with the sign as the top bit, of all."""
    if tensor.dtype not in WORDS:
        return True
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return bool(tensor.isfinite().all())
    kind, infinity = WORDS[tensor.dtype]
    size = numpy.dtype(kind).itemsize
    # `Tensor.numpy` would make the memory unresizable, and trainers resize it to free memory.
    words = numpy.from_dlpack(tensor.detach().view(-1).view(torch.uint8)).view(kind)
    unsigned = words.view(f"u{size}")
    negative = infinity | 1 << (8 * size - 1)
    step = FINITE_BYTES // size
    return not any(
        words[at : at + step].max() >= infinity or unsigned[at : at + step].max() >= negative
        for at in range(0, len(words), step)
    )


def _read_block(
    reader: Reader, region: Region, block: Tensor, *, must_be_finite: bool = False
) -> None:
    """Reads a region into `block`, a view of the target with one dim per run."""
    name, box, dims = region.source, region.source_box, [run.source_dim for run in region.runs]
    if isinstance(reader, DirectReader) and dims == sorted(dims):
        for dim in range(len(region.source_shape)):
            if dim not in dims:  # dims without a run have extent 1
                block = block.unsqueeze(dim)
        reader.read_into(name, box, block)
    else:
        block.copy_(source_block(reader.read(name, box), region.alone))
    if must_be_finite:
        check_finite(reader, name, box, block)


def check_finite(
    reader: Reader,
    name: str,
    box: Box,
    block: Tensor,
    remedy: str = "load the model in a wider dtype",
) -> None:
    """Raises if a block, after reading and casting, has NaN or infinite numbers."""
    if is_finite(block):
        return
    where, count = f"{reader.where}: {name}", int((~reader.read(name, box).isfinite()).sum())
    if not count:
        rule = f"holds numbers too large for {str(block.dtype).removeprefix('torch.')}"
        raise UserError(Problem(where, rule, remedy))
    rule = "holds numbers that are NaN or infinite"
    raise UserError(Problem(where, rule, "give a model with finite weights"))


def _is_absent(entry: Entry, reader: Reader) -> bool:
    return entry.rule.optional and all(r.source not in reader.infos for r in entry.regions)


def missing_optional(
    shards: Mapping[str, Shard], weight_map: WeightMap, reader: Reader
) -> list[str]:
    """Local targets that are optional and missing in the reader; they are initialised."""
    held = [entry for name, entry in weight_map.entries.items() if name in shards]
    return [entry.name for entry in held if _is_absent(entry, reader)]


def check(
    shards: Mapping[str, Shard], weight_map: WeightMap, reader: Reader, *, has_heads: bool = True
) -> None:
    """Raises one error that lists every missing, unknown or misshapen tensor.

    Reads metadata only.
    """
    unknown = [name for name in shards if name not in weight_map.entries]
    assert not unknown, f"tensors without a rule: {unknown}"
    problems = []
    needed: dict[str, Shape] = {}
    for name, entry in weight_map.entries.items():
        if name in shards and not _is_absent(entry, reader):
            needed |= {region.source: region.source_shape for region in entry.regions}
    for name, shape in needed.items():
        problems += _shape_problem(reader, name, shape)
    known = {*weight_map.sources, *weight_map.tied}
    optional = {name for name, source in weight_map.sources.items() if source.optional}
    unused = optional - needed.keys() if has_heads else set()
    for name in reader.infos:
        if name not in known and not weight_map.ignores(name):
            problems.append(Problem(f"{reader.where}: {name}", "no rule of the map matches it"))
        elif name in unused:
            rule = "the folder holds this head, but the model is built without it"
            problems.append(
                Problem(f"{reader.where}: {name}", rule, "load it with value_head=True")
            )
    raise_problems(problems)


def check_tied(weight_map: WeightMap, reader: Reader) -> None:
    """Raises if a folder stores a tied tensor twice with different values."""
    for name, twin in weight_map.tied.items():
        if name in reader.infos and twin in reader.infos and not _are_equal(reader, name, twin):
            rule = f"differs from {twin}, but the config ties the two (tie_word_embeddings)"
            remedy = "set tie_word_embeddings to false in config.json if the head is separate"
            raise UserError(Problem(f"{reader.where}: {name}", rule, remedy))


def _are_equal(reader: Reader, name: str, twin: str) -> bool:
    info = reader.infos[name]
    if info.shape != reader.infos[twin].shape:
        return False
    step = max(1, TWIN_BYTES * info.shape[0] // max(1, info.size_bytes))
    rows = [(at, min(at + step, info.shape[0])) for at in range(0, info.shape[0], step)]
    boxes = [(part, *full_box(info.shape[1:])) for part in rows]
    return all(_is_same(reader.read(name, box), reader.read(twin, box)) for box in boxes)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether numbers or bytes are equal: NaN equals nothing and has its own error message."""
    if torch.equal(a, b):
        return True
    return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _shape_problem(reader: Reader, name: str, shape: Shape) -> list[Problem]:
    info = reader.infos.get(name)
    if info is None:
        return [Problem(f"{reader.where}: {name}", f"missing; the model needs it as {list(shape)}")]
    if info.shape != shape:
        rule = f"shape {list(info.shape)}, but the config makes it {list(shape)}"
        return [Problem(f"{reader.where}: {name}", rule)]
    if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
        rule = f"holds {info.dtype}, and weights are floating point of 16 bits or more"
        return [
            Problem(f"{reader.where}: {name}", rule, "give the model as it was before quantising")
        ]
    return []


def held_sources(held: Iterable[str], weight_map: WeightMap) -> list[Source]:
    """Source tensors that can be written from the local targets, in layer order."""
    names = set(held)
    out = []
    for source in weight_map.sources.values():
        parts = {region.source for region in source.regions}
        if parts <= names:
            out.append(source)
        else:
            assert not parts & names, f"{source.name}: only {sorted(parts & names)} of it is here"
    return out


def iter_sources(
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    dtype: torch.dtype | None = None,
    gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (source name, whole tensor) in layer order, as a view if no copy is needed. `dtype`
    does not change tensors whose rule fixes their dtype. `gather` returns the full tensor of a
    shard; it is called once per target, in order, on every rank."""
    ready: dict[str, Tensor] = {}
    order = held_sources(tensors, weight_map)
    last_use = {region.source: source.name for source in order for region in source.regions}
    for source in order:
        for region in source.regions:
            if region.source not in ready:
                ready[region.source] = gather(tensors[region.source].detach())
        yield source.name, assemble(source, ready, written_dtype(source, dtype))
        for region in source.regions:
            if last_use[region.source] == source.name:
                ready.pop(region.source, None)


def written_dtype(source: Source, dtype: torch.dtype | None) -> torch.dtype | None:
    return DTYPES[source.dtype] if source.dtype and dtype is not None else dtype


def native_dtypes(sources: Iterable[Source], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns, by native name, the dtype in which `iter_sources` yields a tensor's values."""
    return {
        region.source: written_dtype(source, dtype) or dtype
        for source in sources
        for region in source.regions
    }


def assemble(source: Source, ready: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns a source tensor from whole targets, as a view if no copy is needed."""
    first = source.regions[0]
    dtype = dtype or ready[first.source].dtype
    if len(source.regions) == 1:
        block = source_block(ready[first.source], first)
        order = sorted(range(len(first.runs)), key=lambda n: first.runs[n].target_dim)
        return block.permute(order).reshape(source.shape).to(dtype)  # with axes of one row
    out = torch.empty(source.shape, dtype=dtype, device=ready[first.source].device)
    for region in source.regions:
        target_block(out, region).copy_(source_block(ready[region.source], region))
    return out


class PairsReader:
    """A reader over (name, tensor) pairs held in memory."""

    where = "given weights"

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in pairs:
            if name in self.tensors:
                raise UserError(Problem(f"{self.where}: {name}", "given twice"))
            self.tensors[name] = tensor
        self.infos = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in self.tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        tensor = self.tensors[name]
        return tensor if box == full_box(tensor.shape) else tensor[slices(box)]


DECAYS = (0.01, 16.0)
"""Range of initial decays of delta nets; the weights are their logs."""


class RandomReader:
    """A reader that generates random tensors for initialisation: normal with the config's range,
    uniform within 1 / sqrt(last dim), logs of uniform numbers, ones, or zeros."""

    where = "fresh weights"

    def __init__(self, weight_map: WeightMap, held: Iterable[str], seed: int) -> None:
        self.sources = weight_map.sources
        self.std = weight_map.dims.initializer_range
        self.seed = seed
        regions = [region for name in held for region in weight_map.entries[name].regions]
        self.infos = {r.source: TensorInfo(r.source_shape, torch.float32) for r in regions}

    def read(self, name: str, box: Box) -> Tensor:
        source = self.sources[name]
        if source.init in ("ones", "zeros"):
            value = 1.0 if source.init == "ones" else 0.0
            return torch.full(box_shape(box), value, device="cpu")
        generator = torch.Generator("cpu").manual_seed(derive_seed(self.seed, "init", name))
        # The whole tensor is generated, so values do not depend on the block.
        whole = torch.empty(source.shape, device="cpu")
        if source.init == "uniform":
            bound = source.shape[-1] ** -0.5
            whole.uniform_(-bound, bound, generator=generator)
        elif source.init == "log_uniform":
            whole.uniform_(*DECAYS, generator=generator).log_()
        else:
            whole.normal_(0, self.std, generator=generator)
        return whole[slices(box)]
