"""Storage of parameters: sharded by FSDP2 (dense over fsdp, experts over efsdp), or only cast.

Gradients are summed over ranks, never averaged: the engine divides once, by the global count.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from pentad.core.device import DTYPES
from pentad.engine.section import ModelConfig
from pentad.parallel.cuts import Cut
from pentad.parallel.mesh import Meshes

try:
    from pentad.ops.sum_kernel import add_into
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True


ALIGNED = 64
"""Gradients begin at multiples of this many elements, as separately allocated ones do."""


class CastWeights:
    """Casts the master weights of one rank for compute, without FSDP2 and its copies. A forward
    pre-hook of the root module.

    From the first forward pass until `rest`, modules have copies of their parameters in compute
    dtype, made once for all microbatches. Backward adds a copy's gradient to its master's at once.
    Otherwise modules have the masters, and the copies have no memory, unless captured passes read
    it (`keeps_memory`).
    """

    def __init__(self, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        """`dtypes`: by parameter name; parameters that already have their dtype need no copy."""
        self.places = {
            f"{name}.{key}".removeprefix("."): (module, key)
            for name, module in model.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
            if dtypes[f"{name}.{key}".removeprefix(".")] != parameter.dtype
        }
        self.dtypes = dtypes
        self.masters: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}
        self.is_filled = False
        """Whether the copies have the masters' values."""
        self.is_in_use = False
        """Whether modules have the copies."""
        self.keeps_memory = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.is_in_use:
            self.fill()
            self._place(self.copies)
            self.is_in_use = True

    def fill(self) -> None:
        """Casts the masters, unless that was done since `rest`."""
        if self.is_filled:
            return
        if not self.copies:
            self._make_copies()
        for copy in self.copies.values():
            storage = copy.untyped_storage()
            if storage.nbytes() == 0:  # else it would be moved to other memory
                storage.resize_(copy.nbytes)
        with torch.no_grad():
            torch._foreach_copy_(list(self.copies.values()), list(self.masters.values()))
        self.is_filled = True

    def rest(self) -> None:
        """Puts the masters back into the modules."""
        if self.is_in_use:
            self._place(self.masters)
        if self.is_filled and not self.keeps_memory:
            self._free()
        self.is_filled = self.is_in_use = False

    def stop_keeping(self) -> None:
        """Frees memory that was kept for captured passes, at once or with the next `rest`."""
        self.keeps_memory = False
        if not self.is_filled:
            self._free()

    def _free(self) -> None:
        for copy in self.copies.values():
            copy.untyped_storage().resize_(0)

    def drop_gradients(self) -> None:
        """Drops gradients of copies that an interrupted backward left."""
        for copy in self.copies.values():
            copy.grad = None

    def _place(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, (module, key) in self.places.items():
            setattr(module, key, parameters[name])

    def _make_copies(self) -> None:
        """Makes compute copies at first use: before, masters may have no memory or be moved."""
        for name, (module, key) in self.places.items():
            master = module.get_parameter(key)
            copy = nn.Parameter(torch.empty_like(master, dtype=self.dtypes[name]))
            copy.register_post_accumulate_grad_hook(partial(_hand_over, master))
            self.masters[name], self.copies[name] = master, copy


def _hand_over(master: nn.Parameter, copy: nn.Parameter) -> None:
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        _add(master.grad, copy.grad)
    copy.grad = None


def _add(total: Tensor, part: Tensor) -> None:
    is_plain = total.is_contiguous() and part.is_contiguous()
    if HAS_TRITON and total.is_cuda and is_plain:
        add_into(total, part)
    else:
        total.add_(part)


def needs_storage(keys: ModelConfig, meshes: Meshes, cuts: Mapping[str, Cut]) -> bool:
    """Whether parameters are sharded, replicated, cast or offloaded; if not, they stay plain
    tensors."""
    layout = meshes.layout
    num_dense = layout.dp * layout.cp
    has_experts = any(cut.is_expert for cut in cuts.values())
    num_expert = layout.dp_replicate * layout.efsdp if has_experts else 1
    return keys.is_mixed or keys.archon.offload_params or num_dense > 1 or num_expert > 1


def is_cast_whole(keys: ModelConfig, meshes: Meshes) -> bool:
    """Whether nothing is sharded and all weights in compute dtype fit into memory at once."""
    is_here = meshes.layout.world == 1 and not keys.archon.offload_params
    return is_here and not keys.archon.is_resharded


def kept_apart(
    model: nn.Module, own_dtypes: Mapping[str, str], keys: ModelConfig, meshes: Meshes
) -> set[str]:
    """Names of parameters whose dtype differs from that of others in the same module: units of
    FSDP2 have one dtype, so every rank stores them whole."""
    if is_cast_whole(keys, meshes):
        return set()
    own = {name for name, dtype in own_dtypes.items() if dtype != keys.dtype}
    found: set[str] = set()
    for name, module in model.named_modules():
        held = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)} & own
        under = (f"{name}.{key}" for key, _ in module.named_parameters())
        if held and any(key not in own for key in under):
            found |= held
    return found


