"""Tensor parallelism with sequence parallelism: tokens gathered and dealt at a model's seams.

Between the seams the residual stream lies dealt over the tp ranks by tokens, so norms, biases
and routers see a share of the tokens each: their gradients are summed over tp, which `gradients`
does for every parameter that tp does not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.seams import Seam
from pentad.core.swap import swap_class
from pentad.parallel.collectives import gather_parts, scatter_sum
from pentad.parallel.cuts import Cut
from pentad.parallel.mesh import Axis


def apply_seams(
    model: nn.Module,
    seams: Iterable[Seam],
    dims: ModelDims,
    cuts: Mapping[str, Cut],
    tp: Axis,
) -> None:
    """Gives every module at a seam a forward that gathers or deals tokens."""
    if tp.size == 1:
        return
    modules = dict(model.named_modules())
    for seam in seams:
        layers = range(dims.num_layers) if "{i}" in seam.module else [0]
        for i in layers:
            name = seam.module.format(i=i)
            if not seam.when(dims, i) or name not in modules:
                continue  # a pipeline stage holds some of the modules
            module = modules[name]
            start = {"start": cuts[f"{name}.weight"].box[0][0]} if seam.kind == "lookup" else {}
            swap_class(module, _MAKERS[seam.kind](type(module)), tp=tp, **start)


@cache
def _gathered(cls: Any) -> type[nn.Module]:
    class Gathered(cls):
        tp: Axis

        def forward(self, x_TD: Tensor, *args: Any) -> Tensor:
            result: Tensor = super().forward(gather_parts(x_TD, self.tp), *args)
            return result

    return Gathered


@cache
def _scattered(cls: Any) -> type[nn.Module]:
    assert issubclass(cls, nn.Linear), f"a scatter seam is a projection, not a {cls.__name__}"

    class Scattered(cls):
        tp: Axis

        def forward(self, x_TF: Tensor) -> Tensor:
            y_TD = scatter_sum(F.linear(x_TF, self.weight), self.tp)
            return y_TD if self.bias is None else y_TD + self.bias

    return Scattered


@cache
def _looked_up(cls: Any) -> type[nn.Module]:
    assert issubclass(cls, nn.Embedding), f"a lookup seam is a table, not a {cls.__name__}"

    class LookedUp(cls):
        tp: Axis
        start: int

        def forward(self, ids_T: Tensor) -> Tensor:
            num_rows = self.weight.shape[0]
            local_T = ids_T - self.start
            is_away_T = (local_T < 0) | (local_T >= num_rows)
            x_TD = F.embedding(local_T.clamp(0, num_rows - 1), self.weight)
            return scatter_sum(x_TD.masked_fill(is_away_T[:, None], 0), self.tp)

    return LookedUp


_MAKERS: dict[str, Callable[[type], type[nn.Module]]] = {
    "gather": _gathered,
    "scatter": _scattered,
    "lookup": _looked_up,
}
