"""Merges a LoRA adapter into its base weights and measures the rounding loss.

W + scale B A is computed in float32 and rounded to the dtype of the folder. In 16 bits, updates
much smaller than the weights are rounded away, so the loss is measured and reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.folders import read_object
from pentad.weights.hf import HfFolder, plan_folder, save_folder
from pentad.weights.peft import Adapter, fit_problems
from pentad.weights.regions import full_box
from pentad.weights.transfer import TensorInfo


@dataclass(slots=True)
class MergeLoss:
    """Rounding error of the update of the adapted weights."""

    dtype: str
    num_weights: int = 0
    num_changed: int = 0
    update: float = 0.0
    """Sum of the squares of the update."""
    error: float = 0.0
    """Sum of the squares of the rounding error of the merged weights."""

    @property
    def lost(self) -> float:
        """Norm of the error relative to the norm of the update; 0 for a zero update."""
        return (self.error / self.update) ** 0.5 if self.update else 0.0

    @property
    def changed(self) -> float:
        return self.num_changed / self.num_weights if self.num_weights else 0.0

    def __str__(self) -> str:
        return (
            f"merged in {self.dtype}: {self.lost:.1%} of the update was lost to rounding, "
            f"{self.changed:.1%} of the {self.num_weights:,} adapted weights changed"
        )


@torch.no_grad()
def merge_weight(
    weight: Tensor, pair: tuple[Tensor, Tensor], scale: float, dtype: torch.dtype, loss: MergeLoss
) -> Tensor:
    """Returns the merged weight in `dtype` and adds its rounding error to `loss`."""
    a, b = (factor.to(weight.device, torch.float32) for factor in pair)
    base = weight.float()
    update = (b @ a).mul_(scale)
    out = (base + update).to(dtype)
    moved = out.float() - base
    loss.num_weights += weight.numel()
    loss.num_changed += int(moved.count_nonzero())
    loss.update += float(update.double().square().sum())
    loss.error += float((moved - update).double().square().sum())
    return out


def merge_folder(
    base: str | Path,
    adapter: Adapter,
    target: str | Path,
    dtype: str | None,
    where: str,
    names: Mapping[str, str],
) -> MergeLoss:
    """Writes a HF folder with the adapter merged; `where` names the adapter in messages, `names`
    gives the names in the base by the adapter's. Tensors of other towers are copied as they are."""
    folder = HfFolder(base)
    adapted = {name: folder.infos[held] for name, held in names.items()}
    raise_problems(fit_problems(adapter, adapted, where, str(base)))
    if dtype is not None and dtype not in DTYPES:
        raise UserError(Problem(f"--dtype {dtype}", f"is not one of {', '.join(DTYPES)}"))
    modules = {names[f"{module}.weight"]: module for module in adapter.modules}
    held = folder.infos[min(modules)].dtype
    if not held.is_floating_point or held.itemsize < 2:
        rule = f"its weights are {held}, to which nothing can be added"
        raise UserError(Problem(str(base), rule, "merge into the folder they were made from"))
    loss = MergeLoss(dtype or str(held).removeprefix("torch."))
    of_text = set(names.values())
    infos = {
        name: TensorInfo(info.shape, _dtype(info.dtype, dtype if name in of_text else None))
        for name, info in folder.infos.items()
    }

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name, info in infos.items():
            weight = folder.read(name, full_box(info.shape))
            if name in modules:
                pair = adapter.pair(modules[name])
                yield name, merge_weight(weight, pair, adapter.spec.scale, info.dtype, loss)
            else:
                yield name, weight.to(info.dtype)

    config = read_object(Path(base) / "config.json")
    if dtype is not None:
        for one in filter(None, (config, config.get("text_config"))):
            one.pop("torch_dtype", None)
            one["dtype"] = dtype
    save_folder(target, pairs(), plan_folder(infos, config, companions=[base]))
    return loss


def _dtype(held: torch.dtype, asked: str | None) -> torch.dtype:
    is_number = held.is_floating_point and held.itemsize >= 2
    return DTYPES[asked] if asked is not None and is_number else held