def apply_storage(
    root: nn.Module,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    cuts: Mapping[str, Cut],
    own_dtypes: Mapping[str, str],
    keys: ModelConfig,
    meshes: Meshes,
    apart: Container[str] = (),
) -> None:
    """Shards master weights, and casts them to `compute_dtype` block by block when used.

    Modules whose parameters have another dtype (routers) or are on the expert mesh are separate
    units. Embedding, final norm and heads belong to the root unit, because a tied head is used at
    both ends. `apart`: parameters that every rank stores whole, in their own dtype.
    """
    if not needs_storage(keys, meshes, cuts):
        return
    if is_cast_whole(keys, meshes):
        names = dict(model.named_parameters())
        dtypes = {name: DTYPES[own_dtypes.get(name, keys.dtype)] for name in names}
        root.register_forward_pre_hook(CastWeights(model, dtypes))
        return
    dims = {id(p): cuts[name].stored_dim for name, p in model.named_parameters()}
    factors = {p for p in model.parameters() if p.requires_grad} if keys.lora else set()
    factors |= {p for name, p in model.named_parameters() if name in apart}

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(dims[id(parameter)])

    pins = meshes.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if keys.archon.offload_params else OffloadPolicy()

    def shard(module: nn.Module, dtype: str, *, experts: bool = False) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[dtype],
            reduce_dtype=DTYPES[keys.reduce_dtype],
            cast_forward_inputs=False,
        )
        unit = fully_shard(
            module,
            mesh=meshes.storage(experts),
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=place,
            reshard_after_forward=keys.archon.is_resharded if module is not root else None,
            ignored_params=factors,
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    for name, module in model.named_modules():
        own_parameters = list(module.named_parameters(recurse=False))
        held = [f"{name}.{key}" for key, p in own_parameters if p not in factors]
        if any(key in cuts and cuts[key].is_expert for key in held):
            shard(module, keys.dtype, experts=True)
            continue
        own = {own_dtypes[key] for key in held if key in own_dtypes} - {keys.dtype}
        for dtype in own:
            shard(module, dtype)
    for block in blocks:
        shard(block, keys.dtype)
    shard(root, keys.dtype)


def give_memory(root: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Allocates uninitialised memory for meta tensors: on the device, or on the host for offloaded
    parameters."""
    root.to_empty(device="cpu" if offload else device)
    if offload:
        for module in root.modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, buffer.to(device))


def units(root: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: nn.Module) -> None:
    """Puts the stored weights back where a pass left gathered or cast ones."""
    for unit in units(root):
        unit.reshard()
    if (cast := cast_weights(root)) is not None:
        cast.rest()


def cast_weights(root: nn.Module) -> CastWeights | None:
    """Returns the casts of one rank's weights, if it has any."""
    hooks = root._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, CastWeights)), None)


class GradientBuffers:
    """Memory for gradients that keeps its addresses, as captured passes need it: one buffer per
    dtype and device."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        sizes: dict[torch.dtype, int] = {}
        begins = []
        for parameter in self.parameters:
            begin = sizes.get(parameter.dtype, 0)
            begins.append(begin)
            room = -(-parameter.numel() // ALIGNED) * ALIGNED
            sizes[parameter.dtype] = begin + room
        device = self.parameters[0].device
        self.buffers = {
            dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()
        }
        self.views = [
            self.buffers[p.dtype][begin : begin + p.numel()].view(p.shape)
            for p, begin in zip(self.parameters, begins, strict=True)
        ]

    def attach(self) -> None:
        """Makes the buffers the gradients of all parameters, which keep their values."""
        pairs = zip(self.parameters, self.views, strict=True)
        apart = [(p, view) for p, view in pairs if p.grad is not view]
        if not apart:
            return
        found = [(view, p.grad) for p, view in apart if p.grad is not None]
        if len(apart) == len(self.parameters):
            for buffer in self.buffers.values():
                buffer.zero_()
        else:
            torch._foreach_zero_([view for _, view in apart])
        for view, gradient in found:
            view.copy_(gradient)
        for parameter, view in apart:
            parameter.grad = view
