"""What is particular to the embedded engine: updates under way, failures, refusals, memory."""

import asyncio
import gc
import random
import threading

import pytest
import torch
from closeness import assert_logprobs
from sections import sampler_settings

from pentad.core.errors import RunError, UserError
from pentad.infer import engine as infer_engine
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.hf_weights import install_hf, iter_hf
from pentad.models.registry import blank_model, create_model
from pentad.ops.digest import digest_of
from pentad.sync.publisher import Publisher, take_snapshot


async def update_under_way(sampler, request, weights):
    drawn = asyncio.Event()
    task = asyncio.create_task(sampler.generate(request, lambda *_: drawn.set()))
    await drawn.wait()
    await sampler.install(1, weights)
    return await task


@pytest.mark.parametrize("on_update", ["continue", "reprefill"])
def test_tokens_after_an_update(
    make_sampler, make_request, teacher_forced_logits, tiny_dims, on_update
):
    """Reprefilled they are the new policy's; continued they see keys of the old one."""
    sampler = make_sampler(version=0, on_update=on_update)
    request = make_request("a", range(20), n=2, max_new_tokens=60)
    new = create_model(tiny_dims, seed=2)
    for g in asyncio.run(update_under_way(sampler, request, list(iter_hf(new)))):
        old = g.versions.count(0)
        assert 0 < old < 60
        logits = teacher_forced_logits(new, request.prompt_ids, g.ids)[old:]
        if on_update == "reprefill":
            assert_logprobs(g.logprobs[old:], logits, g.ids[old:])
        else:
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(g.ids[old:])[:, None])[:, 0]
            assert (torch.tensor(g.logprobs[old:]) - wanted).abs().max() > 1e-2
    assert sampler.stats()["preemptions"] == (2 if on_update == "reprefill" else 0)


def test_it_holds_when_as_many_requests_have_ended_as_were_allowed(make_sampler, make_request):
    """However long that is noticed afterwards, the others have what they had then."""
    lengths = {"a": 5, "b": 9, "c": 9, "d": 30, "e": 40}
    requests = [make_request(n, range(4), max_new_tokens=num) for n, num in lengths.items()]

    async def scenario(wait_s):
        sampler = make_sampler(version=0)
        sampler.hold_after(1)
        tasks = [asyncio.create_task(sampler.generate(one)) for one in requests]
        await tasks[0]
        await asyncio.sleep(wait_s)
        assert not any(task.done() for task in tasks[1:])
        sampler.hold_after(1)
        await asyncio.gather(*tasks[1:3])
        await asyncio.sleep(wait_s)
        await sampler.abort("e")
        (cut,) = await tasks[4]
        await asyncio.sleep(wait_s)
        assert not tasks[3].done(), "an abort allows nothing"
        sampler.hold_after(None)
        (whole,) = await tasks[3]
        await sampler.close()
        return cut, whole

    (cut, whole), again = (asyncio.run(scenario(wait_s)) for wait_s in (0.0, 0.2))
    assert len(cut.ids) == 9 and cut.finish == "abort" and len(whole.ids) == 30
    assert (cut, whole) == again


def test_a_blank_model_draws_nothing_until_weights_are_installed(tiny_dims, make_request):
    settings = sampler_settings(max_running=4, kv_cache_tokens=1024)
    request = make_request("a", range(20), n=2, max_new_tokens=6)
    new = create_model(tiny_dims, seed=2)

    async def draw(model, weights):
        sampler = EmbeddedSampler(model, settings)
        if weights:
            await sampler.install(0, weights)
        try:
            return [g.ids for g in await sampler.generate(request)]
        finally:
            await sampler.close()

    def blank():
        return blank_model(tiny_dims, device="cpu", dtype=torch.float32)

    with pytest.raises(RunError, match="not finite with weights of version -1"):
        asyncio.run(draw(blank(), None))
    assert asyncio.run(draw(blank(), list(iter_hf(new)))) == asyncio.run(draw(new, None))


