"""LoRA: factors beside frozen weights. A layer computes x W^T + scale * (x A^T) B^T, unmerged.

Learner and sampler apply it to their instances of one model. Merged into 16-bit weights, a small
update would be lost in rounding; unmerged, both sides compute with the same numbers in the same
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.swap import swap_class
from pentad.engine.section import LoraConfig
from pentad.models.hf_weights import native_shards
from pentad.models.language_model import LanguageModel
from pentad.models.layers import Linear
from pentad.models.moe import Experts
from pentad.models.strict import StrictExperts, StrictGateUp, StrictLinear
from pentad.ops import invariant
from pentad.ops.experts import grouped_linear
from pentad.weights import transfer
from pentad.weights.transfer import RandomReader, Reader

STRICT = (StrictLinear, StrictGateUp, StrictExperts)
PAIRS = (".gate_up.lora", ".gate_up_lora")
"""Suffixes of modules with factors of gate and up on a separate axis."""


class AddsFactors(Protocol):
    def product(self, x_TI: Tensor) -> Tensor: ...
    def gated(self, x_TI: Tensor) -> Tensor: ...


class GivesRows(Protocol):
    def rows(self, x_NI: Tensor, ends_E: Tensor) -> Tensor: ...


class Factors(nn.Module):
    """A and B of one matrix, or of several with one input on leading axes: a pair (gate and up),
    experts.

    Kept in float32; products are in the dtype of their input.
    """

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], scale: float, strict: bool) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "meta"}
        self.a = nn.Parameter(torch.empty(a, **kind))
        self.b = nn.Parameter(torch.empty(b, **kind))
        self.scale = scale
        self.strict = strict
        self.num_planes = 1
        """Number of matrices: two if gate and up have a separate axis."""
        self.is_on = True
        self.joined: AddsFactors | None = None
        """In a sampler with kernels: object that computes the output of the layer instead, with
        copies of the factors."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Adds the product of the factors with the input to the output of the frozen matrix."""
        return y_TO + self(x_TI) if self.is_on else y_TO

    def forward(self, x_TI: Tensor) -> Tensor:
        product = invariant.linear if self.strict else F.linear
        a, b = self.a.to(x_TI.dtype), self.b.to(x_TI.dtype)
        if self.num_planes == 1:
            return product(product(x_TI, a), b) * self.scale
        h_TR = product(x_TI, a.flatten(0, 1))
        parts = zip(h_TR.chunk(len(b), dim=-1), b.unbind(), strict=True)
        return (
            torch.cat([product(h_Tr.contiguous(), b_Or) for h_Tr, b_Or in parts], -1) * self.scale
        )


