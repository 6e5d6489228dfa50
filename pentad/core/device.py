"""Which device this process computes on."""

from __future__ import annotations

import torch

from pentad.core.errors import Problem, UserError
from pentad.core.machine import GpuQueryError, find_gpus


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


def gpu_name(device: torch.device) -> str:
    """Asked of the driver's program, where there is one: torch would take memory of the GPU to
    answer, and the scheduler of a run has none."""
    try:
        gpus = find_gpus()
    except GpuQueryError:
        gpus = ()
    index = device.index or 0
    return gpus[index].name if index < len(gpus) else torch.cuda.get_device_name(device)
