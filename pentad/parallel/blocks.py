"""Wrappers of each block: recomputation of activations, then compilation.

Both replace the block's forward, not the block: hooks of FSDP2 stay outside, and parameter names do
not change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.kept import last_time, note_seconds
from pentad.core.layout import Layout
from pentad.engine.section import ModelConfig
from pentad.parallel.recompute_log import RecomputeLog
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)

KEPT_OPS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "torch_attn._varlen_attn.default",
    "pentad.flash4.default",
    "pentad.tree_flash4.default",
    "pentad.short_attend.default",
    "pentad.varlen_sinks.default",
    "pentad.route.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
}
"""Names of operations, because not every build of torch has all of them."""
COMPILED_ON = {"cuda"}
"""Device types on which blocks are compiled; on a CPU compilation takes longer than it saves."""
MAX_GRAPHS = 64
"""Maximum number of graphs of one function: a run needs far fewer unless a function is recompiled
repeatedly."""
GROUPED_PRODUCT = "aten._grouped_mm.default"
"""Grouped products of experts (gate with up, then down); backward does not read the second."""
PRODUCTS = ("aten.mm.default", "aten.addmm.default", GROUPED_PRODUCT)
RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE

# Ignores profiler marks: FSDP2 sets more of them when experts are recomputed,
# which would look like another computation.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A block that is compiled in parts, separated by operations that cannot be compiled: gathers
    of separately wrapped modules, and the exchange of pairs with other ranks."""

    first: Callable[..., Any]
    """The block's unbound method for all operations before the ffn; replaced on the block."""
    ffn: nn.Module
    inner: tuple[nn.Module, ...]
    """Modules of the ffn that neither gather nor communicate."""


def apply_to_blocks(
    blocks: Mapping[int, nn.Module],
    model: ModelConfig,
    device: torch.device,
    parts: Mapping[int, Parts] | None = None,
) -> None:
    """Wraps blocks. `parts`: blocks that cannot be compiled whole, by layer."""
    has_budget = model.archon.ac_mode == "memory_budget" and model.gradient_checkpointing
    if has_budget and device.type not in COMPILED_ON:
        rule = f"the compiler keeps to it, and blocks are compiled on CUDA only, not on {device}"
        raise UserError(Problem("ac_mode = memory_budget", rule, "use selective or full"))
    watch = RecomputeLog() if model.archon.ac_debug else None
    for index, block in blocks.items():
        apply_to_block(block, index, model, device, watch, (parts or {}).get(index))


def apply_to_block(
    block: nn.Module,
    index: int,
    model: ModelConfig,
    device: torch.device,
    watch: RecomputeLog | None = None,
    parts: Parts | None = None,
) -> None:
    how = _recomputing(index, model)
    if watch is not None:
        if how is _run_plain:
            watch.log_kept(index)
        else:
            contexts = _contexts(_rank_of(model)) if how is _keeping(model) else None
            how = _recomputing_by(partial(watch.contexts, index, contexts))
    if not (model.archon.enable_compile is True and device.type in COMPILED_ON):
        if how is not _run_plain:
            block.forward = _around(block, how)
        return
    has_budget = model.gradient_checkpointing and model.archon.ac_mode == "memory_budget"
    backend = _inductor_within(model.archon.ac_memory_budget) if has_budget else "inductor"
    compiled = partial(compile_run, backend=backend, is_static=model.pad_to_maximum is True)
    if parts is None:
        block.forward = _around(block, compiled(how))
    elif how is _keeping(model):
        setattr(block, parts.first.__name__, partial(compiled(how), parts.first, block))
        # The policy is applied to single operations, so blocks run uncompiled.
        parts.ffn.forward = _around(parts.ffn, how)
    else:
        setattr(block, parts.first.__name__, partial(compiled(_run_plain), parts.first, block))
        for module in parts.inner:
            module.forward = _around(module, compiled(_run_plain))
        if how is not _run_plain:
            block.forward = _around(block, how)


