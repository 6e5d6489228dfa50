"""What the workers of a distributed test run: one training step under a layout, seen whole."""

from __future__ import annotations

from typing import Any

import torch
from engine_toys import CONFIG, PolicyLoss, SequenceLoss, ValueLoss, make_rows
from torch import Tensor
from torch.distributed.tensor import DTensor

from pentad.core.layout import Layout
from pentad.engine.engine import Engine, build_engine
from pentad.engine.settings import EngineSettings, OptimizerSettings
from pentad.parallel.cuts import local

DENSE = CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6}
"""8 heads, 2 kv heads: tp * cp up to 8, with repeated kv heads from 4 on. 37 words: uneven."""
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}
BIASED = DENSE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
CONFIGS = {"dense": DENSE, "moe": MOE, "biased": BIASED}
LOSSES = {"token": PolicyLoss(0.3), "sequence": SequenceLoss(), "value": ValueLoss()}


def make(model: str, layout: Layout, loss: str = "token", **settings: Any) -> Engine:
    settings.setdefault(
        "optimizer", OptimizerSettings(lr=1e-2, weight_decay=1.0, gradient_clipping=0.5)
    )
    engine = build_engine(
        CONFIGS[model],
        EngineSettings(**settings),
        layout=layout,
        init_from_scratch=True,
        seed=3,
        value_head=loss == "value",
    )
    bend(engine)
    return engine


def bend(engine: Engine) -> None:
    """Moves weights that start at one value (norms, biases) off it, by name, on any layout."""
    with torch.no_grad():
        for name, tensor in engine.state_dict()["model"].items():
            if tensor.ndim == 1:
                gen = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
                noise = 0.3 * torch.randn(tensor.shape, generator=gen)
                part = engine.cuts[name].take(name, noise)
                engine.tensors[name].add_(part)


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def train_step(
    model: str,
    layout: Layout,
    loss: str = "token",
    num_rows: int = 12,
    calls: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Everything a step gives: outputs, loss, every gradient, the norm, the weights after it."""
    engine = make(model, layout, loss, **settings)
    rows = make_rows(num_rows)
    scored = engine.forward(rows)
    engine.begin_step()
    seen = []
    cuts = [len(rows) * i // calls for i in range(calls + 1)]
    for a, b in zip(cuts, cuts[1:], strict=False):
        seen.append(engine.accumulate(rows[a:b], LOSSES[loss], last=b == len(rows)))
    gradients = gradients_of(engine)
    result = engine.end_step()
    return {
        "scored": scored,
        "outputs": [out for one in seen for out in one.outputs],
        "loss_sum": sum(one.loss_sum for one in seen),
        "stats": [one.stats for one in seen],
        "gradients": gradients,
        "result": result,
        "weights": {n: whole(t) for n, t in engine.state_dict()["model"].items()},
    }


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Every gradient whole, summed over ranks as `end_step` would do; leaves them as they are."""
    from pentad.parallel.gradients import sum_copies

    parts = {n: local(p.grad).clone() for n, p in engine.parameters.items() if p.grad is not None}
    sum_copies(parts, engine.cuts)
    return {name: whole(engine.cuts[name].present(part)) for name, part in parts.items()}
