"""What every Sampler promises, asked of each implementation (see `subjects`)."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from closeness import ROUNDING
from subjects import decode, policy

from pentad.core.errors import RunError, UserError
from pentad.core.types import Generation, Request, SamplingParams
from pentad.models.decoder import Decoder, causal_attend
from pentad.models.hf_weights import iter_hf
from pentad.ops.digest import digest_of

ATOL = 10 * ROUNDING  # the logits of the policy are at most 10


class Missed(Exception):
    """On a busy machine the next call may come before or after the answers are drawn."""


def run(subject, scenario, *needs):
    """Plays `scenario(sampler)` within a deadline, if the sampler can do what it needs."""

    async def main():
        async with subject.start() as sampler:
            missing = set(needs) - sampler.capabilities
            if missing:
                pytest.skip(f"declares that it cannot: {sorted(missing)}")
            return await asyncio.wait_for(scenario(sampler), 240)

    for _ in range(6):
        with suppress(Missed):
            return asyncio.run(main())
    raise AssertionError("no attempt met all answers of the request while they were drawn")


def met_under_way(generations: list[Generation]) -> list[Generation]:
    """Those whose tokens all come from before or after the install show nothing; if every attempt
    misses, the test fails."""
    if any(len(set(g.versions)) == 1 for g in generations):
        raise Missed
    return generations


def ask(name: str, prompt, n: int = 1, **params) -> Request:
    params = SamplingParams(**({"max_new_tokens": 8} | params))
    seeds = tuple(1000 + 17 * i for i in range(n))
    return Request(id=name, prompt_ids=tuple(prompt), params=params, seeds=seeds)


@torch.no_grad()
def truth(model: Decoder, prompt, ids, temperature: float = 1.0) -> torch.Tensor:
    whole = torch.tensor([*prompt, *ids])
    hidden = model(whole, torch.arange(len(whole)), causal_attend)
    logprobs = (model.logits(hidden) / temperature).log_softmax(-1)
    return logprobs[:-1].gather(1, whole[1:, None]).squeeze(1)[len(prompt) - 1 :]


def assert_from(model: Decoder, request: Request, generations: list[Generation]) -> None:
    assert len(generations) == len(request.seeds)
    for g in generations:
        assert len(g.ids) == len(g.logprobs) == len(g.versions)
        wanted = truth(model, request.prompt_ids, g.ids, request.params.temperature or 1.0)
        torch.testing.assert_close(torch.tensor(g.logprobs), wanted, atol=ATOL, rtol=0)


def test_each_seed_gets_a_generation_with_the_policys_logprobs(subject):
    requests = [ask("a", [1, 2, 3], n=4), ask("b", range(30), n=2), ask("c", [7])]

    async def scenario(sampler):
        return await asyncio.gather(*(sampler.generate(r) for r in requests))

    for request, generations in zip(requests, run(subject, scenario), strict=True):
        assert_from(policy(1), request, generations)
        assert all(g.versions == [0] * 8 and g.finish == "length" for g in generations)
        assert len({tuple(g.ids) for g in generations}) == len(generations)


def test_the_same_seed_draws_the_same_tokens(subject):
    async def scenario(sampler):
        first = await sampler.generate(ask("a", [5, 6], n=3))
        second = await sampler.generate(ask("b", [5, 6], n=3))
        return first, second

    first, second = run(subject, scenario, "seeds")
    assert [g.ids for g in first] == [g.ids for g in second]


def test_logprobs_are_those_at_the_temperature(subject):
    requests = [ask(f"at {t}", [5, 6], n=3, temperature=t) for t in (0.5, 1.7)]

    async def scenario(sampler):
        return [await sampler.generate(request) for request in requests]

    for request, generations in zip(requests, run(subject, scenario), strict=True):
        assert_from(policy(1), request, generations)


def test_a_stop_id_ends_and_belongs_to_the_generation(subject):
    async def scenario(sampler):
        (free,) = await sampler.generate(ask("a", [5, 6], max_new_tokens=20))
        stop = free.ids[7]
        request = ask("b", [5, 6], max_new_tokens=20, stop_ids=(40, stop))
        return free, stop, request, await sampler.generate(request)

    free, stop, request, (stopped,) = run(subject, scenario, "seeds")
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.finish == "stop"
    assert_from(policy(1), request, [stopped])


def test_a_stop_string_ends_and_its_tokens_stay(subject):
    async def scenario(sampler):
        (free,) = await sampler.generate(ask("a", [5, 6], max_new_tokens=20))
        string = decode(free.ids[9:12])
        request = ask("b", [5, 6], max_new_tokens=20, stop_strings=("#never#", string))
        return free, string, request, await sampler.generate(request)

    free, string, request, (stopped,) = run(subject, scenario, "seeds", "stop_strings")
    size = len(stopped.ids)
    assert stopped.ids == free.ids[:size] and stopped.finish == "stop"
    assert string in decode(stopped.ids) and string not in decode(stopped.ids[:-1])
    assert_from(policy(1), request, [stopped])


def test_greedy_is_greedy(subject):
    request = ask("a", [3, 1, 4], temperature=0.0, max_new_tokens=10)
    (g,) = run(subject, lambda sampler: sampler.generate(request))
    assert_from(policy(1), request, [g])
    ids = list(request.prompt_ids)
    with torch.no_grad():
        for drawn in g.ids:
            hidden = policy(1)(torch.tensor(ids), torch.arange(len(ids)), causal_attend)
            assert policy(1).logits(hidden[-1]).argmax().item() == drawn
            ids.append(drawn)


def test_the_context_limit_ends_a_generation(subject):
    request = ask("a", [i % 41 for i in range(1019)], max_new_tokens=50)
    (g,) = run(subject, lambda sampler: sampler.generate(request))
    assert len(g.ids) == 5 and g.finish == "length"
    assert_from(policy(1), request, [g])


BAD = [
    (ask("x", []), "is empty"),
    (ask("x", [41]), "outside the vocabulary of 41"),
    (ask("x", [-1]), "outside the vocabulary of 41"),
    (ask("x", [1] * 1024), "context of 1024"),
    (ask("x", [1], n=0), "n = 0"),
    (ask("x", [1], stop_ids=(41,)), "outside the vocabulary of 41"),
    (ask("x", [1], max_new_tokens=0), "at least 1"),
    (ask("x", [1], temperature=-1.0), "temperature"),
    (ask("x", [1], temperature=float("nan")), "temperature"),
    (ask("x", [1], top_p=0.0), "top_p"),
    (ask("x", [1], top_k=-2), "top_k"),
    (ask("x", [1], stop_strings=("",)), "every text"),
]


def test_bad_requests_are_refused_with_a_sentence_and_others_go_on(subject):
    requests = [ask(f"good{i}", [1, 2]) for i in range(len(BAD))]

    async def scenario(sampler):
        answers = []
        for (bad, rule), request in zip(BAD, requests, strict=True):
            good = asyncio.create_task(sampler.generate(request))
            with pytest.raises(UserError, match=rule):
                await sampler.generate(bad)
            answers.append(await good)
        return answers

    for request, generations in zip(requests, run(subject, scenario), strict=True):
        assert_from(policy(1), request, generations)


def test_install_replaces_the_policy_and_the_receipt_proves_it(installing):
    request = ask("a", [1, 2, 3], n=3)

    async def scenario(sampler):
        before = await sampler.generate(request)
        receipt = await sampler.install(7, list(iter_hf(policy(2))))
        return before, receipt, sampler.version, await sampler.generate(request)

    before, receipt, version, after = run(installing, scenario)
    assert_from(policy(1), request, before)
    assert_from(policy(2), request, after)
    assert version == receipt.version == 7
    assert receipt.num_tensors == len(list(iter_hf(policy(2))))
    assert receipt.digest == digest_of(iter_hf(policy(2))).hex()
    assert all(g.versions == [7] * 8 for g in after)


def test_install_after_install_leaves_nothing_of_the_older_policy(installing):
    async def scenario(sampler):
        drawn = {}
        for version in (2, 3, 3, 4):
            await sampler.install(version, list(iter_hf(policy(version))))
            drawn[version] = await sampler.generate(ask(f"v{version}", range(20), n=2))
        return drawn

    for version, generations in run(installing, scenario).items():
        assert_from(policy(version), ask("", range(20), n=2), generations)


def test_a_faulty_install_is_refused_and_changes_nothing(subject):
    pairs = list(iter_hf(policy(2)))
    name, tensor = pairs[3]
    faults = {
        "missing": pairs[:3] + pairs[4:],
        "unknown": [*pairs, ("model.layers.9.nothing", tensor)],
        "shape": [*pairs[:3], (name, torch.zeros(3, 5)), *pairs[4:]],
        "twice": [*pairs, pairs[3]],
    }
    requests = [ask(f"after {fault}", [1, 2, 3]) for fault in faults]

    async def scenario(sampler):
        found = []
        for faulty, request in zip(faults.values(), requests, strict=True):
            with pytest.raises(UserError):
                await sampler.install(5, faulty)
            found.append((sampler.version, await sampler.generate(request)))
        return found

    for request, (version, generations) in zip(requests, run(subject, scenario), strict=True):
        assert version == 0, request.id
        assert_from(policy(1), request, generations)


def test_versions_never_go_back(subject):
    async def scenario(sampler):
        await sampler.install(3, list(iter_hf(policy(2))))
        with pytest.raises(UserError, match="version 3 is already here"):
            await sampler.install(2, list(iter_hf(policy(1))))
        return await sampler.generate(ask("a", [1]))

    assert_from(policy(2), ask("a", [1]), run(subject, scenario))


def test_versions_go_back_once_they_begin_anew(subject):
    async def scenario(sampler):
        await sampler.install(3, list(iter_hf(policy(2))))
        await sampler.rewind()
        await sampler.install(1, list(iter_hf(policy(1))))
        with pytest.raises(UserError, match="version 1 is already here"):
            await sampler.install(0, list(iter_hf(policy(2))))
        return await sampler.generate(ask("a", [1]))

    assert_from(policy(1), ask("a", [1]), run(subject, scenario))


def test_tokens_under_way_carry_the_version_that_drew_them(installing):
    request = ask("a", [1, 2, 3], n=2, max_new_tokens=installing.long)

    async def scenario(sampler):
        task = asyncio.create_task(sampler.generate(request))
        await installing.drawing()
        await sampler.install(1, list(iter_hf(policy(2))))
        return met_under_way(await task)

    for g in run(installing, scenario):
        assert len(g.ids) == installing.long
        assert g.versions == sorted(g.versions) and set(g.versions) == {0, 1}
        old = g.versions.count(0)
        wanted = truth(policy(1), request.prompt_ids, g.ids)[:old]
        torch.testing.assert_close(torch.tensor(g.logprobs[:old]), wanted, atol=ATOL, rtol=0)


def test_requests_that_come_during_an_install_are_answered_by_whole_policies(installing):
    """Each by the old one or by the new one, and by nothing in between."""
    asked = [ask(f"r{i}", [7, 8, i], n=2) for i in range(12)]

    async def scenario(sampler):
        async def later(index, request):
            await asyncio.sleep(0.004 * index)
            return await sampler.generate(request)

        tasks = [asyncio.create_task(later(i, request)) for i, request in enumerate(asked)]
        await sampler.install(1, list(iter_hf(policy(2))))
        return [await task for task in tasks]

    for request, generations in zip(asked, run(installing, scenario), strict=True):
        for g in generations:
            versions = set(g.versions)
            assert versions <= {0, 1}
            if len(versions) == 1:
                assert_from(policy(versions.pop() + 1), replace(request, seeds=(0,)), [g])


def test_tokens_under_way_can_be_recomputed_by_new_weights(reprefilling):
    request = ask("a", [1, 2, 3], n=2, max_new_tokens=reprefilling.long)

    async def scenario(sampler):
        task = asyncio.create_task(sampler.generate(request))
        await reprefilling.drawing()
        await sampler.install(1, list(iter_hf(policy(2))))
        return met_under_way(await task)

    for g in run(reprefilling, scenario):
        old = g.versions.count(0)
        assert 0 < old < reprefilling.long == len(g.ids)
        wanted = [truth(policy(seed), request.prompt_ids, g.ids) for seed in (1, 2)]
        expected = torch.cat([wanted[0][:old], wanted[1][old:]])
        torch.testing.assert_close(torch.tensor(g.logprobs), expected, atol=ATOL, rtol=0)


def test_an_abort_ends_one_request_at_once_and_no_other(subject):
    long, other = (
        ask("long", [1, 2], n=3, max_new_tokens=subject.long),
        ask("other", [3], max_new_tokens=30),
    )

    async def scenario(sampler):
        task = asyncio.create_task(sampler.generate(long))
        beside = asyncio.create_task(sampler.generate(other))
        await subject.drawing()
        await sampler.abort("long")
        await sampler.abort("nobody")
        aborted = await task
        if any(g.finish == "length" for g in aborted):
            raise Missed
        return aborted, await beside

    aborted, (finished,) = run(subject, scenario, "abort")
    assert all(g.finish == "abort" and len(g.ids) < subject.long for g in aborted)
    assert_from(policy(1), long, aborted)
    assert finished.finish == "length" and len(finished.ids) == 30


def test_what_an_aborted_request_drew_is_where_another_goes_on(installing):
    """By newer weights: each token has the log-prob and version of those that drew it."""
    request = ask("cut", [1, 2], n=3, max_new_tokens=installing.long)

    async def scenario(sampler):
        task = asyncio.create_task(sampler.generate(request))
        await installing.drawing()
        await sampler.abort("cut")
        cut = await task
        if any(g.finish == "length" or not g.ids for g in cut):
            raise Missed
        await sampler.install(1, iter_hf(policy(2)))
        before = sampler.stats()["tokens_drawn"]
        whole = await sampler.generate(replace(request, id="rest", drawn=tuple(cut)))
        return cut, whole, sampler.stats()["tokens_drawn"] - before

    cut, whole, num_drawn = run(installing, scenario, "abort")
    for begun, g in zip(cut, whole, strict=True):
        old = len(begun.ids)
        assert len(g.ids) == installing.long and g.finish == "length"
        assert (g.ids[:old], g.logprobs[:old]) == (begun.ids, begun.logprobs)
        assert g.versions == [0] * old + [1] * (len(g.ids) - old)
        wanted = truth(policy(2), request.prompt_ids, g.ids)[old:]
        found = torch.tensor(g.logprobs[old:])
        torch.testing.assert_close(found, wanted, atol=ATOL, rtol=0)
    assert num_drawn == sum(
        len(g.ids) - len(begun.ids) for begun, g in zip(cut, whole, strict=True)
    )


def test_a_request_waits_through_sleep_and_is_exact_after_wake(subject):
    request = ask("a", [1, 2, 3], n=2, max_new_tokens=subject.long)

    async def scenario(sampler):
        task = asyncio.create_task(sampler.generate(request))
        await subject.drawing()
        await sampler.sleep()
        await sampler.sleep()
        late = asyncio.create_task(sampler.generate(ask("late", [9])))
        await asyncio.sleep(0.05)
        assert not task.done() and not late.done()
        await sampler.wake()
        await sampler.wake()
        return await task, await late

    generations, late = run(subject, scenario, "sleep")
    assert_from(policy(1), request, generations)
    assert_from(policy(1), ask("late", [9]), late)


def test_weights_can_be_installed_during_sleep(subject):
    async def scenario(sampler):
        await sampler.sleep()
        await sampler.install(4, list(iter_hf(policy(2))))
        await sampler.wake()
        return await sampler.generate(ask("a", [1, 2]))

    assert_from(policy(2), ask("a", [1, 2]), run(subject, scenario, "sleep"))


def test_health_and_stats(subject):
    async def scenario(sampler):
        await sampler.health()
        await sampler.generate(ask("a", [1, 2, 3], n=4))
        stats = sampler.stats()
        await sampler.close()
        with pytest.raises(RunError, match="closed"):
            await sampler.health()
        with pytest.raises(RunError, match="closed"):
            await sampler.generate(ask("b", [1]))
        return stats

    stats = run(subject, scenario)
    assert stats["tokens_drawn"] == 32
    assert stats["running"] == stats["waiting"] == 0


def test_close_ends_open_requests_with_an_error(subject):
    async def scenario(sampler):
        request = ask("a", [1, 2], max_new_tokens=subject.long)
        task = asyncio.create_task(sampler.generate(request))
        await subject.drawing()
        await sampler.close()
        with pytest.raises(RunError, match="closed"):
            await task

    run(subject, scenario)
