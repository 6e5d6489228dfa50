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
    """Environment that vLLM or SGLang is installed in: its folder or its interpreter. null: that of
    the `vllm` or `sglang` command on the path."""
    args: tuple[str, ...] = ()
    """Further words for the command line of servers that the run starts."""
    start_timeout_s: Seconds = 600.0
    """A server that does not answer after this long ends the run."""
    weight_transport: Literal["disk", "broadcast", "ipc"] = "disk"
    """How new weights reach a server: through a file, by broadcast (gloo, or NCCL from a GPU), or
    by reference on a GPU that both share."""
    transfer_folder: str | None = None
    """Where weights lie while they travel by disk; servers must see it under the same name. null:
    shared memory, or the temporary folder where there is none."""
    check_weights_every: NonNegativeInt = 20
    """At a server's first publish and every n-th after it all tensors that it holds are compared
    with those of the trainer. 0: at the first alone."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of a GPU's memory that a started server takes. null: 0.4 on a GPU that also trains, else
    the server's own choice."""
