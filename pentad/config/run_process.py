"""One process of a run: its name, roles, machine and devices."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """One process, or one server of several."""

    name: str
    """Such as learner-0 or rollout-1."""
    runs: tuple[str, ...]
    """The roles in it."""
    node: int | None = 0
    """Machine, counted from the one the command is typed on; None: Ray or its address says."""
    devices: tuple[int, ...] = ()
    """GPUs of that machine, or of its bundle; on a CPU none."""
    num_gpus: int = 0
    shares_with: tuple[str, ...] = ()
    """Processes on the same GPUs."""
    started_by: str = "pentad"
    bundle: int | None = None
    """On Ray: the bundle of the placement group."""
    cores: tuple[int, ...] = ()
    """CPU cores it is kept on; none given: any."""


def holding(lead: RunProcess, threads: list[RunProcess]) -> RunProcess:
    """With what runs as its threads."""
    devices = {*lead.devices, *(device for one in threads for device in one.devices)}
    return replace(
        lead,
        runs=(*lead.runs, *(role for one in threads for role in one.runs)),
        devices=tuple(sorted(devices)),
        num_gpus=len(devices),
    )


def sharing(processes: list[RunProcess]) -> list[RunProcess]:
    """With the names of those on the same GPUs."""
    users: dict[tuple[int | None, int | None, int], list[str]] = {}
    for one in processes:
        for device in one.devices:
            users.setdefault((one.node, one.bundle, device), []).append(one.name)

    def others(one: RunProcess) -> tuple[str, ...]:
        found = [name for device in one.devices for name in users[one.node, one.bundle, device]]
        return tuple(dict.fromkeys(name for name in found if name != one.name))

    return [replace(one, shares_with=others(one)) for one in processes]