class ExpertFactors(Factors):
    """Factors of stacked experts, for rows sorted by expert. All experts share a factor that has no
    expert axis."""

    stacked: GivesRows | None = None
    """Like `joined`, for experts."""

    def rows(self, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        if self.stacked is not None:
            return self.stacked.rows(x_NI, ends_E)
        a, b = self.a.to(x_NI.dtype), self.b.to(x_NI.dtype)
        h_NR = self._product(x_NI, self._flat(a), ends_E)
        if self.num_planes == 1:
            return self._product(h_NR, b, ends_E) * self.scale
        halves = zip(h_NR.chunk(2, dim=-1), b.unbind(-3), strict=True)
        parts = [self._product(h.contiguous(), one.contiguous(), ends_E) for h, one in halves]
        return torch.cat(parts, -1) * self.scale

    def _flat(self, a: Tensor) -> Tensor:
        return a.flatten(-3, -2) if self.num_planes == 2 else a

    def _product(self, x_NI: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
        if weight.ndim == 2:
            return invariant.linear(x_NI, weight) if self.strict else F.linear(x_NI, weight)
        grouped = invariant.grouped_linear if self.strict else grouped_linear
        return grouped(x_NI, weight, ends_E)


class TrainedHead(Linear):
    """The head of a critic that is trained beside frozen weights, in float32 like factors."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight)


@cache
def _adapted(cls: Any) -> type[nn.Module]:
    class Adapted(cls):
        lora: Factors

        def forward(self, x_TI: Tensor) -> Tensor:
            if self.lora.joined is not None:
                return self.lora.joined.product(x_TI)
            y_TO: Tensor = super().forward(x_TI)
            return self.lora.add_to(y_TO, x_TI)

    return Adapted


@cache
def _adapted_experts(cls: Any) -> type[nn.Module]:
    """A subclass of a kind of `Experts` that adds the factors to each product."""

    class AdaptedExperts(cls):
        gate_up_lora: ExpertFactors
        down_lora: ExpertFactors

        def forward(self, x_ND: Tensor, sizes_E: Tensor, weights_N: Tensor | None = None) -> Tensor:
            if not self.gate_up_lora.is_on:
                y_ND: Tensor = super().forward(x_ND, sizes_E, weights_N)
                return y_ND
            ends_E = sizes_E.cumsum(0, dtype=torch.int32)
            h_NG = self.opened(x_ND, ends_E) + self.gate_up_lora.rows(x_ND, ends_E)
            a_NM = self.mul(h_NG, weights_N)
            y_ND = self.linear(a_NM, self.down, ends_E)
            return y_ND + self.down_lora.rows(a_NM, ends_E)

    return AdaptedExperts


MAKE: Callable[[type], type[nn.Module]] = _adapted
MAKE_EXPERTS: Callable[[type], type[nn.Module]] = _adapted_experts


def apply_lora(model: LanguageModel, lora: LoraConfig) -> None:
    """Freezes the model and adds factors without memory to its layers. Call it after `apply_strict`
    and everything else that changes classes of layers."""
    model.requires_grad_(False)
    model.adapter_map = model.lora_map(lora)
    if model.value_head is not None:
        swap_class(model.value_head, TrainedHead)
        wide = torch.empty_like(model.value_head.weight, dtype=torch.float32)
        model.value_head.weight = nn.Parameter(wide)
    modules, entries = dict(model.named_modules()), model.adapter_map.entries
    for name in [name for name in entries if name.endswith(".a")]:
        place = name.removesuffix(".a")
        path, _, key = place.rpartition(".")
        host = modules.get(path)
        if host is None:  # in another pipeline stage
            continue
        shapes = entries[name].shape, entries[f"{place}.b"].shape
        make, kind = (MAKE_EXPERTS, ExpertFactors) if isinstance(host, Experts) else (MAKE, Factors)
        factors = kind(*shapes, lora.scale, isinstance(host, STRICT))
        factors.num_planes = 2 if place.endswith(PAIRS) else 1
        if key != "down_lora":  # one class for both matrices of experts
            swap_class(host, make(type(host)))
        host.add_module(key, factors)


@torch.no_grad()
def blank_factors(model: nn.Module, device: torch.device) -> None:
    """Allocates factors before an install; until then they are NaN."""
    for factors in factors_of(model):
        factors.to_empty(device=device)
        for factor in factors.parameters():
            factor.fill_(math.nan)


@torch.no_grad()
def share_weights(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Makes a model without memory use the tensors of another model, by native name."""
    for name, module in list(model.named_modules()):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                given = tensors[f"{name}.{key}".removeprefix(".")].detach()
                is_weight = key in module._parameters
                setattr(
                    module, key, nn.Parameter(given, requires_grad=False) if is_weight else given
                )


def factors_of(model: nn.Module) -> list[Factors]:
    return [module for module in model.modules() if isinstance(module, Factors)]


@contextmanager
def switched_off(factors: list[Factors]) -> Iterator[None]:
    """Context in which factors are disabled, without extra memory."""
    for one in factors:
        one.is_on = False
    try:
        yield
    finally:
        for one in factors:
            one.is_on = True


def fill_factors(model: LanguageModel, seed: int, reader: Reader | None = None) -> None:
    """Initialises the factors (B is 0, so the model is unchanged), or reads them."""
    assert model.adapter_map is not None, "apply_lora comes first"
    shards = native_shards(model, model.adapter_map)
    reader = reader or RandomReader(model.adapter_map, shards, seed)
    transfer.fill(shards, model.adapter_map, reader, must_be_finite=True)
