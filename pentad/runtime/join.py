"""How a rank joins its process group, of ours or of torchrun's."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pentad.core.errors import Problem, UserError
from pentad.runtime.rank import Rank


def device_of(rank: Rank, device: str = "auto") -> torch.device:
    """The device of this rank: one GPU each where there are GPUs, or `device`."""
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
    """Makes the default process group, over the given store, or where none is given torchrun's."""
    timeout = timedelta(seconds=timeout_s)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if store is None and (attempt := restarted()):
        # torchrun keeps one store over restarts, with the addresses of dead processes in it.
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
    """torchrun's count of restarts where it shares its own store with us; "" at the first start."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return count if shares_store() and count != "0" else ""


def shares_store() -> bool:
    """Whether torchrun's agents keep their own store for the ranks; its count of restarts differs
    between agents, so on several machines nothing tells one start from the next in it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def leave_group() -> None:
    """Ends the process group once all ranks are done: rank 0 serves the others until then."""
    dist.barrier()
    dist.destroy_process_group()
