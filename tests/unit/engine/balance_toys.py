"""Small mixtures, one whose files have a place for the selection bias, and a step with it."""

import torch.distributed as dist
from engine_toys import CONFIG, PolicyLoss, make_rows, state_of
from sections import engine_settings

from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import OptimizerConfig

MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
}
GLM = CONFIG | {
    "model_type": "glm4_moe",
    "head_dim": 12,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
"""Layers 1 and 2 are mixtures."""


def make_mixture(layout=None, balance=None, config=MIXTURE, **settings) -> Engine:
    optimizer = OptimizerConfig(lr=1e-3, gradient_clipping=None)
    chosen = engine_settings(
        optimizer=optimizer,
        **{f"moe_{name}": value for name, value in (balance or {}).items()},
        **settings,
    )
    return build_engine(config, chosen, layout=layout, init_from_scratch=True, seed=3)


def step(engine: Engine, num_rows: int = 12, calls: int = 1):
    rows = make_rows(num_rows)
    engine.begin_step()
    cuts = [len(rows) * i // calls for i in range(calls + 1)]
    for a, b in zip(cuts, cuts[1:], strict=False):
        engine.accumulate(rows[a:b], PolicyLoss(), last=b == len(rows))
    return engine.end_step()


def biases(engine: Engine) -> dict[str, list[float]]:
    state = state_of(engine)
    return {name: x.tolist() for name, x in state.items() if name.endswith("router.bias")}


def train_balanced(layout=None, steps: int = 3, **settings):
    """What the tests over ranks compare: balance of every step, and the biases at the end, of
    which ranks hold equal ones, and pipeline stages those of their layers."""
    engine = make_mixture(layout, {"bias_rate": 0.01}, GLM, **settings)
    results = [step(engine) for _ in range(steps)]
    held = [biases(engine)]
    if layout is not None:
        held *= layout.world
        dist.all_gather_object(held, biases(engine))
    found = {name: bias for one in held for name, bias in one.items()}
    assert all(found[name] == bias for one in held for name, bias in one.items()), "ranks differ"
    return [result.balance for result in results], found


def spread_over_steps(rate: float, steps: int = 40) -> list[float]:
    """Largest load over mean load of each step, where routers start far from even."""
    engine = make_mixture(balance={"bias_rate": rate}, config=GLM)
    for name, tensor in engine.tensors.items():
        if name.endswith("router.weight"):
            tensor.detach()[3:] *= 0.4  # scores of these experts stay near a half
    results = [step(engine) for _ in range(steps)]
    return [max(one.max / one.mean for one in result.balance) for result in results]
