"""Creates models, loads them from HF or Megatron folders, and saves them as HF folders."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.quantization import KEY as QUANTIZATION
from pentad.core.quantization import needs_key, quantization_of
from pentad.models.decoder import Decoder
from pentad.models.families import (
    ConfigLike,
    class_of,
    dims_of,
    family_of,
    is_known,
    language_config_of,
    map_of,
    read_config,
    spec_of,
)
from pentad.models.hf_weights import hf_metadata, iter_hf, native_shards, native_tensors
from pentad.models.language_model import LanguageModel
from pentad.models.megatron_names import build_named
from pentad.models.spec import MEGATRON_PLAN
from pentad.models.towers import TEXT
from pentad.weights import transfer
from pentad.weights.dequantize import DequantizedFolder
from pentad.weights.files import SafeFile
from pentad.weights.hf import (
    SHARD_BYTES,
    Carried,
    FolderPlan,
    HfFolder,
    carried_tensors,
    plan_folder,
    save_folder,
)
from pentad.weights.map import WeightMap
from pentad.weights.megatron.layout import find_weights
from pentad.weights.megatron.stored import MegatronColumn
from pentad.weights.regions import full_box, slices
from pentad.weights.transfer import RandomReader, Reader

log = logging.getLogger(__name__)


def column_of(dims: ModelDims, vocab_rows: int) -> MegatronColumn:
    """The Megatron tensors of a model with this many vocabulary rows."""
    weight_map = spec_of(dims.family).megatron_map(dims, vocab_rows)
    return MegatronColumn(weight_map, MEGATRON_PLAN)


def open_weights(
    folder: str | Path,
    dims: ModelDims,
    checkpoint: str | None = None,
    *,
    dequantize: bool = False,
) -> Reader:
    """Opens the weights of a HF or Megatron folder, to read blocks of tensors.

    `checkpoint` selects one of a Megatron folder (`release`, `iter_0000100`); by default the one in
    its tracker file. Quantised weights are rejected without `dequantize`.
    """
    found, kind = find_weights(Path(folder), checkpoint)
    if kind == "hf":
        return _open_hf(found, dequantize)
    # Here, since these import torch.distributed.checkpoint, which takes a second.
    from pentad.weights.megatron.dist import DistFiles, read_dist
    from pentad.weights.megatron.legacy import LegacyFiles, read_legacy

    if kind == "torch_dist":
        dist = DistFiles(found, dims)
        return read_dist(dist, column_of(dims, dist.vocab_rows))
    legacy = LegacyFiles(found, dims)
    return read_legacy(legacy, column_of(dims, legacy.vocab_rows))


def _open_hf(folder: Path, dequantize: bool) -> Reader:
    has_config = (folder / "config.json").is_file()
    quantization = quantization_of(read_config(folder)) if has_config else None
    if quantization is None:
        return HfFolder(folder)
    if not dequantize:
        raise UserError(needs_key(f"model folder = {folder}", quantization, "actor.dequantize"))
    return DequantizedFolder(HfFolder(folder), quantization)


def warn_left_out(weight_map: WeightMap, reader: Reader) -> None:
    """Warns of multi-token-prediction layers in a folder, which the model does not have."""
    names = [name for name in reader.infos if name.startswith(weight_map.ignored_prefixes)]
    if names:
        log.warning(
            "%s: %d tensors (%s, ...) are for multi-token prediction; they are not trained, and "
            "saved folders do not have them",
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
    """Builds the model with uninitialised weights. A value head replaces the lm head by default.

    A pipeline stage is a model with some of the layers; the first has the embedding, the last the
    heads.
    """
    model_class = class_of(dims.family)
    if not (isinstance(model_class, type) and issubclass(model_class, Decoder)):
        rule = f"is {model_class!r}, not a subclass of pentad.models.decoder.Decoder"
        raise UserError(Problem(f"model = {spec_of(dims.family).model}", rule))
    with torch.device("meta"):
        keep = not value_head if lm_head is None else lm_head
        is_from_tower = bool(dims.tower_names) and value_head and not keep
        if is_from_tower:  # it is saved as a language model
            dims = replace(dims, tower_names=())
        stage: dict[str, Any] = {"layers": layers, "is_first": is_first, "is_last": is_last}
        model = model_class(dims, lm_head=keep, value_head=value_head, **stage).to(dtype)
        model.is_from_tower = is_from_tower
    own = {name: e.rule.dtype for name, e in map_of(dims).entries.items() if e.rule.dtype}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in own:
            tensor.data = tensor.data.to(DTYPES[own[name]])
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def build_whole(
    config: ConfigLike, backend: str, *, model: str | None = None, value_head: bool = False
) -> LanguageModel:
    """Builds a backend's whole model without memory, for names, shapes and weight map."""
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
    """Creates and initialises a model; each tensor depends only on the seed and its name."""
    model = build_model(dims, device=device, dtype=dtype, value_head=value_head, lm_head=lm_head)
    initialise(model, seed)
    return model


@torch.no_grad()
def blank(model: LanguageModel) -> None:
    """Sets all weights to NaN, for samplers before the first install."""
    for tensor in native_tensors(model).values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)


def blank_model(dims: ModelDims, *, device: DeviceLike, dtype: torch.dtype) -> Decoder:
    """Builds a model whose weights are NaN until the first install."""
    model = build_model(dims, device=device, dtype=dtype)
    blank(model)
    return model


def _has_model_file(folder: str | Path) -> bool:
    return is_known(family_of(read_config(folder)))


def dims_to_sample(folder: str | Path) -> ModelDims:
    """The dimensions of a folder's model: from its family, or, without a model file, from
    transformers' model."""
    if _has_model_file(folder):
        return dims_of(folder)
    # Here and below, since transformers takes seconds to import.
    from pentad.models.hf.config import dims_of_hf

    return dims_of_hf(folder)


