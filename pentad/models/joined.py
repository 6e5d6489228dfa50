"""Joins projections of the same input in one tensor, so that one product computes all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pentad.models.layers import Attention


def join_projections(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Joins weight and bias of q, k and v."""
    parts = attention.projections
    biases = [part.bias for part in parts if part.bias is not None]
    return join([part.weight for part in parts]), join(biases) if biases else None


def join_all_projections(model: nn.Module) -> None:
    """Joins q, k and v in all layers. Call it before the tensors are shared with other instances of
    the model, where joining would copy."""
    for module in model.modules():
        if isinstance(module, Attention):
            join_projections(module)


@torch.no_grad()
def join(parameters: Sequence[Tensor]) -> Tensor:
    """Returns one tensor of which the parameters become views, so that installed values appear in
    it. Parameters that are already adjacent keep their memory."""
    tensors = [parameter.data for parameter in parameters]
    if _are_side_by_side(tensors):
        first = tensors[0]
        rows = sum(len(tensor) for tensor in tensors)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat(tensors)
    for parameter, part in zip(parameters, joined.split([len(t) for t in tensors]), strict=True):
        parameter.data = part
    return joined


def _are_side_by_side(tensors: Sequence[Tensor]) -> bool:
    first, at = tensors[0], tensors[0].storage_offset()
    if first.device.type == "meta":
        return False
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == at):
            return False
        at += tensor.numel()
    return True
