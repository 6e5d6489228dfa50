"""What runs inside vLLM's workers: takes new weights by file, broadcast or CUDA IPC, and proves it.

vLLM mixes `WeightReceiver` into its worker (`--worker-extension-cls`) in its own environment, where
of Pentad only modules that need no more than torch may be imported. Arguments come as JSON text.
A call returns a receipt or {"error": ...}: an exception would end vLLM's engine.

Weights go through the worker's `reload_weights`: on a CPU vLLM keeps them packed for its kernels,
and writing to the model directly would corrupt them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from pentad.ops.digest import RunningDigest, digest_of
from pentad.sync.group import (
    PROTOCOL,
    BroadcastGroup,
    broadcast,
    open_gpu_handle,
    weight_group,
)

TensorStream = Iterator[tuple[str, Tensor]]
Reply = dict[str, Any]


def reports_errors(call: Callable[..., Reply]) -> Callable[..., Reply]:
    @wraps(call)
    def safe(*args: Any) -> Reply:
        try:
            return call(*args)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return safe


class WeightReceiver:
    """Methods of the worker, under names of their own; state is kept on the worker."""

    rank: int
    device: torch.device
    model_runner: Any
    reload_weights: Callable[..., None]
    pentad_group: BroadcastGroup
    pentad_version: str = "none"

    @reports_errors
    def pentad_about(self) -> Reply:
        label, device = self.pentad_version, str(self.device)
        return {"protocol": PROTOCOL, "rank": self.rank, "device": device, "label": label}

    @reports_errors
    def pentad_label(self, version: str) -> Reply:
        """Names the weights, where vLLM itself has no name for them."""
        self.pentad_version = version
        return {"label": version}

    @reports_errors
    def pentad_held(self) -> Reply:
        """The digest of every parameter as the model holds it."""
        model = self.model_runner.get_model()
        return {"held": digest_of(model.named_parameters()).entries}

    @reports_errors
    def pentad_load_file(self, path: str) -> Reply:
        return take(self, read(path, self.device))

    @reports_errors
    def pentad_load_part(self, path: str) -> Reply:
        """The tensors of some modules: the others keep theirs."""
        return take(self, read(path, self.device), is_part=True)

    @reports_errors
    def pentad_join(self, spec: str) -> Reply:
        """Meets the sender, which is rank 0, in a group of its own."""
        wanted = json.loads(spec)
        timeout = timedelta(seconds=wanted["timeout_s"])
        rank, world = self.rank + 1, wanted["world"]
        store: dist.Store
        if "file" in wanted:
            store = dist.FileStore(wanted["file"], world)
        else:
            store = dist.TCPStore(wanted["host"], wanted["port"], world, False, timeout)
        self.pentad_group = weight_group(store, rank, world, wanted["backend"], timeout)
        return {"rank": rank}

    @reports_errors
    def pentad_receive(self, spec: str) -> Reply:
        """Takes the tensors that the sender broadcasts, in the order of `spec`."""
        return take(self, received(self.pentad_group, json.loads(spec), self.device))

    @reports_errors
    def pentad_open(self, spec: str) -> Reply:
        """Takes tensors that lie on this worker's GPU in the sender's process."""
        handles = json.loads(spec)
        mine = str(torch.cuda.get_device_properties(self.device).uuid)
        if mine not in handles:
            raise RuntimeError(
                f"the weights lie on GPU {', '.join(handles)}, this worker on {mine}"
            )
        return take(self, opened(handles[mine], self.device))


def read(path: str, device: torch.device) -> TensorStream:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            yield name, file.get_tensor(name).to(device)


def received(
    group: BroadcastGroup, names: list[tuple[str, list[int], str]], device: torch.device
) -> TensorStream:
    for name, shape, dtype in names:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        broadcast(group, tensor)
        yield name, tensor


def opened(handles: dict[str, Any], device: torch.device) -> TensorStream:
    """All are held to the end: torch waits for the GPU when it lets go of one."""
    yield from {n: open_gpu_handle(one, device.index or 0) for n, one in handles.items()}.items()


def take(worker: WeightReceiver, pairs: TensorStream, *, is_part: bool = False) -> Reply:
    """Loads every tensor; the receipt's digest is of what arrived, as it arrived."""
    model = worker.model_runner.get_model()
    wanted = {plain_name(name) for name, _ in model.named_parameters()}
    running, loaded = RunningDigest(), set[str]()
    load = model.load_weights

    def passing() -> TensorStream:
        for name, tensor in pairs:
            running.add(name, tensor)
            yield name, tensor

    def watched(weights: TensorStream) -> set[str]:
        names = set(load(weights))
        loaded.update(map(plain_name, names))
        return names

    model.load_weights = watched  # reload_weights only warns of what nothing was loaded into
    try:
        worker.reload_weights(weights_iterator=passing())
    finally:
        del model.load_weights
    if worker.device.type == "cpu":
        pack_anew(model)
    missed = sorted(wanted - loaded)
    if missed and not is_part:
        raise RuntimeError(f"nothing was loaded into {len(missed)} parameters, first {missed[0]}")
    arrived = running.finish()
    return {"num_tensors": len(arrived.entries), "digest": arrived.hex()}


def plain_name(name: str) -> str:
    """vLLM's loaders leave a module out of the names of experts."""
    return name.replace(".experts.routed_experts.", ".experts.")


def pack_anew(model: torch.nn.Module) -> None:
    """On a CPU layers compute with packed weights, and a reload (of vLLM 0.32) leaves two kinds
    behind: the packed copy of a head that is tied to the embedding is the old one, and experts
    lie where packed ones are expected, not packed."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(layer, RoutedExperts) and layer.quant_method.moe_kernel is not None:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
