"""The pipeline of a layout: layers of each stage, number of microbatches, copy of a tied head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.fit import (
    SCHEDULES,
    split_layers,
    splits_backward,
    stages_of_rank,
    takes_microbatches,
)
from pentad.core.layout import Layout
from pentad.engine.section import ModelConfig
from pentad.parallel.cuts import local
from pentad.parallel.mesh import ALONE, Axis

PartCompute = Callable[[int, int, Tensor | None], Tensor]
"""Arguments: index of the part on this rank, microbatch, output of the previous stage; result as
`pipeline_stage.Compute`."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages of one model over the pipeline ranks. Made by `plan_pipeline`."""

    schedule: str
    pp: int
    stages_per_rank: int
    layers: tuple[range, ...]
    """The layers of each stage."""
    recomputes: bool
    """Whether blocks are recomputed in backward."""

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def stages(self, rank: int) -> tuple[int, ...]:
        return stages_of_rank(self.schedule, self.pp, self.stages_per_rank, rank)

    def rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self.pp) if stage in self.stages(rank))

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.rank_of(self.num_stages - 1)

    def stage_of(self, name: str, layer: int | None) -> int:
        """Returns the stage of a native parameter: embeddings are in the first stage, other
        parameters outside of layers in the last."""
        if layer is not None:
            return next(n for n, held in enumerate(self.layers) if layer in held)
        return 0 if name.startswith("embed.") else self.num_stages - 1

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are computed separately; not with recomputed blocks,
        because the weight part would recompute them once more."""
        return splits_backward(self.schedule) and not self.recomputes

    def take(self, at_least: int) -> int:
        """Returns the smallest number of microbatches >= `at_least` that the schedule supports."""
        num = max(at_least, self.num_stages)
        while not takes_microbatches(self.schedule, self.pp, num):
            num += 1
        return num


class Schedule(Protocol):
    """Runs microbatches through the stages of this rank."""

    plan: Pipeline

    def run(
        self,
        compute: PartCompute,
        shapes: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        backward: bool,
        reduces: bool = True,
    ) -> None:
        """Runs all microbatches forward, and backward if requested. Every rank of the pipeline
        calls it."""
        ...

    def settle(self) -> None:
        """Reduces gradients that a run left unreduced, so that they can be dropped."""
        ...


def plan_pipeline(dims: ModelDims, layout: Layout, model: ModelConfig) -> Pipeline | None:
    """Plans the pipeline of a layout; None if it has one rank. Raises for unsupported ones."""
    if layout.pp == 1:
        return None
    schedule = model.archon.pp_schedule
    if schedule not in SCHEDULES:
        rule = "is no pipeline schedule"
        raise UserError(Problem(f"pp_schedule = {schedule}", rule, f"use {', '.join(SCHEDULES)}"))
    problems = [
        *model.archon.schedule_problems(
            "",
            pp=layout.pp,
            compiles=model.archon.enable_compile is True,
            keeps=model.gradient_checkpointing,
            reshards=model.archon.is_resharded,
            moe=dims.num_experts > 0,
        ),
        *model.archon.stage_problems(
            "", f"layout = {layout}", pp=layout.pp, num_layers=dims.num_layers
        ),
    ]
    raise_problems(problems)
    num = model.archon.stages
    return Pipeline(
        schedule=schedule,
        pp=layout.pp,
        stages_per_rank=num,
        layers=_layers(dims, layout.pp * num, model.archon.layers_per_stage),
        recomputes=model.gradient_checkpointing and model.archon.ac_mode != "none",
    )


def _layers(dims: ModelDims, num_stages: int, given: tuple[int, ...] | None) -> tuple[range, ...]:
    if given is None:
        return tuple(split_layers(dims, num_stages))
    ends = list(accumulate(given))
    return tuple(range(end - size, end) for end, size in zip(ends, given, strict=True))


@dataclass(slots=True)
class TiedHead:
    """A head tied to an embedding on another stage; a side is None if it is not on this rank.

    The embedding is the parameter: it has the optimizer's state and is saved and published. The
    last stage computes with a copy, which receives the embedding's weights before each pass and
    sends its gradient at the end of a step. With a V schedule both stages are on one rank.
    """

    embedding: Tensor | None = None
    copy: Tensor | None = None
    pp: Axis = ALONE
    first: int = 0
    last: int = 0
    """Pipeline ranks of embedding and head."""
    device: torch.device = torch.device("cpu")

    @torch.no_grad()
    def follow(self) -> None:
        """Copies the embedding's weights to the head; both have the same sharding."""
        if self.embedding is not None and self.copy is not None:
            local(self.copy).copy_(local(self.embedding))
        elif self.embedding is not None:
            self._send(local(self.embedding), self.last)
        elif self.copy is not None:
            local(self.copy).copy_(self._receive(local(self.copy), self.first))

    @torch.no_grad()
    def give_gradient(self) -> None:
        """Adds the copy's gradient to the embedding's."""
        if self.embedding is not None and self.copy is not None:
            _gradient(self.embedding).add_(_gradient(self.copy))
        elif self.embedding is not None:
            gradient = _gradient(self.embedding)
            gradient.add_(self._receive(gradient, self.last).to(gradient.device))
        elif self.copy is not None:
            self._send(_gradient(self.copy), self.first)

    # Through the device, for which the group is made; offloaded weights are on the host.

    def _send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor.to(self.device).contiguous(), group=self.pp.group, group_dst=to)

    def _receive(self, like: Tensor, source: int) -> Tensor:
        got = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(got, group=self.pp.group, group_src=source)
        return got


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every pass uses the embedding and the head"
    return local(parameter.grad)
