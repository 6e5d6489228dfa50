"""Tensor parallelism by transformers' plans: a style per module, and all tokens on every rank.

Projections are split by columns or rows; between them a rank has a part of the columns, elsewhere
all ranks have the same values. So unsplit parameters get equal gradients on all ranks, except those
between two split projections (`replicated_with_grad_allreduce`).

Shapes: T tokens (any leading dims), F features in, G features out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import functional as F

from pentad.core.errors import Problem, raise_problems
from pentad.core.swap import swap_class
from pentad.parallel.collectives import deal, gather_shared, share, sum_shared
from pentad.parallel.cuts import Cut, cut_stack, storage_dim
from pentad.parallel.mesh import ALONE, Axis, Meshes
from pentad.weights.regions import Shape

Styles = Mapping[str, str]
"""Module -> style."""
PARTIAL = "replicated_with_grad_allreduce"
LATENT = "mla_kv_a_proj"
"""A projection to what all heads share: keys and values, compressed, and the rotated part of the
keys, which each rank adds to its own heads."""
FACTORS = (".lora.b", ".lora.a")
"""Names of factors by the dim of the weight that they share: rows, columns."""


def _product(module: nn.Linear, x_TF: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the product with the rank's part of a weight, and with its factors if it has any."""
    y_TG, lora = F.linear(x_TF, module.weight, bias), getattr(module, "lora", None)
    return y_TG + lora(x_TF) if lora is not None and lora.is_on else y_TG


def _run_columns(module: nn.Module, tp: Axis, x_TF: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear), "only linear layers are split by columns"
    return _product(module, share(x_TF, tp), module.bias)


def _run_columns_gathered(module: nn.Module, tp: Axis, x_TF: Tensor) -> Tensor:
    y_TG = _run_columns(module, tp, x_TF)
    return gather_shared(y_TG.movedim(-1, 0), tp).movedim(0, -1)


def _run_rows(module: nn.Module, tp: Axis, x_TF: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear), "only linear layers are split by rows"
    y_TG = sum_shared(_product(module, x_TF), tp)
    return y_TG if module.bias is None else y_TG + module.bias


def _run_rows_dealt(module: nn.Module, tp: Axis, x_TF: Tensor) -> Tensor:
    return _run_rows(module, tp, deal(x_TF.movedim(-1, 0), tp).movedim(0, -1))


RUNS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "colwise": (0, _run_columns),
    "colwise_gather_output": (0, _run_columns_gathered),
    "colwise_rep": (0, _run_columns_gathered),
    "rowwise": (1, _run_rows),
    "rowwise_split_input": (1, _run_rows_dealt),
    "rowwise_rep": (1, _run_rows_dealt),
}
"""Style -> (dim along which the weight is split, forward)."""


def match_styles(model: nn.Module, plan: Styles, num: int, where: str) -> dict[str, str]:
    """Returns the plan's styles by module; UserError for modules that `num` ranks cannot split.

    In the plan * matches a number.
    """
    styles: dict[str, str] = {}
    problems = []
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    unused = set(plan)
    for name in [*modules, *parameters]:
        wanted = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if wanted not in plan:
            continue
        style = plan[wanted]
        is_layer = style in (*RUNS, LATENT) and isinstance(modules.get(name), nn.Linear)
        is_known = style == PARTIAL or is_layer
        if is_known:
            styles[name] = style
            problems += _uneven(name, modules[name], style, num, where) if wanted in unused else []
        elif wanted in unused:
            rule = f"transformers splits {wanted} as {style}, which is not supported"
            problems.append(Problem(where, rule, "use t1"))
        unused.discard(wanted)
    if not styles and not problems:
        rule = "transformers has no tensor-parallel plan for this model"
        problems.append(Problem(where, rule, "use t1"))
    raise_problems(problems)
    return styles


def _uneven(name: str, module: nn.Module, style: str, num: int, where: str) -> list[Problem]:
    if style not in RUNS or not isinstance(module, nn.Linear):
        return []
    size = module.weight.shape[RUNS[style][0]]
    if size % num == 0:
        return []
    return [Problem(where, f"t{num} must divide the {size} features of {name}", "use another t")]


