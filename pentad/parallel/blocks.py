"""What is laid around each block: recomputation of activations, then compilation.

Both replace the block's forward, not the block: hooks of FSDP2 stay outside of it, and parameter
names stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KEPT_OPS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "torch_attn._varlen_attn.default",
    "pentad.route.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
}
"""By name, since not every build of torch has all of them."""
GROUPED_PRODUCT = "aten._grouped_mm.default"
"""Experts run two, gate with up and then down; backward does not read the second's result."""

# Marks for profilers are no work of the block: FSDP2 sets more of them when experts are run again,
# which would be taken for another computation.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


class BlockSettings(Protocol):
    """`engine.settings.EngineSettings` says what each means."""

    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def ac_mode(self) -> str: ...
    @property
    def ac_selective(self) -> Literal["op"] | int: ...
    @property
    def compile(self) -> bool: ...


def apply_to_block(
    block: nn.Module, index: int, settings: BlockSettings, device: torch.device
) -> None:
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


def _run_plain(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = type(block).forward(block, *args, **kwargs)
    return result


def _run_recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    # Blocks draw no random numbers, so there is no generator state to restore.
    result: Tensor = checkpoint(
        _run_plain, block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
    )
    return result


def _run_keeping_products(block: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = checkpoint(
        _run_plain,
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_keep_products,
        **kwargs,
    )
    return result


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_Policy())


class _Policy:
    """Which results one pass through a block keeps; it is asked again when they are recomputed."""

    def __init__(self) -> None:
        self.num_grouped = {False: 0, True: 0}
        """By whether it is the recomputation."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        is_kept = name in KEPT_OPS
        if name == GROUPED_PRODUCT:
            is_kept = self.num_grouped[ctx.is_recompute] % 2 == 0
            self.num_grouped[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
