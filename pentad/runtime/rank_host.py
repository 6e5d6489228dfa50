"""Joins a rank to its process group, ours or torchrun's; and runs a rank in a role process, which
makes the calls of its owner.

Calls on all ranks come one at a time and run on one thread; queries to one rank are answered in
parallel. Log messages of the first rank are sent to the owner.
"""

from __future__ import annotations

import asyncio
import logging
import os
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
from pentad.runtime.calls import RankService
from pentad.runtime.environment import rank_environment
from pentad.runtime.frames import describe_error
from pentad.runtime.pace import WaitMeter
from pentad.runtime.rank import Rank
from pentad.runtime.report import describe_failure
from pentad.runtime.roles import BEAT_S, RoleSpec

TARGET = f"{__name__}:RankHost"
JOIN_S = 600.0
"""Time limit of a collective, and of forming the group."""
Emit = Callable[[str, Any], None]
"""Sends an event to all connections; called on the event loop's thread."""
MakeRank = Callable[[dict[str, Any], Rank, torch.device], RankService]
"""Makes the service of one rank from a JSON value; a module-level function."""


# Joining.


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


def join_group(
    rank: Rank,
    device: torch.device,
    *,
    timeout_s: float,
    store: dist.Store | None = None,
) -> None:
    """Makes the default process group, over the given store or torchrun's."""
    timeout = timedelta(seconds=timeout_s)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if store is None and (attempt := restarted()):
        # torchrun's store survives restarts and contains the addresses of dead processes.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(
            f"attempt-{attempt}", dist.TCPStore(address, port, is_master=False, timeout=timeout)
        )
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=store, rank=rank.rank, world_size=rank.world, timeout=timeout
        )


def restarted() -> str:
    """Returns torchrun's restart count if it shares its store with us; "" at the first start."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return count if shares_store() and count != "0" else ""


def shares_store() -> bool:
    """Whether torchrun's agents share their own store with the ranks. The restart count differs
    between agents, so on several machines two starts in that store cannot be told apart."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def leave_group() -> None:
    """Ends the process group after all ranks are done: until then rank 0 serves the store."""
    dist.barrier()
    dist.destroy_process_group()


# A role process.


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
        self.rank = Rank(payload["rank"], payload["world"])
        self.thread = ThreadPoolExecutor(1, "rank")
        self.service: RankService | None = None
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

    async def close(self) -> None:
        """Does nothing: `end` has already waited for work in progress."""

    def _join(self, place: dict[str, Any]) -> None:
        payload, timeout_s = self.payload, self.payload["timeout_s"]
        device = device_of(self.rank, payload["device"])
        if self.rank.world > 1:
            store, timeout = self.rendezvous, timedelta(seconds=timeout_s)
            if "file" in place:
                store = dist.FileStore(place["file"], self.rank.world)
                store.set_timeout(timeout)
            elif store is None:
                host, port = place["host"], place["port"]
                store = dist.TCPStore(host, port, self.rank.world, is_master=False, timeout=timeout)
            # The prefix keeps ranks of an earlier group out.
            store = dist.PrefixStore(f"generation-{payload.get('generation', 0)}", store)
            join_group(self.rank, device, timeout_s=timeout_s, store=store)
        elif device.type == "cuda":
            torch.cuda.set_device(device)
        if self.rank.world > 1:
            self.waits.watch()
        self.service = load(payload["service"])(payload["given"], self.rank, device)

    def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self.service is not None, "ranks join first"
        called = getattr(self.service, method)
        with self.rank.calling():
            is_mild = method in self.service.mild
            return self._answer(lambda: called(**arguments), is_mild=is_mild)

    def _end(self, is_failed: bool) -> None:
        if self.service is not None:
            self.service.close(is_failed=is_failed)
        if self.rank.world > 1 and not is_failed:
            leave_group()

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