class Compiling:
    """Logs the compilation of blocks, which happens during a pass and takes long."""

    def __init__(self) -> None:
        self.since = 0.0
        self.num_graphs = 0
        self.seconds = 0.0
        """Seconds since the last report."""
        self.total_s = 0.0
        self.what = ""
        """The model and its device, under which the time is recorded and logged."""

    def expect(
        self, dims: ModelDims, model: ModelConfig, layout: Layout, device: torch.device
    ) -> None:
        """Names the model whose blocks will be compiled."""
        if not (model.archon.enable_compile is True and device.type in COMPILED_ON):
            return
        which = f"{dims.family}, {dims.num_layers} layers of width {dims.hidden_size}"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        place = f"{model.dtype}, layout {layout}, {name}"
        self.what, self.total_s = f"{which}, {place}, torch {torch.__version__}", 0.0

    def watch(self) -> None:
        from torch._dynamo.callback import callback_handler  # slow to import, and not for all

        if self._begin not in callback_handler.start_callbacks:  # a reset of dynamo removes them
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def _begin(self, *args: Any) -> None:
        self.since = time.monotonic()
        if self.seconds:
            return
        is_first = self.what and not self.total_s
        more = f" ({self.what}; {last_time(self.what)})" if is_first else ""
        log.info("compiling the model's blocks%s ...", more, extra=NOTICE)

    def _end(self, *args: Any) -> None:
        self.num_graphs += 1
        self.seconds += time.monotonic() - self.since

    def report(self) -> None:
        """Called after a pass: logs the duration of a compilation."""
        if self.seconds:
            text = "compiled the model's blocks in %.1f s (%d graphs so far)"
            log.info(text, self.seconds, self.num_graphs, extra=NOTICE)
            self.total_s, self.seconds = self.total_s + self.seconds, 0.0
            if self.what:
                note_seconds(self.what, self.total_s)


compiling = Compiling()
"""One object per process, like the compiler."""


def _around(module: nn.Module, how: Callable[..., Any]) -> Callable[..., Any]:
    return partial(how, type(module).forward, module)


def compile_run(
    run: Callable[..., Any], backend: str | Callable[..., Any], is_static: bool = False
) -> Callable[..., Any]:
    """Returns one function for all blocks, with the block as argument, so that they share one
    compiled graph. Shapes that never change are compiled as static."""
    # Numbers in modules (an eps, a scale) never change either. As graph inputs they would be
    # CPU tensors, for which a C++ kernel is built after half a minute of trying compilers.
    torch._dynamo.config.specialize_float = True
    # The compiler counts graphs by function, and this one serves every kind of block and part,
    # with gradients and without. Beyond the limit it runs new ones uncompiled.
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    compiling.watch()
    compiled: Callable[..., Any] = torch.compile(
        run, dynamic=None if is_static else True, backend=backend
    )
    return compiled


def _recomputing(index: int, model: ModelConfig) -> Callable[..., Any]:
    """Returns the function that runs a block and keeps only the requested activations."""
    if not model.gradient_checkpointing or model.archon.ac_mode in ("none", "memory_budget"):
        return _run_plain
    if model.archon.keeps_products:
        return _keeping(model)
    return _run_recomputed if model.archon.is_recomputed(index) else _run_plain


@cache
def _inductor_within(budget: float) -> Callable[..., Any]:
    """Returns the default compile backend, which also selects the activations to keep."""

    def compile_within(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config  # both are slow to import, and not for all
        from torch._inductor import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx.compile_fx(graph, inputs)

    return compile_within


def _run_plain(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _run_recomputed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Restores the generators' states, so that dropout is the same as in forward.
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


def _keeping(model: ModelConfig) -> Callable[..., Any]:
    return _keeping_products(_rank_of(model))


def _rank_of(model: ModelConfig) -> int:
    return 0 if model.lora is None else model.lora.rank


@cache
def _keeping_products(rank: int) -> Callable[..., Any]:
    """Function that runs a block and keeps expensive results; one for each rank of factors."""
    return _recomputing_by(_contexts(rank))


def _recomputing_by(contexts: Callable[[], Any]) -> Callable[..., Any]:
    def run_keeping(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=contexts,
            **kwargs,
        )

    return run_keeping


@cache
def _contexts(rank: int) -> Callable[[], Any]:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_Policy(rank))

    return contexts


class _Policy:
    """Selects the results that a pass through a block keeps; also called for the recomputation.
    `rank`: that of factors, or 0. The output of B is recomputed: it is as large as that of the
    frozen matrix and costs a hundredth of it."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.num_grouped = {False: 0, True: 0}
        """Grouped products so far, in forward and in the recomputation."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self._keeps(ctx, str(op), args) else RECOMPUTE

    def _keeps(self, ctx: Any, name: str, args: tuple[Any, ...]) -> bool:
        if self.rank and name in PRODUCTS:
            first, second = args[1:3] if name == PRODUCTS[1] else args[:2]
            if first.shape[-1] == self.rank:
                return False
            if second.shape[-1] in (self.rank, 2 * self.rank):  # of A, of one matrix or of two
                return True
        if name == GROUPED_PRODUCT:
            self.num_grouped[ctx.is_recompute] += 1
            return self.num_grouped[ctx.is_recompute] % 2 == 1
        return name in KEPT_OPS
