"""Keys of the machines and of how processes are started: the blocks `cluster` and `scheduler`."""

from __future__ import annotations

from typing import Literal

from pentad.core.machine import GpuQueryError, find_gpus
from pentad.core.section import Count, Positive, Section


class ClusterConfig(Section):
    n_nodes: Count = 1
    """Machines the run may use."""
    n_gpus_per_node: Count | None = None
    """Devices on each machine. null: as many as are found (one on a machine without a GPU)."""
    n_cpus_per_node: Count | None = None
    """CPU cores that a Slurm job asks for on each machine. null: all of them, and no other job
    beside it (--exclusive)."""
    memory_gb_per_node: Positive | None = None
    """Host memory in GiB that a Slurm job asks for on each machine. null: all of it."""
    share_gpus: bool = False
    """Lets rollout and training that + gives devices of their own share them, each in its own
    process, where there are not enough for both: hybrid and async on one GPU."""
    allow_idle: bool = False
    """Lets a layout leave half of the devices of a cluster of a given size idle, or more."""

    def count_devices(self) -> int | None:
        """Devices of all machines; None without GPUs, where processes share the cores."""
        per_node = self.n_gpus_per_node
        if per_node is None:
            try:
                per_node = len(find_gpus())
            except GpuQueryError:  # `doctor` says so; a run finds out when it asks for the device
                return None
        return self.n_nodes * per_node or None


class SchedulerConfig(Section):
    type: Literal["local", "ray", "slurm"] = "local"
    """Who starts the processes: this machine, a Ray cluster, or Slurm."""
    processes: Literal["auto", "one", "separate"] = "auto"
    """Whether scheduler, trainer and sampler are one process or several. auto: one where one rank
    trains, one embedded sampler samples, both on this machine, and they share a device or there
    are not two; else several."""