def test_the_receipt_tells_what_lies_in_the_model(make_sampler, tiny_dims, monkeypatch):
    sampler = make_sampler()
    weights = list(iter_hf(create_model(tiny_dims, seed=2)))

    def lossy(model, pairs):
        num = install_hf(model, pairs)
        model.norm.weight.mul_(1.001)
        return num

    monkeypatch.setattr("pentad.infer.engine.install_hf", lossy)
    receipt = asyncio.run(sampler.install(0, weights))
    assert receipt.num_tensors == len(weights)
    assert receipt.digest != digest_of(weights).hex()


def test_prefixes_of_older_weights_are_not_found(
    make_sampler, make_request, generate, check_exact, tiny_dims
):
    sampler = make_sampler(keep_prefixes=True)
    generate(sampler, [make_request("a", range(24))])
    weights = list(iter_hf(create_model(tiny_dims, seed=2)))
    asyncio.run(sampler.install(0, weights))
    requests = [make_request("b", range(24))]
    check_exact(sampler, requests, generate(sampler, requests))
    assert sampler.stats()["prefill_tokens_reused"] == 0


def test_a_cache_that_mixes_versions_is_shown_to_nobody(
    make_sampler, make_request, generate, check_exact, tiny_dims
):
    sampler = make_sampler(version=0, keep_prefixes=True)
    request = make_request("a", range(20), max_new_tokens=40)
    new = list(iter_hf(create_model(tiny_dims, seed=2)))
    (mixed,) = asyncio.run(update_under_way(sampler, request, new))
    after = [make_request("b", [*range(20), *mixed.ids])]
    check_exact(sampler, after, generate(sampler, after))
    assert sampler.stats()["prefill_tokens_reused"] == 0


def test_weights_that_are_not_finite_fail_loudly(make_sampler, make_request, generate, tiny_dims):
    sampler = make_sampler()
    weights = [(name, t * float("nan")) for name, t in iter_hf(create_model(tiny_dims))]
    asyncio.run(sampler.install(3, weights))
    with pytest.raises(RunError, match="not finite with weights of version 3"):
        generate(sampler, [make_request("a", [1, 2])])
    with pytest.raises(RunError, match="not finite"):
        asyncio.run(sampler.health())
    with pytest.raises(RunError, match="has failed"):
        generate(sampler, [make_request("b", [1, 2])])


def test_what_never_fits_the_cache_is_refused(make_sampler, make_request, generate):
    sampler = make_sampler(kv_cache_tokens=32)
    with pytest.raises(UserError, match="40 tokens: .* never fit the key-value cache of 32"):
        generate(sampler, [make_request("a", range(20), max_new_tokens=20)])
    assert len(generate(sampler, [make_request("b", range(20))])[0][0].ids) == 12


def test_stop_strings_need_a_decoder(make_sampler, make_request, generate):
    sampler = make_sampler()
    assert "stop_strings" not in sampler.capabilities
    with pytest.raises(UserError, match="cannot decode ids to text"):
        generate(sampler, [make_request("a", [1], stop_strings=("x",))])


def test_a_stop_string_may_span_tokens_that_spell_nothing(make_sampler, make_request, generate):
    """Decoded as a whole: ids below 30 spell nothing here, others one letter each."""

    def decode(ids):
        return "".join(chr(ord("a") + i - 30) for i in ids if i >= 30)

    sampler = make_sampler(decode=decode)
    (free,) = generate(sampler, [make_request("a", [1, 2], max_new_tokens=100)])[0]
    text = decode(free.ids)
    assert len(text) > 4 and len(text) < len(free.ids)
    string = text[2:4]
    (g,) = generate(
        sampler, [make_request("a", [1, 2], max_new_tokens=100, stop_strings=(string,))]
    )[0]
    assert g.finish == "stop"
    assert string in decode(g.ids) and string not in decode(g.ids[:-1])


def test_two_requests_of_one_id_are_refused(make_sampler, make_request, generate):
    sampler = make_sampler()

    async def main():
        first = asyncio.create_task(sampler.generate(make_request("a", [1])))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="of this id is in progress"):
            await sampler.generate(make_request("a", [2]))
        return await first

    assert len(asyncio.run(main())) == 1