def build_unfiled(folder: str | Path, *, device: DeviceLike, dtype: torch.dtype) -> LanguageModel:
    """Builds transformers' model for a folder whose family has no model file. Weights are NaN until
    they are installed or loaded."""
    model = meta_unfiled(folder, dtype).to_empty(device=device)
    model.fill_tables()
    blank(model)
    return model


def meta_unfiled(folder: str | Path, dtype: torch.dtype) -> LanguageModel:
    """Like `build_unfiled`, without memory; UserError for a model that cannot be sampled."""
    from pentad.models.hf.config import read_hf_config
    from pentad.models.hf.module import build_hf_model

    return build_hf_model(read_hf_config(folder), dtype=dtype, samples=True)


def load_to_sample(
    folder: str | Path,
    *,
    device: DeviceLike,
    dtype: torch.dtype,
    seed: int = 0,
    dequantize: bool = False,
) -> LanguageModel:
    """Loads the model of a folder for a sampler: by its model file, or transformers' model."""
    if _has_model_file(folder):
        return load_model(folder, device=device, dtype=dtype, seed=seed, dequantize=dequantize)
    model = build_unfiled(folder, device=device, dtype=dtype)
    load_weights(model, folder, dequantize=dequantize)
    return model


def initialise(model: LanguageModel, seed: int) -> None:
    """Initialises the weights in place, for any part of the model."""
    shards, weight_map = native_shards(model), model.weight_map
    if all(_place_drawn(model, name, shard, seed) for name, shard in shards.items()):
        return
    transfer.fill(shards, weight_map, RandomReader(weight_map, shards, seed))


@torch.no_grad()
def _place_drawn(model: LanguageModel, name: str, shard: transfer.Shard, seed: int) -> bool:
    """Initialises a shard by `model.draw`; False if the model does not support it."""
    drawn = model.draw(name, seed)
    if drawn is not None:
        shard.tensor.copy_(drawn[slices(shard.box)])
    return drawn is not None


def load_weights(
    model: LanguageModel, folder: str | Path, *, seed: int = 0, dequantize: bool = False
) -> list[str]:
    """Streams a HF or Megatron folder into the model; each rank reads only its part.

    Returns the tensors that the folder lacks and that were initialised instead (value heads).
    """
    reader = open_weights(folder, model.dims, dequantize=dequantize)
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
    dequantize: bool = False,
) -> Decoder:
    """Loads the model of a HF folder; a missing value head is initialised from `seed`."""
    dims = dims_of(folder, model)
    built = build_model(dims, device=device, dtype=dtype, value_head=value_head, lm_head=lm_head)
    load_weights(built, folder, seed=seed, dequantize=dequantize)
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
    """Saves a folder that transformers can load, in `dtype` (default: the model's).

    `weights` replaces `iter_hf(model, dtype)`. A text tower is saved with the other towers of
    `source_folder`.

    The config is that of `source_folder` or `hf_config`, with dtype and class set; tokenizer and
    generation config come from `tokenizer_folder`, then from `source_folder`.
    """
    pairs = iter_hf(model, dtype) if weights is None else weights
    save_folder(
        folder,
        chain(pairs, _carried_pairs(model, source_folder)),
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
    """Plans the folder of `save_model` around the weights of `iter_hf(model, dtype)`."""
    given = hf_config if hf_config is not None else source_folder
    assert given is not None, "give source_folder or hf_config: the saved folder needs a config"
    infos = hf_metadata(model, dtype)
    others = carried_by(model, source_folder)
    return plan_folder(
        {**infos, **{name: one.info for name, one in others.items()}},
        config_for(model, read_config(given), next(iter(infos.values())).dtype),
        companions=[path for path in (tokenizer_folder, source_folder) if path is not None],
        shard_bytes=shard_bytes,
    )


def carried_by(model: LanguageModel, source_folder: str | Path | None) -> dict[str, Carried]:
    """Tensors that an export of the model copies from its source folder."""
    if not model.dims.tower_names:
        return {}
    if source_folder is None:
        rule = "a text tower is saved with the other towers, and their folder is not there"
        raise UserError(Problem("source folder", rule, "give the multimodal folder it came from"))
    return carried_tensors(source_folder, model.weight_map)


def _carried_pairs(
    model: LanguageModel, source_folder: str | Path | None
) -> Iterator[tuple[str, Tensor]]:
    for name, one in carried_by(model, source_folder).items():
        yield name, SafeFile(one.file).read(name, full_box(one.info.shape))


def config_for(model: LanguageModel, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The HF config for saving: with the model's class and dtype, and one label for a value head.
    In a multimodal config only the dtype changes; a model with a value head has that of its text
    tower."""
    if model.dims.tower_names:
        return _whole_config(model, config, str(dtype).removeprefix("torch."))
    config = language_config_of(config)
    causal, scalar = model.hf_classes
    out = {**config, **model.saved_config}
    out |= {"dtype": str(dtype).removeprefix("torch."), "architectures": [causal]}
    for key in ("torch_dtype", QUANTIZATION):
        out.pop(key, None)
    if not model.has_lm_head and model.value_head is not None:
        out |= {"architectures": [scalar], "num_labels": 1}
    return out


def _whole_config(model: LanguageModel, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    out = dict(config)
    text = dict(out[TEXT]) if TEXT in out else None
    for one in (out, text):
        for key in ("dtype", "torch_dtype"):
            if one is not None and one.get(key) not in (None, dtype):
                one[key] = dtype
    if text is not None:
        out[TEXT] = text
    (out if text is None else text).update(model.saved_config)
    return out
