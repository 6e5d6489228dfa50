"""How far float32 results may be apart that differ only in the order of their sums.

Kernels choose that order by machine and by the shape of a batch. What they round is as large as the
largest number, not as the one compared, so limits are relative to that.
"""

import torch
from torch import Tensor

ROUNDING = 1e-5
"""Of the largest number: 170 roundings of float32. Models of two to four layers are off by 1e-6 of
their largest logit on x86 and by 2e-6 on ARM. A weight that is off by 1e-4, bfloat16 anywhere
(4e-3), and a key or a position left out (1e-2 and more) are beyond it."""


def assert_close(found: Tensor, wanted: Tensor, scale: float | None = None) -> None:
    """Every element, relative to the largest wanted one or to what it was computed from."""
    scale = float(wanted.detach().abs().max()) if scale is None else scale
    torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING * scale)


def assert_logprobs(found, logits_TV: Tensor, ids) -> None:
    """Log-probs of `ids` as they were reported, against logits at their temperature."""
    wanted = logits_TV.log_softmax(-1).gather(1, torch.as_tensor(ids)[:, None]).squeeze(1)
    assert_close(torch.as_tensor(found), wanted, scale_of(logits_TV))


def assert_stepped(name: str, found: Tensor, wanted: Tensor, gradient: Tensor | None, noise: float):
    """Weights after a first step of AdamW at lr 1e-2, which moves each weight by about lr, whatever
    the size of its gradient. Gradients within rounding (`noise` of the largest) have any sign."""
    is_off = (found - wanted).abs() > 5e-4 + 1e-3 * wanted.abs()
    which = f"{name}: {is_off.sum()} of {is_off.numel()}"
    assert is_off.sum() <= max(1, is_off.numel() // 100), which
    if gradient is not None:
        is_off &= gradient.abs() > 10 * noise * gradient.abs().max()
    assert not is_off.any(), f"{which}, with clear gradients"


def scale_of(logits: Tensor) -> float:
    return float(logits.detach().abs().max())
