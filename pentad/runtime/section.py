"""Keys of machines and process start: the blocks `cluster` and `scheduler`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pentad.core.machine import GpuQueryError, find_gpus
from pentad.core.section import Positive, Section

Few = Annotated[int, Field(ge=1, le=100_000)]
"""A number of machines or devices; bounded, because placement enumerates them."""


class ClusterConfig(Section):
    n_nodes: Few = 1
    """Machines the run may use."""
    n_gpus_per_node: Few | None = None
    """Devices on each machine. null: the number found (one on a machine without a GPU)."""
    n_cpus_per_node: Few | None = None
    """CPU cores that a Slurm job requests on each machine. null: the whole machine
    (--exclusive)."""
    memory_gb_per_node: Positive | None = None
    """Host memory in GiB that a Slurm job requests on each machine. null: all of it."""
    share_gpus: bool = False
    """Lets components joined by `+` share devices, each in its own process, if there are not enough
    for both: hybrid and async on one GPU."""
    allow_idle: bool = False
    """Accepts a layout that leaves half or more of the devices of a cluster of given size idle."""

    def count_devices(self) -> int | None:
        """Returns the devices on all machines; None without GPUs: processes share the cores."""
        per_node = self.n_gpus_per_node
        if per_node is None:
            try:
                per_node = len(find_gpus())
            except GpuQueryError:  # reported by `doctor`, and by a run when it opens the device
                return None
        return self.n_nodes * per_node or None


class SchedulerConfig(Section):
    type: Literal["local", "ray", "slurm"] = "local"
    """Where processes are started: this machine, a Ray cluster, or Slurm."""
    processes: Literal["auto", "one", "separate"] = "auto"
    """Whether scheduler, trainer and sampler are one process or several. auto: one if there is one
    training rank and one embedded sampler on this machine and they share a device or there is only
    one; else several."""
