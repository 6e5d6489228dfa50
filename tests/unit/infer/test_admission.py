"""More work than memory: it waits, gives way, and ends; nothing is allocated beyond the pool."""

import asyncio

import pytest

from pentad.core.errors import UserError


def test_a_storm_of_preemptions_comes_to_an_end(make_sampler, make_request, generate, check_exact):
    """The cache holds one sequence of full length; 24 of them want to run at once."""
    sampler = make_sampler(kv_cache_tokens=28, block_size=4, max_running=24)
    requests = [
        make_request(f"r{i}", [(i + j) % 37 for j in range(1 + i % 12)], n=2, max_new_tokens=16)
        for i in range(12)
    ]
    results = generate(sampler, requests)
    assert all(len(g.ids) == 16 for gs in results for g in gs)
    check_exact(sampler, requests[::4], results[::4])
    stats = sampler.stats()
    assert stats["preemptions"] > 24
    assert stats["running"] == stats["waiting"] == stats["kv_usage"] == 0
    # One at a time would be 24 * 16 steps; giving way costs no more than that.
    assert stats["steps"] <= 24 * 16


@pytest.mark.parametrize("strict", [False, True])
def test_the_likeliest_tokens_stay_with_theirs_through_preemptions(
    make_sampler, make_request, generate, strict
):
    sampler = make_sampler(kv_cache_tokens=64, block_size=16, max_running=8, strict=strict)
    requests = [
        make_request(f"r{i}", [i, 2, 3], n=2, max_new_tokens=24, temperature=0, num_top=i % 3)
        for i in range(8)
    ]
    results = generate(sampler, requests)
    assert sampler.stats()["preemptions"] > 0
    for request, generations in zip(requests, results, strict=True):
        for generation in generations:
            num = request.params.num_top
            assert [len(top) for top in generation.tops] == ([num] * 24 if num else [])
            drawn = zip(generation.ids, generation.logprobs, strict=True)
            for top, (id_, logprob) in zip(generation.tops, drawn, strict=num > 0):
                assert top[0] == (id_, logprob)  # greedy: the likeliest is the drawn one
                assert sorted(top, key=lambda pair: -pair[1]) == top


def test_a_request_as_large_as_the_cache_is_served_among_others(
    make_sampler, make_request, generate, check_exact
):
    sampler = make_sampler(kv_cache_tokens=40, block_size=4, max_running=8)
    small = [make_request(f"s{i}", [i, 2, 3], max_new_tokens=9) for i in range(12)]
    whole = make_request("whole", range(28), max_new_tokens=12)
    requests = [*small[:6], whole, *small[6:]]
    results = generate(sampler, requests)
    assert len(results[6][0].ids) == 12
    check_exact(sampler, requests, results)


def test_a_refusal_leaves_the_others_alone(make_sampler, make_request):
    async def main():
        sampler = make_sampler(kv_cache_tokens=40, block_size=4)
        good = asyncio.create_task(sampler.generate(make_request("good", [1, 2], n=3)))
        await asyncio.sleep(0)
        refused = r"request bad: 41 tokens: .* never fit the key-value cache of 40; lower"
        with pytest.raises(UserError, match=refused):
            await sampler.generate(make_request("bad", range(29), max_new_tokens=12))
        return await asyncio.wait_for(good, 240)

    assert [len(g.ids) for g in asyncio.run(main())] == [12, 12, 12]


def test_hundreds_of_continuations_of_one_prompt(make_sampler, make_request, generate):
    sampler = make_sampler(max_running=16, kv_cache_tokens=400, block_size=4)
    [generations] = generate(sampler, [make_request("many", range(9), n=300, max_new_tokens=5)])
    assert len(generations) == 300 and all(len(g.ids) == 5 for g in generations)
    assert len({tuple(g.ids) for g in generations}) > 50
    stats = sampler.stats()
    assert stats["kv_usage"] == 0
    # The prompt's full blocks are found again by every later batch of 16.
    assert stats["prefill_tokens_computed"] <= 9 + 300 // 16 * 9
    assert stats["prefill_tokens_reused"] >= 300 * 8 - 300
