"""Reported log-probs are those of a forward over the whole sequence, whatever the engine did."""

from dataclasses import replace

import pytest
import torch

from pentad.core.dims import ModelDims
from pentad.infer import host


def ragged(make_request, num, n=1, **params):
    lengths = [1 + (5 * i) % 23 for i in range(num)]
    return [
        make_request(f"r{i}", [(3 * i + 7 * j) % 37 for j in range(length)], n=n, **params)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"block_size": 16}, {}),
        ({"max_running": 3}, {}),
        # 3 tokens a step: the long prompts take many chunks
        ({"max_running": 2, "max_batch_tokens": 3}, {}),
        # 64 tokens for 8 sequences of up to 35: several must give way
        ({"kv_cache_tokens": 64}, {"preemptions": 1}),
        ({"kv_cache_tokens": 48, "max_batch_tokens": 64}, {"preemptions": 1}),
    ],
    ids=["plain", "large-blocks", "few-rows", "chunked", "preempted", "preempted-chunked"],
)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("windowed", [False, True])
def test_logprobs_are_teacher_forced(
    make_sampler, make_request, generate, check_exact, tiny_dims, windowed_dims,
    settings, expected, n, windowed,
):  # fmt: skip
    dims: ModelDims = windowed_dims if windowed else tiny_dims
    sampler = make_sampler(dims, **settings)
    requests = ragged(make_request, 8, n)
    results = generate(sampler, requests)
    assert [len(generations) for generations in results] == [n] * 8
    assert all(len(g.ids) == 12 and g.finish == "length" for gs in results for g in gs)
    check_exact(sampler, requests, results)
    assert all(sampler.stats()[name] >= least for name, least in expected.items())


@pytest.mark.parametrize(
    ("part", "error"), [("norm.weight", 1e-4), ("layers.1.attn.v.weight", 1e-3)]
)
def test_the_limit_of_rounding_is_below_a_small_defect(
    make_sampler, make_request, generate, check_exact, part, error
):
    """A weight of which so much is lost between sampling and scoring."""
    sampler = make_sampler()
    requests = ragged(make_request, 8)
    results = generate(sampler, requests)
    check_exact(sampler, requests, results)
    with torch.no_grad():
        sampler.engine.model.get_parameter(part).mul_(1 + error)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_exact(sampler, requests, results)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_at_the_temperature(
    make_sampler, make_request, generate, check_exact, temperature
):
    sampler = make_sampler()
    requests = ragged(make_request, 4, temperature=temperature)
    check_exact(sampler, requests, generate(sampler, requests))


def test_top_k_limits_the_draw_but_not_the_logprob(
    make_sampler, make_request, generate, check_exact, teacher_forced_logits
):
    sampler = make_sampler()
    requests = ragged(make_request, 4, n=2, top_k=3)
    results = generate(sampler, requests)
    check_exact(sampler, requests, results)
    for request, generations in zip(requests, results, strict=True):
        for g in generations:
            every = teacher_forced_logits(sampler.engine.model, request.prompt_ids, g.ids)
            drawn = every.gather(1, torch.tensor(g.ids)[:, None])
            assert ((every > drawn).sum(1) < 3).all()


def test_top_p_limits_the_draw_but_not_the_logprob(
    make_sampler, make_request, generate, check_exact
):
    sampler = make_sampler()
    requests = ragged(make_request, 4, top_p=1e-6)
    results = generate(sampler, requests)
    check_exact(sampler, requests, results)
    greedy = generate(sampler, ragged(make_request, 4, temperature=0.0))
    assert [g.ids for gs in results for g in gs] == [g.ids for gs in greedy for g in gs]


def test_greedy_takes_the_most_likely_and_reports_at_temperature_one(
    make_sampler, make_request, generate, check_exact
):
    sampler = make_sampler()
    requests = ragged(make_request, 4, n=2, temperature=0.0)
    results = generate(sampler, requests)
    check_exact(sampler, requests, results)
    for first, second in results:
        assert first.ids == second.ids
        assert all(logprob > -3.7 for logprob in first.logprobs)  # above uniform: log(37) = 3.6


