"""The weight map of a transformers model: its tensors in memory as regions of those on disk.

On disk tensors may have other names and be cut otherwise (one per expert). transformers can write
what it holds as it lies on disk; here it does so with tensors that have no memory, whose views show
which block of which tensor each one is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.weights.map import Entry, Rule, WeightMap, sources_of
from pentad.weights.regions import Region, Run, Shape

VALUE_HEAD = "value_head.weight"
VALUE_HEAD_ON_DISK = "score.weight"


def build_hf_map(causal: PreTrainedModel, dims: ModelDims, where: str) -> WeightMap:
    """Exact and complete, or UserError."""
    held = causal.state_dict()
    tied = _tied(causal, held)
    shapes = {name: tuple(x.shape) for name, x in held.items() if name not in tied}
    parts = _parts_on_disk(causal, shapes, where)
    entries: dict[str, Entry] = {}
    for name, shape in shapes.items():
        is_wide = any(part in name for part in causal._keep_in_fp32_modules_strict or ())
        rule = Rule(name, "", name, dtype="float32" if is_wide else "")
        entries[name] = Entry(name, shape, tuple(parts[name]), rule, _layer(name))
    rule = Rule(VALUE_HEAD, "", VALUE_HEAD_ON_DISK, optional=True)
    value_shape = (1, dims.hidden_size)
    region = _whole(VALUE_HEAD_ON_DISK, value_shape)
    entries[VALUE_HEAD] = Entry(VALUE_HEAD, value_shape, (region,), rule, None)
    twins = {
        source: entries[twin].regions[0].source
        for name, twin in tied.items()
        for source in {name, *revert_weight_conversion(causal, {name: held[name]})}
    }
    return WeightMap(dims, {}, entries, sources_of(entries, dims), twins)


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _tied(causal: PreTrainedModel, held: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the name before it of the same tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters = dict(causal.named_parameters(remove_duplicate=False))
    for name in held:
        if name in parameters:
            known = first.setdefault(id(parameters[name]), name)
            if known != name:
                tied[name] = known
    return tied


def _parts_on_disk(
    causal: PreTrainedModel, shapes: Mapping[str, Shape], where: str
) -> dict[str, list[Region]]:
    """Of every tensor in memory, the tensors on disk that it is made of."""
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {x.untyped_storage()._cdata: name for name, x in blank.items()}
    with _ViewsOnly():
        written = revert_weight_conversion(causal, dict(blank))
    parts: dict[str, list[Region]] = {name: [] for name in shapes}
    for source, view in written.items():
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None:
            rule = f"on disk {source} is arranged otherwise than in memory, which is not built"
            raise UserError(Problem(where, rule))
        parts[owner].append(_region(source, view, shapes[owner]))
    return parts


class _ViewsOnly(TorchFunctionMode):
    """`contiguous` would copy, and a copy does not show where it comes from."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _whole(source: str, shape: Shape) -> Region:
    zeros = (0,) * len(shape)
    runs = tuple(Run(dim, dim, size) for dim, size in enumerate(shape))
    return Region(source, shape, zeros, zeros, runs)


def _region(source: str, view: Tensor, shape: Shape) -> Region:
    """The view, as it lies on disk, within the contiguous tensor of that shape in memory."""
    strides = torch.empty(shape, device="meta").stride()
    if view.shape == shape and view.stride() == strides:
        return _whole(source, shape)
    rest, start = view.storage_offset(), []
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    runs = []
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        along = [d for d, step in enumerate(strides) if step == stride and shape[d] > 1]
        if size > 1:
            runs.append(Run(dim, along[0], size))
    zeros = (0,) * view.ndim
    return Region(source, tuple(view.shape), zeros, tuple(start), tuple(runs))
