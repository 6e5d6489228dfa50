"""Blobs in the memory of Ray actors (storage units) on any machine of a cluster.

Each group is stored in one unit, chosen by gid. Ray restarts a dead unit empty: its groups are
missing until they are written again. Units end with the process that created them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray import _raylet
from ray.exceptions import GetTimeoutError, RayError

from pentad.core.errors import Problem, RunError, UserError
from pentad.core.machine import RAY_SETTINGS, process_kept
from pentad.data.packing import Buffer

RAYLET: Any = _raylet  # has no stubs
NAMESPACE = "pentad"
READY_S = 60.0
"""Time limit for the cluster to provide the units, in seconds."""
ANSWER_S = 120.0
"""Time limit for a unit's answer, including a restart, in seconds."""


class StorageUnit:
    """The actor of a storage unit."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, bytes]] = {}
        """Gid -> key -> blob."""

    def keys(self, gids: Sequence[str]) -> list[str]:
        return [key for gid in gids for key in self.groups.get(gid, ())]

    def put(self, key: str, data: np.ndarray) -> None:
        self.groups.setdefault(_gid(key), {})[key] = data.tobytes()

    def get(self, keys: Sequence[str]) -> list[np.ndarray | None]:
        """Returns arrays, which readers map without unpickling."""
        found = [self.groups.get(_gid(key), {}).get(key) for key in keys]
        return [None if data is None else np.frombuffer(data, np.uint8) for data in found]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            held = self.groups.get(_gid(key), {})
            held.pop(key, None)
            if not held:
                self.groups.pop(_gid(key), None)


class RayBlobs:
    patience_s = 120.0

    def __init__(self, name: str, units: Sequence[Any], *, is_maker: bool) -> None:
        self.units = units
        self.is_maker = is_maker
        self.name = name
        self.address = {"kind": "ray", "name": name, "num_units": len(units)} | cluster()

    def keys(self, gids: Iterable[int]) -> list[str]:
        found = self._ask(lambda unit, mine: unit.keys.remote(mine), map(str, gids))
        return [key for keys, _ in found for key in keys]

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        joined = np.frombuffer(b"".join(data), np.uint8)
        self._ask(lambda unit, mine: unit.put.remote(mine[0], joined), [key])

    def get(self, keys: Sequence[str]) -> list[Any | None]:
        """Returns copies, which the caller may change."""
        found: dict[str, Any] = {}
        for blobs, mine in self._ask(lambda unit, mine: unit.get.remote(mine), keys):
            found |= zip(mine, blobs, strict=True)
        return [None if found[key] is None else bytearray(found[key]) for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        self._ask(lambda unit, mine: unit.delete.remote(mine), keys)

    def close(self) -> None:
        if self.is_maker and ray.is_initialized():
            for unit in self.units:
                ray.kill(unit)

    def describe(self, key: str) -> str:
        return f"{key} in storage unit {self._unit(key)} of {self.name}"

    def _unit(self, key: str) -> int:
        return int(_gid(key)) % len(self.units)

    def _ask(
        self, call: Callable[[Any, list[str]], Any], keys: Iterable[str]
    ) -> list[tuple[Any, list[str]]]:
        """Calls each unit with its share of these keys or gids; returns (answer, share) of each
        unit."""
        shares: dict[int, list[str]] = {}
        for key in keys:
            shares.setdefault(self._unit(key), []).append(key)
        calls = [call(self.units[number], mine) for number, mine in shares.items()]
        try:
            answers = ray.get(calls, timeout=ANSWER_S)
        except GetTimeoutError as error:
            rule = f"did not answer within {ANSWER_S:g} s"
            raise RunError(f"a storage unit of {self.name} {rule}") from error
        except RayError as error:
            raise _gone(self.name, error) from error
        return list(zip(answers, shares.values(), strict=True))


def make_blobs(num_units: int) -> RayBlobs:
    """Starts units, spread over the machines of the cluster that this process has joined."""
    name = f"pentad-store-{secrets.token_hex(6)}"
    made = ray.remote(StorageUnit)
    units = [
        made.options(
            name=f"{name}-{number}",
            namespace=NAMESPACE,
            num_cpus=0,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=-1,  # all of them are idempotent
        ).remote()
        for number in range(num_units)
    ]
    return RayBlobs(name, units, is_maker=True)


def open_blobs(address: Mapping[str, Any]) -> RayBlobs:
    join(address)
    name = address["name"]
    try:
        units = [
            ray.get_actor(f"{name}-{number}", NAMESPACE) for number in range(address["num_units"])
        ]
    except ValueError as error:
        raise _gone(name, error) from error
    return RayBlobs(name, units, is_maker=False)


def cluster() -> dict[str, Any]:
    """The cluster of this process, as part of an address. If it requires a token, Ray finds the
    token itself."""
    has_token = RAYLET.get_authentication_mode() == RAYLET.AuthenticationMode.TOKEN
    return {"cluster": ray.get_runtime_context().gcs_address, "has_token": has_token}


def join(address: Mapping[str, Any]) -> None:
    """Joins the cluster of the address, unless this process is in a cluster."""
    if ray.is_initialized():
        return
    where = address["cluster"]
    mode = {"RAY_AUTH_MODE": "token"} if address["has_token"] else {}
    with process_kept(RAY_SETTINGS | mode):
        RAYLET.Config.initialize("")  # read at the import of ray
        try:
            ray.init(address=where, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RayError) as error:
            raise RunError(f"the Ray cluster {where} cannot be joined: {error}") from error


def wait_cpus(num: int) -> None:
    """Waits for the CPUs of TransferQueue: one for each unit and one for its controller, for which
    it would wait without a limit. UserError if the cluster lacks them."""
    until = time.monotonic() + READY_S
    while (free := ray.available_resources().get("CPU", 0.0)) < num:
        if time.monotonic() >= until:
            rule = f"needs {num} CPUs of the Ray cluster besides those of the run's roles"
            rule += f" (num_data_storage_units and one), and {free:g} are free after {READY_S:g} s"
            remedy = "add nodes, use fewer units, or use store=ray, which takes none"
            raise UserError(Problem("store = transfer_queue", rule, remedy))
        time.sleep(0.5)


def has_actor(name: str, namespace: str) -> bool:
    try:
        ray.get_actor(name, namespace)
    except ValueError:
        return False
    return True


def _gid(key: str) -> str:
    return key.partition(".")[0]


def _gone(name: str, error: BaseException) -> RunError:
    said = " ".join(str(error).split())
    return RunError(f"the store {name} is not here: the run that made it has ended ({said})")
