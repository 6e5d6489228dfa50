"""One-line explanations of torch's errors during a run: out of memory, and operations without a
deterministic version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pentad.core.errors import RunError
from pentad.engine.section import ModelConfig

VARIES = " does not have a deterministic implementation"
"""Text of torch's messages after the name of a nondeterministic operation."""


@contextmanager
def explain(phase: str, model: ModelConfig, num_tokens: int | None = None) -> Iterator[None]:
    """Explains an exception: the phase in which memory ran out, the requested size and the keys
    that help; or the operation that is not repeatable. `num_tokens`: those of the current
    microbatch, if any."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where = phase if num_tokens is None else f"{phase} of a microbatch of {num_tokens} tokens"
        sizes = _sizes(str(error))
        remedies = _remedies(model, has_tokens=phase not in ("loading", "the optimizer step"))
        raise RunError(f"out of device memory in {where}{sizes}; {remedies}") from error
    except RuntimeError as error:
        if VARIES not in str(error):
            raise
        name = str(error).partition(VARIES)[0].splitlines()[-1]
        raise RunError(
            f"archon.use_deterministic_algorithms = true: {name} has no deterministic form on this "
            f"device, and {phase} uses it; set it to false, or do without the operation"
        ) from error


def _sizes(said: str) -> str:
    """Extracts the requested and the allocated size from the allocator's message."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
    device = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", said)
    held = re.search(r"([\d.]+ \w+) is allocated by PyTorch", said)
    text = f", asking for {asked[1]} more" if asked else ""
    text += f"; {device[2]} of {device[1]} are free" if device else ""
    return text + (f", tensors hold {held[1]}" if held else "")


def _remedies(model: ModelConfig, *, has_tokens: bool) -> str:
    """Returns keys that can still be set to save memory."""
    found = []
    if has_tokens:
        found.append("lower mb_spec.max_tokens_per_mb")
        if model.archon.ac_mode != "full" or not model.gradient_checkpointing:
            found.append("set archon.ac_mode: full")
        if model.archon.keep_logits:
            found.append("set archon.keep_logits: false")
    if not model.archon.offload_params:
        found.append("set archon.offload_params: true")
    return ", ".join([*found, "or use more devices (allocation_mode)"])
