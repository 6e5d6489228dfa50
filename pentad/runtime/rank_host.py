"""Runs a rank: joins it to its process group, and makes the calls of the scheduler.

Calls on all ranks come one at a time and run on one thread; queries to one rank are answered in
parallel. Log messages of the first rank are sent to the owner.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pentad.core.errors import Problem, RunError, UserError
from pentad.core.specs import load
from pentad.runtime.environment import rank_environment
from pentad.runtime.frames import describe_error
from pentad.runtime.learner_client import RankService
from pentad.runtime.pace import WaitMeter
from pentad.runtime.rank import Rank
from pentad.runtime.report import describe_failure
from pentad.runtime.role_host import FORMAT
from pentad.runtime.roles import BEAT_S, RoleSpec

TARGET = f"{__name__}:RankHost"
JOIN_S = 600.0
"""Time limit of a collective, and of forming the group."""
Emit = Callable[[str, Any], None]
"""Sends an event to all connections; called on the event loop's thread."""
MakeRank = Callable[[dict[str, Any], Rank, torch.device], RankService]
"""Makes the service of one rank from a JSON value; a module-level function."""


def device_of(rank: Rank, device: str = "auto") -> torch.device:
    """Returns the device of this rank: its own GPU if there are GPUs, or `device`."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if rank.local_rank >= count:
        rule = f"rank {rank.local_rank} of this machine needs a GPU of its own, there are {count}"
        remedy = "use fewer ranks, or device=cpu"
        raise UserError(Problem(f"device = {device}", rule, remedy))
    return torch.device("cuda", rank.local_rank)


def keep_log(path: Path) -> None:
    """Appends log messages, and at SIGUSR1 the stacks of all threads, to the log of a rank whose
    output belongs to its launcher. Does nothing if this machine does not have the run folder."""
    if not path.parent.is_dir():
        return
    file = path.open("a", encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter(FORMAT))
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


class LogSender(logging.Handler):
    """Sends our log messages, and warnings of libraries, as events."""

    def __init__(self, send: Emit) -> None:
        super().__init__(logging.INFO)
        self.send = send

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.name.startswith("pentad.")
        if is_own or record.levelno >= logging.WARNING:
            text, is_notice = record.getMessage(), hasattr(record, "is_notice")
            self.send("log", [record.levelno, record.name, text, is_notice])


def specs_of_ranks(
    role: str,
    make: MakeRank,
    given: dict[str, Any],
    logs: Sequence[Path],
    *,
    device: str,
    devices: Sequence[int],
    generation: int,
    deterministic: bool,
    is_spread: bool = False,
    slots: Sequence[int] = (),
    beat_s: float = BEAT_S,
    seed: int = 0,
) -> list[RoleSpec]:
    """Returns the specs of a group's processes, one for each of `logs`; `devices` are their GPUs,
    if any, and `slots` their slots, by rank. A single rank gets as many threads as this process, so
    that both give equal results."""
    world = len(logs)
    return [
        RoleSpec(
            name=f"{role}-{slots[rank] if slots else rank}",
            target=TARGET,
            payload={
                "rank": rank,
                "world": world,
                "device": device,
                "timeout_s": JOIN_S,
                "generation": generation,
                "num_threads": torch.get_num_threads() if world == 1 else 0,
                "service": f"{make.__module__}:{make.__qualname__}",
                "given": given,
            },
            log=log,
            generation=generation,
            beat_s=beat_s,
            seed=seed,
            num_gpus=1 if devices else 0,
            devices=tuple(devices[rank : rank + 1]),
            environment=rank_environment(
                rank=rank, world=world, deterministic=deterministic, is_spread=is_spread
            ),
        )
        for rank, log in enumerate(logs)
    ]


class RankHost:
    """The served object of a role process that is a rank; `runtime.group_calls` calls it."""

    def __init__(self, payload: Mapping[str, Any], emit: Emit) -> None:
        self.payload = payload
        self.emit = emit
        self.rank = Rank(payload["rank"], payload["world"], payload.get("local_rank", 0))
        self.thread = ThreadPoolExecutor(1, "rank")
        self.service: RankService | None = None
        self.has_ended = False
        """Whether the scheduler has called `end`."""
        self.rendezvous: dist.Store | None = None
        self.waits = WaitMeter()
        if payload["num_threads"]:
            torch.set_num_threads(payload["num_threads"])

    def stats(self) -> dict[str, float]:
        return self.rank.beat()

    async def open_rendezvous(self, host: str) -> dict[str, Any]:
        """Opens the rendezvous port on rank 0 for a group on several machines; the kernel chooses
        the port. It requires no token."""
        if self.rank.rank > 0 or self.rank.world == 1:
            return {"value": {}}
        listening = socket.create_server((host, 0))
        port: int = listening.getsockname()[1]
        self.rendezvous = dist.TCPStore(
            host,
            port,
            self.rank.world,
            is_master=True,
            timeout=timedelta(seconds=self.payload["timeout_s"]),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return {"value": {"host": host, "port": port}}

    async def join(self, place: dict[str, Any]) -> dict[str, Any]:
        """Joins the group at this address and makes the service."""
        loop = asyncio.get_running_loop()

        def send(event: str, value: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.emit, event, value)

        if self.rank.rank == 0:
            logging.getLogger().addHandler(LogSender(send))
            logging.getLogger("pentad").setLevel(logging.INFO)
            logging.captureWarnings(True)
        return await loop.run_in_executor(self.thread, self._answer, self._join, place)

    async def call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Makes a call that runs on all ranks; returns its value or its failure."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self._call, method, arguments)

    async def ask(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answers a query to this rank only, also during a call."""
        assert self.service is not None, "ranks join first"
        asked = getattr(self.service, method)
        return await asyncio.to_thread(self._answer, lambda: asked(**arguments))

    async def end(self, is_failed: bool) -> dict[str, Any]:
        """Waits for work in progress, or abandons it after a failure; no call follows."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self._answer, self._end, is_failed)

    async def stacks(self) -> None:
        """Writes the stacks of all threads to the log, as SIGUSR1 does."""
        os.kill(os.getpid(), signal.SIGUSR1)

    async def close(self) -> None:
        """Does nothing: `end` has already waited for work in progress."""

    def _join(self, place: dict[str, Any]) -> None:
        payload = self.payload
        if payload.get("log"):
            keep_log(Path(payload["log"]))
        device = device_of(self.rank, payload["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.rank.world > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=self._store(place),
                rank=self.rank.rank,
                world_size=self.rank.world,
                timeout=timedelta(seconds=payload["timeout_s"]),
            )
            self.waits.watch()
        self.service = load(payload["service"])(payload["given"], self.rank, device)

    def _store(self, place: dict[str, Any]) -> dist.Store:
        """Opens the store at which the ranks meet."""
        world, timeout = self.rank.world, timedelta(seconds=self.payload["timeout_s"])
        store = self.rendezvous
        if "file" in place:
            store = dist.FileStore(place["file"], world)
            store.set_timeout(timeout)
        elif store is None:
            host, port = place["host"], place["port"]
            store = dist.TCPStore(host, port, world, is_master=False, timeout=timeout)
        # The prefix keeps ranks of an earlier group out.
        group = f"{place.get('prefix', '')}generation-{self.payload.get('generation', 0)}"
        return dist.PrefixStore(group, store)

    def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self.service is not None, "ranks join first"
        called = getattr(self.service, method)
        with self.rank.calling():
            is_mild = method in self.service.mild
            return self._answer(lambda: called(**arguments), is_mild=is_mild)

    def _end(self, is_failed: bool) -> None:
        self.has_ended = True
        if self.service is not None:
            self.service.close(is_failed=is_failed)
        if self.rank.world > 1 and not is_failed:
            dist.barrier()  # until all are done, rank 0 may serve the store
            dist.destroy_process_group()

    def _answer(
        self, function: Callable[..., Any], *arguments: Any, is_mild: bool = False
    ) -> dict[str, Any]:
        waited = self.waits.waited_s
        try:
            value = function(*arguments)
            waited_s = self.waits.waited_s - waited
            return {"value": value, "step": self.rank.step, "waited_s": waited_s}
        except Exception as error:
            if is_mild and isinstance(error, OSError | RunError | UserError):
                described = describe_error(error)
                if isinstance(error, OSError):
                    described["kind"] = "OSError"
                return {"mild": described}
            logging.getLogger("rank").info("the call failed", exc_info=True)
            return {"failure": asdict(describe_failure(self.rank.rank, self.rank.step, error))}
