"""Experts of transformers' models that ep and tp can distribute.

Classes with transformers' interface for experts stack the weights of a layer's experts in
parameters whose first dim is the expert, and compute any number of (token, expert) pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

from torch import nn
from transformers import PreTrainedModel

from pentad.core.errors import Problem

OF_INTERFACE = ("has_gate", "has_bias", "is_transposed", "num_experts")
"""Attributes of modules with the interface, `use_experts_implementation`."""

ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
ATTENTION |= {"layers.*.self_attn.o_proj": "rowwise"}
NORMS = dict.fromkeys(("query_layernorm", "key_layernorm"), "replicated_with_grad_allreduce")
PLANS: dict[str, Mapping[str, str]] = {
    "granitemoe": ATTENTION,
    "hunyuan_v1_moe": ATTENTION | {f"layers.*.self_attn.{n}": kind for n, kind in NORMS.items()},
    "phimoe": ATTENTION,
}
"""Tensor-parallel plans of mixtures for which transformers has none: model type -> module in the
body -> style."""


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Module (* for numbers) -> transformers' tensor-parallel style; includes the head."""
    plan, body = dict(model.tp_plan or {}), model.base_model_prefix
    if any(key.startswith(f"{body}.") for key in plan):
        return plan
    own = PLANS.get(model.config.model_type, {})
    return plan | {f"{body}.{key}": style for key, style in own.items()}


def expert_stacks(model: nn.Module) -> dict[str, int]:
    """Name of each module with stacked experts -> number of its experts."""
    return {
        name: int(module.num_experts)
        for name, module in model.named_modules()
        if all(hasattr(module, key) for key in OF_INTERFACE)
    }


def stack_problems(
    model: nn.Module, stacks: Mapping[str, int], wide: Set[str], where: str
) -> Iterator[Problem]:
    """Problems of stacks that cannot be distributed. `wide`: names of weights in float32."""
    for name, num in stacks.items():
        for key, weight in model.get_submodule(name).named_parameters():
            rule = ""
            if "." in key or weight.shape[0] != num:
                rule = f"{name}.{key} has the shape {list(weight.shape)}, and only weights stacked "
                rule += f"by expert, {num} in the first dim, can be distributed over ranks"
            elif f"{name}.{key}" in wide:
                rule = f"{name}.{key} is float32 in 16-bit models, which is not supported for "
                rule += "experts that are distributed over ranks"
            if rule:
                yield Problem(where, rule, "use d only")
                return


def without_stacks(plan: Mapping[str, str], stacks: Mapping[str, int]) -> dict[str, str]:
    """transformers' tensor-parallel plan without the stacks; * stands for numbers."""
    names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in stacks}
    return {
        key: style
        for key, style in plan.items()
        if key not in names and not any(key.startswith(f"{name}.") for name in names)
    }
