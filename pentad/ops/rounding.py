"""Stochastic rounding of a bfloat16 optimizer step, and AdamW with it as torch operations.

A step smaller than half of the last place is lost when it is rounded to the nearest number: at a
learning rate of 1e-6 hardly a weight in bfloat16 moves. Rounded up with the probability that is the
share of the way, a number is right on average.

The random bits are a hash of a key (of seed, tensor and step) and of an element's place in the
whole tensor. They are the same however the tensor is cut over ranks, and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that are moved at once: some arrays of that many fp32 numbers are needed beside them."""
WORD = (1 << 32) - 1
HALF = (1 << 31) - 1
FIRST, SECOND, THIRD = 0x7FEB352D, 0x846CA68B, 0x9E3779B9
"""Constants of `_mix`, a finalizer of low bias (https://github.com/skeeto/hash-prospector)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the elements of a shard lie in the whole tensor, both counted through."""

    offset: int
    sizes: tuple[int, ...]
    """Sizes of the shard, after dims were joined that lie as one in the whole tensor, too."""
    strides: tuple[int, ...]
    """Strides of these dims in the whole tensor; the last is 1."""

    @classmethod
    def of(cls, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> Place:
        """The place of a block of a tensor, (start, stop) for each dim."""
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
        """Places in the whole tensor of the shard's elements from `start` to `stop`, int64."""
        at = torch.arange(start, stop, device=device)
        found = torch.full_like(at, self.offset)
        for size, stride in zip(reversed(self.sizes[1:]), reversed(self.strides[1:]), strict=True):
            found += at % size * stride
            at //= size
        return found.add_(at, alpha=self.strides[0])


def split_key(key: int) -> tuple[int, int]:
    """Two numbers of 31 bits: a kernel takes them as they are, whatever their value."""
    return key & HALF, key >> 31 & HALF


def random_bits(index: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three times 16 bits for each element, int32."""
    low, high = split_key(key)
    bits = _mix((index & WORD).to(torch.int32).bitwise_xor_(low))
    bits = _mix(bits.add_((index >> 32).to(torch.int32)).bitwise_xor_(high))
    more = _mix(bits ^ _signed(THIRD))
    return bits & 0xFFFF, bits >> 16 & 0xFFFF, more & 0xFFFF


def _mix(x: Tensor) -> Tensor:
    """In place. Of int32, whose shifts copy the sign: what they bring in is masked."""
    x ^= x >> 16 & 0xFFFF
    x *= FIRST
    x ^= x >> 15 & 0x1FFFF
    x *= _signed(SECOND)
    x ^= x >> 16 & 0xFFFF
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word > HALF else word


def round_up_or_down(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 as bfloat16, whose last place is one more with the probability of what is cut off. What
    bfloat16 holds exactly stays, and what is not finite, too."""
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
    """A step of AdamW as `adamw_kernel.move` makes it, all three rounded stochastically."""
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
