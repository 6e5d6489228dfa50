"""Where the parts of a model meet other ranks' parts, as data that a model file declares.

Under tensor parallelism the residual stream is dealt over the ranks by tokens (sequence
parallelism), while projections are cut by heads or columns and need all tokens. A seam names a
module at which one form becomes the other. Models know no ranks; `parallel.tensor` reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pentad.core.dims import ModelDims


def always(dims: ModelDims, layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Seam:
    """One kind of module. Example: Seam("layers.{i}.attn", "gather"), {i} counts layers."""

    module: str
    kind: Literal["lookup", "gather", "scatter"]
    """lookup: a table cut by rows; what each rank finds is summed and dealt by tokens.
    gather: the module takes all tokens; its first argument is put together from the ranks.
    scatter: its product is a part of a sum; the sum is dealt by tokens, a bias added after it."""
    when: Callable[[ModelDims, int], bool] = always
