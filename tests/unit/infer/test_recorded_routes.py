"""Which experts the sampler used is returned with the answer, and training can follow it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from sections import settings_for

from pentad.core.errors import UserError
from pentad.core.types import Group, Prompt, Row
from pentad.models.balance import iter_routers
from pentad.models.decoder import causal_attend
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.rl.algorithms import make_rows
from pentad.rollout.workflows import Transcript

NUM_EXPERTS, NUM_CHOSEN = 8, 2


@pytest.fixture
def mixture_dims(tiny_dims):
    return replace(
        tiny_dims,
        family="qwen3_moe",
        num_layers=3,
        num_experts=NUM_EXPERTS,
        num_experts_per_token=NUM_CHOSEN,
        moe_intermediate_size=16,
        moe_layers=(True, False, True),
    )


@torch.no_grad()
def own_routes(model, ids):
    """[tokens, mixture layers, k] by one forward over the whole sequence, experts in order."""
    routes = {}
    model(torch.tensor(ids), torch.arange(len(ids)), causal_attend, routes)
    return torch.stack([routes[layer] for layer in sorted(routes)], 1).sort(-1).values.numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_running": 2, "max_batch_tokens": 3},
        {"kv_cache_tokens": 64},
        {"keep_prefixes": True, "block_size": 4},
    ],
    ids=["plain", "chunked", "preempted", "prefixes"],
)
def test_the_routes_are_those_of_every_token(
    make_sampler, make_request, generate, mixture_dims, settings
):
    sampler = make_sampler(mixture_dims, replay_routes=True, **settings)
    assert "routes" in sampler.capabilities
    common = [5, 9, 2, 11, 3, 8, 1, 30]
    requests = [make_request(f"r{i}", [*common, *range(i % 4)], n=3) for i in range(6)]
    for request, generations in zip(requests, generate(sampler, requests), strict=True):
        for g in generations:
            ids = [*request.prompt_ids, *g.ids]
            assert g.routes.shape == (len(ids), 2, NUM_CHOSEN) and g.routes.dtype == np.uint8
            # The last token was drawn, never computed. No tie is near in fp32 at this scale.
            np.testing.assert_array_equal(
                np.sort(g.routes[:-1], -1), own_routes(sampler.engine.model, ids)[:-1]
            )
            assert (np.diff(np.sort(g.routes[-1], -1)) > 0).all()


def test_tokens_computed_again_keep_the_routes_they_were_followed_with(
    make_sampler, make_request, mixture_dims
):
    """New weights, and the cache computed anew: earlier tokens were drawn with the old routes."""

    async def main():
        sampler = make_sampler(mixture_dims, replay_routes=True, on_update="reprefill", version=0)
        old = {n: t.clone() for n, t in sampler.engine.model.named_parameters()}
        told = asyncio.Event()
        seen = []

        def on_token(index, token, logprob):
            seen.append(token)
            if len(seen) == 5:
                told.set()

        request = make_request("a", [5, 9, 2], max_new_tokens=40)
        work = asyncio.create_task(sampler.generate(request, on_token))
        await told.wait()
        await sampler.pause()
        num_old = len(seen)
        other = create_model(mixture_dims, seed=99)
        await sampler.install(1, iter_hf(other))
        await sampler.resume()
        (generation,) = await work
        return sampler, old, num_old, [*request.prompt_ids, *generation.ids], generation

    sampler, old, num_old, ids, generation = asyncio.run(main())
    new_routes = own_routes(sampler.engine.model, ids)
    with torch.no_grad():
        for name, tensor in sampler.engine.model.named_parameters():
            tensor.copy_(old[name])
    old_routes = own_routes(sampler.engine.model, ids)
    # The prompt and all drawn tokens but the last had been computed with the old weights.
    cut = 3 + num_old - 1
    told = np.sort(generation.routes, -1)
    np.testing.assert_array_equal(told[:cut], old_routes[:cut])
    np.testing.assert_array_equal(told[cut:-1], new_routes[cut:-1])
    assert (old_routes[:cut] != new_routes[:cut]).any()


def test_a_dense_model_has_no_routes(make_sampler):
    with pytest.raises(UserError, match="no mixture of experts"):
        make_sampler(replay_routes=True)


def test_a_second_turn_keeps_the_routes_of_the_first(
    make_sampler, make_request, generate, mixture_dims
):
    sampler = make_sampler(mixture_dims, replay_routes=True)
    (first,) = generate(sampler, [make_request("a", [4, 7, 1])])[0]
    transcript = Transcript([4, 7, 1])
    transcript.add_sampled(first)
    transcript.add_given([8, 8, 2])
    (second,) = generate(sampler, [make_request("b", transcript.ids)])[0]
    marked = replace(second, routes=second.routes.copy())
    marked.routes[:] = 7
    transcript.add_sampled(marked)
    sample = transcript.finished("length", "")
    known = 3 + len(first.ids) - 1
    np.testing.assert_array_equal(sample.routes[:known], first.routes[:known])
    assert (sample.routes[known:] == 7).all() and len(sample.routes) == len(sample.ids)


def test_following_the_routes_closes_the_gap_between_sampler_and_trainer(
    make_sampler, make_request, generate, mixture_dims
):
    """Routers of the trainer are nudged, as rounding nudges them, so that some choose otherwise."""
    sampler = make_sampler(mixture_dims, replay_routes=True)
    model = sampler.engine.model
    requests = [make_request(f"r{i}", [i, 3, 9], n=4, max_new_tokens=24) for i in range(4)]
    results = generate(sampler, requests)
    torch.manual_seed(0)
    for _, router in iter_routers(model):
        router.weight.data += 0.002 * torch.randn_like(router.weight)
    alone, followed, rerouted = [], [], 0
    for request, generations in zip(requests, results, strict=True):
        for g in generations:
            ids = torch.tensor([*request.prompt_ids, *g.ids])
            layers = (0, 2)
            given = dict(zip(layers, torch.from_numpy(g.routes).long().unbind(1), strict=True))
            for gaps, routes in ((alone, None), (followed, given)):
                hidden = model(ids, torch.arange(len(ids)), causal_attend, routes)
                logp = model.logits(hidden).log_softmax(-1)[2:-1]
                drawn = logp.gather(1, torch.tensor(g.ids)[:, None])[:, 0]
                gaps.append((drawn - torch.tensor(g.logprobs)).abs())
            own = own_routes(model, ids.tolist())
            rerouted += (np.sort(g.routes, -1) != own)[:-1].any(-1).sum()
    assert rerouted > 0
    assert torch.cat(followed).mean() < torch.cat(alone).mean() / 2
    assert torch.cat(followed).max() < torch.cat(alone).max()


def test_rows_carry_the_routes(make_sampler, make_request, generate, mixture_dims):
    sampler = make_sampler(mixture_dims, replay_routes=True, version=0)
    (first, second) = generate(sampler, [make_request("a", [4, 7], n=2)])[0]
    samples = []
    for reward, generation in ((0.0, first), (1.0, second)):
        transcript = Transcript([4, 7])
        transcript.add_sampled(generation)
        sample = transcript.finished("length", "")
        sample.reward = reward
        samples.append(sample)
    group = Group(Prompt(0, (4, 7), {}), samples)
    rows = make_rows([group], settings_for("grpo"), max_new_tokens=12)
    for row, generation in zip(rows, (first, second), strict=True):
        assert isinstance(row, Row) and row.routes.dtype == torch.int64
        np.testing.assert_array_equal(row.routes.numpy(), generation.routes)
