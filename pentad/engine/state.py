"""The state that a resume needs, by name: tensors that share this rank's memory, and its random
states.

`model.NAME`, `optimizer.exp_avg.NAME`, `optimizer.exp_avg_sq.NAME`, `optimizer.step.NAME` and
`tags.TAG.NAME` are whole tensors to callers, under a layout DTensors; `rng.RANK.KIND` belong to one
rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from pentad.models.hf_weights import hf_metadata
from pentad.models.language_model import LanguageModel
from pentad.parallel.cuts import Cut
from pentad.weights.map import WeightMap, between
from pentad.weights.regions import Region

Cuts = Mapping[str, Cut]
MT_WORDS = 624
"""State words of the generator type of Python and numpy; each is exact as float64."""


def present_all(tensors: Mapping[str, Tensor], cuts: Cuts) -> dict[str, Tensor]:
    """Returns each shard as its whole tensor (a DTensor under a layout), sharing memory. Parameters
    and tensors of their shape are sharded; step counts of the optimizer and buffers are not."""
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    for name in cuts.keys() & found.keys():
        if found[name].ndim == len(cuts[name].shape):
            found[name] = cuts[name].present(found[name])
    return found


def read_random(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the random states of this process, as tensors of fixed shapes."""
    _, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    held = {
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), place, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        held["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{kind}": tensor for kind, tensor in held.items()}


def write_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the random states of this process to those returned by `read_random`."""
    held = {name.rpartition(".")[2]: tensor for name, tensor in states.items()}
    *words, has_gauss, gauss = held["python"].tolist()
    random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))
    keys, (place, has_cached, cached) = held["numpy"][:MT_WORDS], held["numpy"][MT_WORDS:].tolist()
    state = (keys.numpy().astype(numpy.uint32), int(place), int(has_cached), cached)
    numpy.random.set_state(("MT19937", *state))
    torch.set_rng_state(held["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(held["cuda"], device)


def sources_between(
    names: Sequence[str], own: WeightMap, saved: WeightMap
) -> dict[str, tuple[Region, ...]]:
    """Returns the parts of each of these tensors, as regions of a state with other names."""
    regions = between(own, saved)
    return {name: tuple(_sources(name, regions)) for name in names if not name.startswith("rng.")}


def _sources(name: str, regions: Mapping[str, Sequence[Region]]) -> Iterator[Region]:
    depth = 1 if name.startswith("model.") else 2
    *prefix, inner = name.split(".", depth)
    for region in regions[inner]:
        source = ".".join((*prefix, region.source))
        if prefix == ["optimizer", "step"]:  # a count, equal for tensors that are joined elsewhere
            yield Region(source, (), (), (), ())
            return
        yield replace(region, source=source)


def model_digest(model: LanguageModel) -> str:
    """Returns a digest of names and shapes as on disk: the same for any layout and backend."""
    infos = hf_metadata(model)
    text = repr([(name, tuple(infos[name].shape)) for name in sorted(infos)])
    return hashlib.sha256(text.encode()).hexdigest()
