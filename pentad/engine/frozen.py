"""The frozen weights that an adapter stands on: where they are from, and the tags that they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import RunError
from pentad.core.seeds import derive_seed
from pentad.engine.held import HeldModel
from pentad.engine.section import LoraConfig, ModelConfig
from pentad.models.families import lora_words
from pentad.ops.digest import digest_of
from pentad.parallel.cuts import Cut
from pentad.weights.peft import LoraSpec

BASE = "base"
"""The tag of the frozen weights alone, whatever others mean them too."""
SHAKE = 1e-2
"""Size of a test's B at strength 1."""


@dataclass(eq=False)
class FrozenBase:
    """A reference that is the model before its first step costs nothing: it is the frozen weights
    with the factors off."""

    held: HeldModel
    lora: LoraConfig
    path: str
    """The folder they were read from; empty: they are random."""
    digest: str
    """Digest of their bytes in the dtype in which they are held, after its name."""
    tags: list[str] = field(default_factory=list)
    """Names under which the frozen weights alone are used."""
    is_shared: bool = False
    """A sampler of this process computes with the same tensors."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Factors as they are, while a test has others in their place."""

    @classmethod
    def of(cls, held: HeldModel, model: ModelConfig, folder: str | Path | None) -> FrozenBase:
        """All ranks call it."""
        assert model.lora is not None, "without factors nothing is frozen"
        digest = digest_of(held.iter_hf(DTYPES[model.dtype], is_frozen=True)).hex()
        path = "" if folder is None else str(Path(folder).expanduser().absolute())
        return cls(held, model.lora, path, f"{model.dtype}:{digest}")

    @property
    def spec(self) -> LoraSpec:
        return spec_of_lora(self.held.whole.dims, self.lora)

    def takes(self, tag: str, num_steps: int) -> bool:
        """Whether the model as it is now is the frozen weights alone, which `tag` then means."""
        is_base = num_steps == 0 and self.lora.init_path is None
        if is_base and tag not in self.tags:
            self.tags.append(tag)
        elif not is_base and tag in self.tags:
            self.tags.remove(tag)
        return is_base

    def load_tag(self, tag: str, weights: str | Path) -> None:
        """Adds a tag for the frozen weights, which need no copy; other weights are refused."""
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
        """Random B, the same on any layout; with strength 0 what was there before."""
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
        """What leaves the device with the rest of the learner."""
        return [] if self.is_shared else self.held.frozen().values()

    def counters(self) -> dict[str, Any]:
        keys = self.lora.model_dump(mode="json", exclude={"init_path"})
        return {**keys, "base": self.path, "digest": self.digest, "off": list(self.tags)}


def spec_of_lora(dims: ModelDims, lora: LoraConfig) -> LoraSpec:
    """What `actor.lora` means for a model, as files say it."""
    words = lora_words(dims, lora)
    experts = lora.experts if "experts" in words else "each"
    return LoraSpec(lora.rank, lora.alpha, tuple(sorted(words)), experts)


def restored_tags(base: FrozenBase | None, saved: Mapping[str, Any] | None) -> list[str]:
    """The tags of a checkpoint that are the frozen weights alone. RunError where it is of another
    adapter, or of other frozen weights, than this engine."""
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
