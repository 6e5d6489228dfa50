"""Environment variables that must be set before a process starts: libraries read them once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "TORCH_COMPILE_DETERMINISTIC": "1",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
"""Variables for bitwise repeatable runs, in addition to torch's own switch."""


def make_deterministic() -> None:
    """Sets the variables in a process not started as a rank, before its first GPU product and
    compilation. Values set by the user are kept; torch rejects invalid ones."""
    import torch  # not in a process that only starts ranks

    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)


@contextmanager
def determinism_restored() -> Iterator[None]:
    """Undoes `make_deterministic` at the end, because later runs of this process, and ranks that
    they start, may have other settings."""
    import torch

    before = {name: os.environ.get(name) for name in DETERMINISTIC}
    mode = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        if torch.are_deterministic_algorithms_enabled() != mode:  # it imports torch's compiler
            torch.use_deterministic_algorithms(mode, warn_only=warns)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def rank_environment(
    *, rank: int, world: int, deterministic: bool, is_spread: bool = False
) -> dict[str, str]:
    """Returns the environment variables to add for one rank; values that the user set are kept.
    Each rank sees only its own GPU. `is_spread`: ranks may be on several machines."""
    threads = max(1, (os.cpu_count() or 1) // world)
    defaults = {
        "OMP_NUM_THREADS": str(threads),  # otherwise ranks compete for the cores
        **({} if is_spread else {"GLOO_SOCKET_IFNAME": "lo"}),
        **(DETERMINISTIC if deterministic else {}),
    }
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return {name: value for name, value in defaults.items() if name not in os.environ} | own


def visible_devices(devices: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for GPUs given in the numbering of this process."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = own.split(",") if own else [str(n) for n in range(max(devices, default=-1) + 1)]
    return ",".join(names[device] for device in devices)
