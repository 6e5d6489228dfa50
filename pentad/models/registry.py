"""How models are made: fresh, from a HF or Megatron folder, and back into a HF folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.models.decoder import Decoder
from pentad.models.families import (
    ConfigLike,
    class_of,
    dims_of,
    map_of,
    read_config,
    spec_of,
)
from pentad.models.hf_weights import hf_metadata, iter_hf, native_shards, native_tensors
from pentad.models.language_model import LanguageModel
from pentad.models.megatron_names import build_named
from pentad.models.spec import MEGATRON_PLAN, megatron_sizes
from pentad.weights import transfer
from pentad.weights.hf import SHARD_BYTES, FolderPlan, HfFolder, plan_folder, save_folder
from pentad.weights.map import WeightMap, sizes_of
from pentad.weights.megatron.layout import find_weights
from pentad.weights.megatron.stored import MegatronColumn
from pentad.weights.regions import slices
from pentad.weights.transfer import RandomReader, Reader

log = logging.getLogger(__name__)


def column_of(dims: ModelDims, vocab_rows: int) -> MegatronColumn:
    """A model's Megatron tensors, with so many rows of vocabulary."""
    weight_map = spec_of(dims.family).megatron_map(dims, vocab_rows)
    sizes = {**sizes_of(dims), **megatron_sizes(dims, vocab_rows)}
    return MegatronColumn(weight_map, MEGATRON_PLAN, sizes)


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
    """Warns of the layers that a folder holds to predict further tokens, and a model does not."""
    names = [name for name in reader.infos if name.startswith(weight_map.ignored_prefixes)]
    if names:
        log.warning(
            "%s: %d tensors (%s, ...) serve to predict further tokens; they are not trained, and "
            "what is saved is without them",
            reader.where,
            len(names),
            names[0],
        )


DeviceLike = torch.device | str


def build_model(
    dims: ModelDims,
    *,
    device: DeviceLike,
    dtype: torch.dtype,
    value_head: bool = False,
    lm_head: bool | None = None,
    layers: Iterable[int] | None = None,
    is_first: bool = True,
    is_last: bool = True,
) -> Decoder:
    """The model with uninitialised weights. A value head replaces the lm head by default.

    A pipeline stage is a model with some of the layers; the first has the embedding, the last the
    heads.
    """
    model_class = class_of(dims.family)
    if not (isinstance(model_class, type) and issubclass(model_class, Decoder)):
        rule = f"is {model_class!r}, not a subclass of pentad.models.decoder.Decoder"
        raise UserError(Problem(f"model = {spec_of(dims.family).model}", rule))
    with torch.device("meta"):
        keep = not value_head if lm_head is None else lm_head
        stage: dict[str, Any] = {"layers": layers, "is_first": is_first, "is_last": is_last}
        model = model_class(dims, lm_head=keep, value_head=value_head, **stage).to(dtype)
    own = {name: e.rule.dtype for name, e in map_of(dims).entries.items() if e.rule.dtype}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in own:
            tensor.data = tensor.data.to(DTYPES[own[name]])
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def build_whole(
    config: ConfigLike, backend: str, *, model: str | None = None, value_head: bool = False
) -> LanguageModel:
    """The whole model of a backend without memory: its names, its shapes and its weight map."""
    if backend == "fsdp":
        # Here, since transformers takes seconds to import.
        from pentad.models.hf.config import read_hf_config
        from pentad.models.hf.module import build_hf_model

        found = read_hf_config(config)
        return build_hf_model(found, dtype=torch.float32, value_head=value_head)
    dims = dims_of(config, model)
    if backend == "megatron":
        return build_named(dims, torch.float32, value_head=value_head)
    return build_model(dims, device="meta", dtype=torch.float32, value_head=value_head)


def create_model(
    dims: ModelDims,
    *,
    device: DeviceLike = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    value_head: bool = False,
    lm_head: bool | None = None,
) -> Decoder:
    """A freshly initialised model; each tensor depends on the seed and its own name alone."""
    model = build_model(dims, device=device, dtype=dtype, value_head=value_head, lm_head=lm_head)
    initialise(model, seed)
    return model