def test_a_cancelled_request_leaves_the_engine(make_sampler, make_request):
    sampler = make_sampler()

    async def main():
        drawn = asyncio.Event()
        request = make_request("a", [1, 2], n=4, max_new_tokens=100)
        task = asyncio.create_task(sampler.generate(request, lambda *_: drawn.set()))
        await drawn.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sampler.generate(make_request("b", [3], max_new_tokens=1))
        return sampler.stats()

    stats = asyncio.run(main())
    assert stats["running"] == stats["kv_usage"] == 0
    assert stats["tokens_drawn"] < 400
    assert sampler.open == {}


def test_a_sampler_that_is_closed_after_a_cancelled_request_is_quiet(make_sampler, make_request):
    sampler, complaints = make_sampler(), []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        drawn = asyncio.Event()
        request = make_request("a", [1, 2], n=4, max_new_tokens=100)
        task = asyncio.create_task(sampler.generate(request, lambda *_: drawn.set()))
        await drawn.wait()
        task.cancel()
        await asyncio.wait([task])
        await sampler.close()
        gc.collect()

    gc.collect()  # what other tests left, HTTP clients for one, would close itself in this loop
    asyncio.run(main())
    assert complaints == []


@pytest.mark.parametrize("way", ["abort", "cancel"])
def test_a_request_that_ends_while_weights_arrive_is_never_run(
    make_sampler, make_request, tiny_dims, monkeypatch, way
):
    sampler = make_sampler()
    arriving, release = threading.Event(), threading.Event()
    install = sampler.engine.install

    def slow(*given, **how):
        arriving.set()
        release.wait(240)
        return install(*given, **how)

    monkeypatch.setattr(sampler.engine, "install", slow)

    async def main():
        update = asyncio.create_task(sampler.install(1, iter_hf(create_model(tiny_dims, seed=2))))
        while not arriving.is_set():
            await asyncio.sleep(0.001)
        task = asyncio.create_task(sampler.generate(make_request("a", [1, 2], max_new_tokens=50)))
        await asyncio.sleep(0)
        ending = asyncio.create_task(sampler.abort("a")) if way == "abort" else task.cancel()
        await asyncio.sleep(0.01)
        release.set()
        await update
        if way == "abort":
            await ending
            [generation] = await task
            assert generation.finish == "abort"
        await sampler.generate(make_request("b", [3], max_new_tokens=1))

    asyncio.run(main())
    assert sampler.stats()["tokens_drawn"] == 1 and sampler.open == {}


def test_a_listener_that_raises_ends_its_own_request_only(make_sampler, make_request):
    sampler = make_sampler()

    def listen(*_):
        raise KeyError("listener")

    async def main():
        bad = sampler.generate(make_request("a", [1], max_new_tokens=50), listen)
        good = sampler.generate(make_request("b", [2], max_new_tokens=50))
        return await asyncio.gather(bad, good, return_exceptions=True)

    bad, (good,) = asyncio.run(main())
    assert isinstance(bad, KeyError) and len(good.ids) == 50
    assert sampler.stats()["running"] == 0


def test_an_abort_of_a_waiting_request_returns_nothing_drawn(make_sampler, make_request):
    sampler = make_sampler(max_running=1)

    async def main():
        running = asyncio.create_task(sampler.generate(make_request("a", [1], max_new_tokens=50)))
        waiting = asyncio.create_task(sampler.generate(make_request("b", [2], n=2)))
        await asyncio.sleep(0.01)
        await sampler.abort("b")
        return await waiting, await running

    aborted, (finished,) = asyncio.run(main())
    assert [(g.ids, g.finish) for g in aborted] == [([], "abort")] * 2
    assert len(finished.ids) == 50


def test_sleep_frees_the_cache(make_sampler):
    sampler = make_sampler()
    asyncio.run(sampler.sleep())
    assert sampler.engine.runner.cache is None
    asyncio.run(sampler.wake())
    assert sampler.engine.runner.cache is not None


