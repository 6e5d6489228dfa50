"""A pool of gloo processes, started once and fed cases: starting them costs more than a case.

A case is a function of a module under tests/dist, its keyword arguments, and the number of ranks
it wants. A process group is made anew whenever that number changes, so cases come sorted by it.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SIZE = 8
START_S, CASE_S = 240.0, 240.0
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit/engine")]
IMPORTED = ("checkpoint_cases", "compiled_cases", "hf_cases", "run_cases", "strict_cases")
"""What cases import, once for all workers: most of a short case would be the import."""


def serve(rank: int, pipe: multiprocessing.connection.Connection) -> None:
    """The life of a worker: cases until the pipe closes, a new world when a case names one."""
    sys.path[:0] = PATHS
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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
                store = dist.FileStore(world, num_ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
                current = world
            out = vars(importlib.import_module(module))[function](**kwargs)
            pipe.send((True, out if rank == 0 else None))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


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
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
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
        for _, pipe in asked:
            pipe.send((world, num_ranks, module, function, kwargs))
        try:
            return self._answers(asked, timeout_s)
        except CaseFailed:
            self.stop()
            raise

    def _answers(self, asked: list[Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(asked)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise CaseFailed(f"ranks {sorted(waiting.values())} gave no answer in time")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    is_good, answer = pipe.recv()
                except EOFError:
                    asked[rank][0].join(60)
                    code = asked[rank][0].exitcode
                    raise CaseFailed(f"rank {rank} died with exit code {code}") from None
                if not is_good:
                    raise CaseFailed(f"rank {rank}:\n{answer}")
                answers[rank] = answer
        return answers[0]
