"""The part of a save on each rank: staging in host memory, writing, and outcomes of all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pentad.checkpoint.job import Memory, WriterJob, run_job
from pentad.checkpoint.writer import Pending, Writer
from pentad.core.errors import RunError, UserError
from pentad.core.group_values import gather_values

log = logging.getLogger(__name__)

PATIENCE = timedelta(days=60)
"""How long a rank waits for others to write their part: a large state takes long, and a dead rank
ends the wait by its closed connection."""
ROOM = 1 << 20
"""Sizes are rounded up to this, so that slightly more state does not need new memory."""
Outcomes = list[dict[str, Any]]
"""`Pending.outcome` of every rank."""


class HostMemory:
    """A buffer that a writer process can map. Allocation takes seconds per 10 GB, so a thread does
    it during training."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.is_pinned = False
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def prepare(self, size: int, *, pins: bool) -> None:
        """Starts to allocate; returns at once."""
        self._wait()
        if self.memory is None or self.memory.size < size:
            self.close()
            device = torch.cuda.current_device() if pins else None
            self.thread = threading.Thread(target=self._make, args=(size, device), daemon=True)
            self.thread.start()

    def take(self, size: int, *, pins: bool) -> Memory:
        """Memory of at least this many bytes; the previous content may be overwritten."""
        self.prepare(size, pins=pins)
        self._wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise RunError(f"no host memory to stage {size / 1e9:.1f} GB of state ({failure})")
        assert self.memory is not None
        return self.memory

    def close(self) -> None:
        self._wait()
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _make(self, size: int, device: int | None) -> None:
        try:
            self.memory = Memory(-(-max(size, 1) // ROOM) * ROOM)
            self.bytes = torch.frombuffer(self.memory.view, dtype=torch.uint8)
            self.bytes.zero_()  # pages are allocated at the first write
            if device is not None:
                torch.cuda.set_device(device)
                where, num = self.bytes.data_ptr(), self.bytes.numel()
                self.is_pinned = int(torch.cuda.cudart().cudaHostRegister(where, num, 0)) == 0
                if not self.is_pinned:
                    text = "%.1f GB of host memory cannot be pinned: saves block training longer"
                    log.warning(text, num / 1e9)
        except (OSError, RuntimeError, MemoryError) as error:
            self.failure = error


class RankSaver:
    """One per learner and rank; all ranks make the same calls. At most one save is in flight."""

    def __init__(self, writer: Writer | None = None) -> None:
        """A collective call: with several ranks it creates a process group."""
        self.writer = writer
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.group = None if is_alone else dist.new_group(backend="gloo")
        self.answers = None if is_alone else dist.new_group(backend="gloo", timeout=PATIENCE)
        """Process group for one thread of each rank, separate from computation."""
        self.rank = 0 if self.group is None else dist.get_rank()
        self.world = 1 if self.group is None else dist.get_world_size()
        self.memory = HostMemory()
        self.pending: Pending | None = None
        self.gathering: Future[Outcomes] | None = None

    def begin(self, make_job: Callable[[], WriterJob], *, is_async: bool) -> Pending:
        """Makes this rank's job and runs it, here or in the writer. An error is stored in the
        result, so that all ranks return; `outcomes` has the errors of all ranks."""
        pending = Pending()
        try:
            job = make_job()
            if is_async:
                assert self.writer is not None, "asynchronous saves need a writer"
                pending = self.writer.submit(job)
            else:
                pending.set_result(run_job(job))
        except (OSError, RunError) as error:
            pending.set_exception(error)
        except UserError as error:
            pending.set_exception(RunError(str(error)))
        self.pending = pending
        self.gathering = Future()
        threading.Thread(target=self._gather, args=(pending, self.gathering), daemon=True).start()
        return pending

    def outcomes(self) -> Outcomes:
        """Waits for the last save on all ranks and returns their outcomes (`Pending.outcome`);
        RunError if a rank is dead."""
        assert self.gathering is not None, "something was saved"
        return self.gathering.result()

    def finish(self) -> None:
        """Waits until no writer uses the memory; `outcomes` has the results."""
        if self.pending is not None and self.gathering is not None:
            wait([self.pending])
            wait([self.gathering])
            self.pending = None

    def close(self, *, is_failed: bool = False) -> None:
        """Closes the saver; after a failure it does not wait for other ranks."""
        if is_failed and self.pending is not None:
            wait([self.pending])
        elif not is_failed:
            self.finish()
        self.memory.close()

    def conclude(self, outcomes: Outcomes) -> Outcomes:
        """Called in the gathering thread after all ranks have written; returns the outcomes."""
        return outcomes

    def _gather(self, own: Pending, gathering: Future[Outcomes]) -> None:
        found = own.outcome()
        try:
            outcomes = [found] if self.answers is None else gather_values(found, self.answers)
            gathering.set_result(self.conclude(outcomes))
        except Exception as error:  # any error must end the wait
            text = f"a rank ended before all ranks had written their part of the state ({error})"
            gathering.set_exception(RunError(text))
