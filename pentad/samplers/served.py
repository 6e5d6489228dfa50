"""What a server gets where it differs from the run's own folder and weights: the text tower of a
multimodal folder as a language model, and weights in fp8 (`rollout.weight_dtype`).

A server that the run starts then has a temporary model folder: a config.json of its own, and links
to the other files. The weights come with the first publish, and every publish converts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import raise_problems
from pentad.core.folders import read_object
from pentad.core.quantization import KEY, Shapes, fp8_config, fp8_problems
from pentad.core.roles import TensorPairs
from pentad.core.scratch import OWNER, scratch_folder
from pentad.models.families import language_config_of, map_of, spec_of
from pentad.models.registry import build_whole
from pentad.models.towers import named_by_family
from pentad.samplers.process import ServerSettings
from pentad.weights.block_fp8 import quantised

CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def is_fp8(settings: ServerSettings) -> bool:
    return settings.rollout.weight_dtype == "fp8"


def is_converted(settings: ServerSettings) -> bool:
    """Whether the server gets other tensors than those published."""
    return is_fp8(settings) or bool(settings.dims.tower_names)


def converted(settings: ServerSettings, weights: TensorPairs) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that the server gets."""
    named = [(named_by_family(name, settings.dims), tensor) for name, tensor in weights]
    return quantised(named) if is_fp8(settings) else iter(named)


@contextmanager
def served_folder(settings: ServerSettings) -> Iterator[Path]:
    """Makes the server's folder; UserError for a model that servers cannot hold in fp8."""
    source = Path(settings.model_folder).resolve()
    dims = replace(settings.dims, tower_names=())
    shapes = shapes_of(dims, settings.model_folder) if is_fp8(settings) else None
    if shapes is not None:
        raise_problems(fp8_problems(shapes, dims, settings.tensor_parallel))
    config = read_object(source / CONFIG)
    if settings.dims.tower_names:
        config = _of_tower(config, dims, settings.dtype)
    if shapes is not None:
        config |= {KEY: fp8_config(shapes)}
    with scratch_folder("pentad-served-") as made:
        for file in source.iterdir():
            if file.name not in (CONFIG, OWNER) and not file.name.endswith(WEIGHTS):
                (made / file.name).symlink_to(file)
        (made / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        yield made


def _of_tower(config: dict[str, Any], dims: ModelDims, dtype: str) -> dict[str, Any]:
    """The config of a text tower as a language model."""
    spec = spec_of(dims.family)
    own = {**language_config_of(config), **spec.saved_config}
    return {**own, "architectures": [spec.classes[0]], "dtype": dtype}


def shapes_of(dims: ModelDims, folder: str) -> Shapes:
    """Shapes of the published tensors by their names. Without a model file they come from
    transformers' model of the folder."""
    found = map_of(dims) if dims.is_whole else build_whole(folder, "fsdp").weight_map
    return {name: source.shape for name, source in found.sources.items()}
