"""Storage of parameters: sharded by FSDP2 (dense over fsdp, experts over efsdp), or cast whole.

Gradients are summed over ranks, never averaged: the engine divides once, by the global count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from pentad.core.dtypes import DTYPES
from pentad.core.settings import EngineSettings
from pentad.parallel.cast import CastWeights
from pentad.parallel.cuts import Cut
from pentad.parallel.mesh import Meshes


def needs_storage(settings: EngineSettings, meshes: Meshes, cuts: Mapping[str, Cut]) -> bool:
    """Whether anything is sharded, replicated, cast or kept elsewhere; if not, parameters stay
    plain tensors."""
    layout = meshes.layout
    num_dense = layout.dp * layout.cp
    has_experts = any(cut.is_expert for cut in cuts.values())
    num_expert = layout.dp_replicate * layout.efsdp if has_experts else 1
    return settings.is_mixed or settings.offload_params or num_dense > 1 or num_expert > 1


def is_cast_whole(settings: EngineSettings, meshes: Meshes) -> bool:
    """Whether there is nothing to gather and room for all weights in compute dtype at once."""
    is_here = meshes.layout.world == 1 and not settings.offload_params
    return is_here and not settings.reshard_after_forward


def apply_storage(
    root: nn.Module,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    cuts: Mapping[str, Cut],
    own_dtypes: Mapping[str, str],
    settings: EngineSettings,
    meshes: Meshes,
) -> None:
    """Master weights in storage, cast to `compute_dtype` block by block when used.

    Modules whose parameters have a dtype of their own (routers) or lie on the expert mesh are
    units of their own. Embedding, final norm and heads are the root's: a tied head is used at
    both ends.
    """
    if not needs_storage(settings, meshes, cuts):
        return
    if is_cast_whole(settings, meshes):
        names = dict(model.named_parameters())
        dtypes = {name: DTYPES[own_dtypes.get(name, settings.compute_dtype)] for name in names}
        root.register_forward_pre_hook(CastWeights(model, dtypes))
        return
    dims = {id(p): cuts[name].stored_dim for name, p in model.named_parameters()}

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(dims[id(parameter)])

    pins = meshes.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if settings.offload_params else OffloadPolicy()

    def shard(module: nn.Module, dtype: str, *, experts: bool = False) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[dtype],
            reduce_dtype=DTYPES[settings.reduce_dtype],
            cast_forward_inputs=False,
        )
        unit = fully_shard(
            module,
            mesh=meshes.storage(experts),
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=place,
            reshard_after_forward=settings.reshard_after_forward if module is not root else None,
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    for name, module in model.named_modules():
        keys = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        if any(key in cuts and cuts[key].is_expert for key in keys):
            shard(module, settings.compute_dtype, experts=True)
            continue
        own = {own_dtypes[key] for key in keys if key in own_dtypes} - {settings.compute_dtype}
        for dtype in own:
            shard(module, dtype)
    for block in blocks:
        shard(block, settings.compute_dtype)
    shard(root, settings.compute_dtype)


def give_memory(root: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Memory, not yet filled, for everything that has none: on the device, or parameters on the
    host where they are offloaded."""
    root.to_empty(device="cpu" if offload else device)
    if offload:
        for module in root.modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, buffer.to(device))


def units(root: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: nn.Module) -> None:
    """Puts the stored weights back in place, wherever a pass left gathered or cast ones."""
    for unit in units(root):
        unit.reshard()
    for hook in root._forward_pre_hooks.values():
        if isinstance(hook, CastWeights):
            hook.rest()
