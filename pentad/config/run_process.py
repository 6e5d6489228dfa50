"""One process of a run: its name, roles, machine and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """One process, or one server of several."""

    name: str
    """For example learner-0 or rollout-1."""
    runs: tuple[str, ...]
    """The roles in it."""
    node: int | None = 0
    """Machine, counted from the one of the command; None: Ray or its address determines it."""
    devices: tuple[int, ...] = ()
    """GPUs of that machine, or of its bundle; empty on a CPU."""
    num_gpus: int = 0
    shares_with: tuple[str, ...] = ()
    """Processes on the same GPUs."""
    started_by: str = "pentad"
    bundle: int | None = None
    """On Ray: the bundle of the placement group."""
    cores: tuple[int, ...] = ()
    """CPU cores it is bound to; empty: any."""


def holding(lead: RunProcess, threads: list[RunProcess]) -> RunProcess:
    """Adds to a process the roles that run as its threads."""
    devices = {*lead.devices, *(device for one in threads for device in one.devices)}
    return replace(
        lead,
        runs=(*lead.runs, *(role for one in threads for role in one.runs)),
        devices=tuple(sorted(devices)),
        num_gpus=len(devices),
    )


def sharing(processes: list[RunProcess]) -> list[RunProcess]:
    """Adds to each process the names of processes on the same GPUs."""
    users: dict[tuple[int | None, int | None, int], list[str]] = {}
    for one in processes:
        for device in one.devices:
            users.setdefault((one.node, one.bundle, device), []).append(one.name)

    def others(one: RunProcess) -> tuple[str, ...]:
        found = [name for device in one.devices for name in users[one.node, one.bundle, device]]
        return tuple(dict.fromkeys(name for name in found if name != one.name))

    return [replace(one, shares_with=others(one)) for one in processes]
