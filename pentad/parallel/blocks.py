"""What is laid around each block: recomputation of activations, then compilation.

Both replace the block's forward, not the block: hooks of FSDP2 stay outside of it, and parameter
names stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentad.core.errors import Problem, UserError
from pentad.parallel.recompute_log import RecomputeLog

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
    def ac_memory_budget(self) -> float: ...
    @property
    def ac_debug(self) -> bool: ...
    @property
    def compile(self) -> bool: ...
    @property
    def pad_to_maximum(self) -> bool: ...


def apply_to_blocks(
    blocks: Mapping[int, nn.Module], settings: BlockSettings, device: torch.device
) -> None:
    has_budget = settings.ac_mode == "memory_budget" and settings.gradient_checkpointing
    if has_budget and device.type != "cuda":
        rule = f"the compiler keeps to it, and blocks are compiled on CUDA only, not on {device}"
        raise UserError(Problem("ac_mode = memory_budget", rule, "use selective or full"))
    watch = RecomputeLog() if settings.ac_debug else None
    for index, block in blocks.items():
        apply_to_block(block, index, settings, device, watch)


def apply_to_block(
    block: nn.Module,
    index: int,
    settings: BlockSettings,
    device: torch.device,
    watch: RecomputeLog | None = None,
) -> None:
    run = _recomputing(index, settings)
    if watch is not None:
        if run is None:
            watch.tell_kept(index)
        else:
            contexts = _keep_products if run is _run_keeping_products else None
            run = partial(_run_watched, watch, index, contexts)
    if settings.compile and device.type == "cuda":
        has_budget = settings.gradient_checkpointing and settings.ac_mode == "memory_budget"
        budget = settings.ac_memory_budget if has_budget else None
        backend = "inductor" if budget is None else _inductor_within(budget)
        run = compile_run(run or _run_plain, backend, is_static=settings.pad_to_maximum)
    if run is not None:
        block.forward = partial(run, block)


def compile_run(
    run: Callable[..., Tensor], backend: str | Callable[..., Any], is_static: bool = False
) -> Callable[..., Tensor]:
    """One function for all blocks, the block an argument: they share one compiled graph. Shapes
    that never change are compiled as they are."""
    # Numbers of modules (an eps, a scale) never change either. As inputs of a graph they would be
    # tensors of the CPU, for which a C++ kernel is built, after half a minute of trying compilers.
    torch._dynamo.config.specialize_float = True
    compiled: Callable[..., Tensor] = torch.compile(
        run, dynamic=None if is_static else True, backend=backend
    )
    return compiled


def _recomputing(index: int, settings: BlockSettings) -> Callable[..., Tensor] | None:
    """How a block runs so that it keeps less; None: as it is."""
    if not settings.gradient_checkpointing or settings.ac_mode in ("none", "memory_budget"):
        return None
    if settings.ac_mode == "full":
        return _run_recomputed
    if settings.ac_selective == "op":
        return _run_keeping_products
    return _run_recomputed if index % settings.ac_selective == 0 else None


@cache
def _inductor_within(budget: float) -> Callable[..., Any]:
    """The default backend, with the choice of what is kept left to it.

    One for each budget: graphs are shared only among blocks with the same backend.
    """

    def compile_within(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config  # both are slow to import, and not for all
        from torch._inductor import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx.compile_fx(graph, inputs)

    return compile_within


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


def _run_watched(
    watch: RecomputeLog,
    layer: int,
    contexts: Callable[[], Any] | None,
    block: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    result: Tensor = checkpoint(
        _run_plain,
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(watch.contexts, layer, contexts),
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
