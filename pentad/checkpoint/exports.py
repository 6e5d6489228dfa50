"""HF exports: every rank writes its blocks into safetensors files laid out beforehand.

No rank gathers a tensor. All write into one folder beside the target, which rank 0 renames when all
are done. In asynchronous mode a rank copies its blocks to host memory, and its writer process
writes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pentad.checkpoint.export_job import BlockSpec, ExportJob, PlaceJob
from pentad.checkpoint.job import FileSegment, FileSpan, Lazy, Span, run_job
from pentad.checkpoint.rank_saver import Outcomes, RankSaver
from pentad.checkpoint.writer import Pending, Writer, failure_in
from pentad.core.errors import RunError, UserError
from pentad.core.group_values import gather_values
from pentad.ops.capture import wait_for_device
from pentad.runtime.rank import pulse
from pentad.weights.blocks import WeightBlock, plan_blocks, staged_bytes
from pentad.weights.files import memory_of
from pentad.weights.hf import Carried, FolderPlan
from pentad.weights.map import WeightMap
from pentad.weights.peft import Adapter, write_adapter
from pentad.weights.regions import Runs, runs_of
from pentad.weights.transfer import Shard, TensorInfo


class Exportable(Protocol):
    """A learner whose weights are exported; `engine.engine.Engine`."""

    def weights_to_save(self) -> dict[str, Shard]:
        """This rank's shards of the weights, which must be those of a completed step."""
        ...

    def published(self) -> tuple[WeightMap, dict[str, TensorInfo]]: ...

    def plan_export(self) -> FolderPlan: ...

    def carried(self) -> dict[str, Carried]:
        """Tensors besides the weights that an export copies from the source folder."""
        ...


class AdapterLearner(Protocol):
    """A learner that trains an adapter; `engine.engine.Engine` with `actor.lora`."""

    def adapter(self) -> tuple[Adapter, Iterable[str]]:
        """The adapter, unsharded on every rank, and the names of the base model's tensors."""
        ...


GiveBlock = Callable[[WeightBlock], FileSegment]
"""Function that returns the bytes of a block."""


