"""A training step of compiled blocks on the CPU, as a GPU would run them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._dynamo.utils import counters

from pentad.parallel import blocks


@contextmanager
def compiled_as_on_a_gpu(backend: Any) -> Iterator[None]:
    compile_ = torch.compile

    def compile_with(run: Any, *, backend: Any, **kwargs: Any) -> Any:
        return compile_(run, backend=chosen, **kwargs)

    chosen = backend
    torch._dynamo.reset()
    counters.clear()
    with (
        patch.object(blocks, "COMPILED_ON", {"cpu"}),
        patch.object(torch, "compile", compile_with),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),  # not uncompiled in silence
    ):
        yield
    torch._dynamo.reset()


def compiled_step(
    cases: str = "parity_cases", backend: str = "traced", **kwargs: Any
) -> dict[str, Any]:
    """`train_step` of the cases, and how it was compiled. Traced: all but code generation."""
    chosen = aot_eager_decomp_partition if backend == "traced" else backend
    step = vars(importlib.import_module(cases))["train_step"]
    with compiled_as_on_a_gpu(chosen):
        out = step(enable_compile=True, **kwargs)
        breaks = list(counters["graph_break"])
        return out | {"num_graphs": counters["stats"]["unique_graphs"], "breaks": breaks}
