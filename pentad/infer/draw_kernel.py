"""Sampling on a GPU: `sampling.draw` without truncation as two Triton kernels.

The logits are read once: the first kernel computes maximum and sum of every chunk of the
vocabulary, the second selects the chunk and then the token inside it. Shape letters as in
`sampling`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.infer.sampling import UNIFORM_BITS

CHUNK = 2048


def draw_fused(
    logits_NV: Tensor, uniform_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `sampling.draw`: uniform numbers and sums in fp64, the rest in fp32."""
    num_draws, vocab_size = logits_NV.shape
    assert logits_NV.is_contiguous()
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    device = logits_NV.device
    tops = torch.empty((num_draws, num_chunks), dtype=torch.float32, device=device)
    sums = torch.empty_like(tops)
    ids_N = torch.empty(num_draws, dtype=torch.int64, device=device)
    logprobs_N = torch.empty(num_draws, dtype=torch.float32, device=device)
    _scan[(num_draws, num_chunks)](
        logits_NV, temperature_N, tops, sums, vocab_size, CHUNK=CHUNK, num_warps=4
    )
    _pick[(num_draws,)](
        logits_NV,
        temperature_N,
        uniform_N,
        tops,
        sums,
        ids_N,
        logprobs_N,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        WIDE=triton.next_power_of_2(num_chunks),
        # Not a plain argument, which would be rounded to fp32, to 1.
        BELOW_ONE=1.0 - 2.0**-UNIFORM_BITS,
        num_warps=4,
    )
    return ids_N, logprobs_N


@triton.jit
def _scan(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = v < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + v, mask=mask, other=float("-inf"))
    x = x.to(tl.float32) / divisor
    top = tl.max(x, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + at, top)
    # A chunk of only -inf has weight 0.
    total = tl.sum(tl.where(mask, tl.exp(x - top), 0.0), 0)
    tl.store(sums_ptr + at, tl.where(top == float("-inf"), 0.0, total))


@triton.jit
def _pick(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    BELOW_ONE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    uniform = tl.load(uniform_ptr + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)

    c = tl.arange(0, WIDE)
    is_chunk = c < num_chunks
    tops = tl.load(tops_ptr + row * num_chunks + c, mask=is_chunk, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_chunks + c, mask=is_chunk, other=0.0)
    top = tl.max(tops, 0)
    weights = (sums * tl.exp(tops - top)).to(tl.float64)
    running = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)
    # Not `total`, which is summed in another order: the last chunk's sum must exceed the target.
    target = uniform * tl.max(running, 0)
    drawn_chunk = tl.sum(((running <= target) & is_chunk).to(tl.int32), 0)
    first_top = tl.min(tl.where(tops == top, c, WIDE), 0)  # greedy: first chunk of the maximum
    chunk = tl.where(temperature > 0, drawn_chunk, first_top)
    chunk = tl.minimum(chunk, num_chunks - 1)
    before = tl.sum(tl.where(c < chunk, weights, 0.0), 0)

    v = tl.arange(0, CHUNK)
    mask = chunk * CHUNK + v < vocab_size
    at = row * vocab_size + chunk * CHUNK
    x = tl.load(logits_ptr + at + v, mask=mask, other=float("-inf")).to(tl.float32) / divisor
    inner = tl.where(mask, tl.exp(x - top), 0.0).to(tl.float64)
    inner_running = tl.cumsum(inner, 0)
    rest = tl.minimum(target - before, tl.max(inner_running, 0) * BELOW_ONE)
    drawn = tl.sum((inner_running <= rest).to(tl.int32), 0)
    best = tl.min(tl.where(x == tl.max(x, 0), v, CHUNK), 0)
    token = tl.where(temperature > 0, drawn, best)
    token = tl.minimum(token, CHUNK - 1)  # for non-finite logits; the log-prob shows the error

    chosen = tl.sum(tl.where(v == token, x, 0.0), 0)
    tl.store(ids_ptr + row, (chunk * CHUNK + token).to(tl.int64))
    logprob = chosen - top - tl.log(total).to(tl.float32)
    tl.store(logprobs_ptr + row, logprob)
