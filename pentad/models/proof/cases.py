"""Cases: tiny models of transformers, all weights random, that a family is held against."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.dims import ModelDims
from pentad.models.decoder import Decoder
from pentad.models.families import dims_of, map_of, path_of
from pentad.models.registry import load_model
from pentad.models.spec import ModelSpec
from pentad.weights.hf import HfFolder
from pentad.weights.map import WeightMap
from pentad.weights.regions import full_box

NUM_TOKENS = 37
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""transformers' written-out arithmetic: its fused expert kernels refuse odd widths."""


class Fault(Exception):
    """A check's finding: one sentence naming the tensor and the rule."""


@dataclass
class Case:
    """One tiny config, a transformers model of it with random weights, and its folder."""

    name: str
    spec: ModelSpec
    dims: ModelDims
    theirs: nn.Module
    folder: Path
    ids: Tensor

    @property
    def weight_map(self) -> WeightMap:
        return map_of(self.dims)

    def disk(self) -> dict[str, Tensor]:
        """Everything transformers wrote, by its name on disk."""
        return read_all(self.folder)

    def load(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return load_model(self.folder, dtype=dtype, model=path_of(self.spec.family))

    def expected(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Their logits, the weights of a scalar of them, and its gradients by name on disk."""
        self.theirs.zero_grad()
        logits = self.theirs(self.ids[None]).logits[0]
        weight = torch.randn(logits.shape, generator=generator(2))
        (logits * weight).sum().backward()
        grads = {n: p.grad for n, p in self.theirs.named_parameters() if p.grad is not None}
        # transformers fuses experts in memory; this gives the names and shapes of its files.
        on_disk = revert_weight_conversion(self.theirs, grads)
        own = {name: grad for name, grad in on_disk.items() if name not in self.weight_map.tied}
        return logits.detach(), weight, own


def read_all(folder: Path) -> dict[str, Tensor]:
    reader = HfFolder(folder)
    return {name: reader.read(name, full_box(info.shape)) for name, info in reader.infos.items()}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build_case(name: str, spec: ModelSpec, config: Mapping[str, Any], scratch: Path) -> Case:
    config = {key: deepcopy(value) for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(spec.family, **config)
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config, **PLAIN)
    randomise(theirs)
    theirs.save_pretrained(scratch / "hf")
    dims = dims_of(scratch / "hf", path_of(spec.family))
    ids = torch.randint(dims.vocab_size, (NUM_TOKENS,), generator=generator(1))
    return Case(name, spec, dims, theirs.eval(), scratch / "hf", ids)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Every parameter and persistent buffer; at their initial ones swapped norms would pass."""
    source = generator(0)
    for tensor in model.state_dict().values():
        noise = torch.randn(tensor.shape, generator=source)
        tensor.copy_(0.15 * noise if tensor.dim() > 1 else 0.7 + 0.3 * noise)
