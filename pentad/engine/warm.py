"""A training pass over made-up rows before the first batch: compiles the blocks while samplers draw
that batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from pentad.core.types import Row, TokenOutputs
from pentad.engine.engine import Engine
from pentad.parallel.blocks import COMPILED_ON

log = logging.getLogger(__name__)

MOST_TOKENS = 4096
"""Maximum length of the made-up row."""
BYTES_PER_GRADIENT_BYTE = 3
"""Memory that a pass may need, relative to the gradient: itself, the weights in compute dtype, and
activations."""


class SumOfLogprobs:
    """A loss that needs no columns."""

    needs_entropy = False
    columns: tuple[str, ...] = ()

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        parts = [x_T for x_T in (outputs.logprobs_T, outputs.values_T) if x_T is not None]
        return torch.stack([x_T.sum() for x_T in parts]).sum(), {}


def warm_up(engine: Engine) -> bool:
    """Runs a pass if it would compile anything and has the memory; returns whether it ran."""
    is_compiled = engine.settings.model.archon.enable_compile is True
    if not (is_compiled and engine.device.type in COMPILED_ON and engine.optimizer is not None):
        return False
    if engine.meshes.layout.world > 1 or engine.is_offloaded:
        return False
    gradient = sum(tensor.numel() * tensor.element_size() for tensor in engine.masters.values())
    free, _ = torch.cuda.mem_get_info(engine.device)
    if free < BYTES_PER_GRADIENT_BYTE * gradient:
        log.info("no training pass is compiled in advance: %.1f GB are free", free / 1e9)
        return False
    run_made_up(engine)
    return True


def run_made_up(engine: Engine) -> None:
    """Runs forward and backward of two rows of different lengths, as long as real ones may be so
    that attention has the same kernels, and drops the gradient. Changes no state."""
    longest = max(2, min(engine.settings.max_row_tokens or MOST_TOKENS, MOST_TOKENS))
    lengths = (longest, longest // 2 + 1)
    rows = [Row(torch.zeros(n, dtype=torch.int64), {}, 1.0) for n in lengths]
    engine.begin_step()
    engine.accumulate(rows, SumOfLogprobs())
    engine.drop_step()