def test_a_group_prefills_its_prompt_once(make_sampler, make_request, generate, check_exact):
    sampler = make_sampler()
    requests = [make_request("g", range(22), n=8)]
    check_exact(sampler, requests, generate(sampler, requests))
    stats = sampler.stats()
    assert stats["prefill_tokens_computed"] == 22
    assert stats["prefill_tokens_reused"] == 7 * 22


def test_requests_share_full_blocks_of_a_common_prefix(
    make_sampler, make_request, generate, check_exact
):
    sampler = make_sampler(block_size=4)
    common = list(range(20))
    requests = [make_request(f"r{i}", [*common, 30 + i, 3]) for i in range(4)]
    check_exact(sampler, requests, generate(sampler, requests))
    stats = sampler.stats()
    assert stats["prefill_tokens_computed"] == 22 + 3 * 2
    assert stats["prefill_tokens_reused"] == 3 * 20


def test_prefixes_are_found_again_later_if_kept(make_sampler, make_request, generate, check_exact):
    sampler = make_sampler(keep_prefixes=True, block_size=4)
    first = [make_request("a", range(16))]
    (generation,) = generate(sampler, first)[0]
    turn = [make_request("b", [*range(16), *generation.ids, 5, 6])]
    computed = sampler.stats()["prefill_tokens_computed"]
    check_exact(sampler, turn, generate(sampler, turn))
    # 16 + 11 tokens had been computed (the last drawn one had not): 6 full blocks of 4
    assert sampler.stats()["prefill_tokens_computed"] - computed == 30 - 24


def test_followers_without_a_block_start_later_and_exactly(
    make_sampler, make_request, generate, check_exact
):
    # 10 blocks; the prompt takes 4, so at most 6 of 7 followers can copy its last one
    sampler = make_sampler(kv_cache_tokens=40, block_size=4)
    requests = [make_request("g", range(14), n=8)]
    check_exact(sampler, requests, generate(sampler, requests))


@pytest.mark.parametrize(
    ("family", "shared_expert_size"), [("qwen3_moe", 0), ("qwen2_moe", 12), ("glm4_moe", 16)]
)
def test_a_mixture_of_experts_is_exact(
    make_sampler, make_request, generate, check_exact, tiny_dims, family, shared_expert_size
):
    dims = replace(
        tiny_dims,
        family=family,
        qk_norm=family == "qwen3_moe",
        shared_expert_size=shared_expert_size,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        moe_layers=(True, True),
    )
    if family == "glm4_moe":
        dims = replace(dims, router_score="sigmoid", router_scale=1.5, router_bias=True)
        dims = replace(dims, shared_expert_gate=False, rotary_dim=4, tie_embeddings=False)
    sampler = make_sampler(dims, kv_cache_tokens=64)
    for name, buffer in sampler.engine.runner.model.named_buffers():
        if name.endswith("router.bias"):
            buffer.copy_(torch.tensor([0.3, -0.2, 0.1, -0.4]))
    requests = ragged(make_request, 6, n=2)
    check_exact(sampler, requests, generate(sampler, requests))


def test_products_of_few_rows_the_other_way_round(
    make_sampler, make_request, generate, check_exact, tiny_dims, monkeypatch
):
    """As large weights are multiplied on a CPU; sizes here are small."""
    turned = []
    monkeypatch.setattr(host, "TURNED_SIZE", 1)
    monkeypatch.setattr(host, "HAS_MKL", True)
    monkeypatch.setattr(torch, "mm", lambda *x, mm=torch.mm: turned.append(1) or mm(*x))
    sampler = make_sampler(replace(tiny_dims, qkv_bias=True, mlp_bias=True))
    requests = ragged(make_request, 8)
    results = generate(sampler, requests)
    monkeypatch.undo()
    assert turned
    check_exact(sampler, requests, results)
