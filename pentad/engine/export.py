"""Whole weights leave the engine: saved as a HF folder, or staged in host memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.models.hf_weights import hf_metadata
from pentad.models.language_model import LanguageModel
from pentad.parallel.collectives import reduce_ranks
from pentad.parallel.mesh import Meshes
from pentad.weights.hf import FolderPlan, save_folder
from pentad.weights.transfer import TensorInfo

Weights = Iterator[tuple[str, Tensor]]
"""Whole tensors under HF names. Each is gathered from all ranks, so all of them iterate."""


def save_whole(
    folder: str, weights: Weights, plan: Callable[[], FolderPlan], meshes: Meshes
) -> None:
    """Rank 0 writes; a failure is raised on every rank."""
    error: Exception | None = None
    if meshes.rank == 0:
        try:
            save_folder(folder, weights, plan())
        except Exception as failure:  # raised below, when the other ranks know
            error = failure
    for _ in weights:  # the others take part in every gathering, whatever became of the file
        pass
    failed = torch.tensor(int(error is not None), device=meshes.device)
    if int(reduce_ranks(failed, meshes.world, "max")):
        raise error or RunError(f"rank 0 could not save {folder}")


def stage_weights(
    weights: Weights, infos: Mapping[str, TensorInfo], into: Tensor | None, device: torch.device
) -> None:
    """One after another to the bytes `into`, where this rank has them."""
    end = 0
    for (name, tensor), announced in zip(weights, infos.items(), strict=True):
        info = TensorInfo(tuple(tensor.shape), tensor.dtype)
        assert (name, info) == announced, f"{announced}: got {name} {info}"
        start, end = end, end + info.size_bytes
        if into is not None:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            into[start:end].copy_(flat, non_blocking=True)
    assert into is None or end == into.numel(), f"{end} bytes instead of {into.numel()}"
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_digest(model: LanguageModel) -> str:
    """Of names and shapes as on disk: whatever the layout and the backend."""
    infos = hf_metadata(model)
    text = repr([(name, tuple(infos[name].shape)) for name in sorted(infos)])
    return hashlib.sha256(text.encode()).hexdigest()