class Exporter(RankSaver):
    """Exports of one role on one rank; all ranks make the same calls. At most one export is in
    progress."""

    def __init__(self, writer: Writer | None = None) -> None:
        super().__init__(writer)
        self.blocks: list[WeightBlock] | None = None
        self.number = 0
        """Number in the temporary folder's name: the same on all ranks and never reused."""
        self.is_async = False
        self.is_abandoned = False
        self.place = PlaceJob(Path(), Path(), {})
        """The job that renames the folder when all ranks have written."""

    def export(self, learner: Exportable, folder: str | Path, *, is_async: bool) -> None:
        """Starts an export; the weights may change after it returns. Synchronous: the folder is
        complete on return, or it fails on all ranks. Asynchronous: `outcomes` has the result."""
        self.finish()
        shards = learner.weights_to_save()
        weight_map, infos = learner.published()
        if self.blocks is None:
            self.blocks = plan_blocks(shards, weight_map, infos, self.group)
            now = time.time_ns()
            self.number = now if self.group is None else gather_values(now, self.group)[0]
        self.number += 1
        self.is_async = is_async
        target = Path(folder)
        aside = target.with_name(f".{target.name}.writing-{self.number}")
        self.place = PlaceJob(aside, target, {})

        def make_job() -> ExportJob:
            is_first = self.rank == 0
            others = learner.carried()
            every = {**infos, **{name: one.info for name, one in others.items()}}
            plan = learner.plan_export() if is_first else FolderPlan.around(every)
            self.place = PlaceJob(aside, target, plan.sizes())
            give = self._stage(shards) if is_async else self._lazily(shards)
            own = [BlockSpec(path, Runs(0, len(data)), data) for path, data in plan.small_parts()]
            own += _copies(plan, others)
            return ExportJob(aside, tuple([*(own if is_first else ()), *self._specs(plan, give)]))

        self.begin(make_job, is_async=is_async)
        if not is_async and (failure := failure_in(self.outcomes()[0])) is not None:
            raise failure

    def abandon(self) -> None:
        """Called before the process ends: an export in progress will not replace its target."""
        self.is_abandoned = True

    def conclude(self, outcomes: Outcomes) -> Outcomes:
        """Renames the folder, or removes it after a failure; all ranks get the same result."""
        done = Pending()
        if self.rank == 0:
            done.settle_by(lambda: self._place(outcomes))
        else:
            done.set_result({})
        found = {**done.outcome(), "files": {}}
        return [found if self.answers is None else gather_values(found, self.answers)[0]]

    def _place(self, outcomes: Outcomes) -> dict[str, Any]:
        failures = [failure for one in outcomes if (failure := failure_in(one)) is not None]
        place = replace(self.place, failure=failures[0] if failures else None)
        if self.is_abandoned:
            ended = RunError(f"{place.target}: the process ended before it was complete")
            raise place.failure or ended
        if not self.is_async:
            return run_job(place)
        assert self.writer is not None
        return self.writer.submit(place).result()

    def _specs(self, plan: FolderPlan, give: GiveBlock) -> list[BlockSpec]:
        assert self.blocks is not None
        where = plan.places()
        return [
            BlockSpec(file, runs_of(info.shape, block.box, info.dtype.itemsize, start), give(block))
            for block in self.blocks
            for file, start, info in (where[block.name],)
        ]

    def _stage(self, shards: Mapping[str, Shard]) -> GiveBlock:
        """Copies all blocks of this rank to host memory."""
        assert self.blocks is not None
        device = _gpu_of(shards)
        memory = self.memory.take(staged_bytes(self.blocks), pins=device is not None)
        for block in self.blocks:
            pulse()
            block.copy_to(block.view(self.memory.bytes), shards)
        if device is not None:
            wait_for_device(device)
        return lambda block: Span(memory, block.offset, block.size_bytes)

    def _lazily(self, shards: Mapping[str, Shard]) -> GiveBlock:
        """Returns blocks when they are written: views of a shard, or copies made by the thread."""
        assert self.blocks is not None
        device, own = _gpu_of(shards), threading.local()
        size = max((block.size_bytes for block in self.blocks), default=0)

        def produce(block: WeightBlock) -> memoryview:
            pulse()
            if (as_it_is := block.contiguous(shards)) is not None:
                return memory_of(as_it_is.view(-1).view(torch.uint8))
            with torch.no_grad(), torch.cuda.device(-1 if device is None else device):  # -1: none
                if not hasattr(own, "memory"):
                    pins = device is not None
                    own.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pins)
                block.copy_to(block.view(own.memory, 0), shards)
                if device is not None:
                    wait_for_device(device)
            return memoryview(own.memory[: block.size_bytes].numpy())

        return lambda block: Lazy(block.size_bytes, partial(produce, block))


class AdapterExporter(RankSaver):
    """Exports of an adapter as a PEFT folder. It is small, so it is written synchronously. One
    exporter per role and rank; all ranks make the same calls."""

    def export(self, learner: AdapterLearner, folder: str | Path, *, is_async: bool) -> None:
        """Writes an export; the folder is complete when this returns, or it fails on all ranks."""
        error: str | None = None
        adapter, base_names = learner.adapter()
        if self.rank == 0:
            try:
                write_adapter(folder, adapter, base_names)
            except (OSError, RunError, UserError) as failure:
                error = str(failure)
        if self.group is not None:
            error = gather_values(error, self.group)[0]
        if error is not None:
            raise RunError(error)

    def outcomes(self) -> Outcomes:
        """A successful outcome: an export is complete on return, so none is pending."""
        return [{"files": {}, "error": None, "system": None}]

    def abandon(self) -> None:
        """No cleanup needed between calls."""


def _copies(plan: FolderPlan, others: Mapping[str, Carried]) -> Iterator[BlockSpec]:
    where = plan.places()
    for name, one in others.items():
        file, start, info = where[name]
        span = FileSpan(one.file, one.start, info.size_bytes)
        yield BlockSpec(file, Runs(start, info.size_bytes), span)


def export_model(learner: Exportable, folder: str | Path) -> None:
    """Writes one export, complete on return; all ranks call it."""
    Exporter().export(learner, folder, is_async=False)


def _gpu_of(shards: Mapping[str, Shard]) -> torch.device | None:
    return next((one.tensor.device for one in shards.values() if one.tensor.is_cuda), None)
