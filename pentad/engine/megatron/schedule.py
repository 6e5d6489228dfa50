"""Runs microbatches through this rank's pipeline stages with Megatron's 1F1B and interleaved 1F1B
schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pentad.engine.megatron.core import (
    DistributedDataParallel,
    TransformerConfig,
    get_forward_backward_func,
)
from pentad.parallel.pipeline import PartCompute, Pipeline


class MegatronSchedule:
    """Like `parallel.pipeline_stage.PipelineRun`, with Megatron's sends and order of passes."""

    def __init__(
        self,
        plan: Pipeline,
        chunks: Sequence[DistributedDataParallel],
        config: TransformerConfig,
    ) -> None:
        self.plan = plan
        self.chunks = list(chunks)
        self.config = config

    def run(
        self,
        compute: PartCompute,
        shapes: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        backward: bool,
        reduces: bool = True,
    ) -> None:
        """Runs all microbatches forward, and backward if requested. Gradients stay in Megatron's
        buffers until they are summed, so `reduces` has no effect."""
        number = len(shapes)
        # Microbatches per round: all rounds are equal, as in `Pipeline.take`.
        self.config.microbatch_group_size_per_vp_stage = number // max(1, number // self.plan.pp)

        def step(turn: Iterator[int], chunk: DistributedDataParallel) -> tuple[Tensor, Any]:
            gpt, mb = chunk.module, next(turn)
            hidden_TD = None if gpt.pre_process else gpt.decoder.input_tensor.squeeze(1)
            out = compute(self.chunks.index(chunk), mb, hidden_TD)
            return (out if gpt.post_process else out[:, None]), _as_it_is

        with nullcontext() if backward else torch.no_grad():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(range(number)) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=number,
                seq_length=max(num_tokens for num_tokens, _ in shapes),
                micro_batch_size=1,
                forward_only=not backward,
            )

    def settle(self) -> None:
        """Does nothing: nothing is pending between two runs."""


def _as_it_is(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Loss function for Megatron, which must not divide it: the loss is a sum."""
    return loss, torch.zeros((), dtype=torch.int), {}
