"""Stochastic rounding of a bfloat16 optimizer step, and AdamW with it as torch operations.

Round-to-nearest drops updates smaller than half a bfloat16 unit: at a learning rate of 1e-6 almost
no weight changes. Stochastic rounding rounds up with a probability equal to the fraction cut off,
so weights are correct on average.

The random bits are a hash of a key (seed, tensor, step) and of the element's index in the whole
tensor. They do not depend on the sharding and are equal after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that are updated at once, which needs several temporary fp32 arrays of this size."""
WORD = (1 << 32) - 1
HALF = (1 << 31) - 1
FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B, 0x9E3779B9
"""Constants of `_mix`, a low-bias finalizer (https://github.com/skeeto/hash-prospector)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Maps flat indices of a shard to flat indices of the whole tensor."""

    offset: int
    sizes: tuple[int, ...]
    """Sizes of the shard, with dims joined that are contiguous in the whole tensor, too."""
    strides: tuple[int, ...]
    """Strides of these dims in the whole tensor; the last is 1."""

    @classmethod
    def of(cls, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> Place:
        """The `Place` of a block of a tensor, given (start, stop) for each dim."""
        wholes = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        offset = sum(start * stride for (start, _), stride in zip(box, wholes, strict=True))
        sizes, strides = [1], [1]
        for dim in reversed(range(len(shape))):
            size = box[dim][1] - box[dim][0]
            if wholes[dim] == sizes[0] * strides[0]:
                sizes[0] *= size
            elif size > 1:
                sizes, strides = [size, *sizes], [wholes[dim], *strides]
        return cls(offset, tuple(sizes), tuple(strides))

    def indices(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Flat int64 indices in the whole tensor of the shard's elements `start` to `stop`."""
        at = torch.arange(start, stop, device=device)
        found = torch.full_like(at, self.offset)
        for size, stride in zip(reversed(self.sizes[1:]), reversed(self.strides[1:]), strict=True):
            found += at % size * stride
            at //= size
        return found.add_(at, alpha=self.strides[0])


def split_key(key: int) -> tuple[int, int]:
    """Splits a key into two 31-bit numbers, which a kernel takes without recompilation."""
    return key & HALF, key >> 31 & HALF


def random_bits(index: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three 16-bit random numbers for each element, as int32."""
    low, high = split_key(key)
    bits = _mix((index & WORD).to(torch.int32).bitwise_xor_(low))
    bits = _mix(bits.add_((index >> 32).to(torch.int32)).bitwise_xor_(high))
    more = _mix(bits ^ _signed(THIRD))
    return bits & 0xFFFF, bits >> 16 & 0xFFFF, more & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    """Integer hash of int32 in place; masks remove the bits of sign extension."""
    x ^= x >> 16 & 0xFFFF
    x *= FIRST
    x ^= x >> 15 & 0x1FFFF
    x *= _signed(SECOND)
    x ^= x >> 16 & 0xFFFF
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word > HALF else word


def round_up_or_down(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to bfloat16 stochastically: up with a probability equal to the fraction cut off.
    Exact values and non-finite values do not change."""
    rounded = (x.view(torch.int32) + bits).bitwise_and_(_signed(0xFFFF0000)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def move(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Tensor,
    *,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    key: int,
    place: Place,
) -> None:
    """AdamW step in torch, equal to `adamw_kernel.move`, with stochastic rounding."""
    held = [x.view(-1) for x in (parameter, exp_avg, exp_avg_sq)]
    gradient = gradient.reshape(-1)
    for start in range(0, parameter.numel(), CHUNK):
        chunk = slice(start, min(start + CHUNK, parameter.numel()))
        bits = random_bits(place.indices(chunk.start, chunk.stop, parameter.device), key)
        g = gradient[chunk].float() * scale
        p, m, v = (x[chunk].float() for x in held)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        size = v.sqrt() / corrections[1] + eps
        p -= lr * weight_decay * p + lr / corrections[0] * m / size
        for x, moved, own in zip(held, (p, m, v), bits, strict=True):
            x[chunk] = round_up_or_down(moved, own)
