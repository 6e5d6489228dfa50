"""Balances the load of experts: losses, a selection bias, and measurements.

Everything is off by default. The losses are means over the tokens of one router call, so unlike all
other terms they depend on how a batch is split into microbatches and ranks. The bias
(https://arxiv.org/abs/2408.15664) changes once per step and needs no loss.

Shapes: R experts of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.types import LayerBalance
from pentad.engine.section import ArchonConfig
from pentad.models.decoder import Block
from pentad.models.language_model import LanguageModel
from pentad.models.moe import Moe, Router, Routes


def iter_routers(model: LanguageModel) -> Iterator[tuple[int, Router]]:
    """Yields (layer, router) of every mixture on this rank."""
    for layer, block in model.blocks.items():
        if isinstance(block, Block) and isinstance(block.ffn, Moe):
            yield layer, block.ffn.router


def apply_balance(model: LanguageModel, archon: ArchonConfig) -> None:
    """Sets the coefficients of the router losses from the keys."""
    for _, router in iter_routers(model):
        router.aux_loss_coef = archon.moe_aux_loss_coef
        router.z_loss_coef = archon.moe_z_loss_coef


def scale_losses(model: LanguageModel, count_per_token: float) -> None:
    """Scales the losses so that they become means over tokens when the step divides by its
    count."""
    routers = [one for _, one in iter_routers(model) if one.aux_loss_coef or one.z_loss_coef]
    if not routers:
        return
    # A tensor, not a number, for which a compiled block would be recompiled at each value. Filled
    # on the device, because a copy to it would synchronise.
    scale = torch.full((), count_per_token, device=routers[0].weight.device)
    for router in routers:
        router.loss_scale = scale


class ExpertLoads:
    """Number of pairs assigned to each expert of each layer, summed over the passes of a step."""

    def __init__(self, dims: ModelDims, device: torch.device) -> None:
        self.layers = [layer for layer in range(dims.num_layers) if dims.is_moe(layer)]
        # A row for every layer of the model, so that ranks can sum their tables, and a last row
        # with the number of pairs that arrived at experts, which is summed with them.
        shape = (dims.num_layers + 1, dims.num_experts)
        self.table_LR = torch.zeros(shape, dtype=torch.int64, device=device)
        self.one = torch.ones((), dtype=torch.int64, device=device)
        self.arrived = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, routes: Routes) -> None:
        """Adds the counts of a pass; recomputed passes must not be added again."""
        for layer, chosen_Tk in routes.items():
            flat_N = chosen_Tk.flatten()
            self.table_LR[layer].scatter_add_(0, flat_N, self.one.expand(flat_N.shape))

    def reset(self) -> None:
        self.table_LR.zero_()

    def take(
        self, reduce: Callable[[Tensor], Tensor] = lambda x: x, num_arrived: int = 0
    ) -> dict[int, Tensor]:
        """Returns the counts of each layer, summed over ranks by `reduce`, and resets them.
        `num_arrived`: pairs at experts of this rank; `arrived` is the sum over all ranks."""
        if not self.layers:
            return {}
        self.table_LR[-1, 0] = num_arrived
        whole_LR = reduce(self.table_LR.clone())
        self.arrived = whole_LR[-1, 0]
        self.reset()
        return {layer: whole_LR[layer] for layer in self.layers}


@torch.no_grad()
def move_biases(model: LanguageModel, loads: Mapping[int, Tensor], rate: float) -> None:
    """Does bias += rate * sign(mean load - load), after an optimizer step that was not skipped."""
    for layer, router in iter_routers(model):
        if rate and router.bias is not None and layer in loads:
            load_R = loads[layer].to(torch.float64)
            router.bias.add_((load_R.mean() - load_R).sign().to(router.bias), alpha=rate)


def measure_balance(loads: Mapping[int, Tensor]) -> tuple[LayerBalance, ...]:
    """The balance of every layer; synchronises with the device once."""
    if not loads:
        return ()
    table = torch.stack(list(loads.values())).tolist()
    return tuple(LayerBalance(layer, tuple(row)) for layer, row in zip(loads, table, strict=True))
