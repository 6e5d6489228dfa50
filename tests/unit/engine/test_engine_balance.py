"""The engine and its experts: loads reported, losses weighed by count, the bias moved and kept."""

import pytest
import torch
from balance_toys import GLM, biases, make_mixture, spread_over_steps, step
from engine_toys import PolicyLoss, bring_back, keep_state, make_engine, make_rows, train
from sections import engine_settings, sampler_settings
from transformers import AutoModelForCausalLM

from pentad.checkpoint.exports import export_model
from pentad.core.errors import UserError
from pentad.core.types import Row
from pentad.engine.engine import build_engine
from pentad.infer.engine import InferenceEngine
from pentad.models.decoder import causal_attend
from pentad.models.hf_weights import install_hf
from pentad.models.registry import create_model
from pentad.ops.router import expert_load
from pentad.sync.publisher import take_snapshot


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
        assert (one.min, one.max) == (float(load.min()), float(load.max()))
        assert one.num_idle == int((load == 0).sum())
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
    other = make_mixture(balance={"bias_rate": 0.01}, config=GLM)
    other.save_tag("ref")
    bring_back(other, keep_state(engine))
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
    with pytest.raises(UserError, match="bias_rate = 0.01: a saved qwen3_moe cannot store a bias"):
        make_mixture(balance={"bias_rate": 0.01})


def test_a_skewed_router_is_evened_out_by_the_bias_and_by_nothing_else():
    moved, still = spread_over_steps(0.01), spread_over_steps(0.0)
    assert moved[0] == still[0] > 2.4
    assert max(moved[-5:]) < 1.3
    assert min(still[-5:]) > 2.2


def test_the_bias_is_handed_out_in_float32_whatever_the_weights_are_published_in(tmp_path):
    engine = make_mixture(balance={"bias_rate": 0.01}, config=GLM, publish_dtype="bfloat16")
    for _ in range(3):
        step(engine)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    weights = dict(engine.iter_weights())
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert weights[name].tolist() == biases(engine)["layers.2.ffn.router.bias"]
    assert weights[name].dtype == torch.float32
    export_model(engine, str(tmp_path / "out"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.state_dict()[name], weights[name])


def test_the_sampler_gets_the_bias_with_every_publish():
    engine = make_mixture(balance={"bias_rate": 0.07}, config=GLM)
    sampler = InferenceEngine(
        create_model(engine.dims, seed=1), sampler_settings(kv_cache_tokens=64)
    )
    rows = make_rows(3)
    digests = set()
    for version in range(3):
        snapshot = take_snapshot(version, engine.iter_weights(), copy=True)
        receipt = sampler.install(version, list(snapshot.weights))
        assert receipt.digest == snapshot.digest.hex()
        digests.add(snapshot.digest.entries["model.layers.1.mlp.gate.e_score_correction_bias"])
        held = sampler.runner.model.state_dict()["layers.1.ffn.router.bias"]
        assert held.tolist() == biases(engine)["layers.1.ffn.router.bias"]
        routes: dict = {}
        chosen = torch.cat([routes_of(sampler.runner.model, row.ids, routes) for row in rows])
        assert torch.equal(chosen, torch.cat(engine.routes(rows)))
        step(engine)
    assert len(digests) == 3, "a digest that leaves the bias out would not change with it alone"


def routes_of(model, ids, routes):
    routes.clear()
    model(ids, torch.arange(len(ids)), causal_attend, routes)
    return torch.stack([routes[layer] for layer in sorted(routes)], dim=1)


def test_weights_without_the_bias_are_refused_by_the_sampler():
    engine = make_mixture(config=GLM)
    sampler = InferenceEngine(
        create_model(engine.dims, seed=1), sampler_settings(kv_cache_tokens=64)
    )
    rest = [(n, x) for n, x in engine.iter_weights() if "e_score_correction_bias" not in n]
    with pytest.raises(UserError, match="e_score_correction_bias: missing"):
        sampler.install(0, rest)


def test_the_fsdp_backend_computes_with_the_bias_and_hands_it_out_in_float32():
    settings = engine_settings(publish_dtype="bfloat16")
    theirs = build_engine(GLM, settings, init_from_scratch=True, seed=3, backend="fsdp")
    weights = {name: tensor.float() for name, tensor in theirs.iter_weights()}
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights[name] = torch.linspace(-1, 1, 8) / 3  # no number of 16 bits
    assert install_hf(theirs.decoder, list(weights.items())) == len(weights)
    again = dict(theirs.iter_weights())[name]
    assert again.dtype == torch.float32 and torch.equal(again, weights[name])
    ours = make_mixture(config=GLM)
    install_hf(ours.decoder, list(weights.items()))
    rows = make_rows(4)
    for one, other in zip(ours.forward(rows), theirs.forward(rows), strict=True):
        torch.testing.assert_close(one["logprobs"], other["logprobs"], rtol=1e-4, atol=1e-4)
