"""Weights in the formats of quantised folders, with the numbers that they stand for."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCK = 8


def as_fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight in files, and what they stand for."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) * 0.01
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scales}, numbers.float() * spread


def as_mxfp4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    experts, ins, outs = weight.shape
    packed = torch.randint(0, 256, (experts, outs, ins // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(121, 125, packed.shape[:-1], dtype=torch.uint8)
    tensors = {f"{name}_blocks": packed, f"{name}_scales": exponents}
    return tensors, convert_moe_packed_tensors(packed, exponents).float()