def test_the_cache_keeps_to_its_memory(tiny_dims, make_sampler):
    sampler = make_sampler(kv_cache_tokens=None, kv_cache_gb=100_000 / 2**30, block_size=4)
    cache = sampler.engine.runner.cache
    held = sum(tensor.numel() * tensor.element_size() for tensor in cache.held)
    one = held // cache.num_blocks
    assert 100_000 - one < held <= 100_000


def test_a_cache_without_a_block_is_refused(make_sampler):
    with pytest.raises(
        UserError,
        match="no room for a block of 4 tokens.*rollout.kv_cache_gb of a run, --kv-cache-gb of",
    ):
        make_sampler(kv_cache_tokens=None, kv_cache_gb=100 / 2**30)


@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_of_calls_ends_with_nothing_held(make_sampler, make_request, tiny_dims, seed):
    sampler = make_sampler(version=0, kv_cache_tokens=160, max_running=6, max_batch_tokens=24)
    weights = [list(iter_hf(create_model(tiny_dims, seed=s))) for s in (2, 3)]
    rng = random.Random(seed)

    async def disturb():
        for version in range(1, 12):
            await asyncio.sleep(rng.random() * 0.02)
            kind = rng.choice(["install", "pause", "sleep", "abort"])
            if kind == "install":
                await sampler.install(version, weights[version % 2])
            elif kind == "pause":
                await sampler.pause()
                await asyncio.sleep(0.002)
                await sampler.resume()
            elif kind == "sleep":
                await sampler.sleep()
                await sampler.wake()
            else:
                await sampler.abort(f"r{rng.randrange(25)}")

    async def one(i):
        await asyncio.sleep(rng.random() * 0.1)
        size, new, n = rng.randrange(1, 30), rng.randrange(1, 30), rng.randrange(1, 5)
        task = asyncio.create_task(
            sampler.generate(make_request(f"r{i}", range(size), n=n, max_new_tokens=new))
        )
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        generations = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(generations, asyncio.CancelledError):
            return
        assert len(generations) == n
        for g in generations:
            assert len(g.ids) == new if g.finish == "length" else g.finish == "abort"
            assert len(g.ids) == len(g.logprobs) == len(g.versions)
            assert g.versions == sorted(g.versions)

    async def main():
        await asyncio.wait_for(asyncio.gather(disturb(), *(one(i) for i in range(25))), 60)
        await sampler.pause()  # aborts of cancelled requests are through
        await sampler.resume()
        await sampler.health()
        return sampler.stats()

    stats = asyncio.run(main())
    assert stats["running"] == stats["waiting"] == stats["kv_usage"] == 0
    assert sampler.open == {}
    assert len(sampler.engine.table.free_rows) == 6


@pytest.mark.parametrize("name", [None, "embed.weight", "layers.1.attn.o.weight", "norm.weight"])
def test_weights_of_this_process_are_compared_instead_of_hashed(
    make_sampler, tiny_dims, monkeypatch, name
):
    """One flipped bit of what was installed, even the sign of a zero, is seen all the same."""
    sampler, learner = make_sampler(), create_model(tiny_dims, seed=2)
    for parameter in learner.parameters():
        parameter.data.view(-1)[3] = 0.0
    install = infer_engine.install_hf

    def damaged(model, pairs):
        num = install(model, pairs)
        if name is not None:
            model.get_parameter(name).data.view(-1)[3] = -0.0
        return num

    monkeypatch.setattr(infer_engine, "install_hf", damaged)
    snapshot = take_snapshot(1, iter_hf(learner), copy=False, hashed=False)
    publishing = Publisher([sampler]).publish(snapshot)
    if name is None:
        asyncio.run(publishing)
        assert "entries" not in vars(snapshot.digest)
        assert snapshot.digest.hex() == digest_of(iter_hf(sampler.engine.model)).hex()
    else:
        with pytest.raises(RunError, match="sampler 0 holds version 1, digest"):
            asyncio.run(publishing)
