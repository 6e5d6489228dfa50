"""Experts of transformers' models over ranks: tokens dealt over tp, pairs exchanged over ep.

All tp ranks of such a model have all tokens. Each sends only its share of them to experts, as the
ranks of the backend archon do, so that every pair is computed once and the experts' gradients are
summed over the expert mesh as there.

Shapes: T tokens, k experts per token, N pairs here, E experts here, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pentad.core.swap import swap_class
from pentad.parallel.collectives import deal, gather_shared
from pentad.parallel.experts import ExpertDispatch
from pentad.parallel.mesh import Axis, Meshes


def apply_to_stacks(model: nn.Module, stacks: Mapping[str, int], meshes: Meshes) -> None:
    """Replaces the forward of every module with stacked experts; `stacks` has their number."""
    make: Callable[[type], type[nn.Module]] = _stack
    for name, num in stacks.items():
        module, dispatch, held = model.get_submodule(name), None, num
        if meshes.expert_group.size > 1:
            dispatch = ExpertDispatch(meshes.expert_group, meshes.layout.etp, num)
            held = dispatch.num_held
        cls = make(type(module))
        swap_class(module, cls, tp=meshes.tp, dispatch=dispatch, num_experts=held)


@cache
def _stack(cls: Any) -> type[nn.Module]:
    class ExpertStack(cls):
        tp: Axis
        dispatch: ExpertDispatch | None

        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            given = (hidden_states, top_k_weights, top_k_index)
            x_TD, weights_Tk, chosen_Tk = (deal(part, self.tp) for part in given)
            if self.dispatch is None:
                y_TD = super().forward(x_TD, chosen_Tk, weights_Tk)
            else:
                y_TD = self.dispatch(x_TD, weights_Tk, chosen_Tk, self.run_sorted)
            return gather_shared(y_TD, self.tp)

        def run_sorted(self, x_ND: Tensor, sizes_E: Tensor, weights_N: Tensor) -> Tensor:
            """Computes rows sorted by expert, `sizes_E[e]` of them by expert e."""
            num_rows = len(x_ND)
            if not num_rows:  # one row of weight 0: all ranks must have gradients of experts
                x_ND, weights_N = pad(x_ND, (0, 0, 0, 1)), pad(weights_N, (0, 1))
                sizes_E = pad(torch.ones_like(sizes_E[:1]), (0, len(sizes_E) - 1))
            experts_E = torch.arange(len(sizes_E), device=x_ND.device)
            expert_N = experts_E.repeat_interleave(sizes_E, output_size=len(x_ND))
            y_ND: Tensor = super().forward(x_ND, expert_N[:, None], weights_N[:, None])
            return y_ND[:num_rows]

    return ExpertStack
