"""FlashAttention-4 over packed sequences, as an operation that torch can trace and differentiate.

The package `flash-attn-4` (extra `fa4`) compiles its kernels on first use. Its own autograd
function is opaque to torch.compile, and the registration that torch ships expects a different
number of results, so this module registers its own forward and backward ops.

Shapes: T packed tokens, Q queries and N keys where their numbers differ, H query heads, K key-value
heads, d head width.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pentad.core.kept import kept_folder, last_time, note_seconds, seconds_of
from pentad.ops.sinks import scaled_by_sinks, sink_gradients
from pentad.telemetry.log import NOTICE

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

NOTABLE_S = 1.0
"""Shorter compilations, in seconds, are not logged."""
HEAD_DIMS = frozenset({32, 64, 96, 128, 192, 256})
"""Widths with verified gradients. At 8, 16, 40 and 48 gradients of version 4.0.0b36 on Hopper are
wrong by more than their own size, without an error."""


@cache
def kernels() -> ModuleType:
    """Imports the package, which takes seconds. Its compiled kernels are cached for later runs."""
    keep_compiled()
    return importlib.import_module("flash_attn.cute.interface")


def keep_compiled() -> None:
    if (folder := kept_folder()) is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash4"))


_compiled: set[str] = set()
"""Kinds of kernels that have run in this process."""


@contextmanager
def announced(direction: str, q_THd: Tensor, window: int, cap: float) -> Iterator[None]:
    """Logs that a kernel is being compiled around the first call of its kind, which takes seconds
    unless the kernel is cached."""
    limit = (f"window {window}, " if window else "") + (f"scores to {cap:g}, " if cap else "")
    kind = f"{direction}, width {q_THd.shape[-1]}, {limit}{q_THd.dtype}"
    if kind in _compiled:
        yield
        return
    what = f"FlashAttention-4's kernel ({kind})"
    known_s, started = seconds_of(what), time.monotonic()
    if known_s is None or known_s >= NOTABLE_S:
        log.info("compiling %s (%s) ...", what, last_time(what), extra=NOTICE)
    yield
    seconds = time.monotonic() - started
    note_seconds(what, seconds)
    if seconds >= NOTABLE_S:
        log.info("compiled %s in %.1f s", what, seconds, extra=NOTICE)
    _compiled.add(kind)


@cache
def has_flash4(device: torch.device) -> bool:
    """Whether the package is installed and has kernels for this GPU (Hopper and later)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # flash_attn is not installed
        return False


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS


def _mask(window: int) -> dict[str, Any]:
    """Window arguments of the kernel. `window` counts visible tokens; 0: no limit."""
    if window == 0:
        return {"causal": True}
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


def attend(
    q_QHd: Tensor,
    k_NKd: Tensor,
    v_NKd: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; the queries of a sequence are its last tokens."""
    with announced("forward", q_QHd, window, cap):
        out_QHd, lse_HQ, *_ = kernels()._flash_attn_fwd(
            q_QHd,
            k_NKd,
            v_NKd,
            return_lse=True,
            softcap=cap or None,
            **_mask(window),
            **_bounds(bounds_q, bounds_k, max_q, max_k),
        )
    return out_QHd, lse_HQ


def attend_backward(
    grad_QHd: Tensor,
    q_QHd: Tensor,
    k_NKd: Tensor,
    v_NKd: Tensor,
    out_QHd: Tensor,
    lse_HQ: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    with announced("backward", q_QHd, window, cap):
        dq_QHd, dk_NKd, dv_NKd = kernels()._flash_attn_bwd(
            q_QHd,
            k_NKd,
            v_NKd,
            out_QHd,
            grad_QHd,
            lse_HQ,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            softcap=cap,
            **_mask(window),
            **_bounds(bounds_q, bounds_k, max_q, max_k),
        )
    return dq_QHd, dk_NKd, dv_NKd


def results_of(q_QHd: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors with the shapes of the results of `attend`."""
    num_tokens, num_heads, _ = q_QHd.shape
    lse_HQ = q_QHd.new_empty((num_heads, num_tokens), dtype=torch.float32)
    return q_QHd.new_empty(q_QHd.shape), lse_HQ


def _bounds(bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": bounds_q,
        "cu_seqlens_k": bounds_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
    }


@torch.library.custom_op("pentad::flash4", mutates_args=(), device_types="cuda")
def flash4(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    bounds_S: Tensor,
    max_length: int,
    window: int,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention as a differentiable op. Also returns the log-sum-exp, for backward. `cap`:
    limit of scores; 0: no limit."""
    limits = (bounds_S, bounds_S, max_length, max_length, window, cap)
    out_THd, lse_HT = attend(q_THd, k_TKd, v_TKd, *limits)
    if sinks is None:
        return out_THd, lse_HT
    out_THd, total_TH = scaled_by_sinks(out_THd, lse_HT.t(), sinks)
    return out_THd, total_TH.t().contiguous()


@flash4.register_fake
def _(q_THd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return results_of(q_THd)


@torch.library.custom_op("pentad::flash4_backward", mutates_args=(), device_types="cuda")
def flash4_backward(
    grad_THd: Tensor,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    out_THd: Tensor,
    lse_HT: Tensor,
    bounds_S: Tensor,
    max_length: int,
    window: int,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    limits = (bounds_S, bounds_S, max_length, max_length, window, cap)
    return attend_backward(grad_THd, q_THd, k_TKd, v_TKd, out_THd, lse_HT, *limits)


@flash4_backward.register_fake
def _(
    grad_THd: Tensor,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    out_THd: Tensor,
    lse_HT: Tensor,
    bounds_S: Tensor,
    max_length: int,
    window: int,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_THd.new_empty(q_THd.shape),
        k_TKd.new_empty(k_TKd.shape),
        v_TKd.new_empty(v_TKd.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THd, k_TKd, v_TKd, bounds_S, ctx.max_length, ctx.window, sinks, ctx.cap = inputs
    ctx.save_for_backward(q_THd, k_TKd, v_TKd, *output, bounds_S, sinks)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_THd: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_THd is None:
        return (None,) * 8
    *saved, sinks = ctx.saved_tensors
    grads = flash4_backward(grad_THd.contiguous(), *saved, ctx.max_length, ctx.window, ctx.cap)
    if sinks is None:
        return (*grads, None, None, None, None, None)
    dsinks = sink_gradients(grad_THd, saved[3], saved[4].t(), sinks).sum(0)
    return (*grads, None, None, None, dsinks.to(sinks.dtype), None)


flash4.register_autograd(_backward, setup_context=_save)
