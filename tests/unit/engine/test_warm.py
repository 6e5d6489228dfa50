"""The pass that compiles the blocks in advance changes nothing."""

import pytest
import torch
from engine_toys import CONFIG, keep_state, make_engine, make_rows, train

from pentad.engine.warm import run_made_up, warm_up

MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("config", "keys"),
    [(CONFIG, {}), (MOE, {}), (CONFIG, {"dtype": "bfloat16", "param_dtype": "float32"})],
    ids=["dense", "mixture", "fp32 masters"],
)
def test_training_after_made_up_rows_is_bitwise_the_same(config, keys):
    plain, warmed = (make_engine(config=config, **keys) for _ in range(2))
    run_made_up(warmed)
    assert all(tensor.grad is None for tensor in warmed.masters.values())
    rows = make_rows()
    for engine in (plain, warmed):
        train(engine, rows, steps=2)
    run_made_up(warmed)  # and between steps
    results = [train(engine, rows) for engine in (plain, warmed)]
    assert results[0] == results[1]
    (one, counters), (other, others) = keep_state(plain), keep_state(warmed)
    assert counters == others and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_critic_is_warmed_by_its_values():
    engine = make_engine(value_head=True)
    run_made_up(engine)
    assert engine.step is None and all(x.grad is None for x in engine.masters.values())


def test_nothing_runs_where_nothing_is_compiled(monkeypatch):
    """On a CPU blocks are not compiled, and the pass would only take time."""
    engine = make_engine()
    monkeypatch.setattr(engine, "accumulate", None)
    assert not warm_up(engine)
