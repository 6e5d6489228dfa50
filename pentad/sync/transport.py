"""Transports of weights to servers: by a file, by broadcast, or by reference on one GPU (CUDA IPC
for vLLM, pickles for SGLang).

Each transport returns the workers' receipts, which contain the digest of the received weights.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from pentad.core.errors import InfraFailure
from pentad.core.roles import TensorPairs
from pentad.core.scratch import scratch_folder
from pentad.ops.capture import wait_for_device
from pentad.sync.group import DEVICE_ARGUMENT, BroadcastGroup, gpu_handle, send_all, weight_group
from pentad.sync.published import WEIGHTS, FilePairs, gpu_uuid
from pentad.weights.hf import write_file
from pentad.weights.transfer import TensorInfo

T = TypeVar("T")
Receipts = list[dict[str, Any]]
Ask = Callable[..., Awaitable[Receipts]]
"""`ask(method, *arguments)`: calls a method of all workers; raises InfraFailure if one failed."""
JOIN_TIMEOUT_S = 300.0
"""Time limit for all workers to join a group, in seconds."""


class Transport:
    async def send(self, weights: TensorPairs, ask: Ask, *, is_part: bool = False) -> Receipts:
        """Sends weights. `is_part`: other modules keep their weights, which only a file
        supports."""
        raise NotImplementedError

    async def close(self) -> None:
        """No cleanup needed between sends."""


class DiskTransport(Transport):
    """A safetensors file that the server can read: the published one, or one that is removed after
    the install."""

    def __init__(self, folder: Path, *, is_private: bool) -> None:
        self.folder = folder
        self.is_private = is_private

    async def send(self, weights: TensorPairs, ask: Ask, *, is_part: bool = False) -> Receipts:
        async with file_for(weights, self.folder, is_private=self.is_private) as path:
            return await ask("pentad_load_part" if is_part else "pentad_load_file", str(path))


@contextmanager
def transfer_folder(parent: Path, *, is_private: bool) -> Iterator[Path]:
    """Makes a new folder in `parent`, which all users may write to. Other users can read it unless
    `is_private`."""
    with ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch_folder("pentad-transfer-", parent))
            if not is_private:
                folder.chmod(0o755)
        except OSError as error:
            text = f"{parent}: cannot be written to ({error.strerror or error})"
            raise InfraFailure(text) from error
        yield folder


@asynccontextmanager
async def file_for(weights: TensorPairs, parent: Path, *, is_private: bool) -> AsyncIterator[Path]:
    """Yields a safetensors file of these tensors for a server. Weights already published as a file
    are not written again for a server that the run started on this machine."""
    if is_private and isinstance(weights, FilePairs):
        yield weights.file
        return
    with transfer_folder(parent, is_private=is_private) as folder:
        path = folder / WEIGHTS
        await asyncio.to_thread(write_weights, path, weights)
        yield path


def write_weights(path: Path, weights: TensorPairs) -> None:
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in weights}
    try:
        write_file(path, iter(weights), infos)
    except OSError as error:
        raise InfraFailure(f"{path}: cannot be written ({error.strerror or error})") from error


class Broadcast(Transport):
    """A group of this process and all workers: gloo for tensors in memory, NCCL on GPUs.

    The sender is rank 0. The group is made at the first send and again after a failure. If the run
    started the workers on this machine, the rendezvous is a folder that no other user can open.
    """

    def __init__(
        self,
        address: str,
        num_workers: int,
        folder: Path | None = None,
        *,
        uses_helper: bool = False,
    ) -> None:
        """`folder`: for the rendezvous; None: workers may be on another machine or of another
        user. `uses_helper`: whether workers join by torch's helper, as SGLang's do."""
        self.host = own_host(address)
        self.uses_helper = uses_helper
        self.world = num_workers + 1
        self.group: BroadcastGroup | None = None
        self.folder = folder
        self.meeting = ExitStack()

    async def send(self, weights: TensorPairs, ask: Ask, *, is_part: bool = False) -> Receipts:
        assert not is_part, "a broadcast sends all tensors"
        device = weights[0][1].device
        try:
            group = self.group or await self._meet(ask, "nccl" if device.type == "cuda" else "gloo")
            names = [(name, list(t.shape), str(t.dtype)[6:]) for name, t in weights]
            receiving = asyncio.ensure_future(ask("pentad_receive", json.dumps(names)))
            await together(asyncio.to_thread(send_all, group, weights), receiving)
        except BaseException:
            self.group = None
            raise
        self.group = group
        return receiving.result()

    async def _meet(self, ask: Ask, backend: str) -> BroadcastGroup:
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        await self.close()
        store: dist.Store
        if self.folder is not None:
            parent = self.meeting.enter_context(transfer_folder(self.folder, is_private=True))
            place: dict[str, Any] = {"file": str(parent / "store")}
            store = dist.FileStore(place["file"], self.world)
        else:
            store = dist.TCPStore(self.host, 0, self.world, True, timeout, wait_for_workers=False)
            place = {"host": self.host, "port": store.port}
        name = f"pentad-{uuid.uuid4().hex[:8]}"  # the workers still have the older groups
        place |= {"name": name, "world": self.world, "backend": backend}
        if self.uses_helper:  # it derives keys from the group's name and device
            for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
                store = dist.PrefixStore(prefix, store)
        more = {"timeout_s": JOIN_TIMEOUT_S}
        joining = asyncio.ensure_future(ask("pentad_join", json.dumps(place | more)))
        make = asyncio.to_thread(weight_group, store, 0, self.world, backend, timeout)
        return await together(make, joining)

    async def close(self) -> None:
        self.group = None
        self.meeting.close()


async def together(ours: Awaitable[T], theirs: asyncio.Future[Any]) -> T:
    """Runs both ends concurrently; the first failure is raised."""
    mine = asyncio.ensure_future(ours)
    done, _ = await asyncio.wait([mine, theirs], return_when=asyncio.FIRST_EXCEPTION)
    for task in (theirs, mine):
        failure = task.exception() if task in done else None
        if isinstance(failure, InfraFailure):
            raise failure
        if failure is not None:
            raise InfraFailure(f"the broadcast of weights failed ({failure})") from failure
    return mine.result()


def own_host(address: str) -> str:
    """Returns the address by which the server reaches this machine."""
    parts = urlsplit(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


class CudaIpc(Transport):
    """Sends handles of tensors on the worker's GPU, identified by the GPU's UUID.

    The two processes may number GPUs differently (CUDA_VISIBLE_DEVICES). Tensors stay alive until
    the receipt arrives, which the worker sends after reading them.
    """

    async def send(self, weights: TensorPairs, ask: Ask, *, is_part: bool = False) -> Receipts:
        assert not is_part, "CUDA IPC shares all tensors"
        handles: dict[str, dict[str, Any]] = {}
        kept = []
        for name, tensor in weights:
            kept.append(tensor.detach().contiguous())
            handles.setdefault(gpu_uuid(tensor.device), {})[name] = gpu_handle(kept[-1])
        wait_for_device()
        return await ask("pentad_open", json.dumps(handles))


# For SGLang, which reads pickles.

BUCKET_BYTES = 1 << 29


class Pickles(Transport):
    """Sends CUDA tensors as references, others through shared memory: same machine only."""

    async def send(self, weights: TensorPairs, ask: Ask, *, is_part: bool = False) -> Receipts:
        assert not is_part, "pickles have all tensors"
        buckets = list(in_buckets(weights, BUCKET_BYTES))
        for number, bucket in enumerate(buckets, start=1):
            receipts = await ask("pentad_unpickle", packed(bucket), number == len(buckets))
        return receipts


def in_buckets(weights: TensorPairs, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().contiguous()))
        size += tensor.nbytes
    yield bucket


class SharedTensor:
    """Pickles a tensor for another process, where its GPU may have another index: SGLang also
    accepts the GPU's UUID."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        build, arguments = reduce_tensor(self.tensor)
        if not self.tensor.is_cuda:
            return build, arguments
        at = DEVICE_ARGUMENT
        return build, (*arguments[:at], gpu_uuid(arguments[at]), *arguments[at + 1 :])


def packed(bucket: list[tuple[str, Tensor]]) -> str:
    out = io.BytesIO()
    ForkingPickler(out).dump([(name, SharedTensor(tensor)) for name, tensor in bucket])
    return base64.b64encode(out.getvalue()).decode()
