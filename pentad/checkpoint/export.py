"""A HF folder of a recovery checkpoint: without its run, its ranks and their devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.checkpoint.folders import Checkpoint, find_checkpoints, state_folder
from pentad.checkpoint.restore import fill_state, open_state, read_counters
from pentad.core.device import DTYPES
from pentad.core.errors import Problem, UserError
from pentad.core.folders import STATE, RecoveryPath
from pentad.models.hf_weights import hf_metadata
from pentad.models.language_model import LanguageModel
from pentad.models.registry import build_face, save_model
from pentad.weights.dcp import DcpFolder
from pentad.weights.transfer import TensorInfo

ACTOR = "default"
"""The folder of the actor's state."""
BATCH_BYTES = 1 << 30
"""How much is read in one go: tensors that lie in one piece of a file are read together."""


def find_recovery(given: RecoveryPath) -> Checkpoint:
    """The checkpoint that a path names: of its step, else the newest."""
    found = find_checkpoints(given.root)
    if not found:
        raise UserError(Problem(str(given.root), "holds no committed recovery checkpoint"))
    for checkpoint in found:
        if given.step in (None, checkpoint.step):
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in found)
    rule = f"is not committed; the steps {steps} are" if found[1:] else f"only step {steps} is"
    raise UserError(Problem(f"{given.root}: globalstep{given.step}", rule, "name one of them"))


def export_hf(
    checkpoint: Checkpoint,
    target: Path,
    *,
    role: str = ACTOR,
    tag: str = "actor",
    dtype: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Writes the folder, every byte verified on the way; returns the counters of the state."""
    folder = state_folder(role, checkpoint.step)
    if not any(path.startswith(f"{folder}/") for path in checkpoint.manifest.files):
        states = (path.split("/") for path in checkpoint.manifest.files if f"/{STATE}/" in path)
        roles = sorted({"actor" if parts[0] == ACTOR else parts[0] for parts in states})
        rule = f"the checkpoint holds no such role; it has {', '.join(roles)}"
        raise UserError(Problem(f"--role {role}", rule))
    counters = read_counters(checkpoint, folder)
    tags = ["actor", *counters["tags"]]
    if tag not in tags:
        raise UserError(Problem(f"--tag {tag}", f"the checkpoint has {', '.join(tags)}"))
    wanted = dtype or counters["dtype"]
    if wanted not in DTYPES:
        raise UserError(Problem(f"--dtype {wanted}", f"use one of {', '.join(DTYPES)}"))
    config, head = counters["hf_config"], counters["value_head"]
    face = build_face(config, counters["backend"], model=model, value_head=head)
    prefix = "model." if tag == "actor" else f"tags.{tag}."
    folders = [Path(path) for path in counters["companions"] if Path(path).is_dir()]
    save_model(
        face,
        target,
        dtype=DTYPES[wanted],
        hf_config=config,
        tokenizer_folder=folders[0] if folders else None,
        source_folder=folders[-1] if folders else None,
        weights=_read(open_state(checkpoint, folder), face, prefix, DTYPES[wanted]),
    )
    return counters


def _read(
    saved: DcpFolder, face: LanguageModel, prefix: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    sources = face.weight_map.sources
    regions = {
        name: [replace(region, source=prefix + region.source) for region in source.regions]
        for name, source in sources.items()
    }
    infos = hf_metadata(face, dtype)
    for names in _batches(infos):
        kept = {n: saved.infos[regions[n][0].source].dtype for n in names}
        batch = {n: torch.empty(sources[n].shape, dtype=kept[n]) for n in names}
        fill_state(batch, saved, regions)
        for name in names:
            yield name, batch.pop(name).to(infos[name].dtype)


def _batches(infos: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, info in infos.items():
        if batch and size + info.size_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += info.size_bytes
    yield batch
