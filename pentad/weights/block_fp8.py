"""Quantises weights to fp8 (e4m3) with a float32 scale per block: the checkpoint format of
DeepSeek-V3 and Qwen3-FP8, which vLLM and SGLang read natively.

The largest number of a block maps to the largest of the format. Elementwise operations in float32
only, so CPU and GPU give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pentad.core.quantization import FP8_BLOCK, is_quantised
from pentad.weights.dequantize import SCALES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix in fp8 and its scales; both sides are multiples of the block."""
    blocks = in_blocks(weight.detach().float())
    largest = torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3)))
    scales = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (blocks / scales[:, None, :, None]).to(FP8).view(weight.shape), scales


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that a quantised matrix stands for, rounded once to `dtype`."""
    blocks = in_blocks(weight.float())
    return (blocks * scales[:, None, :, None]).view(weight.shape).to(dtype)


def in_blocks(matrix: Tensor) -> Tensor:
    """Views a matrix as [block of rows, row, block of columns, column]."""
    (rows, columns), (high, wide) = matrix.shape, FP8_BLOCK
    return matrix.reshape(rows // high, high, columns // wide, wide)


def quantised(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields published weights as a server in fp8 reads them: each matrix, then its scales."""
    for name, tensor in weights:
        if is_quantised(name, tensor.shape):
            weight, scales = quantise(tensor)
            yield name, weight
            yield name + SCALES, scales
        else:
            yield name, tensor.detach()


def dequantised(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields quantised weights as the matrices they stand for."""
    held = dict(weights)
    for name, tensor in held.items():
        if name + SCALES in held:
            yield name, dequantise(tensor, held[name + SCALES], dtype)
        elif not name.endswith(SCALES):
            yield name, tensor
