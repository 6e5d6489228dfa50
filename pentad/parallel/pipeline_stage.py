"""Runs microbatches of unequal length through the stages of a rank, by the schedules of
torch.distributed.pipelining.

A schedule orders the passes; a stage computes, keeps tensors and defines the communication. torch's
own stages infer one shape from the first microbatch. Here all ranks know the shape of every
microbatch, so receive buffers are allocated when needed, and shapes are not exchanged.

The schedules of torch 2.11 and 2.13 call a stage in the same way. Their function for separate
weight gradients differs: before 2.13 it adds up the gradients of several outputs of one node and
counts some paths twice, so there the backward pass is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from pentad.parallel.mesh import Meshes
from pentad.parallel.pipeline import PartCompute, Pipeline
from pentad.parallel.storage import reshard

CAN_SPLIT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

Compute = Callable[[int, Tensor | None], Tensor]
"""(microbatch, output of the previous stage) -> input of the next stage; in the last stage the
loss, or any tensor without backward."""


@dataclass(slots=True)
class Pass:
    """Data of a stage for one run of a schedule."""

    compute: Compute
    shapes: list[tuple[int, int]]
    """Shapes of the tensors sent between stages, by microbatch."""
    dtype: torch.dtype


@dataclass(slots=True)
class _Alive:
    """Tensors kept between the passes of microbatches, by microbatch number."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """(input, output) between forward and backward."""
    grads_in: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of outputs, received from the next stage."""
    grads_out: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of inputs, for the previous stage."""
    weight_parts: dict[int, Any] = field(default_factory=dict)
    """State for the weight part of a split backward."""


class PackedStage(_PipelineStageBase):
    """A model part as a pipeline stage; call `begin` before each run of a schedule."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        splits: bool,
    ) -> None:
        super().__init__(module, index, num_stages, device, group)
        self.splits = splits and CAN_SPLIT
        self.alive = _Alive()
        self.now: Pass | None = None
        self.reduces = True
        """Whether a run of the schedule ends by reducing gradients over data-parallel ranks."""

    def begin(self, now: Pass, *, reduces: bool) -> None:
        self.now, self.reduces = now, reduces

    def end(self) -> None:
        self.now = None
        self.clear_runtime_states()

    @property
    def run(self) -> Pass:
        assert self.now is not None, "begin() comes before a run of the schedule"
        return self.now

    # Calls of the schedules before the first microbatch

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = {0: ()}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        raise AssertionError("gradient buffers are allocated at receive time")

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def clear_runtime_states(self) -> None:
        self.alive = _Alive()

    # Communication

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self.alive.inputs[fwd_chunk_id] = self._room(fwd_chunk_id)
        return [self._receive(self.alive.inputs[fwd_chunk_id], self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        alive = self.alive.outputs
        _, output = alive[fwd_chunk_id] if self.has_backward else alive.pop(fwd_chunk_id)
        return [self._send(output.detach(), self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self.alive.grads_in[bwd_chunk_id] = self._room(bwd_chunk_id)
        return [self._receive(self.alive.grads_in[bwd_chunk_id], self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        return [self._send(self.alive.grads_out.pop(bwd_chunk_id), self.stage_index - 1)]

    def _room(self, microbatch: int) -> Tensor:
        return torch.empty(self.run.shapes[microbatch], dtype=self.run.dtype, device=self.device)

    def _receive(self, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, self._peer(stage), self.group)

    def _send(self, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor.contiguous(), self._peer(stage), self.group)

    def _peer(self, stage: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    # Two neighbours on one rank (the turn of a V schedule): no communication

    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        self.alive.inputs[mb_index] = prev_stage_outputs.detach()

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        return (self.alive.grads_out.pop(mb_index),) if self.has_backward else ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        for grad in next_stage_bwd_outputs:
            assert grad is not None, f"stage {self.stage_index + 1} made no gradient"
            self.alive.grads_in[mb_index] = grad

    # Computation

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Tensor:
        given = None if self.is_first else self.alive.inputs.pop(fwd_chunk_id)
        if given is not None and self.has_backward:
            given.requires_grad_(True)
        output = self.run.compute(fwd_chunk_id, given)
        if not self.is_last:
            made = (*output.shape, output.dtype)
            due = (*self.run.shapes[fwd_chunk_id], self.run.dtype)
            assert made == due, f"stage {self.stage_index} made {made}, the next awaits {due}"
        if self.has_backward or not self.is_last:
            self.alive.outputs[fwd_chunk_id] = given, output
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not self.has_backward:
            return
        given, output = self.alive.outputs.pop(bwd_chunk_id)
        grad = None if self.is_last else self.alive.grads_in.pop(bwd_chunk_id)
        self._hold_gradients()
        if full_backward or not self.splits:
            torch.autograd.backward(output, grad)
            grad_out = None if given is None else given.grad
        elif given is None:  # the first stage sends no gradient: all is the weight part
            self.alive.weight_parts[bwd_chunk_id] = output, grad
            return
        else:
            grads = None if grad is None else [grad]
            (grad_out, *_), parts = stage_backward_input(
                [output], grads, [given], self.submod.parameters()
            )
            self.alive.weight_parts[bwd_chunk_id] = parts
        if given is not None:
            assert grad_out is not None, f"stage {self.stage_index} does not depend on its input"
            self.alive.grads_out[bwd_chunk_id] = grad_out
            given.grad = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward or not self.splits:
            return
        parts = self.alive.weight_parts.pop(bwd_chunk_id)
        self._hold_gradients()
        if self.is_first:
            torch.autograd.backward(*parts)
        else:
            stage_backward_weight(self.submod.parameters(), parts)
            self._keep_precision()

    # Gradients of sharded parameters

    def _hold_gradients(self) -> None:
        """Accumulates gradients unsharded; `perform_reduce_grad` reduces them once."""
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)

    def _keep_precision(self) -> None:
        """Accumulates in the reduce dtype, as FSDP2 does after a whole backward; its hook does not
        run after the weight part."""
        for unit in self.submod.modules():
            if isinstance(unit, FSDPModule):
                for parameter in _sharded_parameters(unit):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward and self.reduces:
            super().perform_reduce_grad(1)


def _sharded_parameters(unit: FSDPModule) -> Iterable[Any]:
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        yield from group.fsdp_params


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
        """Runs all microbatches forward, and backward if asked; every pipeline rank calls it."""
        schedule = self._schedule(len(shapes))
        for position, stage in enumerate(self.stages):

            def of_part(mb: int, x: Tensor | None, position: int = position) -> Tensor:
                return compute(position, mb, x)

            stage.begin(Pass(of_part, shapes, dtype), reduces=reduces)
        # The loss is the last stage's output; torch also requires a target.
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
                scale_grads=False,  # only the end of the step divides
            )
        return self.schedules[num_microbatches]


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return output
