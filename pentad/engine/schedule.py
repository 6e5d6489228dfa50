"""The learning rate as a pure function of the step: nothing to save, nothing to drift."""

from __future__ import annotations

import math

from pentad.engine.settings import OptimizerSettings


def compute_lr(settings: OptimizerSettings, step: int) -> float:
    """Of the step with this index, counted from 0.

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
