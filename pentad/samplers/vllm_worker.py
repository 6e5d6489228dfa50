"""Extension of vLLM's workers: installs weights by file, broadcast or CUDA IPC, and verifies them.

vLLM adds `WeightReceiver` as a mixin to its worker (`--worker-extension-cls`) in its own
environment, where only modules of Pentad that need nothing but torch may be imported.

Weights go through the worker's `reload_weights`: on a CPU vLLM keeps them packed for its kernels,
and writing to the model directly would corrupt them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from pentad.ops.digest import RunningDigest, digest_of
from pentad.samplers.receiver import Receiver, Reply, TensorStream, reports_errors
from pentad.sync.group import PROTOCOL
from pentad.weights.peft import PREFIX, A, B, expanded

ADAPTER_ID = 1
"""Id of the first adapter in vLLM's front end."""


class WeightReceiver(Receiver):
    """Methods added to vLLM's worker, with unique names; state is kept on the worker."""

    model_runner: Any
    reload_weights: Callable[..., None]
    pentad_version: str = "none"
    pentad_lora: dict[str, Any] | None = None
    """Rank and alpha of the adapter, if its factors are received instead of weights."""

    @reports_errors
    def pentad_about(self) -> Reply:
        label, device = self.pentad_version, str(self.device)
        return {"protocol": PROTOCOL, "rank": self.rank, "device": device, "label": label}

    @reports_errors
    def pentad_label(self, version: str) -> Reply:
        """Sets the version label of the weights, if vLLM itself has none."""
        self.pentad_version = version
        return {"label": version}

    @reports_errors
    def pentad_held(self) -> Reply:
        """Returns the digest of every parameter of the model."""
        model = self.model_runner.get_model()
        return {"held": digest_of(model.named_parameters()).entries}

    @reports_errors
    def pentad_adapter(self, spec: str) -> Reply:
        """Prepares the worker for factors; returns the modules that support them."""
        self.pentad_lora = json.loads(spec)
        names = [name for name, _ in held_factors(self, 0) if name.endswith(A)]
        return {"modules": [name.removesuffix(A) for name in names]}

    @reports_errors
    def pentad_held_factors(self) -> Reply:
        """Returns the digest of every factor in the layers, with B scaled; omits modules without
        factors, whose values are 0."""
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        taken = manager.get_adapter(ADAPTER_ID).pentad_names
        held = [(n, t) for n, t in held_factors(self, slot) if n in taken or bool(t.any())]
        return {"held": digest_of((name, tensor.contiguous()) for name, tensor in held).entries}

    def pentad_take(self, pairs: TensorStream, *, is_part: bool = False) -> Reply:
        return take(self, pairs, is_part=is_part)


def take(worker: WeightReceiver, pairs: TensorStream, *, is_part: bool = False) -> Reply:
    """Loads every tensor; the receipt has the digest of the tensors as received."""
    if worker.pentad_lora is not None:
        return take_factors(worker, dict(pairs), worker.pentad_lora)
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

    model.load_weights = watched  # reload_weights only warns of parameters that were not loaded
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
    """Removes the module that vLLM's loaders omit from the names of experts."""
    return name.replace(".experts.routed_experts.", ".experts.")


def pack_anew(model: torch.nn.Module) -> None:
    """Repacks weights on a CPU, where layers compute with packed weights. A reload of vLLM 0.32
    misses two kinds: the packed copy of a head tied to the embedding is not updated, and experts
    are left unpacked."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(layer, RoutedExperts) and layer.quant_method.moe_kernel is not None:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def take_factors(worker: WeightReceiver, factors: dict[str, Tensor], lora: Reply) -> Reply:
    """Replaces the factors of the adapter, which requests in progress then use."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    arrived = digest_of(factors.items())
    outer = worker.model_runner.lora_manager
    config = {"r": lora["rank"], "lora_alpha": lora["alpha"], "target_modules": []}
    # A copy for each expert: vLLM scales B in place. They stay on the device: in host memory vLLM
    # pins each one twice, which takes seconds at every install.
    named = {PREFIX + name: tensor.clone() for name, tensor in expanded(factors).items()}
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        named,
        PEFTHelper.from_dict(config),
        device=str(worker.device),
        dtype=outer.lora_config.lora_dtype,
        model_vocab_size=outer.vocab_size,
        weights_mapper=renames_of(worker.model_runner.get_model()),
    )
    adapter.pentad_names = {name.removeprefix(PREFIX) for name in named}
    manager = outer._adapter_manager
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return {"num_tensors": len(arrived.entries), "digest": arrived.hex()}


def renames_of(model: torch.nn.Module) -> Any:
    """The model's map of names without the fusion of matrices, whose name depends on the
    version."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    make = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
    return make()


def held_factors(worker: WeightReceiver, slot: int) -> TensorStream:
    """Yields the factors in a slot of every layer with adapter capacity, by their names in
    files."""
    assert worker.pentad_lora is not None, "pentad_adapter comes first"
    manager, rank = worker.model_runner.lora_manager._adapter_manager, worker.pentad_lora["rank"]
    for name, module in manager.modules.items():
        if hasattr(module, "w13_lora_a_stacked"):
            yield from expert_factors(name, module, slot, rank)
        elif isinstance(getattr(module, "lora_a_stacked", None), tuple):
            place, _, last = name.rpartition(".")
            parts = manager.packed_modules_mapping.get(last) or [last]
            stacks = zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for part, a, b in stacks:
                yield f"{place}.{part}{A}", a[slot, 0, :rank]
                yield f"{place}.{part}{B}", b[slot, 0, :, :rank]


def expert_factors(name: str, module: Any, slot: int, rank: int) -> TensorStream:
    """Yields experts' factors, which vLLM stacks; a shared factor may be stored once."""
    gate, up = zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)
    down = (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0])
    for part, (a, b) in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        for e in range(max(a.shape[1], b.shape[1])):
            yield f"{name}.{e}.{part}{A}", a[slot, min(e, a.shape[1] - 1), :rank]
            yield f"{name}.{e}.{part}{B}", b[slot, min(e, b.shape[1] - 1), :, :rank]
