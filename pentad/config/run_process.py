"""One process of a run: its name, roles, machine and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """One process, or one server, which may consist of several processes."""

    name: str
    """For example learner-0 or rollout-1."""
    runs: tuple[str, ...]
    """Roles that run in it."""
    node: int | None = 0
    """Index of the machine; 0 runs the command. None: Ray or the server's address determines it."""
    devices: tuple[int, ...] = ()
    """GPUs of that machine, or of its bundle; empty on a CPU."""
    num_gpus: int = 0
    shares_with: tuple[str, ...] = ()
    """Processes on the same GPUs."""
    started_by: str = "pentad"
    bundle: int | None = None
    """On Ray: the bundle of the placement group."""
    cores: tuple[int, ...] = ()
    """CPU cores to which it is bound; empty: any."""


def holding(lead: RunProcess, threads: list[RunProcess]) -> RunProcess:
    """The process with the roles and devices of others that run as its threads."""
    devices = {*lead.devices, *(device for one in threads for device in one.devices)}
    return replace(
        lead,
        runs=(*lead.runs, *(role for one in threads for role in one.runs)),
        devices=tuple(sorted(devices)),
        num_gpus=len(devices),
    )


def sharing(processes: list[RunProcess]) -> list[RunProcess]:
    """The processes, each with the names of others on the same GPUs."""
    users: dict[tuple[int | None, int | None, int], list[str]] = {}
    for one in processes:
        for device in one.devices:
            users.setdefault((one.node, one.bundle, device), []).append(one.name)

    def others(one: RunProcess) -> tuple[str, ...]:
        found = [name for device in one.devices for name in users[one.node, one.bundle, device]]
        return tuple(dict.fromkeys(name for name in found if name != one.name))

    return [replace(one, shares_with=others(one)) for one in processes]