def plan_style_cuts(
    shapes: Mapping[str, Shape],
    styles: Styles,
    meshes: Meshes,
    trained: Container[str] = (),
    stacks: Container[str] = (),
) -> dict[str, Cut]:
    """Returns the cut of every named parameter. Every rank must call it. `trained`: parameters
    trained in addition to frozen weights, or in another dtype than their neighbours, which every
    rank stores as it computes with them.
    `stacks`: modules whose parameters are stacked by expert, if these are on the expert mesh."""
    return {
        name: cut_stack(shape, meshes)
        if name.rpartition(".")[0] in stacks
        else _cut(name, shape, styles, meshes, trained)
        for name, shape in shapes.items()
    }


def _cut_dim(name: str, shape: Shape, style: str) -> int | None:
    """Returns the dim along which tp splits a layer's weight, bias or factor: B has the rows of the
    weight, A its columns; the other dim is not split."""
    if style not in RUNS:
        return None
    dim = RUNS[style][0]
    if len(shape) == 1:  # the bias of rows is added after their sum
        return 0 if dim == 0 else None
    return None if name.endswith(FACTORS[1 - dim]) else dim


def _cut(name: str, shape: Shape, styles: Styles, meshes: Meshes, trained: Container[str]) -> Cut:
    layout, tp = meshes.layout, meshes.tp
    box = [(0, size) for size in shape]
    place, is_factor = name.removesuffix(FACTORS[0]).removesuffix(FACTORS[1]), name in trained
    style = styles.get(place if place != name else name.rpartition(".")[0], "")
    dim = _cut_dim(name, shape, style)
    placement: Placement = Replicate()
    if dim is not None and tp.size > 1:
        assert shape[dim] % tp.size == 0, "checked when styles were matched"
        size = shape[dim] // tp.size
        box[dim] = (tp.rank * size, (tp.rank + 1) * size)
        placement = Shard(dim)
    local = tuple(stop - start for start, stop in box)
    stored = storage_dim(local, layout.dp_shard * layout.cp) if shape else 0
    mesh = None if meshes.dense is None else meshes.dense["tp", "fsdp"]
    is_cut = placement.is_shard()
    is_apart = style == PARTIAL or (place != name and style in RUNS)
    return Cut(
        shape=shape,
        box=tuple(box),
        copies=ALONE if is_cut else tp,
        is_expert=False,
        stored_dim=stored,
        mesh=mesh,
        placements=(placement, Replicate() if is_factor else Shard(stored)),
        sees_all=not is_cut and not is_apart,
        data=meshes.batch if is_factor else ALONE,
    )


def apply_styles(model: nn.Module, styles: Styles, tp: Axis, num_rotated: int = 0) -> None:
    """Replaces the forward of every module with a style. `num_rotated`: features at the end of a
    `LATENT` projection that are added to each head."""
    if tp.size == 1:
        return
    make: Callable[[type, str], type[nn.Module]] = _styled
    make_latent: Callable[[type], type[nn.Module]] = _latent
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in RUNS:
            swap_class(module, make(type(module), style), tp=tp)
        elif style == LATENT:
            assert num_rotated > 0, "the config of a latent attention has the width it rotates"
            swap_class(module, make_latent(type(module)), tp=tp, num_rotated=num_rotated)


@cache
def _styled(cls: Any, style: str) -> type[nn.Module]:
    run = RUNS[style][1]

    class Styled(cls):
        tp: Axis

        def forward(self, x_TF: Tensor) -> Tensor:
            return run(self, self.tp, x_TF)

    return Styled


@cache
def _latent(cls: Any) -> type[nn.Module]:
    class Latent(cls):
        tp: Axis
        num_rotated: int

        def forward(self, x_TF: Tensor) -> Tensor:
            y_TG = super().forward(x_TF)
            rest_TG, rotated_TG = y_TG.tensor_split([y_TG.shape[-1] - self.num_rotated], dim=-1)
            return torch.cat([rest_TG, share(rotated_TG, self.tp)], dim=-1)

    return Latent
