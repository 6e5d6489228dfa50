"""Decode steps that are launched together, and before those in progress are read: the same tokens
as one step at a time.

On a GPU the steps are captured graphs. Here `HostDecoder` computes them from the same buffers in
plain torch, so that everything except the kernels is the real code.
"""

import asyncio
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="captured decode steps need Triton")

from pentad.core.errors import RunError  # noqa: E402
from pentad.infer.attend import PagedAttend, StepRows  # noqa: E402
from pentad.infer.blocks import SCRATCH  # noqa: E402
from pentad.infer.engine import Report  # noqa: E402
from pentad.infer.graphs import PLACES, POSITIONS, TEMPERATURES, UNIFORMS, WIDTH  # noqa: E402
from pentad.infer.graphs import GraphDecoder as Decoder  # noqa: E402
from pentad.infer.sampling import draw  # noqa: E402
from pentad.models.hf_weights import iter_hf  # noqa: E402
from pentad.models.registry import create_model  # noqa: E402


class HostDecoder(Decoder):
    """Computes steps on a CPU. Padded rows, and rows at their limit, must write to the scratch
    block; their ids are made up."""

    def compute(self, inputs, ids_S, *, is_shared):
        size, width = len(ids_S), int(inputs[WIDTH, 0])
        starts, places = (inputs[row, :size] for row in (POSITIONS, PLACES))
        is_real = places // self.cache.block_size != SCRATCH
        assert not is_real[self.num :].any()
        which = is_real.nonzero()[:, 0]
        blocks = self.blocks[: size * width].view(size, width)[which].numpy()
        own = starts[which].numpy()
        rows = StepRows(own, np.ones(len(own), np.int64), blocks, places[which])
        logits_SV = torch.full((size, self.model.dims.vocab_size), torch.nan)
        drawn_S = torch.randint(0, self.model.dims.vocab_size, (size,))
        logprobs_S = torch.full((size,), torch.nan)
        if len(which):
            hidden = self.model(ids_S[which], starts[which], PagedAttend(self.cache, rows))
            logits_SV[which] = self.model.logits(hidden)
            uniform, heat = (
                inputs[row, :size].view(torch.float64)[which] for row in (UNIFORMS, TEMPERATURES)
            )
            drawn_S[which], logprobs_S[which] = draw(logits_SV[which], uniform, heat.float())
        return logits_SV, drawn_S, logprobs_S

    def launch(self, rows, num_steps, after=None):
        self.num = len(rows)
        self.launches.append((num_steps, after is not None))
        return super().launch(rows, num_steps, after)


@pytest.fixture
def ahead_sampler(make_sampler):
    def make(steps_together=4, **settings):
        sampler = make_sampler(steps_together=steps_together, **settings)
        engine, runner = sampler.engine, sampler.engine.runner
        places = runner.model, runner.cache, engine.table, engine.max_context
        runner.decoder = HostDecoder(*places, steps_together, capture=False)
        runner.decoder.launches = []
        runner.captures_graphs = True
        return sampler, runner.decoder.launches

    return make


def tokens(results):
    return [[(g.ids, g.versions, g.finish) for g in one] for one in results]


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_running": 5},
        {"kv_cache_tokens": 96, "max_running": 8},
        {"max_batch_tokens": 9, "max_running": 8},
    ],
    ids=["room for all", "few rows", "few blocks", "chunked"],
)
def test_the_tokens_are_those_of_steps_in_turn(
    make_sampler, ahead_sampler, make_request, generate, check_exact, settings, together
):
    requests = [
        make_request("a", range(3), n=4, max_new_tokens=20, stop_ids=(1, 5, 9, 30)),
        make_request("b", range(13), n=2, max_new_tokens=7),
        make_request("c", range(5), n=3, max_new_tokens=30, stop_ids=(2,)),
        make_request("d", range(2), n=1, max_new_tokens=1),
    ]
    plain = generate(make_sampler(**settings), requests)
    sampler, launches = ahead_sampler(together, **settings)
    found = generate(sampler, requests)
    assert tokens(found) == tokens(plain)
    assert sum(is_ahead for _, is_ahead in launches) > 1, "no step was ever launched ahead"
    assert max(num for num, _ in launches) == together
    if not settings:
        assert launches[0] == (together, True), "the first steps wait for the prefill's tokens"
    check_exact(sampler, requests, found)
    stats = sampler.engine.stats()
    assert stats["running"] == stats["kv_usage"] == 0
    assert stats["tokens_drawn"] == sum(len(g.ids) for one in found for g in one)


def any_request(chosen, make_request, name):
    """A request of random size; some need the host after each step, or for sampling."""
    kind = chosen.choice(["plain"] * 4 + ["text", "top_k", "tops", "greedy"])
    params = {"max_new_tokens": chosen.randint(1, 30)}
    if chosen.random() < 0.7:
        params["stop_ids"] = tuple(chosen.sample(range(37), chosen.randint(1, 4)))
    if kind == "text":
        params["stop_strings"] = (chr(65 + chosen.randrange(37)) + chr(65 + chosen.randrange(37)),)
    if kind == "top_k":
        params |= {"top_k": 5, "top_p": 0.9}
    if kind == "tops":
        params["num_top"] = 2
    if kind == "greedy":
        params["temperature"] = 0.0
    prompt = [chosen.randrange(37) for _ in range(chosen.choice([1, 4, 5, 8, 9, 20]))]
    return make_request(name, prompt, n=chosen.randint(1, 5), seed=chosen.random(), **params)


