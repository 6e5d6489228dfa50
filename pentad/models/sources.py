"""Weights opened from whatever folder holds them, read under HF-on-disk names."""

from __future__ import annotations

import logging
from pathlib import Path

from pentad.core.dims import ModelDims
from pentad.models.columns import MEGATRON_PLAN, megatron_sizes
from pentad.models.families import spec_of
from pentad.weights.flow import Reader
from pentad.weights.hf import HfFolder
from pentad.weights.map import WeightMap, sizes_of
from pentad.weights.megatron.folders import find_weights
from pentad.weights.megatron.stored import Column

log = logging.getLogger(__name__)


def column_of(dims: ModelDims, vocab_rows: int) -> Column:
    """A model's Megatron tensors, with so many rows of vocabulary."""
    weight_map = spec_of(dims.family).megatron_map(dims, vocab_rows)
    sizes = {**sizes_of(dims), **megatron_sizes(dims, vocab_rows)}
    return Column(weight_map, MEGATRON_PLAN, sizes)


def open_weights(folder: str | Path, dims: ModelDims, checkpoint: str | None = None) -> Reader:
    """The weights of a HF folder or of a Megatron folder, any block of any tensor at a time.

    `checkpoint` names one of a Megatron folder's (`release`, `iter_0000100`); without it the one
    that its tracker file names is opened.
    """
    found, kind = find_weights(Path(folder), checkpoint)
    if kind == "hf":
        return HfFolder(found)
    # Here, since these import torch.distributed.checkpoint: a second that HF folders do without.
    from pentad.weights.megatron.dist import DistFiles, read_dist
    from pentad.weights.megatron.legacy import LegacyFiles, read_legacy

    if kind == "torch_dist":
        dist = DistFiles(found, dims)
        return read_dist(dist, column_of(dims, dist.vocab_rows))
    legacy = LegacyFiles(found, dims)
    return read_legacy(legacy, column_of(dims, legacy.vocab_rows))


def warn_left_out(weight_map: WeightMap, reader: Reader) -> None:
    """Tells of the layers that a folder holds to predict further tokens, and a model does not."""
    names = [name for name in reader.infos if name.startswith(weight_map.ignored_prefixes)]
    if names:
        log.warning(
            "%s: %d tensors (%s, ...) serve to predict further tokens; they are not trained, and "
            "what is saved is without them",
            reader.where,
            len(names),
            names[0],
        )
