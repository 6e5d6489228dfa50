"""Fresh weights: each HF-on-disk tensor from a seed of its own, so no layout changes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pentad.core.seeds import derive_seed
from pentad.weights.flow import TensorInfo
from pentad.weights.map import WeightMap
from pentad.weights.regions import Box, box_shape, slices


class RandomReader:
    """A reader that makes its tensors: normal with the config's range, ones, or zeros."""

    where = "fresh weights"

    def __init__(self, weight_map: WeightMap, held: Iterable[str], seed: int) -> None:
        self.sources = weight_map.sources
        self.std = weight_map.dims.initializer_range
        self.seed = seed
        regions = [region for name in held for region in weight_map.entries[name].regions]
        self.infos = {r.source: TensorInfo(r.source_shape, torch.float32) for r in regions}

    def read(self, name: str, box: Box) -> Tensor:
        source = self.sources[name]
        if source.init != "normal":
            value = 1.0 if source.init == "ones" else 0.0
            return torch.full(box_shape(box), value, device="cpu")
        generator = torch.Generator("cpu").manual_seed(derive_seed(self.seed, "init", name))
        # The whole tensor is drawn whatever part is asked for: that is what keeps it one tensor.
        whole = torch.empty(source.shape, device="cpu").normal_(0, self.std, generator=generator)
        return whole[slices(box)]