def text_of(ids):
    return "".join(chr(65 + id_) for id_ in ids)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_get_the_same_tokens(make_sampler, ahead_sampler, make_request, seed):
    """Requests that arrive one after the other, some with a listener, in little memory."""
    chosen = random.Random(seed)
    requests = [any_request(chosen, make_request, f"r{i}") for i in range(14)]
    pauses = [chosen.randrange(6) for _ in requests]
    listened = {request.id for request in requests if chosen.random() < 0.15}
    settings = chosen.choice([{}, {"max_running": 9}, {"kv_cache_tokens": 160, "max_running": 12}])
    settings |= {"decode": text_of}

    def run(sampler):
        heard = {}

        async def one(request, num):
            for _ in range(num):
                await asyncio.sleep(0)
            on_token = None
            if request.id in listened:
                told = heard.setdefault(request.id, {})
                on_token = lambda i, id_, _: told.setdefault(i, []).append(id_)  # noqa: E731
            return await sampler.generate(request, on_token)

        async def main():
            pairs = zip(requests, pauses, strict=True)
            return await asyncio.gather(*(one(*pair) for pair in pairs))

        return asyncio.run(main()), heard

    plain, _ = run(make_sampler(**settings))
    sampler, launches = ahead_sampler(chosen.choice([2, 3, 4]), **settings)
    found, heard = run(sampler)
    assert tokens(found) == tokens(plain)
    for before, after in zip(plain, found, strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)  # other batches
    for request, generations in zip(requests, found, strict=True):
        if request.id in listened:
            assert heard[request.id] == {i: g.ids for i, g in enumerate(generations)}
    assert launches
    assert sampler.engine.stats()["kv_usage"] == 0


@pytest.mark.parametrize("on_update", ["continue", "reprefill"])
@pytest.mark.parametrize("seed", range(3))
def test_an_abort_and_new_weights_meet_steps_that_are_under_way(
    ahead_sampler, make_request, tiny_dims, check_exact, seed, on_update
):
    """Tokens that were launched before an install have the version that sampled them; rows of an
    aborted request, and the sequence that takes such a row, get none of its tokens."""
    sampler, launches = ahead_sampler(version=0, on_update=on_update)
    num_drawn = 2 + 3 * seed

    async def main():
        long = make_request("long", range(4), n=2, max_new_tokens=110, seed=seed)
        ended = make_request("ended", range(6), n=3, max_new_tokens=110)
        answers = asyncio.create_task(sampler.generate(long))
        other = asyncio.create_task(sampler.generate(ended))
        while sampler.engine.num_drawn < 5 * num_drawn:
            await asyncio.sleep(0)
        await sampler.abort("ended")
        await sampler.install(1, list(iter_hf(create_model(tiny_dims, seed=2))))
        third = make_request("third", range(5), n=3, max_new_tokens=6)
        return await answers, await other, await sampler.generate(third), third

    answers, other, third, request = asyncio.run(main())
    assert any(is_ahead for _, is_ahead in launches)
    assert all(g.finish == "abort" for g in other)
    assert all(len(g.ids) == 6 and g.versions == [1] * 6 for g in third)
    check_exact(sampler, [request], [third])
    for answer in answers:
        assert len(answer.ids) == 110 and sorted(answer.versions) == answer.versions
        assert set(answer.versions) == {0, 1}


def test_a_sleeping_engine_holds_no_steps_that_were_under_way(
    make_sampler, ahead_sampler, make_request, generate
):
    """They refer to the logits of captured graphs, whose memory a sleeping engine frees."""
    request = make_request("a", range(5), n=3, max_new_tokens=20)
    (plain,) = generate(make_sampler(), [request])
    sampler, _ = ahead_sampler()
    engine, report = sampler.engine, Report()
    engine.submit(request)
    while engine.ahead is None:
        engine.step(report)
    engine.sleep()
    assert engine.ahead is None
    engine.wake()
    while engine.has_work:
        engine.step(report)
    ended = sorted(report.finished, key=lambda sequence: sequence.index)
    assert [sequence.generation().ids for sequence in ended] == [g.ids for g in plain]


def test_weights_that_are_not_finite_fail_the_run(ahead_sampler, make_request, generate):
    sampler, _ = ahead_sampler(version=3)
    launch = sampler.engine.runner.decoder.launch

    def broken(rows, num_steps, after=None):
        launched = launch(rows, num_steps, after)
        launched.outputs[num_steps - 1, 1, 0] = torch.tensor(torch.nan).double().view(torch.int64)
        return launched

    sampler.engine.runner.decoder.launch = broken
    with pytest.raises(RunError, match="not finite with weights of version 3"):
        generate(sampler, [make_request("a", range(3), n=2)])
