"""Replaces the implementation of a built layer: another class, the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def swap_class(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Changes the module's class to `cls`, a subclass of its class, and sets further attributes.

    Parameters, buffers, hooks and names stay, so weight maps, FSDP and optimizers see the same
    model. A class instead of a `forward` of the instance, because the compiler shares code among
    modules of one class.
    """
    assert issubclass(cls, type(module)), f"{cls.__name__} is no {type(module).__name__}"
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)


def swap_classes(model: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Every layer of exactly this class."""
    for module in list(model.modules()):
        if type(module) in classes:
            swap_class(module, classes[type(module)])
