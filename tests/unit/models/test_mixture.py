"""Mixtures: routes recorded and followed, balancing losses, selection bias, measured loads."""

import dataclasses

import pytest
import torch

from pentad.core.dims import ModelDims
from pentad.engine.section import ArchonConfig
from pentad.models.balance import (
    ExpertLoads,
    apply_balance,
    iter_routers,
    measure_balance,
    move_biases,
    scale_losses,
)
from pentad.models.decoder import Decoder, causal_attend
from pentad.models.registry import create_model, load_model, save_model
from pentad.ops.meter import Meter
from pentad.ops.router import RouteRule, balance_loss, expert_load, gate_logits, z_loss

DIMS = ModelDims(
    family="qwen3_moe",
    vocab_size=31,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=16,
    qk_norm=True,
    num_experts=6,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    norm_topk_prob=True,
    moe_layers=(True, False, True),
    initializer_range=0.3,
)
HF_CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
IDS = torch.arange(17) * 5 % 31
POSITIONS = torch.arange(17)
BIASED = dataclasses.replace(
    DIMS,
    family="glm4_moe",
    router_score="sigmoid",
    router_bias=True,
    router_scale=1.3,
    shared_expert_size=8,
    shared_expert_gate=False,
    moe_layers=(False, True, True),
)
"""A family whose files have a place for the bias."""
BIASED_CONFIG = {
    **{key: value for key, value in HF_CONFIG.items() if "experts" not in key},
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.3,
    "use_qk_norm": True,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
}


def run(model: Decoder, routes=None) -> torch.Tensor:
    return model.logits(model(IDS, POSITIONS, causal_attend, routes))


def gradients(model: Decoder, routes=None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run(model, routes).log_softmax(-1)[:, 3].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_pass_records_what_every_mixture_chose():
    model = create_model(DIMS, seed=1)
    routes = {}
    with_routes, without = run(model, routes), run(model)
    assert torch.equal(with_routes, without)
    assert sorted(routes) == [0, 2]
    hidden = model.layers["0"].attn_norm  # the first mixture's choice, computed by hand
    x = model.embed(IDS)
    cos, sin = model.rotary(POSITIONS, x.dtype)["full"]
    x = x + model.layers["0"].attn(hidden(x), cos, sin, causal_attend)
    logits = model.layers["0"].ffn_norm(x) @ model.layers["0"].ffn.router.weight.T
    assert torch.equal(routes[0], logits.topk(2).indices)


def test_following_its_own_routes_changes_no_bit_of_results_and_gradients():
    model = create_model(DIMS, seed=1)
    routes = {}
    wanted = gradients(model, routes)
    recorded = {layer: chosen.clone() for layer, chosen in routes.items()}
    again = gradients(model, routes)
    assert all(torch.equal(routes[layer], recorded[layer]) for layer in recorded)
    assert wanted.keys() == again.keys()
    assert all(torch.equal(wanted[name], again[name]) for name in wanted)
    assert wanted["layers.0.ffn.router.weight"].abs().max() > 0


def test_other_routes_are_followed_and_the_router_still_learns():
    model = create_model(DIMS, seed=1)
    routes = {}
    before = run(model, routes)
    routes[2] = (routes[2] + 1) % 6
    wanted = routes[2].clone()
    found = gradients(model, routes)
    assert torch.equal(routes[2], wanted)
    assert not torch.allclose(run(model, routes), before)
    assert found["layers.2.ffn.router.weight"].abs().max() > 0
    used = set(wanted.flatten().tolist())
    for expert in range(6):
        moved = float(found["layers.2.ffn.experts.down"][expert].abs().max()) > 0
        assert moved == (expert in used)


def test_the_choice_is_the_same_in_low_precision_weights_computed_in_fp32():
    model = create_model(DIMS, seed=1)
    router = model.layers["0"].ffn.router
    x = torch.randn(40, 24).bfloat16()
    low = router.weight.detach().bfloat16()
    exact = x.double() @ low.double().T
    router.weight.data = low
    weights, chosen = router(x)
    assert weights.dtype == torch.float32
    assert torch.equal(chosen, exact.topk(2).indices)
    wanted = exact.softmax(-1).gather(1, chosen)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_mixture_with_a_balancing_loss_is_one_graph_while_its_work_is_counted():
    """In bf16: grouped products are traced in no other dtype."""
    model = create_model(DIMS, seed=1, dtype=torch.bfloat16)
    apply_balance(model, ArchonConfig(moe_aux_loss_coef=0.7))
    scale_losses(model, 0.25)
    mixture = model.layers["0"].ffn
    compiled = torch.compile(mixture, backend="eager", dynamic=True, fullgraph=True)
    with Meter().counting():
        for num_tokens in (16, 40):
            x = torch.randn(num_tokens, 24, dtype=torch.bfloat16)
            for ours, wanted in zip(compiled(x), mixture(x), strict=True):
                assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    "settings", [{"moe_aux_loss_coef": 0.7}, {"moe_z_loss_coef": 0.3}], ids=str
)
def test_a_balancing_loss_adds_its_own_gradient_and_changes_no_result(settings):
    model = create_model(DIMS, seed=1)
    plain, values = gradients(model), run(model)
    apply_balance(model, ArchonConfig(**settings))
    scale_losses(model, 0.25)
    assert torch.equal(run(model), values)
    found = gradients(model)
    apply_balance(model, ArchonConfig())
    inputs = {}
    for layer, router in iter_routers(model):
        router.register_forward_pre_hook(lambda _, args, key=layer: inputs.update({key: args[0]}))
    model.zero_grad()
    run(model)
    total = torch.zeros(())
    for layer, router in iter_routers(model):
        logits = gate_logits(inputs[layer], router.weight)
        chosen = logits.topk(2).indices
        if "moe_aux_loss_coef" in settings:
            total = total + 0.7 * balance_loss(logits, chosen, RouteRule(2)) * 17 * 0.25
        else:
            total = total + 0.3 * z_loss(logits) * 17 * 0.25
    total.backward()
    for name, parameter in model.named_parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], plain[name] + own, atol=1e-5, rtol=1e-4)
    assert model.layers["0"].ffn.router.weight.grad.abs().max() > 1e-3


