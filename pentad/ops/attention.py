"""Causal attention over packed sequences: a token attends to earlier tokens of its own sequence.

Three implementations of the same function: `PaddedAttend` pads sequences of similar length and uses
SDPA (any device, any dtype); `VarlenAttend` is a kernel over the packed tokens (CUDA, 16 bit):
FlashAttention-4 if installed (Hopper and later, about twice as fast), else torch's flash kernel,
or `ops.short_kernel` if all sequences are short;
`EqualAttend` is cuDNN's kernel for sequences of one length (Hopper and later).

Shapes: T packed tokens, P padded slots, S sequences, L length, H query heads, K key-value heads,
d head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pentad.core.types import Attend
from pentad.ops import flash4
from pentad.ops.sinks import (
    attend_limited,
    attend_with_sinks,
    limited,
    scaled_by_sinks,
    sink_gradients,
)

try:
    from pentad.ops.short_kernel import short_attend
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

VARLEN_OPTIONS = frozenset[str]()
if torch.backends.cuda.is_built():  # the import takes a second, so it is skipped without CUDA
    with suppress(ImportError):  # some platforms build torch without it
        from torch.nn.attention.varlen import varlen_attn

        VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)

Window = int | None
"""Number of tokens, itself included, to which a token attends; None: all earlier ones."""
BUCKET_RATIO = 0.75
"""A sequence shorter than this share of the longest one of a bucket starts the next bucket..."""
BUCKET_SLACK = 16
"""...unless it is at most this many tokens shorter: a call costs more than such padding."""
FLASH4_FROM = 128
"""Shorter sequences use torch's kernel, whose call takes a third of the host time."""
MAX_SHORT = 128
"""Sequences of up to this many tokens use a kernel for which a sequence is one tile."""
MAX_SHORT_HEAD_DIM = 64
SHORT_SHARED_BYTES = 120_000
"""Shared memory of a GPU that such a tile of gradients needs at this width."""
MAX_FLASH_HEAD_DIM = 256
MAX_CUDNN_HEAD_DIM = 128
CUDNN_STEP = 128
"""Only lengths that are multiples of this use cuDNN, which prepares a kernel for every shape."""


def build_attend(
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    longest: int | None = None,
    capped: bool = False,
) -> PaddedAttend | VarlenAttend | EqualAttend:
    """Chooses the fastest supported attention for this device, dtype and head width.

    `longest` is the longest sequence of all calls, so compiled layers use one kernel only. Limited
    scores (`capped`) are computed by FlashAttention-4 or in plain torch.
    """
    kind = flash_kind(longest or max(lengths), device=device, dtype=dtype, head_dim=head_dim)
    if kind is None or (capped and kind != "flash4"):
        return PaddedAttend(lengths, device=device)
    is_short = kind == "varlen" and takes_short(max(longest or 0, *lengths), head_dim, device)
    packed = VarlenAttend(lengths, device=device, is_flash4=kind == "flash4", is_short=is_short)
    is_equal = len(set(lengths)) == 1 and lengths[0] % CUDNN_STEP == 0
    if is_equal and not capped and has_cudnn_attention(device, head_dim):
        return EqualAttend(lengths, packed)
    return packed


def attend_captured(
    lengths_S: Tensor,
    max_length: int,
    *,
    dtype: torch.dtype,
    head_dim: int,
    longest: int | None = None,
) -> VarlenAttend:
    """The kernel of `build_attend` for lengths on the device, which a captured pass reads again at
    each replay; none exceeds `max_length`."""
    kind = flash_kind(
        longest or max_length, device=lengths_S.device, dtype=dtype, head_dim=head_dim
    )
    assert kind is not None, "buckets are used only with a flash kernel"
    is_short = kind == "varlen" and takes_short(
        max(longest or 0, max_length), head_dim, lengths_S.device
    )
    is_flash4 = kind == "flash4"
    return VarlenAttend.on_device(lengths_S, max_length, is_flash4=is_flash4, is_short=is_short)


