"""AdamW over named parameters: groups, state that exists from the start, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from pentad.core.settings import OptimizerSettings

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def build_adamw(
    parameters: Mapping[str, Tensor], settings: OptimizerSettings, undecayed: Container[str] = ()
) -> torch.optim.AdamW:
    """Over this rank's memory of the parameters: every operation is elementwise.

    Matrices are decayed but for those named in `undecayed`.
    """

    def is_decayed(name: str, parameter: Tensor) -> bool:
        return parameter.ndim >= 2 and name not in undecayed

    decayed = [p for name, p in parameters.items() if is_decayed(name, p)]
    plain = [p for name, p in parameters.items() if not is_decayed(name, p)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    # From the start, so that memory is known and a checkpoint can be loaded before a step.
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def optimizer_state(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """state[key][name]: by name, so it does not depend on the order or grouping of parameters."""
    return {
        key: {name: optimizer.state[parameter][key] for name, parameter in parameters.items()}
        for key in STATE_KEYS
    }


def compute_lr(settings: OptimizerSettings, step: int) -> float:
    """Of the step with this index, counted from 0: a pure function, so there is nothing to save.

    Warm-up rises linearly over w = proportion * total steps and reaches `lr` at step w - 1; then
    linear or cosine falls from `lr` to `min_lr_ratio * lr`, which it reaches at step `total`.
    """
    total = settings.total_steps or 0
    num_warmup = round(settings.warmup_steps_proportion * total)
    if step < num_warmup:
        return settings.lr * (step + 1) / num_warmup
    if settings.lr_scheduler_type == "constant":
        return settings.lr
    done = min(1.0, (step - num_warmup) / max(1, total - num_warmup))
    left = 1.0 - done
    if settings.lr_scheduler_type == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)


def clip_scale(norm: float, max_norm: float | None) -> float:
    """What the gradient is multiplied by so that its norm is at most `max_norm`, exactly."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