def test_a_balancing_loss_leaves_scoring_alone():
    model = create_model(DIMS, seed=1)
    apply_balance(model, ArchonConfig(moe_aux_loss_coef=1.0))
    with torch.no_grad():
        assert not run(model).requires_grad


def test_the_bias_balances_an_unbalanced_router_and_is_saved_and_loaded(tmp_path):
    model = create_model(BIASED, seed=2)
    apply_balance(model, ArchonConfig(moe_bias_rate=0.02))
    router = model.layers["2"].ffn.router
    assert torch.equal(router.bias, torch.zeros(6))
    assert "layers.2.ffn.router.bias" in model.state_dict()
    loads = ExpertLoads(BIASED, torch.device("cpu"))
    spreads = []
    for _ in range(60):
        routes = {}
        with torch.no_grad():
            run(model, routes)
        loads.add(routes)
        taken = loads.take()
        spreads.append({one.layer: one.std for one in measure_balance(taken)})
        move_biases(model, taken, rate=0.02)
    assert spreads[0][2] > 2
    assert min(step[2] for step in spreads[-10:]) < 0.5 * spreads[0][2]
    save_model(model, tmp_path / "out", hf_config=BIASED_CONFIG)
    again = load_model(tmp_path / "out")
    assert torch.equal(again.layers["2"].ffn.router.bias, router.bias)
    assert torch.equal(run(again), run(model))


def test_the_bias_moves_up_for_idle_and_down_for_busy_experts():
    model = create_model(BIASED, seed=2)
    load = torch.tensor([0, 10, 5, 5, 5, 5])
    move_biases(model, {1: load}, rate=0.1)
    moved = model.layers["1"].ffn.router.bias
    torch.testing.assert_close(moved, torch.tensor([0.1, -0.1, 0.0, 0.0, 0.0, 0.0]))
    assert float(model.layers["2"].ffn.router.bias.abs().max()) == 0


def test_loads_are_summed_over_passes_and_ranks_and_start_anew():
    loads = ExpertLoads(dataclasses.replace(DIMS, num_experts=4), torch.device("cpu"))
    loads.add({0: torch.tensor([[0, 1], [0, 2]]), 2: torch.tensor([[3, 2]])})
    loads.add({0: torch.tensor([[0, 1]])})
    asked = []

    def over_two_equal_ranks(x):
        asked.append(x.shape)
        return 2 * x

    taken = loads.take(over_two_equal_ranks, 7)
    assert {layer: load.tolist() for layer, load in taken.items()} == {
        0: [6, 4, 2, 0],
        2: [0, 0, 2, 2],
    }
    assert asked == [(4, 4)] and int(loads.arrived) == 14, "one sum over ranks for both"
    assert all(int(load.sum()) == 0 for load in loads.take().values())
    found = measure_balance(taken)
    assert [(one.layer, one.mean, one.max, one.num_idle) for one in found] == [
        (0, 3.0, 6.0, 1),
        (2, 1.0, 2.0, 2),
    ]
    assert found[0].std == pytest.approx(5**0.5)


def test_every_pair_is_counted():
    model = create_model(DIMS, seed=1)
    routes = {}
    run(model, routes)
    assert all(int(expert_load(chosen, 6).sum()) == 17 * 2 for chosen in routes.values())
