"""The keys of the block `rollout.server`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pentad.core.section import NonNegativeInt, Seconds, Section


class ServerConfig(Section):
    addresses: tuple[str, ...] = ()
    """Servers to attach to, such as `http://node7:8000`, one for each replica (the d of the rollout
    component). Empty: the run starts its servers on this machine and ends them."""
    python: str | None = None
    """Python environment of vLLM or SGLang: its folder or its interpreter. null: that of the `vllm`
    or `sglang` command on the path."""
    args: tuple[str, ...] = ()
    """Further command-line arguments for servers that the run starts."""
    start_timeout_s: Seconds = 600.0
    """Time limit for the start of a server; beyond it the run ends."""
    weight_transport: Literal["disk", "broadcast", "ipc"] = "disk"
    """How new weights reach a server: through a file, by broadcast (gloo, or NCCL from a GPU), or
    by reference on a GPU that both share."""
    transfer_folder: str | None = None
    """Folder for weights that are published by disk; servers must see it under the same path. null:
    shared memory, or the temporary folder without it."""
    check_weights_every: NonNegativeInt = 20
    """At a server's first publish and every n-th after it, all its tensors are compared with the
    trainer's. 0: only at the first."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for a server that the run starts. null: 0.4 on a GPU that also
    trains, else the server's default."""
