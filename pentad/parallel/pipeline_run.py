"""Runs microbatches through the stages of this rank, in the order of the chosen schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from pentad.parallel.mesh import Meshes
from pentad.parallel.pipeline import PartCompute, Pipeline
from pentad.parallel.pipeline_stage import PackedStage, Pass
from pentad.parallel.storage import reshard

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti


class PipelineRun:
    """The stages of one rank and their schedules, one for each number of microbatches."""

    def __init__(self, plan: Pipeline, parts: Sequence[nn.Module], meshes: Meshes) -> None:
        assert meshes.pp.group is not None, "a pipeline has several ranks"
        self.plan = plan
        self.rank = meshes.pp.rank
        self.device = meshes.device
        self.stages = [
            PackedStage(
                part,
                index,
                plan.num_stages,
                meshes.device,
                meshes.pp.group,
                splits=plan.splits_backward,
            )
            for index, part in zip(plan.stages(self.rank), parts, strict=True)
        ]
        self.schedules: dict[int, TorchSchedule] = {}
        self.has_unreduced = False

    @property
    def is_last(self) -> bool:
        return self.rank == self.plan.last_rank

    def run(
        self,
        compute: PartCompute,
        shapes: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        backward: bool,
        reduces: bool = True,
    ) -> None:
        """All microbatches forward, and backward if asked. Every rank of the pipeline calls it."""
        schedule = self._schedule(len(shapes))
        for position, stage in enumerate(self.stages):

            def of_part(mb: int, x: Tensor | None, position: int = position) -> Tensor:
                return compute(position, mb, x)

            stage.begin(Pass(of_part, shapes, dtype), reduces=reduces)
        # The loss is the last stage's output; torch wants a target beside it.
        given: dict[str, Any] = {"return_outputs": False}
        if self.is_last:
            given["target"] = torch.zeros(len(shapes))
        with nullcontext() if backward else torch.no_grad():
            try:
                schedule.step(**given) if backward else schedule.eval(**given)
            finally:
                for stage in self.stages:
                    stage.end()
                    reshard(stage.submod)
        if backward:
            self.has_unreduced = not reduces

    def settle(self) -> None:
        """Reduces gradients that a step left unreduced, so that they can be dropped."""
        if not self.has_unreduced:
            return
        for stage in self.stages:
            stage.has_backward = stage.reduces = True
            stage.perform_reduce_grad(1)
        self.has_unreduced = False

    def _schedule(self, num_microbatches: int) -> TorchSchedule:
        if num_microbatches not in self.schedules:
            kind = get_schedule_class(self.plan.schedule)
            is_single = issubclass(kind, PipelineScheduleSingle)
            self.schedules[num_microbatches] = kind(
                self.stages[0] if is_single else self.stages,
                n_microbatches=num_microbatches,
                loss_fn=_as_it_is,
                scale_grads=False,  # nothing divides before the end of the step
            )
        return self.schedules[num_microbatches]


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return output
