"""Publishing from several ranks: each writes the blocks of HF tensors that its shards contain.

No rank gathers whole tensors. Of several equal shards one rank writes each. The digest of a tensor
is the sum of its blocks' digests, so it needs no whole tensor either. If writing would block the
learner (from a GPU, or to a disk), the blocks are staged in host memory as the snapshot, and a
thread writes them in the background. Only changed tensors are written to a disk (`deltas`).
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.group_values import OptionalGroup, gather_values
from pentad.ops.capture import wait_for_device
from pentad.ops.digest import (
    Hasher,
    WeightDigest,
    digest_of,
    entry_of,
    is_of_words,
    tensor_checksum,
)
from pentad.sync.deltas import VersionPlan, WrittenVersion, make_version, plan_version
from pentad.sync.published import (
    WEIGHTS,
    WRITING,
    Kind,
    PublishedWeights,
    by_width,
    make_buffer,
    make_file,
    mark_of,
    no_room,
    share_on_gpu,
)
from pentad.weights.blocks import WeightBlock, plan_blocks, staged_bytes
from pentad.weights.map import WeightMap
from pentad.weights.regions import runs_of, slices
from pentad.weights.transfer import Shard, TensorInfo, source_block


@dataclass(frozen=True, slots=True)
class Publish:
    """The result of a publish, on every rank."""

    weights: PublishedWeights
    digest: WeightDigest
    kept: Tensor | None
    """A buffer on the GPU that must stay until the weights are no longer needed."""


class ShardWriter:
    """Writes the shards of one rank; all ranks make the same calls."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        weight_map: WeightMap,
        infos: Mapping[str, TensorInfo],
        group: OptionalGroup,
    ) -> None:
        """`infos`: all published tensors; `group` None: this is the only rank."""
        self.infos = infos
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.blocks = plan_blocks(shards, weight_map, infos, group)
        cut = {one.name for one in self.blocks if not self._is_of_words(one)}
        self.loose = {name for names in self._gather(sorted(cut)) for name in names}
        """Tensors with a block that ends within a word (small ones of odd widths)."""
        self.staged_bytes = staged_bytes(self.blocks)
        self.layout = by_width(infos)
        self.staging: Tensor | None = None
        self.thread: threading.Thread | None = None
        self.is_whole = True
        """Whether the last file of this rank was completed."""
        self.base: WrittenVersion | None = None
        self.num_written = 0

    @torch.no_grad()
    def write(
        self,
        version: int,
        shards: Mapping[str, Shard],
        kind: Kind,
        folder: Path,
        *,
        deltas: bool = False,
    ) -> Publish:
        """Writes a version. The weights may change after it returns; fails on all ranks or on none.
        `deltas`: links tensors unchanged since the previous version."""
        self.close()
        device = next(iter(shards.values())).tensor.device
        if kind == "ipc" and device.type != "cuda":  # parameters in host memory
            kind = "shm"
        path = folder / f"{version}-{self._gather(os.getpid())[0]}-{self.num_written}"
        self.num_written += 1
        if kind == "file":
            return self._write_files(version, shards, path, device, deltas)
        failure, sums, is_staged = "", [], device.type == "cuda" and kind == "shm"
        try:
            flat = self._make(kind, path, device)
        except RunError as error:
            failure, flat = str(error), None
        self._agree(failure)
        try:
            if flat is None:
                size = self.layout.num_bytes
                flat = torch.from_file(str(path / WEIGHTS), True, size, dtype=torch.uint8)
            if is_staged:
                sums = self._stage(shards, device)
                self._begin(path, partial(self._copy_to, flat))
            else:
                sums = self._write_into(flat, shards)
        except (OSError, RuntimeError) as error:
            failure = f"{folder}: rank {self.rank} cannot write weights ({error})"
        found = self._agree(failure, sums)
        digest, count = digest_from(found, self.infos), len(self.infos)
        if kind == "ipc":
            assert flat is not None
            return Publish(share_on_gpu(version, flat, count, digest.hex()), digest, flat)
        writers = tuple(range(len(found))) if is_staged else ()
        size = self.layout.num_bytes
        made = PublishedWeights(
            version, digest.hex(), kind, str(path), count, size, writers=writers
        )
        return Publish(made, digest, None)

    def _write_files(
        self,
        version: int,
        shards: Mapping[str, Shard],
        path: Path,
        device: torch.device,
        deltas: bool,
    ) -> Publish:
        """Writes the changed tensors, all ranks into one file, and links the rest."""
        is_whole = all(self._gather(self.is_whole))
        base = self.base if deltas and is_whole else None
        self.base, failure, sums = None, "", []
        try:
            sums = self._stage(shards, device)
        except (OSError, RuntimeError) as error:
            failure = f"{path.parent}: rank {self.rank} cannot write weights ({error})"
        digest = digest_from(self._agree(failure, sums), self.infos)
        has_links = base is not None
        if self.rank == 0:
            try:
                made, _ = make_version(version, path, self.infos, digest, base)
                has_links = made.base is not None
            except RunError as error:
                failure = str(error)
        if not self._agree(failure, has_links)[0]:
            base = None
        plan = plan_version(version, path, self.infos, digest, base)
        self.is_whole = True
        mine = [block for block in self.blocks if block.name in plan.changed]
        try:
            if mine:
                self._begin(path, partial(self._write_blocks, plan, mine))
        except OSError as error:
            failure = str(error)
        found = self._agree(failure, bool(mine))
        self.base = plan.written
        writers = [rank for rank, writes in enumerate(found) if writes]
        return Publish(plan.published(writers), digest, None)

    def close(self) -> None:
        """Waits for the background write; its outcome is in the marker file."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _make(self, kind: Kind, path: Path, device: torch.device) -> Tensor | None:
        """Returns the memory for all tensors; rank 0 makes the file that all ranks share."""
        if kind == "ipc":
            assert self.group is None, "a shared GPU buffer needs a single rank"
            return make_buffer(self.layout, device)
        return make_file(path / WEIGHTS, self.layout) if self.rank == 0 else None

    def _write_into(self, flat: Tensor, shards: Mapping[str, Shard]) -> list[Any]:
        """Writes directly to the memory that receivers read."""
        whole = self.layout.views(flat)
        targets = [source_block(whole[block.name], block.region) for block in self.blocks]
        sources = [block.source(shards) for block in self.blocks]
        if targets:
            torch._foreach_copy_(targets, sources)
        if self.group is None:
            hashed = digest_of(whole.items()).entries
            return [[name, [], int(entry.rpartition("/")[2], 16)] for name, entry in hashed.items()]
        return self._sums((block, whole[block.name][slices(block.box)]) for block in self.blocks)

    def _stage(self, shards: Mapping[str, Shard], device: torch.device) -> list[Any]:
        pins = device.type == "cuda"
        if self.staging is None:
            size = max(self.staged_bytes, 1)
            self.staging = torch.empty(size, dtype=torch.uint8, pin_memory=pins)

        def passing() -> Iterator[tuple[WeightBlock, Tensor]]:
            for block in self.blocks:
                yield block, block.copy_to(self._staged(block), shards)

        sums = self._sums(passing())
        if pins:
            wait_for_device(device)
        return sums

    def _staged(self, block: WeightBlock) -> Tensor:
        assert self.staging is not None
        return block.view(self.staging)

    def _is_of_words(self, block: WeightBlock) -> bool:
        info = self.infos[block.name]
        return is_of_words(info.dtype.itemsize, info.shape, block.box)

    def _sums(self, pieces: Iterator[tuple[WeightBlock, Tensor]]) -> list[Any]:
        """Returns [name, box, part of the checksum; for a loose tensor its bytes] of each block."""
        hasher, known, out = Hasher(), [], []
        for block, piece in pieces:
            if block.name in self.loose:
                raw = piece.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
                out.append([block.name, block.box, base64.b64encode(raw).decode()])
            else:
                hasher.add_block(piece, self.infos[block.name].shape, block.box)
                known.append(block)
        sums = zip(known, hasher.finish(), strict=True)
        return out + [[block.name, block.box, value] for block, value in sums]

    def _begin(self, path: Path, move: Callable[[], None]) -> None:
        """Starts a thread that writes the staged blocks. Files removed meanwhile are no longer
        needed."""
        mark = mark_of(path, self.rank)
        mark.write_text(WRITING, encoding="utf-8")
        self.is_whole = False

        def write() -> None:
            failure = ""
            try:
                with suppress(FileNotFoundError):
                    move()
                    self.is_whole = True
            except OSError as error:
                failure = no_room(path, self.staged_bytes, error)
            except Exception as error:
                failure = f"{path}: rank {self.rank} cannot write weights ({error!r})"
            if not mark.exists():
                return
            draft = mark.with_name(f"{mark.name}.draft")
            try:
                draft.write_text(failure, encoding="utf-8")
                draft.replace(mark)
            except OSError:  # receivers must not wait forever
                mark.unlink(missing_ok=True)
                draft.unlink(missing_ok=True)

        self.thread = threading.Thread(target=write, name="weights", daemon=True)
        self.thread.start()

    def _copy_to(self, flat: Tensor) -> None:
        whole = self.layout.views(flat)
        for block in self.blocks:
            whole[block.name][slices(block.box)].copy_(self._staged(block))

    def _write_blocks(self, plan: VersionPlan, mine: Sequence[WeightBlock]) -> None:
        """Writes each block at its position in the new file; other machines may write to the same
        file."""
        assert self.staging is not None
        data = self.staging.numpy().data
        file = os.open(plan.written.folder / plan.newest, os.O_WRONLY)
        try:
            for block in mine:
                info, begin = self.infos[block.name], plan.layout.starts[block.name]
                runs = runs_of(info.shape, block.box, info.dtype.itemsize, begin)
                for offset, start, stop in runs.parts():
                    done, end = block.offset + start, block.offset + stop
                    while done < end:
                        done += os.pwrite(
                            file, data[done:end], offset + done - block.offset - start
                        )
        finally:
            os.close(file)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self.group is None else gather_values(value, self.group)

    def _agree(self, failure: str, value: Any = None) -> list[Any]:
        """Gathers the values of all ranks; RunError on all if one failed."""
        found = self._gather([failure, value])
        if failures := [one for one, _ in found if one]:
            raise RunError(failures[0])
        return [one for _, one in found]


def digest_from(sums: Sequence[list[Any]], infos: Mapping[str, TensorInfo]) -> WeightDigest:
    """The digest of the tensors, from the sums of their blocks on all ranks."""
    totals = dict.fromkeys(infos, 0)
    loose: dict[str, Tensor] = {}
    for name, box, value in (one for of_rank in sums for one in of_rank):
        if isinstance(value, int):
            totals[name] += value
            continue
        info = infos[name]
        whole = loose.setdefault(name, torch.empty(info.shape, dtype=info.dtype))
        block = torch.frombuffer(bytearray(base64.b64decode(value)), dtype=info.dtype)
        room = whole[slices(box)]
        room.copy_(block.view(room.shape))
    totals |= {name: tensor_checksum(whole) for name, whole in loose.items()}
    digest = WeightDigest()
    for name, info in infos.items():
        digest.entries[name] = entry_of(info.dtype, info.shape, totals[name])
    return digest
