"""Replaces the implementation of an existing layer by another class with the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def swap_class(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Changes the module's class to `cls`, a subclass of its class, and sets further attributes.

    Parameters, buffers, hooks and names are kept, so nothing changes for weight maps, FSDP and
    optimizers. The class is changed, not `forward` of the instance, because the compiler shares
    code between modules of a class.
    """
    assert issubclass(cls, type(module)), f"{cls.__name__} is no {type(module).__name__}"
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)


def swap_classes(model: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Applies `swap_class` to all layers with exactly these classes."""
    for module in list(model.modules()):
        if type(module) in classes:
            swap_class(module, classes[type(module)])
