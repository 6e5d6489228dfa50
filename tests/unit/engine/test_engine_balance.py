"""The engine and its experts: loads reported, losses weighed by count, the bias moved and kept."""

import pytest
import torch
from balance_toys import GLM, biases, make_mixture, step
from engine_toys import PolicyLoss, make_engine, make_rows, train

from pentad.core.errors import UserError
from pentad.core.types import Row
from pentad.ops.router import expert_load


def gradients(engine, rows, **accumulate):
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss(), **accumulate)
    return {name: p.grad.clone() for name, p in engine.parameters.items()}


@pytest.mark.parametrize("ac_mode", ["none", "full", "selective"])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_step_reports_how_its_tokens_lay_on_the_experts(ac_mode, calls):
    engine = make_mixture(ac_mode=ac_mode, max_tokens_per_mb=64)
    rows = make_rows(12)
    wanted = torch.cat(engine.routes(rows))  # tokens, mixture layers, k
    result = step(engine, calls=calls)
    assert result.num_microbatches > 1
    assert [one.layer for one in result.balance] == [0, 2]
    for n, one in enumerate(result.balance):
        load = expert_load(wanted[:, n], 8).double()
        assert one.mean == pytest.approx(float(load.mean()))
        assert one.std == pytest.approx(float(load.std(correction=0)))
        assert (one.max, one.num_idle) == (float(load.max()), int((load == 0).sum()))
    assert step(engine).balance[0].mean == result.balance[0].mean  # it counts each step anew


def test_a_dense_model_reports_none():
    assert train(make_engine(), make_rows()).balance == ()


def test_replayed_routes_are_counted_as_they_were_given():
    engine = make_mixture()
    rows = make_rows(6)
    for row in rows:
        row.routes = torch.tensor([3, 5]).expand(len(row.ids), 2, 2)
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss())
    total = sum(len(row.ids) for row in rows)
    assert {(one.max, one.num_idle) for one in engine.end_step().balance} == {(float(total), 6)}


def test_a_balancing_loss_weighs_as_much_as_its_rows_count():
    """Doubling the counts, at the same loss of the tokens, doubles what the step divides by."""
    plain, balanced = make_mixture(), make_mixture(balance={"aux_loss_coef": 0.5})
    rows = make_rows(8)
    doubled = [Row(row.ids, row.columns, 2 * row.count) for row in rows]
    base, once, twice = (
        gradients(engine, given)["layers.0.ffn.router.weight"]
        for engine, given in ((plain, rows), (balanced, rows), (balanced, doubled))
    )
    own = once - base
    assert own.norm() > 1e-2 * base.norm()
    torch.testing.assert_close(twice - base, 2 * own, rtol=1e-4, atol=1e-5)


def test_the_bias_moves_with_the_steps_and_is_state():
    engine = make_mixture(balance={"bias_rate": 0.01}, config=GLM)
    assert biases(engine) == {
        "layers.1.ffn.router.bias": [0.0] * 8,
        "layers.2.ffn.router.bias": [0.0] * 8,
    }
    engine.save_tag("ref")
    for _ in range(3):
        step(engine)
    moved = biases(engine)
    assert all(max(map(abs, bias)) > 0.005 for bias in moved.values())
    state = engine.state_dict()
    saved = {key: {n: x.clone() for n, x in state[key].items()} for key in ("model",)}
    other = make_mixture(balance={"bias_rate": 0.01}, config=GLM)
    other.save_tag("ref")
    other.load_state_dict({**state, **saved})
    assert biases(other) == moved
    with engine.use("ref"):  # the bias belongs to the weights
        assert float(engine.tensors["layers.1.ffn.router.bias"].abs().max()) == 0
    assert biases(engine) == moved


def test_a_skipped_step_leaves_the_bias():
    engine = make_mixture(balance={"bias_rate": 0.01}, config=GLM)
    rows = make_rows(4)
    for row in rows:
        row.columns["advantages"][:] = float("inf")
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss())
    assert engine.end_step().skipped
    assert all(set(bias) == {0.0} for bias in biases(engine).values())


def test_a_bias_that_the_format_cannot_hold_is_refused_at_the_start():
    with pytest.raises(UserError, match="bias_rate = 0.01: a saved qwen3_moe has no place"):
        make_mixture(balance={"bias_rate": 0.01})
