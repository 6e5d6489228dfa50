"""Passes of microbatches through a pipeline: each call is one run of the schedule.

Results of the last stage (log-probs, entropies, values, loss, statistics) are sent to all pipeline
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.types import Loss
from pentad.engine.batch import PackedRows
from pentad.engine.explain import explain
from pentad.engine.graphs import TrainGraphs
from pentad.engine.outputs import NAMES, Sums
from pentad.engine.passes import (
    apply_loss,
    detach_all,
    run_part,
    without_filling,
)
from pentad.engine.predictor import Predicted, Predictor
from pentad.engine.section import EngineSettings
from pentad.models.balance import ExpertLoads
from pentad.models.moe import Routes
from pentad.parallel.collectives import reduce_ranks
from pentad.parallel.mesh import Meshes
from pentad.parallel.pipeline import PartCompute, Schedule, TiedHead


class PipelinedPasses:
    """Implements `passes.Passes` over the stages of this rank."""

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[Predictor],
        tied: TiedHead,
        settings: EngineSettings,
        meshes: Meshes,
    ) -> None:
        self.parts = list(parts)
        self.schedule = schedule
        self.tied = tied
        self.settings = settings
        self.meshes = meshes
        self.dims = parts[0].decoder.dims
        self.loads = ExpertLoads(self.dims, meshes.device)
        self.graphs: TrainGraphs | None = None

    def forward(
        self, microbatches: Iterable[PackedRows], noted: list[Routes] | None = None
    ) -> list[Predicted]:
        packed = list(microbatches)
        routes: list[Routes] = [{} for _ in packed]
        predicted: dict[int, Predicted] = {}

        def compute(position: int, mb: int, hidden_TD: Tensor | None) -> Tensor:
            with explain("scoring", self.settings.model, packed[mb].num_tokens):
                out = self._run(position, packed[mb], hidden_TD, routes[mb])
            if isinstance(out, Tensor):
                return out
            predicted[mb] = (out[0], None, out[2])
            return torch.zeros(())

        self._start(packed, compute, backward=False, reduces=False)
        if noted is not None:
            noted += [self._all_layers(known, mb) for known, mb in zip(routes, packed, strict=True)]
        shared = self._broadcast([predicted[mb] for mb in sorted(predicted)], [], packed)
        return shared[0]

    def train(
        self, microbatches: Iterable[PackedRows], loss: Loss, *, last: bool
    ) -> tuple[list[Predicted], list[Sums]]:
        packed = list(microbatches)
        predicted: dict[int, Predicted] = {}
        sums: dict[int, Sums] = {}

        def compute(position: int, mb: int, hidden_TD: Tensor | None) -> Tensor:
            with explain("forward and backward", self.settings.model, packed[mb].num_tokens):
                routes: Routes = {}
                out = self._run(position, packed[mb], hidden_TD, routes)
                self.loads.add(without_filling(routes, packed[mb], self.meshes))
                if isinstance(out, Tensor):
                    return out
                loss_sum, stats, named = apply_loss(packed[mb], loss, out)
            # A copy: a split backward pass detaches the loss in place.
            sums[mb] = loss_sum.detach().clone(), stats
            predicted[mb] = detach_all(named)
            return loss_sum

        self._start(packed, compute, backward=True, reduces=last)
        order = sorted(predicted)
        return self._broadcast([predicted[mb] for mb in order], [sums[mb] for mb in order], packed)

    def give_up(self) -> None:
        self.schedule.settle()

    def _run(
        self, position: int, packed: PackedRows, hidden_TD: Tensor | None, routes: Routes | None
    ) -> Predicted | Tensor:
        part = self.parts[position]
        return run_part(part, packed, hidden_TD, routes, self.settings, self.meshes)

    def _start(
        self, packed: list[PackedRows], compute: PartCompute, *, backward: bool, reduces: bool
    ) -> None:
        self.tied.follow()
        share, width = self.meshes.token_multiple, self.dims.hidden_size
        shapes = [(mb.num_tokens // share, width) for mb in packed]
        dtype = DTYPES[self.settings.model.dtype]
        with explain("forward and backward" if backward else "scoring", self.settings.model):
            self.schedule.run(compute, shapes, dtype, backward=backward, reduces=reduces)

    def _all_layers(self, known: Routes, packed: PackedRows) -> Routes:
        """Returns the routes of all MoE layers; each rank has those of its stages."""
        layers = [n for n in range(self.dims.num_layers) if self.dims.is_moe(n)]
        size = (packed.num_tokens // self.meshes.token_multiple, self.dims.num_experts_per_token)
        none_Tk = torch.zeros(size, dtype=torch.int64, device=self.meshes.device)
        all_LTk = torch.stack([known.get(layer, none_Tk) for layer in layers])
        all_LTk = reduce_ranks(all_LTk, self.meshes.pp)
        return dict(zip(layers, all_LTk, strict=True))

    def _broadcast(
        self, predicted: list[Predicted], sums: list[Sums], packed: list[PackedRows]
    ) -> tuple[list[Predicted], list[Sums]]:
        """Returns the last stage's results on all ranks of the pipeline."""
        source, axis = self.schedule.plan.last_rank, self.meshes.pp
        columns = [
            [x_T for parts in predicted if (x_T := parts[k]) is not None] for k in range(len(NAMES))
        ]
        flat = [torch.cat(column) if column else None for column in columns]
        numbers = [(float(s), {n: float(x) for n, x in stats.items()}) for s, stats in sums]
        note = [(numbers, [None if x is None else x.dtype for x in flat])]
        dist.broadcast_object_list(note, group=axis.group, group_src=source)
        numbers, dtypes = note[0]
        sizes = [mb.segments.num_tokens for mb in packed]
        out: list[tuple[Tensor, ...] | None] = []
        for x_T, dtype in zip(flat, dtypes, strict=True):
            if dtype is not None and x_T is None:
                x_T = torch.empty(sum(sizes), dtype=dtype, device=self.meshes.device)
            if dtype is not None and x_T is not None:
                dist.broadcast(x_T, group=axis.group, group_src=source)
            out.append(None if x_T is None else x_T.split(sizes))
        shared: list[Predicted] = [
            (*(None if column is None else column[mb] for column in out),)  # type: ignore[misc]
            for mb in range(len(packed))
        ]
        return shared, [_as_tensors(loss_sum, stats) for loss_sum, stats in numbers]


def _as_tensors(loss_sum: float, stats: dict[str, float]) -> Sums:
    double = torch.float64
    return torch.tensor(loss_sum, dtype=double), {
        name: torch.tensor(value, dtype=double) for name, value in stats.items()
    }
