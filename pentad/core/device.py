"""Which device this process computes on."""

from __future__ import annotations

import torch

from pentad.core.errors import Problem, UserError


def pick_device(wanted: str = "auto") -> torch.device:
    """The first GPU if there is one, unless another is named."""
    has_gpu = torch.cuda.is_available()
    if wanted == "auto":
        return torch.device("cuda:0" if has_gpu else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        rule = "no such device"
        raise UserError(Problem(f"device = {wanted}", rule, "give auto, cpu or cuda")) from error
    if device.type == "cuda" and not has_gpu:
        rule = "torch finds no GPU"
        raise UserError(Problem(f"device = {wanted}", rule, "give cpu, or see pentad doctor"))
    return torch.device("cuda:0") if wanted == "cuda" else device
