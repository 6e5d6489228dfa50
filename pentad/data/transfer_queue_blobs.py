"""Blobs in TransferQueue, by its key-value interface, in one partition per run.

TransferQueue has one controller on a Ray cluster, and storage units (`num_data_storage_units`) that
the run starts. It does not restart dead units: the run then ends, and resumes from its checkpoint
at the next start.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from pentad.core.errors import Problem, RunError, Transient, UserError
from pentad.data import ray_blobs
from pentad.data.packing import Buffer

os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "30")
os.environ.setdefault("TQ_NUM_THREADS", str(torch.get_num_threads()))
import transfer_queue as tq  # noqa: E402  it reads its settings once

FIELD = "blob"
WHOLE = {"is_whole": True}
"""Tag of a key, set when its blob is complete in a unit."""
T = TypeVar("T")


class TransferQueueBlobs:
    patience_s = 0.0

    def __init__(self, partition: str, *, is_maker: bool) -> None:
        self.partition = partition
        self.is_maker = is_maker
        self.address = {"kind": "transfer_queue", "partition": partition} | ray_blobs.cluster()

    def keys(self, gids: Iterable[int]) -> list[str]:
        wanted = {str(gid) for gid in gids}
        found = self._ask(lambda: tq.kv_list(self.partition)).get(self.partition, {})
        return [key for key, tag in found.items() if tag and key.partition(".")[0] in wanted]

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        blob = torch.frombuffer(bytearray().join(data), dtype=torch.uint8)
        self._ask(lambda: tq.kv_put(key, self.partition, {FIELD: blob}, WHOLE))

    def get(self, keys: Sequence[str]) -> list[Any | None]:
        """Reads blobs; one by one if some are missing, which a batched answer does not name."""
        found = self._get(keys)
        if len(found) == len(keys):
            return list(found)
        return [next(iter(self._get([key])), None) for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._ask(lambda: tq.kv_clear(list(keys), self.partition))

    def close(self) -> None:
        if self.is_maker:
            self.is_maker = False
            tq.close()

    def describe(self, key: str) -> str:
        return f"{key} in partition {self.partition} of TransferQueue"

    def _get(self, keys: Sequence[str]) -> list[bytearray]:
        if not keys:
            return []
        try:
            rows = self._ask(lambda: tq.kv_batch_get(list(keys), self.partition, FIELD))[FIELD]
        except (ValueError, tq.StorageKeyNotFoundError):  # missing, or not complete yet
            return []
        return [bytearray(np.asarray(row)) for row in rows.unbind()]

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            said = " ".join(str(error).split())
            raise Transient(f"TransferQueue does not answer: {said}") from error


def make_blobs(num_units: int) -> TransferQueueBlobs:
    """Starts TransferQueue on the cluster that this process has joined."""
    if ray_blobs.has_actor("TransferQueueController", "transfer_queue"):
        rule = "the Ray cluster has one already, that of another run"
        raise UserError(Problem("store = transfer_queue", rule, "wait for its end, or use ray"))
    ray_blobs.wait_cpus(num_units + 1)
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": num_units}}})
    return TransferQueueBlobs(f"pentad-{secrets.token_hex(6)}", is_maker=True)


def open_blobs(address: Mapping[str, Any]) -> TransferQueueBlobs:
    ray_blobs.join(address)
    if not ray_blobs.has_actor("TransferQueueController", "transfer_queue"):
        raise RunError("TransferQueue is not here: the run that made it has ended")
    tq.init()
    return TransferQueueBlobs(address["partition"], is_maker=False)
