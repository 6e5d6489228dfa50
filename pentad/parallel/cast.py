"""Master weights of one rank, cast for compute: what FSDP2 does elsewhere, without its copies.

From the first forward pass until `rest`, modules hold copies of their parameters in compute dtype,
made once for all microbatches. A copy's gradient is added to its master's as soon as backward has
made it. Outside, modules hold the masters and the copies have no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

try:
    from pentad.ops.sum_kernel import add_into
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True


class CastWeights:
    """A forward pre-hook of the module that everything is called through."""

    def __init__(self, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        """`dtypes` by parameter name; those that are kept in theirs need no copy."""
        self.places = {
            f"{name}.{key}".removeprefix("."): (module, key)
            for name, module in model.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
            if dtypes[f"{name}.{key}".removeprefix(".")] != parameter.dtype
        }
        self.dtypes = dtypes
        self.masters: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}
        self.is_in_use = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.is_in_use:
            return
        if not self.copies:
            self._make_copies()
        for copy in self.copies.values():
            copy.untyped_storage().resize_(copy.nbytes)
        with torch.no_grad():
            torch._foreach_copy_(list(self.copies.values()), list(self.masters.values()))
        self._place(self.copies)
        self.is_in_use = True

    def rest(self) -> None:
        """Puts the masters back in place."""
        if not self.is_in_use:
            return
        self._place(self.masters)
        for copy in self.copies.values():
            copy.untyped_storage().resize_(0)
        self.is_in_use = False

    def _place(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, (module, key) in self.places.items():
            setattr(module, key, parameters[name])

    def _make_copies(self) -> None:
        """Not before they are used: until then masters may have no memory, or get another."""
        for name, (module, key) in self.places.items():
            master = module.get_parameter(key)
            copy = nn.Parameter(torch.empty_like(master, dtype=self.dtypes[name]))
            copy.register_post_accumulate_grad_hook(partial(_hand_over, master))
            self.masters[name], self.copies[name] = master, copy


def _hand_over(master: nn.Parameter, copy: nn.Parameter) -> None:
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        _add(master.grad, copy.grad)
    copy.grad = None


def _add(total: Tensor, part: Tensor) -> None:
    is_plain = total.is_contiguous() and part.is_contiguous()
    if HAS_TRITON and total.is_cuda and is_plain:
        add_into(total, part)
    else:
        total.add_(part)
