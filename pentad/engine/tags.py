"""Named copies of weights (ref, old_actor, teacher), and offloading of training state to the
host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.ops.capture import free_cached_memory, wait_for_device


class FlatCopy:
    """A copy of many tensors in one buffer per dtype, on one device."""

    def __init__(self, like: Sequence[Tensor], device: torch.device, pin: bool) -> None:
        sizes: dict[torch.dtype, int] = {}
        for tensor in like:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        buffers = {
            dtype: torch.empty(size, dtype=dtype, device=device, pin_memory=pin)
            for dtype, size in sizes.items()
        }
        self.views: list[Tensor] = []
        used = dict.fromkeys(sizes, 0)
        for tensor in like:
            start = used[tensor.dtype]
            used[tensor.dtype] = start + tensor.numel()
            self.views.append(buffers[tensor.dtype][start : start + tensor.numel()].view_as(tensor))


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies pairwise; after it returns both sides may be used."""
    devices = {x.device for x in (*targets, *sources) if x.is_cuda}
    if not devices and torch.cuda.is_initialized():
        wait_for_device()  # offloaded weights may still be copied for a pass
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
    if devices and any(not x.is_cuda for x in (*targets, *sources)):
        for device in devices:  # copies to and from pinned memory are asynchronous
            wait_for_device(device)


class WeightTags:
    """Named copies of a fixed list of tensors, one of which is in place. "actor" is the trained
    one: it is in place except within `use`."""

    def __init__(self, tensors: Mapping[str, Tensor], memory: str) -> None:
        self.names = list(tensors)
        self.tensors = list(tensors.values())
        on_cuda = self.tensors[0].is_cuda
        self.pin = on_cuda and memory == "host"
        self.device = torch.device("cpu") if memory == "host" else self.tensors[0].device
        self.copies: dict[str, FlatCopy] = {}
        self.stash: FlatCopy | None = None
        """The actor's weights while others are in place; never freed, because pinning memory is
        slow."""
        self.current = "actor"

    def save(self, tag: str) -> None:
        """Saves the weights in place as `tag`; replaces its earlier copy."""
        self.require_actor(f"saving the tag {tag}")
        self._keep(tag)

    def load(self, tag: str, write: Callable[[], object]) -> None:
        """Saves the weights written by `write` as `tag`; the actor's weights are unchanged."""
        with self.borrow(tag):
            write()
            self._keep(tag)

    def _keep(self, tag: str) -> None:
        if tag == "actor":
            raise RunError("the tag actor names the trained weights; choose another name")
        if tag not in self.copies:
            self.copies[tag] = self._new()
        copy_all(self.copies[tag].views, self.tensors)

    def require_actor(self, purpose: str) -> None:
        if self.current != "actor":
            raise RunError(
                f"{purpose} needs the actor's weights, but those of {self.current} are used"
            )

    @contextmanager
    def use(self, tag: str) -> Iterator[None]:
        self.require_actor(f"using the tag {tag}")
        if tag != "actor" and tag not in self.copies:
            known = ", ".join(["actor", *self.copies])
            raise RunError(f"no weights were saved as {tag}; there are {known}")
        if tag == "actor":
            yield
            return
        with self.borrow(tag):
            copy_all(self.tensors, self.copies[tag].views)
            yield

    @contextmanager
    def borrow(self, name: str) -> Iterator[None]:
        """While active, the tensors may be overwritten; afterwards restores the actor's weights."""
        self.require_actor(f"using the tag {name}")
        self.stash = self.stash or self._new()
        copy_all(self.stash.views, self.tensors)
        self.current = name
        try:
            yield
        finally:
            copy_all(self.tensors, self.stash.views)
            self.current = "actor"

    def views(self, tag: str) -> dict[str, Tensor]:
        return dict(zip(self.names, self.copies[tag].views, strict=True))

    def memory(self) -> Iterator[Tensor]:
        """Yields all tensors besides the weights in place."""
        for copy in filter(None, (*self.copies.values(), self.stash)):
            yield from copy.views

    def prepare(self, tags: Iterable[str]) -> None:
        """Allocates exactly these tags; the caller writes their weights later."""
        self.copies = {tag: self.copies.get(tag) or self._new() for tag in tags}

    def _new(self) -> FlatCopy:
        return FlatCopy(self.tensors, self.device, self.pin)


class Offload:
    """Moves storages to the host, into memory that is never freed, because pinning is slow. Tensors
    keep their identity without memory, so modules, optimizer and views stay valid. On a CPU a
    storage stays that was read or written as NumPy's: it may not be resized."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rooms: dict[int, Tensor] = {}
        self.away: dict[int, torch.UntypedStorage] = {}

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Moves storages to the host; memory shared by several tensors is moved once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            stays = storage.device.type == "cpu" and not storage.resizable()
            if storage.device.type == self.device.type and storage.nbytes() and not stays:
                self.away[storage._cdata] = storage
        for key, storage in self.away.items():
            room = self.rooms.get(key)
            if room is None or room.numel() != storage.nbytes():
                pins = self.device.type == "cuda"
                room = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins)
                self.rooms[key] = room
            room.copy_(_bytes(storage), non_blocking=True)
        self._wait()
        for storage in self.away.values():
            storage.resize_(0)
        if self.device.type == "cuda":
            free_cached_memory()  # a sampler in another process may need it

    def come_back(self) -> None:
        for key, storage in self.away.items():
            storage.resize_(self.rooms[key].numel())
            _bytes(storage).copy_(self.rooms[key], non_blocking=True)
        self._wait()
        self.away = {}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            wait_for_device(self.device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
