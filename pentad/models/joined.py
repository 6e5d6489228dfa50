"""Joins projections of the same input in one tensor, so that one product computes all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        if type(module) is Attention:  # samplers join no other kind
            join_projections(module)


RANK_STEP = 16
"""A sampler's kernels and grouped products support multiples of this rank."""


def padded(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


def adapted_hosts(
    model: nn.Module, joint: type[Attention] = Attention
) -> Iterator[list[nn.Module]]:
    """Yields layers with factors, grouped by input: q, k and v of a `joint` attention, or one."""
    seen: set[nn.Module] = set()
    for module in model.modules():
        hosts: list[nn.Module] = [module]
        if isinstance(module, joint) and type(module) is joint:
            hosts = [*module.projections]
        if seen.isdisjoint(hosts) and any("lora" in host._modules for host in hosts):
            seen.update(hosts)
            yield hosts


def leave_room(model: nn.Module, rank: int) -> None:
    """Gives the adapted weights memory in which a sampler can keep A beside them. Call it before
    the tensors are shared with other instances of the model."""
    for hosts in adapted_hosts(model):
        weights = [host.weight for host in hosts if isinstance(host.weight, Tensor)]
        join_with_room(weights, sum(map(num_planes, weights)) * padded(rank))


def num_planes(weight: Tensor) -> int:
    """Number of matrices: two for gate and up, which have a separate axis."""
    return len(weight) if weight.ndim == 3 else 1


@torch.no_grad()
def join_with_room(parameters: Sequence[Tensor], rows: int) -> Tensor:
    """Returns one matrix that begins with the rows of all parameters, which become views of it, and
    ends with `rows` further ones. Parameters that have the room keep their memory."""
    tensors = [parameter.data for parameter in parameters]
    first, width = tensors[0], tensors[0].shape[-1]
    num = sum(tensor.numel() // width for tensor in tensors) + rows
    size = num * width * first.element_size()
    if (
        _are_side_by_side(tensors)
        and first.storage_offset() == 0
        and first.untyped_storage().nbytes() == size
    ):
        return first.as_strided((num, width), (width, 1))
    wide, at = first.new_zeros(num, width), 0
    for parameter, tensor in zip(parameters, tensors, strict=True):
        own = wide[at : at + tensor.numel() // width]
        own.copy_(tensor.reshape(-1, width))
        parameter.data = own.view(tensor.shape)
        at += len(own)
    return wide


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
