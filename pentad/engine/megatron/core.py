"""Imports of megatron-core, and setup of its process groups for a layout."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist

from pentad.core.errors import RunError
from pentad.core.layout import Layout
from pentad.core.machine import installed
from pentad.engine.section import TransformerImpl
from pentad.parallel.mesh import solo_mesh
from pentad.parallel.pipeline import Pipeline

# Its linear layers need kernels to run in launch order on a GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which are optional
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

if not hasattr(moe_utils, "te_general_gemm"):
    # 0.16.1 defines it only with Transformer Engine, but always checks whether it is None.
    moe_utils.te_general_gemm = None

TRANSFORMER_ENGINE = "transformer-engine"

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "PackedSeqParams",
    "TransformerConfig",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_decoder_block_spec",
    "join_groups",
    "uses_transformer_engine",
    "virtual_stages",
]

Key = tuple[object, Layout, int | None]
"""Key of a set of groups: world, layout and stages per rank."""
_MADE: dict[Key, dict[str, Any]] = {}
"""For each key, the variables of Megatron's module of process groups."""


def uses_transformer_engine(wanted: TransformerImpl, device: str) -> bool:
    """Whether the layers are those of Transformer Engine. Its layers need CUDA."""
    version = installed(TRANSFORMER_ENGINE)
    if wanted == "local" or (wanted == "auto" and (version is None or device != "cuda")):
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, AssertionError) as error:
        raise RunError(
            f"Transformer Engine {version or ''} cannot be imported ({error}); install it with "
            "its PyTorch part (docs/megatron-training.md), or set megatron.transformer_impl=local."
        ) from error
    return True


def virtual_stages(pipeline: Pipeline | None) -> int | None:
    """Returns a rank's number of stages in Megatron's convention: None for one stage."""
    return pipeline.stages_per_rank if pipeline and pipeline.stages_per_rank > 1 else None


def join_groups(layout: Layout, pipeline: Pipeline | None, device: torch.device) -> None:
    """Sets Megatron's process groups, a global of the process, to those of a layout. Engines of one
    layout share groups; actor and critic may have different ones. Ranks are in Megatron's default
    order, which is also ours."""
    if not dist.is_initialized():
        solo_mesh(device)
    wanted = (dist.group.WORLD, layout, virtual_stages(pipeline))
    for key in [key for key in _MADE if key[0] is not dist.group.WORLD]:
        del _MADE[key]
    if wanted not in _MADE:
        _make_groups(layout, virtual_stages(pipeline))
        _MADE[wanted] = _held()
    vars(parallel_state).update(_MADE[wanted])


def _held() -> dict[str, Any]:
    """Returns the groups, ranks and sizes in the variables of Megatron's module."""
    kept = vars(parallel_state).items()
    return {name: x for name, x in kept if re.fullmatch("_[A-Z_]+", name)}


def _make_groups(layout: Layout, stages: int | None) -> None:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=stages,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    # Not used for sampling (no dropout, weights are given), but layers need the RNG state.
    tensor_parallel.model_parallel_cuda_manual_seed(0)
