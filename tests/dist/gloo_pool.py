"""A pool of gloo processes, started once and fed cases: starting them costs more than a case.

A case is a function of a module under tests/dist, its keyword arguments, and the number of ranks
it wants. A process group is made anew whenever that number changes, so cases come sorted by it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

START_S, CASE_S = 240.0, 240.0
SIZE = 8
MOST_GROUPS = 30
"""A world in which a rank holds more is made anew: each group has threads of its own."""
TRACE_S = 2.0
"""How long ranks have to write where they are, and one that crashed to be seen as such: its peers
may report the lost connection first."""
HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent / "unit/engine"), str(HERE.parent)]
IMPORTED = ("checkpoint_cases", "compiled_cases", "hf_cases", "publish_cases")
IMPORTED += ("strict_cases", "exchange_cases", "group_targets", "preloaded")
"""What cases import, once for all workers: most of a short case would be the import."""


def serve(rank: int, pipe: multiprocessing.connection.Connection, traces: str) -> None:
    """The life of a worker: cases until the pipe closes, a new world when a case names one."""
    sys.path[:0] = PATHS
    import torch
    import warm_start

    gc.freeze()  # what was imported: no collection has to look at it
    warm_start.nest()  # or the processes of a run would each import torch
    torch.set_num_threads(1)
    with Path(traces).open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        serve_cases(rank, pipe)


def serve_cases(rank: int, pipe: multiprocessing.connection.Connection) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    share_one_device()
    current = ""
    while True:
        try:
            world, num_ranks, module, function, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if world != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                    gc.collect()  # engines of earlier cases hold groups, and their threads
                store = dist.FileStore(world, num_ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
                current = world
            out = vars(importlib.import_module(module))[function](**kwargs)
            pipe.send((True, (out, len(_world.pg_map)) if rank == 0 else None))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def share_one_device() -> None:
    """Gives all groups of this rank one device of gloo: each would have its own, with a thread that
    looks for messages a hundred times a second."""
    from torch.distributed import ProcessGroupGloo

    device, plain = ProcessGroupGloo.create_default_device(), ProcessGroupGloo.__init__

    def init(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        plain(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


class CaseFailed(AssertionError):
    """A worker raised, died or ran out of time."""


class Pool:
    """Runs cases on all ranks; the answer is rank 0's. After a failure the processes are started
    anew, since the others may wait for ever in a collective."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.num_ranks = 0
        self.num_worlds = 0

    def start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["transformers", "pentad.engine.pipelined", *IMPORTED])
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            given = (rank, theirs, str(self._traces(rank)))
            process = context.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []
        self.num_ranks = 0

    def run(
        self, num_ranks: int, module: str, function: str, timeout_s: float = CASE_S, **kwargs: Any
    ) -> Any:
        if not self.workers:
            self.start()
            timeout_s += START_S
        if num_ranks != self.num_ranks:
            self.num_ranks, self.num_worlds = num_ranks, self.num_worlds + 1
        world = f"{self.folder.name}/world-{self.num_worlds}"
        asked = self.workers[:num_ranks]
        try:
            for _, pipe in asked:
                pipe.send((world, num_ranks, module, function, kwargs))
            answer, num_groups = self._answers(asked, timeout_s)
        except BaseException:
            self.stop()
            raise
        if num_groups > MOST_GROUPS:
            self.num_ranks = 0
        return answer

    def _answers(self, asked: list[Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(asked)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise CaseFailed(self._hanging(asked, sorted(waiting.values())))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    is_good, answers[rank] = pipe.recv()
                except EOFError:
                    is_good, answers[rank] = False, "its connection ended"
                if not is_good:
                    raise CaseFailed(self._died(asked) or f"rank {rank}:\n{answers[rank]}")
        return answers[0]

    def _died(self, asked: list[Any]) -> str:
        """Which ranks have ended by themselves, and where each was; empty where all live."""
        multiprocessing.connection.wait([process.sentinel for process, _ in asked], TRACE_S)
        return "\n".join(
            f"rank {rank} died with exit code {process.exitcode}\n{self._traces(rank).read_text()}"
            for rank, (process, _) in enumerate(asked)
            if process.exitcode is not None
        )

    def _hanging(self, asked: list[Any], ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(asked[rank][0].pid, signal.SIGUSR1)
        time.sleep(TRACE_S)
        places = [f"rank {rank}:\n{self._traces(rank).read_text()}" for rank in ranks]
        return "\n".join([f"ranks {ranks} gave no answer in time", *places])

    def _traces(self, rank: int) -> Path:
        """What a rank's interpreter writes at a crash, or asked where it is."""
        return Path(self.folder.name) / f"traces-{rank}"
