"""Replaces attention in transformers' models by Pentad's core for packed rows.

The core is passed as a keyword through the model's forward, so that no state is shared between
passes and a recomputed block uses the same core. In some families the window is only in the mask
that transformers builds. So a probe pass is run once with masks that describe themselves, and each
attention module stores the window of its mask.

Shapes: T packed tokens, H query heads, K key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pentad.core.errors import Problem, UserError
from pentad.core.types import Attend

NAME = "pentad"
"""The attention implementation of the models. transformers builds no mask for it."""
PROBE = "pentad_probe"
"""The attention implementation of the probe, with masks that describe themselves."""
WINDOW = "pentad_window"
"""Attribute of an attention module with its window."""
CORE = "pentad_attend"
"""Keyword argument with the core."""
WITHOUT_EFFECT = {
    "cache_position",
    "dropout",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "sliding_window",
    "use_cache",
}
"""Keyword arguments of attention calls that are ignored: models run in eval mode, queries and keys
are already rotated, and windows are known from the masks."""


class NoCoreError(Exception):
    """The model does not pass keyword arguments to its attention."""


class CallNote:
    """A core without computation that records heads and width of the keys of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        self.calls.append((k_TKd.shape[1], k_TKd.shape[2]))
        return torch.zeros_like(q_THd)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of [S, H, T, d] queries and [S, K, T, d] keys and values; returns [S, T, H, d].
    Several rows have T tokens each, which the core gets one row after the other."""
    core: Attend | None = others.pop(CORE, None)
    if core is None:
        raise NoCoreError(type(module).__name__)
    own = getattr(module, "is_causal", True)  # transformers' default
    _refuse_unknown(module, attention_mask, own if is_causal is None else is_causal, others)
    # Models transpose them from [T, heads, d], so nothing is copied.
    q_THd, k_TKd, v_TKd = (
        x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value)
    )
    width, value_width = q_THd.shape[-1], v_TKd.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        q_THd = q_THd * (scaling * width**0.5)  # cores scale by the width
    if value_width < width:  # cores need equal widths
        v_TKd = F.pad(v_TKd, (0, width - value_width))
    window: int | None = vars(module).get(WINDOW)
    given = {"window": window, "cap": softcap}
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    # Cores for packed rows ignore the layer, and reading its number would recompile each block.
    o_THd = core(0, q_THd, k_TKd, v_TKd, **options)
    return o_THd[..., :value_width].unflatten(0, (len(query), -1)), None


def _refuse_unknown(
    module: nn.Module, mask: Tensor | None, is_causal: bool, others: dict[str, Any]
) -> None:
    """Raises UserError for arguments that the core does not support."""
    unknown = sorted(k for k, v in others.items() if v is not None and k not in WITHOUT_EFFECT)
    if mask is not None:
        unknown.append("attention_mask")
    if not is_causal:
        unknown.append("is_causal=False")
    if unknown:
        what = {
            "s_aux": "s_aux (attention sinks)",
            "is_causal=False": "is_causal=False (tokens attend to later ones)",
        }
        named = ", ".join(what.get(name, name) for name in unknown)
        rule = f"its attention needs {named}, which packed attention does not compute"
        raise UserError(Problem(f"attention of {type(module).__name__}", rule))


@dataclass(frozen=True, slots=True)
class Sliding:
    """Replaces a mask: every token attends to `width` tokens, itself included."""

    width: int


def describe_mask(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, **others: Any
) -> Sliding | None:
    """Replaces transformers' mask creation; returns the window, or None for plain causal."""
    far = 2 * (local_size or 4)
    q_Q1 = torch.tensor([0, 1, far // 2 - 1, far // 2, far // 2 + 1, far], device="cpu")[:, None]
    k_1K = torch.arange(far + 2, device="cpu")[None]
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    seen_QK = mask_function(zero, zero, q_Q1, k_1K).expand(len(q_Q1), far + 2)
    expected_QK = k_1K <= q_Q1
    if local_size is not None:
        expected_QK = expected_QK & (q_Q1 - k_1K < local_size)
    if not torch.equal(seen_QK, expected_QK):
        rule = "it masks attention otherwise than causally, within a window or without"
        raise UserError(Problem("attention mask", rule))
    return None if local_size is None else Sliding(local_size)


def attend_probed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sliding | Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`attend_packed`; stores the mask's window in the module."""
    width = attention_mask.width if isinstance(attention_mask, Sliding) else None
    mask = None if isinstance(attention_mask, Sliding) else attention_mask
    if vars(module).setdefault(WINDOW, width) != width:
        rule = "an attention module gets windows of different widths"
        raise UserError(Problem(f"attention of {type(module).__name__}", rule))
    return attend_packed(module, query, key, value, mask, **others)


AttentionInterface.register(NAME, attend_packed)
AttentionInterface.register(PROBE, attend_probed)
AttentionMaskInterface.register(PROBE, describe_mask)
