"""An optimizer step: the accumulated gradient, AdamW over named parameters, and the learning
rate."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pentad.core.seeds import derive_seed
from pentad.engine.section import OptimizerConfig
from pentad.ops import rounding
from pentad.ops.rounding import Place
from pentad.parallel.cuts import Cut
from pentad.weights.regions import full_box

try:
    from pentad.ops import adamw_kernel
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
LARGE = 2**24
"""Minimum number of elements for which a tensor on a GPU gets a separate kernel launch."""
Moved = tuple[Tensor, Tensor, dict[str, Tensor]]
"""A parameter, its gradient and its state."""


class FusedAdamW:
    """Same computation and kernels as `torch.optim.AdamW(fused=True)`, whose first step imports
    torch's compiler, which takes seconds at every start. bfloat16 parameters and state are rounded
    stochastically (`ops.rounding`)."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        keys: OptimizerConfig,
        decayed: Container[str] = (),
        cuts: Mapping[str, Cut] | None = None,
        seed: int = 0,
    ) -> None:
        """Works on this rank's shards, because every operation is elementwise. Weight decay applies
        to the parameters in `decayed`. Random bits depend on `seed`, the names, and the position of
        the shards (`cuts`) in whole tensors."""
        self.lr, self.keys, self.seed = keys.lr, keys, seed
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.places = {
            name: cuts[name].place if cuts else Place.of(p.shape, full_box(p.shape))
            for name, p in parameters.items()
        }
        self.groups = [
            (decay, group)
            for decay, is_in in ((keys.weight_decay, True), (0.0, False))
            if (group := [p for name, p in parameters.items() if (name in decayed) == is_in])
        ]
        # Allocated here, so that memory is known and a checkpoint can be loaded before a step.
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
            for parameter in parameters.values()
        }

    @torch.no_grad()
    def step(self, scale: float = 1.0, number: int = 0) -> None:
        """Updates the parameters that have a gradient, which is scaled by `scale` and consumed. The
        step's `number` seeds its random bits."""
        for weight_decay, group in self.groups:
            moved = [(p, p.grad, self.state[p]) for p in group if p.grad is not None]
            alone = [one for one in moved if _is_rounded(one) or _is_large(one)]
            small = [one for one in moved if not (_is_rounded(one) or _is_large(one))]
            self._move_small(small, scale, weight_decay)
            self._move_alone(alone, scale, weight_decay, number)

    def _move_small(self, moved: list[Moved], scale: float, weight_decay: float) -> None:
        if not moved:
            return
        gradients = [gradient for _, gradient, _ in moved]
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        adamw(
            [parameter for parameter, _, _ in moved],
            gradients,
            [state["exp_avg"] for _, _, state in moved],
            [state["exp_avg_sq"] for _, _, state in moved],
            [],
            [state["step"] for _, _, state in moved],
            fused=True,
            amsgrad=False,
            beta1=self.keys.beta1,
            beta2=self.keys.beta2,
            lr=self.lr,
            weight_decay=weight_decay,
            eps=self.keys.eps,
            maximize=False,
        )

    def _move_alone(
        self, moved: list[Moved], scale: float, weight_decay: float, number: int
    ) -> None:
        """Updates the tensors one at a time."""
        if not moved:
            return
        beta1, beta2 = self.keys.beta1, self.keys.beta2
        steps = [state["step"] for _, _, state in moved]
        torch._foreach_add_(steps, 1)
        steps_N = torch.stack(steps).double()
        corrections_N2 = torch.stack([1 - beta1**steps_N, (1 - beta2**steps_N).sqrt()], 1).float()
        for one, corrections in zip(moved, corrections_N2, strict=True):
            parameter, gradient, state = one
            name = self.names[parameter]
            is_plain = _is_rounded(one) and not _has_kernel(one)
            move = rounding.move if is_plain else adamw_kernel.move
            move(
                parameter,
                gradient,
                state["exp_avg"],
                state["exp_avg_sq"],
                corrections,
                scale=scale,
                lr=self.lr,
                beta1=beta1,
                beta2=beta2,
                eps=self.keys.eps,
                weight_decay=weight_decay,
                key=derive_seed(self.seed, "round", name, number),
                place=self.places[name],
            )


def _is_rounded(moved: Moved) -> bool:
    """Whether the dtype is too short for small updates, so that rounding is stochastic."""
    return moved[0].dtype == torch.bfloat16


def _is_large(moved: Moved) -> bool:
    parameter = moved[0]
    is_fit = parameter.numel() >= LARGE and parameter.dtype != torch.float64
    return is_fit and _has_kernel(moved)


def _has_kernel(moved: Moved) -> bool:
    parameter, gradient, state = moved
    tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
    return HAS_TRITON and all(x.is_cuda and x.is_contiguous() for x in tensors)


def optimizer_state(
    parameters: Mapping[str, Tensor], optimizer: FusedAdamW
) -> dict[str, dict[str, Tensor]]:
    """Returns state[key][name], independent of the order and grouping of parameters."""
    return {
        key: {name: optimizer.state[parameter][key] for name, parameter in parameters.items()}
        for key in STATE_KEYS
    }


def compute_lr(keys: OptimizerConfig, step: int, total: int) -> float:
    """Returns the learning rate of a step, counted from 0: a pure function, without state to save.

    Warm-up rises linearly over w = proportion * total steps and reaches `lr` at step w - 1; then
    linear or cosine falls from `lr` to `min_lr_ratio * lr`, which it reaches at step `total`.
    """
    num_warmup = round(keys.warmup_steps_proportion * total)
    if step < num_warmup:
        return keys.lr * (step + 1) / num_warmup
    if keys.lr_scheduler_type == "constant":
        return keys.lr
    done = min(1.0, (step - num_warmup) / max(1, total - num_warmup))
    left = 1.0 - done
    if keys.lr_scheduler_type == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    return keys.lr * (keys.min_lr_ratio + (1.0 - keys.min_lr_ratio) * left)


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Returns the factor of the gradient that limits its norm to `max_norm`, exactly."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


@dataclass(frozen=True, slots=True)
class WholeGradient:
    shards: dict[str, Tensor]
    """This rank's shards, by name."""
    square: Tensor
    """Square of the norm over all ranks, on the device."""


@dataclass(slots=True)
class OpenStep:
    optimizer: FusedAdamW
    loss_sum: float = 0.0
    count: float = 0.0
    num_tokens: int = 0
    num_microbatches: int = 0
    left_out: list[int] = field(default_factory=list)
    whole: WholeGradient | None = None
    """None until the last rows are added."""

    def add(self, loss_sum: float, count: float, num_tokens: int, num_microbatches: int) -> None:
        self.loss_sum += loss_sum
        self.count += count
        self.num_tokens += num_tokens
        self.num_microbatches += num_microbatches

    def scale(self, norm: float) -> float:
        """Returns the factor of the gradient of the summed loss."""
        return clip_scale(norm, self.optimizer.keys.gradient_clipping) / self.count

    def why_skipped(self, norm: float) -> str:
        """Returns why the update is skipped; empty if it is applied."""
        if self.count == 0:
            return "nothing to train: the counts of all rows sum to 0"
        if self.count < 0:
            return f"the counts of all rows sum to {self.count}, which is negative"
        if not math.isfinite(norm):
            return f"the gradient is not finite (norm {norm}, loss sum {self.loss_sum})"
        if not math.isfinite(self.loss_sum):
            return f"the loss is not finite (sum {self.loss_sum}, norm of the gradient {norm})"
        return ""