@torch.no_grad()
def blank_model(dims: ModelDims, *, device: DeviceLike, dtype: torch.dtype) -> Decoder:
    """A model that waits for an install: until then its weights are NaN, and a sampler refuses to
    draw from it."""
    model = build_model(dims, device=device, dtype=dtype)
    for tensor in native_tensors(model).values():
        tensor.fill_(math.nan)
    return model


def initialise(model: LanguageModel, seed: int) -> None:
    """Fresh weights in place, whatever part of the model is held here."""
    shards, weight_map = native_shards(model), model.weight_map
    if all(_place_drawn(model, name, shard, seed) for name, shard in shards.items()):
        return
    transfer.fill(shards, weight_map, RandomReader(weight_map, shards, seed))


@torch.no_grad()
def _place_drawn(model: LanguageModel, name: str, shard: transfer.Shard, seed: int) -> bool:
    """Whether the model draws its weights itself."""
    drawn = model.draw(name, seed)
    if drawn is not None:
        shard.tensor.copy_(drawn[slices(shard.box)])
    return drawn is not None


def load_weights(model: LanguageModel, folder: str | Path, *, seed: int = 0) -> list[str]:
    """Streams a HF or Megatron folder into the model; each rank reads only what it holds.

    Returns the tensors that the folder lacks and that were initialised instead (value heads).
    """
    reader = open_weights(folder, model.dims)
    shards, weight_map = native_shards(model), model.map_for(reader.infos)
    transfer.fill(shards, weight_map, reader, has_heads=model.is_last, must_be_finite=True)
    if model.is_last:
        warn_left_out(weight_map, reader)
    fresh = transfer.missing_optional(shards, weight_map, reader)
    if fresh:
        own = {name: shards[name] for name in fresh}
        transfer.fill(own, weight_map, RandomReader(weight_map, own, seed))
    return fresh


def load_model(
    folder: str | Path,
    *,
    device: DeviceLike = "cpu",
    dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    lm_head: bool | None = None,
    model: str | None = None,
    seed: int = 0,
) -> Decoder:
    """The model of a HF folder; a value head that the folder lacks is initialised from `seed`."""
    dims = dims_of(folder, model)
    built = build_model(dims, device=device, dtype=dtype, value_head=value_head, lm_head=lm_head)
    load_weights(built, folder, seed=seed)
    return built


def save_model(
    model: LanguageModel,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    source_folder: str | Path | None = None,
    hf_config: ConfigLike | None = None,
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """A folder that transformers loads, in `dtype` (default: as held).

    `weights` are those of `iter_hf(model, dtype)`, where they are elsewhere.

    The config is that of `source_folder` or `hf_config`, with dtype and class set; tokenizer and
    generation config come from `tokenizer_folder`, then from `source_folder`.
    """
    save_folder(
        folder,
        iter_hf(model, dtype) if weights is None else weights,
        plan_export(
            model,
            dtype=dtype,
            source_folder=source_folder,
            hf_config=hf_config,
            tokenizer_folder=tokenizer_folder,
            shard_bytes=shard_bytes,
        ),
    )


def plan_export(
    model: LanguageModel,
    *,
    dtype: torch.dtype | None = None,
    source_folder: str | Path | None = None,
    hf_config: ConfigLike | None = None,
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> FolderPlan:
    """The folder of `save_model`, around the weights of `iter_hf(model, dtype)`."""
    given = hf_config if hf_config is not None else source_folder
    assert given is not None, "give source_folder or hf_config: the saved folder needs a config"
    infos = hf_metadata(model, dtype)
    return plan_folder(
        infos,
        config_for(model, read_config(given), next(iter(infos.values())).dtype),
        companions=[path for path in (tokenizer_folder, source_folder) if path is not None],
        shard_bytes=shard_bytes,
    )


def config_for(model: LanguageModel, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The HF config of the model as it is: its class, its dtype, one label if it has a value."""
    causal, scalar = model.hf_classes
    out = {**config, **model.saved_config}
    out |= {"dtype": str(dtype).removeprefix("torch."), "architectures": [causal]}
    out.pop("torch_dtype", None)
    if not model.has_lm_head and model.value_head is not None:
        out |= {"architectures": [scalar], "num_labels": 1}
    return out
