"""Tensor parallelism with sequence parallelism: tokens gathered and dealt at a model's seams.

Between the seams the residual stream lies dealt over the tp ranks by tokens, so norms, biases
and routers see a share of the tokens each: their gradients are summed over tp, which `gradients`
does for every parameter that tp does not cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.seams import Seam
from pentad.parallel.collectives import gather_parts, reduce_ranks, scatter_sum
from pentad.parallel.cuts import Cut
from pentad.parallel.mesh import Axis


def apply_seams(
    model: nn.Module,
    seams: Iterable[Seam],
    dims: ModelDims,
    cuts: Mapping[str, Cut],
    tp: Axis,
) -> None:
    """Replaces the forward of every module at a seam; modules themselves stay what they are."""
    if tp.size == 1:
        return
    modules = dict(model.named_modules())
    for seam in seams:
        layers = range(dims.num_layers) if "{i}" in seam.module else [0]
        for i in layers:
            name = seam.module.format(i=i)
            if not seam.when(dims, i) or name not in modules:
                continue  # a pipeline stage holds some of the modules
            if seam.kind == "gather":
                modules[name].forward = partial(_run_gathered, modules[name], tp)
            elif seam.kind == "scatter":
                modules[name].forward = partial(_run_scattered, modules[name], tp)
            else:
                start = cuts[f"{name}.weight"].box[0][0]
                modules[name].forward = partial(_run_lookup, modules[name], tp, start)


def _run_gathered(module: nn.Module, tp: Axis, x_TD: Tensor, *args: Any) -> Tensor:
    result: Tensor = type(module).forward(module, gather_parts(x_TD, tp), *args)
    return result


def _run_scattered(module: nn.Module, tp: Axis, x_TF: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear), "a scatter seam is a projection"
    y_TD = scatter_sum(F.linear(x_TF, module.weight), tp)
    return y_TD if module.bias is None else y_TD + module.bias


def _run_lookup(module: nn.Module, tp: Axis, start: int, ids_T: Tensor) -> Tensor:
    assert isinstance(module, nn.Embedding), "a lookup seam is a table"
    num_rows = module.weight.shape[0]
    local_T = ids_T - start
    is_away_T = (local_T < 0) | (local_T >= num_rows)
    x_TD = F.embedding(local_T.clamp(0, num_rows - 1), module.weight)
    return scatter_sum(x_TD.masked_fill(is_away_T[:, None], 0), tp)


def max_over(tp: Axis, x: Tensor) -> Tensor:
    return reduce_ranks(x, tp, "max")


def sum_over(tp: Axis, x: Tensor) -> Tensor:
    return reduce_ranks(x, tp)