class WidthAttend:
    """Selects a core by the width of heads, for models in which layers differ."""

    def __init__(self, cores: Mapping[int, Attend]) -> None:
        self.cores = cores

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: Window = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        return self.cores[q_THd.shape[-1]](layer, q_THd, k_TKd, v_TKd, window, sinks, cap)


def by_width(build: Callable[..., Attend], head_dims: Sequence[int]) -> Attend:
    """The core from `build(head_dim=...)`; a `WidthAttend` if there are several widths."""
    if len(head_dims) == 1:
        return build(head_dim=head_dims[0])
    return WidthAttend({width: build(head_dim=width) for width in head_dims})


def flash_kind(
    longest: int, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Literal["flash4", "varlen"] | None:
    """Name of the flash kernel for sequences of up to `longest` tokens; None if unsupported."""
    is_long = longest >= FLASH4_FROM
    if is_long and flash4.takes(dtype, head_dim) and flash4.has_flash4(device):
        return "flash4"
    return "varlen" if has_varlen_attention(device, dtype, head_dim) else None


def takes_short(longest: int, head_dim: int, device: torch.device) -> bool:
    """Whether the kernel for short sequences is used instead of torch's flash kernel."""
    if not HAS_TRITON or longest > MAX_SHORT or head_dim > MAX_SHORT_HEAD_DIM:
        return False
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)
    return room >= SHORT_SHARED_BYTES


