"""Same weights, same requests, same settings: the same bits; other company: the same tokens."""

import asyncio
from dataclasses import replace

import pytest
from closeness import ROUNDING

CLOSE = 10 * ROUNDING
"""The logits of the tiny model are at most 10; other shapes sum in another order."""
REQUEST_LENGTHS = (3, 9, 1, 17, 6, 6, 12, 20)


@pytest.fixture
def requests(make_request):
    return [
        make_request(f"r{i}", [(5 * i + 3 * j) % 37 for j in range(size)], n=2, max_new_tokens=16)
        for i, size in enumerate(REQUEST_LENGTHS)
    ]


def everything(results):
    return [(g.ids, g.logprobs, g.versions, g.finish) for gs in results for g in gs]


@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_tokens": 60}, {"max_running": 3, "max_batch_tokens": 5}]
)
def test_two_runs_are_bitwise_equal(make_sampler, generate, requests, settings):
    first, second = make_sampler(**settings), make_sampler(**settings)
    assert everything(generate(first, requests)) == everything(generate(second, requests))
    assert first.stats() == second.stats()


def test_a_batch_does_not_depend_on_what_ran_before_it(
    make_sampler, make_request, generate, requests
):
    fresh, used = make_sampler(), make_sampler()
    generate(used, [make_request("before", range(30), n=5), *requests[::2]])
    before = used.stats()
    assert everything(generate(used, requests)) == everything(generate(fresh, requests))
    for work in ("steps", "prefill_tokens_computed", "prefill_tokens_reused"):
        assert used.stats()[work] - before[work] == fresh.stats()[work]


@pytest.mark.parametrize(
    "settings",
    [{"max_running": 1}, {"max_running": 3, "max_batch_tokens": 4}, {"kv_cache_tokens": 60},
     {"block_size": 16}],
    ids=["alone", "chunked", "preempted", "blocks"],
)  # fmt: skip
def test_other_batches_give_the_same_tokens(make_sampler, generate, requests, settings):
    usual = generate(make_sampler(), requests)
    other = generate(make_sampler(**settings), requests)
    for ours, theirs in zip(everything(usual), everything(other), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], abs=CLOSE)


def test_company_and_order_do_not_change_tokens(make_sampler, generate, requests):
    sampler = make_sampler()
    together = generate(sampler, requests)
    alone = [generate(sampler, [request])[0] for request in requests]
    backwards = generate(sampler, requests[::-1])[::-1]
    for other in (alone, backwards):
        for ours, theirs in zip(everything(together), everything(other), strict=True):
            assert ours[0] == theirs[0]
            assert ours[1] == pytest.approx(theirs[1], abs=CLOSE)


def test_a_continuation_is_known_by_its_seed_not_by_its_place(make_sampler, make_request, generate):
    sampler = make_sampler()
    group = make_request("g", [4, 5, 6], n=4)
    swapped = replace(group, id="s", seeds=group.seeds[::-1])
    ids = [g.ids for g in generate(sampler, [group])[0]]
    assert len({tuple(i) for i in ids}) > 1
    assert [g.ids for g in generate(sampler, [swapped])[0]] == ids[::-1]


def test_requests_given_before_the_first_step_join_it(make_sampler, requests):
    sampler = make_sampler()

    async def main():
        tasks = [asyncio.create_task(sampler.generate(request)) for request in requests]
        return await asyncio.gather(*tasks)

    asyncio.run(main())
    assert sampler.stats()["steps"] == 16  # one prefill step for all, then 15 tokens
