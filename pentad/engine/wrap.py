"""What is laid around a model before it gets its weights: recomputation, compilation, precision.

In this order, from the inside out: activation checkpointing, torch.compile, FSDP2. Each acts on
blocks and leaves parameter names as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentad.engine.predictor import Predictor
from pentad.engine.settings import DTYPES, EngineSettings
from pentad.models.decoder import Decoder
from pentad.models.registry import map_of

KEPT_OPS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "torch_attn._varlen_attn.default",
}
"""By name, since not every build of torch has all of them."""


def wrap_model(decoder: Decoder, settings: EngineSettings, device: torch.device) -> Predictor:
    """The decoder with everything the settings ask for around it; its weights may be meta."""
    for index, block in enumerate(decoder.layers.values()):
        apply_to_block(block, index, settings, device)
    predictor = Predictor(decoder, settings.temperature, settings.logprob_bytes)
    if settings.is_mixed:
        apply_fsdp(predictor, settings, solo_mesh(device))
    return predictor


def apply_to_block(
    block: nn.Module, index: int, settings: EngineSettings, device: torch.device
) -> None:
    """Replaces the block's forward, not the block: hooks of FSDP2 stay outside of it."""
    run: Callable[..., Tensor] | None = None
    if settings.gradient_checkpointing and settings.ac_mode != "none":
        if settings.ac_mode == "full":
            run = _run_recomputed
        elif settings.ac_selective == "op":
            run = _run_keeping_products
        elif index % settings.ac_selective == 0:
            run = _run_recomputed
    if settings.compile and device.type == "cuda":
        # One function for all blocks, the block an argument: they share one compiled graph.
        run = torch.compile(run or _run_plain, dynamic=True)
    if run is not None:
        block.forward = partial(run, block)


def _run_plain(block: nn.Module, *args: Any) -> Tensor:
    result: Tensor = type(block).forward(block, *args)
    return result


def _run_recomputed(block: nn.Module, *args: Any) -> Tensor:
    # Blocks draw no random numbers, so there is no generator state to restore.
    result: Tensor = checkpoint(
        _run_plain, block, *args, use_reentrant=False, preserve_rng_state=False
    )
    return result


def _run_keeping_products(block: nn.Module, *args: Any) -> Tensor:
    result: Tensor = checkpoint(
        _run_plain,
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_keep_products,
    )
    return result


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = str(op) in KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_fsdp(predictor: Predictor, settings: EngineSettings, mesh: DeviceMesh) -> None:
    """Master weights in `param_dtype`, cast to `compute_dtype` block by block when used.

    Parameters whose rule in the weight map names a dtype (routers) are computed in that dtype.
    Embedding, final norm and heads are the root's: a tied head is used at both ends.
    """
    own_dtypes = {
        name: entry.rule.dtype
        for name, entry in map_of(predictor.decoder.dims).entries.items()
        if entry.rule.dtype
    }
    reduce_dtype = DTYPES[settings.reduce_dtype]

    def policy(dtype: str) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[dtype], reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )

    for name, module in predictor.decoder.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            own = own_dtypes.get(f"{name}.{key}")
            if own and own != settings.compute_dtype:
                fully_shard(module, mesh=mesh, mp_policy=policy(own))
    for block in predictor.decoder.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy(settings.compute_dtype))
    fully_shard(predictor, mesh=mesh, mp_policy=policy(settings.compute_dtype))


def reshard(predictor: Predictor) -> None:
    """Puts the master weights back in place, wherever a forward pass left the cast ones."""
    for module in predictor.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def solo_mesh(device: torch.device) -> DeviceMesh:
    """A mesh of this process alone; makes a process group of one where there is none."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