def reference_attention(
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    lengths: Sequence[int],
    window: Window = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Reference implementation of packed attention with one T x T mask."""
    num_rep = q_THd.shape[1] // k_TKd.shape[1]
    k_HTd = k_TKd.repeat_interleave(num_rep, 1).transpose(0, 1)
    v_HTd = v_TKd.repeat_interleave(num_rep, 1).transpose(0, 1)
    seq_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seq_T = seq_T.to(q_THd.device)
    at_T = torch.arange(len(seq_T), device=q_THd.device)
    distance_TT = at_T[:, None] - at_T[None, :]
    sees_TT = (seq_T[:, None] == seq_T[None, :]) & (distance_TT >= 0)
    if window is not None:
        sees_TT &= distance_TT < window
    scores_HTT = q_THd.transpose(0, 1) @ k_HTd.transpose(1, 2) * q_THd.shape[-1] ** -0.5
    scores_HTT = limited(scores_HTT, cap).masked_fill(~sees_TT, float("-inf"))
    if sinks is not None:
        sinks_HT1 = sinks[:, None, None].expand(-1, len(seq_T), 1)
        scores_HTT = torch.cat([scores_HTT, sinks_HT1], dim=-1)
    p_HTT = scores_HTT.softmax(-1)[..., : len(seq_T)]
    return (p_HTT @ v_HTd).transpose(0, 1)


class PaddedAttend:
    """Packed attention by SDPA over buckets of sequences padded to the longest of the bucket.

    Padding comes after the tokens of a sequence, so the causal mask hides it from all of them.
    """

    def __init__(self, lengths: Sequence[int], *, device: torch.device) -> None:
        self.plan = plan_buckets(lengths)
        slots = torch.from_numpy(self.plan.slot_of_token)
        self.slot_T: Tensor | None = None if self.plan.is_identity else slots.to(device)
        self.bands: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: Window = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        q_PHd, k_PKd, v_PKd = (self._pad(x) for x in (q_THd, k_TKd, v_TKd))
        out: list[Tensor] = []
        for start, num, length in self.plan.buckets:
            part = slice(start, start + num * length)
            q, k, v = (
                x[part].unflatten(0, (num, length)).transpose(1, 2) for x in (q_PHd, k_PKd, v_PKd)
            )
            out.append(self._attend_bucket(q, k, v, window, sinks, cap))
        o_PHd = out[0] if len(out) == 1 else torch.cat(out)
        return o_PHd if self.slot_T is None else from_slots(o_PHd, self.slot_T)

    def _pad(self, x_Tnd: Tensor) -> Tensor:
        if self.slot_T is None:
            return x_Tnd
        return to_slots(x_Tnd, self.slot_T, int(self.plan.num_slots))

    def _attend_bucket(
        self,
        q_SHLd: Tensor,
        k_SKLd: Tensor,
        v_SKLd: Tensor,
        window: Window,
        sinks: Tensor | None,
        cap: float | None,
    ) -> Tensor:
        """Returns o_PHd of one bucket."""
        length = q_SHLd.shape[2]
        # A branch: torch.compile rejects the symbolic comparison as a value.
        is_whole = True if window is None or window >= length else False  # noqa: SIM210
        band = None if is_whole else self._band(length, window or 0, q_SHLd.device)
        assert sinks is None or cap is None, "no family has sinks and limited scores"
        if sinks is not None:
            out = attend_with_sinks(q_SHLd, k_SKLd, v_SKLd, sinks, is_causal=is_whole, seen=band)
        elif cap is not None:
            out = attend_limited(q_SHLd, k_SKLd, v_SKLd, cap, is_causal=is_whole, seen=band)
        else:
            gqa: dict[str, Any] = {"enable_gqa": True} if q_SHLd.shape[1] != k_SKLd.shape[1] else {}
            out = F.scaled_dot_product_attention(
                q_SHLd, k_SKLd, v_SKLd, attn_mask=band, is_causal=is_whole, **gqa
            )
        return out.transpose(1, 2).flatten(0, 1)

    def _band(self, length: int, window: int, device: torch.device) -> Tensor:
        if (length, window) not in self.bands:
            at_L = torch.arange(length, device=device)
            distance_LL = at_L[:, None] - at_L[None, :]
            self.bands[length, window] = (distance_LL >= 0) & (distance_LL < window)
        return self.bands[length, window]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Index of each packed token among the padded slots. Example: lengths (2, 1) in one bucket of
    length 2 give slots (0, 1, 2), one bucket (0, 2, 2), four slots."""

    buckets: tuple[tuple[int, int, int], ...]
    """(first slot, number of sequences, padded length) of each bucket."""
    slot_of_token: np.ndarray
    """int64 [T]: slot of each token."""
    num_slots: int

    @property
    def is_identity(self) -> bool:
        """Whether packed and padded layouts are equal (all sequences have one length)."""
        return len(self.buckets) == 1 and self.num_slots == len(self.slot_of_token)


def plan_buckets(lengths: Sequence[int]) -> BucketPlan:
    """Groups sequences of similar length; within a bucket they keep their order."""
    length_S = np.asarray(lengths, dtype=np.int64)
    assert len(length_S) and length_S.min() > 0, "every packed sequence has at least one token"
    order = np.argsort(-length_S, kind="stable")
    sorted_S = length_S[order]
    slot_S = np.empty_like(length_S)
    buckets: list[tuple[int, int, int]] = []
    first, num_slots = 0, 0
    while first < len(order):
        top = int(sorted_S[first])
        floor = min(BUCKET_RATIO * top, top - BUCKET_SLACK)
        last = first + int((sorted_S[first:] >= floor).sum())
        members = np.sort(order[first:last])
        slot_S[members] = num_slots + top * np.arange(len(members))
        buckets.append((num_slots, len(members), top))
        num_slots += top * len(members)
        first = last
    start_S = np.cumsum(length_S) - length_S
    slot_T = np.repeat(slot_S - start_S, length_S) + np.arange(int(length_S.sum()))
    return BucketPlan(tuple(buckets), slot_T, num_slots)


class _Pad(torch.autograd.Function):
    """Scatters rows to distinct slots of a zero tensor. Backward is a gather."""

    @staticmethod
    def forward(ctx: Any, x_Tnd: Tensor, slot_T: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slot_T)
        # Not in place: compiled by torch 2.11, an in-place result of forward has no gradient.
        return x_Tnd.new_zeros((num_slots, *x_Tnd.shape[1:])).index_copy(0, slot_T, x_Tnd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


class _Unpad(torch.autograd.Function):
    """Gathers rows from padded slots: the inverse of `_Pad`."""

    @staticmethod
    def forward(ctx: Any, x_Pnd: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_T)
        ctx.num_slots = x_Pnd.shape[0]
        return x_Pnd.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_zeros((ctx.num_slots, *grad.shape[1:]))
        return out.index_copy_(0, ctx.saved_tensors[0], grad), None


def to_slots(x_Tnd: Tensor, slot_T: Tensor, num_slots: int) -> Tensor:
    result: Tensor = _Pad.apply(x_Tnd, slot_T, num_slots)
    return result


def from_slots(x_Pnd: Tensor, slot_T: Tensor) -> Tensor:
    result: Tensor = _Unpad.apply(x_Pnd, slot_T)
    return result


class VarlenAttend:
    """Packed attention by a kernel for variable lengths: torch's, FlashAttention-4, or one for
    short sequences."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        device: torch.device,
        is_flash4: bool = False,
        is_short: bool = False,
    ) -> None:
        self.is_flash4, self.is_short = is_flash4, is_short
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
        self.bounds_S = bounds.to(device, non_blocking=True)
        # The kernel uses the maximum only to size its grid. Powers of two avoid a recompilation for
        # every length.
        self.max_length = 1 << (max(lengths) - 1).bit_length()

    @classmethod
    def on_device(
        cls, lengths_S: Tensor, max_length: int, *, is_flash4: bool, is_short: bool
    ) -> VarlenAttend:
        """Takes lengths that are on the device, of which none exceeds `max_length`, so that a
        captured pass computes with the lengths of each replay."""
        made = cls.__new__(cls)
        made.is_flash4, made.is_short, made.max_length = is_flash4, is_short, max_length
        made.bounds_S = F.pad(lengths_S.cumsum(0), (1, 0)).to(torch.int32)
        return made

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: Window = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        if self.is_flash4:
            result: Tensor = flash4.flash4(
                *(q_THd, k_TKd, v_TKd, self.bounds_S, self.max_length),
                *(window or 0, sinks, cap or 0.0),
            )[0]
            return result
        assert cap is None, "torch's kernel has no limit on scores"
        bounds, most = self.bounds_S, self.max_length
        if self.is_short and sinks is None:
            short: Tensor = short_attend(q_THd, k_TKd, v_TKd, bounds, most, window or 0)
            return short
        return varlen(q_THd, k_TKd, v_TKd, bounds, bounds, most, most, window, sinks)


def varlen(
    q_QHd: Tensor,
    k_NKd: Tensor,
    v_NKd: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: Window,
    sinks: Tensor | None = None,
) -> Tensor:
    """torch's flash kernel. With more keys than queries, the queries are the last tokens."""
    if sinks is not None:
        bounds = (bounds_q, bounds_k, max_q, max_k, window or 0)
        result: Tensor = varlen_sinks(q_QHd, k_NKd, v_NKd, sinks, *bounds)[0]
        return result
    # The kernel counts tokens to the left, excluding the token itself.
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"window_size": (left, 0)}
    if q_QHd.shape[1] != k_NKd.shape[1] and "enable_gqa" in VARLEN_OPTIONS:
        options["enable_gqa"] = True  # earlier versions support grouped heads without a flag
    packed = varlen_attn(q_QHd, k_NKd, v_NKd, bounds_q, bounds_k, max_q, max_k, **options)
    assert isinstance(packed, Tensor), "only one result was requested"
    return packed


# The same kernel as an operator that also returns the log-sum-exp, which sinks need.


def _how(window: int) -> tuple[bool, dict[str, int]]:
    """Arguments of `varlen_attn` for this window: (plain causal, limits). 0 means no window."""
    return window == 0, {"window_size_left": window - 1, "window_size_right": 0}


@torch.library.custom_op("pentad::varlen_sinks", mutates_args=(), device_types="cuda")
def varlen_sinks(
    q_QHd: Tensor,
    k_NKd: Tensor,
    v_NKd: Tensor,
    sinks: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attention with sinks. Also returns the log-sum-exp with sinks, [H, Q], for backward."""
    is_causal, limits = _how(window)
    out_QHd, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
        *(q_QHd, k_NKd, v_NKd, bounds_q, bounds_k, max_q, max_k, 0.0, is_causal, False), **limits
    )
    out_QHd, total_QH = scaled_by_sinks(out_QHd, lse_HQ.t(), sinks)
    return out_QHd, total_QH.t().contiguous()


@varlen_sinks.register_fake
def _(q_QHd: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return flash4.results_of(q_QHd)


@torch.library.custom_op("pentad::varlen_sinks_backward", mutates_args=(), device_types="cuda")
def varlen_sinks_backward(
    grad_QHd: Tensor,
    q_QHd: Tensor,
    k_NKd: Tensor,
    v_NKd: Tensor,
    out_QHd: Tensor,
    total_HQ: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    is_causal, limits = _how(window)
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q_QHd.device)  # unused: no dropout
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad_QHd, q_QHd, k_NKd, v_NKd, out_QHd, total_HQ, bounds_q, bounds_k, max_q, max_k),
        *(0.0, is_causal, no_seed, no_seed.new_empty(0)),
        **limits,
    )
    return found


@varlen_sinks_backward.register_fake
def _(
    grad_QHd: Tensor, q_QHd: Tensor, k_NKd: Tensor, v_NKd: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q_QHd, k_NKd, v_NKd))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_QHd, k_NKd, v_NKd, sinks, bounds_q, bounds_k, *ctx.limits = inputs
    ctx.save_for_backward(q_QHd, k_NKd, v_NKd, *output, bounds_q, bounds_k, sinks)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_QHd: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_QHd is None:
        return (None,) * 9
    *saved, sinks = ctx.saved_tensors
    grads = varlen_sinks_backward(grad_QHd.contiguous(), *saved, *ctx.limits)
    dsinks = sink_gradients(grad_QHd, saved[3], saved[4].t(), sinks).sum(0)
    return (*grads, dsinks.to(sinks.dtype), *(None,) * 5)


varlen_sinks.register_autograd(_backward, setup_context=_save)


class EqualAttend:
    """Attention over sequences of one length by cuDNN; layers with a window, sinks or limited
    scores use `packed`."""

    def __init__(self, lengths: Sequence[int], packed: VarlenAttend) -> None:
        self.num, self.length, self.packed = len(lengths), lengths[0], packed

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: Window = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        is_plain = sinks is None and cap is None and (window is None or window >= self.length)
        if not is_plain:
            return self.packed(layer, q_THd, k_TKd, v_TKd, window, sinks, cap)
        # The operator is called directly: `scaled_dot_product_attention` prefers another kernel.
        result: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.unflatten(0, (self.num, -1)).transpose(1, 2) for x in (q_THd, k_TKd, v_TKd)),
            None,  # no bias
            True,  # returns the log-sum-exp, for backward
            0.0,  # no dropout
            True,  # causal
        )[0]
        return result.transpose(1, 2).flatten(0, 1)


def has_cudnn_attention(device: torch.device, head_dim: int) -> bool:
    """Whether cuDNN's kernel is available and deterministic mode is off: its backward sums in no
    fixed order."""
    return (
        torch.cuda.get_device_capability(device) >= (9, 0)
        and torch.backends.cudnn.is_available()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and head_dim <= MAX_CUDNN_HEAD_DIM
    )


def has_varlen_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernel supports these: CUDA, 16-bit dtype, head width a multiple of 8."""
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    fits = head_dim <= MAX_FLASH_HEAD_DIM and head_dim % 8 == 0
    return device.type == "cuda" and "window_size" in VARLEN_OPTIONS and is_narrow and fits
