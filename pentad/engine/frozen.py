"""The frozen weights of an adapter: their source, and the tags that refer to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.errors import RunError
from pentad.core.seeds import derive_seed
from pentad.engine.held import HeldModel
from pentad.engine.section import LoraConfig, ModelConfig
from pentad.models.hf_weights import hf_metadata
from pentad.models.language_model import LanguageModel
from pentad.ops.digest import digest_of
from pentad.parallel.cuts import Cut
from pentad.weights.blocks import iter_whole
from pentad.weights.peft import LoraSpec

BASE = "base"
"""The tag of the frozen weights without factors; other tags may refer to them too."""
SHAKE = 1e-2
"""Scale of B in a test at strength 1."""


@dataclass(eq=False)
class FrozenBase:
    """The frozen weights of an adapter. A reference with the initial weights needs no copy: it is
    the frozen weights without the factors."""

    held: HeldModel
    lora: LoraConfig
    path: str
    """The folder they were read from; empty: random weights."""
    digest: str
    """Digest of their bytes, prefixed by the name of their dtype."""
    tags: list[str] = field(default_factory=list)
    """Tags that refer to the frozen weights without factors."""
    is_shared: bool = False
    """Whether a sampler of this process uses the same tensors."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """The original factors, while a test replaces them."""

    @classmethod
    def of(cls, held: HeldModel, model: ModelConfig, folder: str | Path | None) -> FrozenBase:
        """Makes the frozen weights of a model; called on all ranks."""
        assert model.lora is not None, "without factors nothing is frozen"
        weight_map = held.whole.weight_map
        infos = hf_metadata(held.whole, DTYPES[model.dtype], weight_map)
        group, device = held.meshes.world.group, held.meshes.device
        shards = held.shards(weight_map)
        digest = digest_of(iter_whole(shards, weight_map, infos, group, device)).hex()
        path = "" if folder is None else str(Path(folder).expanduser().absolute())
        return cls(held, model.lora, path, f"{model.dtype}:{digest}")

    @property
    def spec(self) -> LoraSpec:
        return spec_of_lora(self.held.whole, self.lora)

    def takes(self, tag: str, num_steps: int) -> bool:
        """Whether the model equals the frozen weights; if so, adds `tag` without a copy."""
        is_base = num_steps == 0 and self.lora.init_path is None
        if is_base and tag not in self.tags:
            self.tags.append(tag)
        elif not is_base and tag in self.tags:
            self.tags.remove(tag)
        return is_base

    def load_tag(self, tag: str, weights: str | Path) -> None:
        """Adds a tag for the frozen weights, which need no copy; other weights are rejected."""
        if str(Path(weights).expanduser().absolute()) != self.path:
            raise RunError(
                f"the tag {tag} is to be {weights}, and beside an adapter a learner holds no other "
                f"weights than {self.path}"
            )
        if tag not in self.tags:
            self.tags.append(tag)

    @torch.no_grad()
    def shake(
        self, tensors: Mapping[str, Tensor], cuts: Mapping[str, Cut], strength: float
    ) -> None:
        """Sets B to random values, the same for any layout; strength 0 restores the original
        ones."""
        if not strength:
            for name, tensor in self.kept.items():
                tensors[name].copy_(tensor)
            self.kept = {}
            return
        names = [name for name in tensors if name.endswith(".b")]
        self.kept = self.kept or {name: tensors[name].clone() for name in names}
        for name in self.kept:
            generator = torch.Generator().manual_seed(derive_seed(0, "shake", name))
            noise = strength * SHAKE * torch.randn(cuts[name].shape, generator=generator)
            tensors[name].copy_(cuts[name].take(noise))

    def to_offload(self) -> Iterable[Tensor]:
        """Tensors that are offloaded with the rest of the learner."""
        return [] if self.is_shared else self.held.frozen().values()

    def counters(self) -> dict[str, Any]:
        keys = self.lora.model_dump(mode="json", exclude={"init_path"})
        return {**keys, "base": self.path, "digest": self.digest, "off": list(self.tags)}


def spec_of_lora(model: LanguageModel, lora: LoraConfig) -> LoraSpec:
    """Returns the adapter of `actor.lora` for a model, in the form of PEFT files."""
    words = model.lora_words(lora)
    experts = lora.experts if "experts" in words else "each"
    return LoraSpec(lora.rank, lora.alpha, tuple(sorted(words)), experts)


def restored_tags(base: FrozenBase | None, saved: Mapping[str, Any] | None) -> list[str]:
    """Returns the tags of a checkpoint that refer to the frozen weights without factors. RunError
    if it has another adapter, or other frozen weights, than this engine."""
    if base is None or saved is None:
        if base is None and saved is None:
            return []
        holds, wants = ("an adapter", "all weights") if saved else ("all weights", "an adapter")
        raise RunError(
            f"the checkpoint holds {holds}, and this run trains {wants}: set actor.lora as it was, "
            "or start under another trial_name"
        )
    mine = base.counters()
    for key in ("rank", "alpha", "targets", "experts"):
        if saved[key] != mine[key]:
            raise RunError(
                f"the checkpoint's adapter has actor.lora.{key} = {saved[key]}, and this run has "
                f"{mine[key]}: set it as it was, or start under another trial_name"
            )
    dtype, _, digest = str(saved["digest"]).partition(":")
    own_dtype, _, own = base.digest.partition(":")
    if dtype == own_dtype and digest != own:
        raise RunError(
            f"the checkpoint's adapter was trained on the weights of {saved['base']} with digest "
            f"{digest}, and those of {base.path} have {own}: the folder has changed, or it is "
            "another model; give the one that the run was started with"
        )
    base.tags = list(saved["off"])
    return base.tags
