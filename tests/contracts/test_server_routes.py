"""A mixture over a server: the experts of a token are those the server used, or it is refused."""

import asyncio
import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from http_thread import served
from sections import sampler_settings
from sglang_stand_in import StandIn
from subjects import DIMS, server_settings

from pentad.core.errors import InfraFailure, UserError
from pentad.core.types import Generation, Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.samplers import sglang
from pentad.samplers.dialect import routes_of

NUM_EXPERTS, NUM_CHOSEN = 8, 2
MIXTURE = replace(
    DIMS,
    family="qwen3_moe",
    num_layers=3,
    num_experts=NUM_EXPERTS,
    num_experts_per_token=NUM_CHOSEN,
    moe_intermediate_size=16,
    moe_layers=(True, False, True),
    initializer_range=0.1,
)
PROMPT = (5, 9, 2)


def policy(seed):
    return create_model(MIXTURE, seed=seed)


@torch.no_grad()
def own_routes(model, ids):
    """Of all tokens but the last, experts in order."""
    routes = {}
    model(torch.tensor(ids), torch.arange(len(ids)), causal_attend, routes)
    return torch.stack([routes[layer] for layer in sorted(routes)], 1).sort(-1).values.numpy()[:-1]


def stand_in(version, on_update):
    settings = sampler_settings(
        max_running=16, kv_cache_tokens=4096, on_update=on_update, replay_routes=True
    )

    def make():
        return EmbeddedSampler(policy(9), settings, version=-1)

    return StandIn(make, version=version, enable_return_routed_experts=True)


def ask(num_new, num=1):
    params = SamplingParams(max_new_tokens=num_new)
    return Request(id=f"r{num_new}", prompt_ids=PROMPT, params=params, seeds=tuple(range(num)))


@pytest.mark.parametrize("version", ["0.5.23", "0.5.17"])
def test_routes_are_those_of_the_weights_that_drew(model_folder, version):
    server = stand_in(version, "reprefill")

    async def main(address):
        settings = server_settings(
            model_folder,
            dims=MIXTURE,
            replay_routes=True,
            on_update="reprefill",
            weight_transport="ipc",
        )
        sampler = await sglang.attach(address, settings)
        assert "routes" in sampler.capabilities
        await sampler.install(0, list(iter_hf(policy(1))))
        short = await sampler.generate(ask(6, 3))
        second, drawn = list(iter_hf(policy(2))), server.sampler.stats()["tokens_drawn"]
        work = asyncio.create_task(sampler.generate(ask(200)))
        while server.sampler.stats()["tokens_drawn"] == drawn:
            await asyncio.sleep(0.001)
        await sampler.install(1, second)
        (long,) = await work
        await sampler.close()
        return short, long

    with served(server.app()) as address:
        short, long = asyncio.run(main(address))
    for made in short:
        assert made.routes.shape == (len(PROMPT) + 6, 2, NUM_CHOSEN)
        expected = own_routes(policy(1), [*PROMPT, *made.ids])
        np.testing.assert_array_equal(np.sort(made.routes, -1)[:-1], expected)
    assert set(long.versions) == {0, 1} and len(long.ids) == 200
    old, new = (own_routes(policy(seed), [*PROMPT, *long.ids]) for seed in (1, 2))
    cut = len(PROMPT) + long.versions.count(0) - 1
    told = np.sort(long.routes, -1)[:-1]
    np.testing.assert_array_equal(told[:cut], old[:cut])
    np.testing.assert_array_equal(told[cut:], new[cut:])
    assert (old[:cut] != new[:cut]).any()


def test_a_server_without_the_flag_is_refused_with_the_flag(model_folder):
    server = StandIn(lambda: EmbeddedSampler(policy(9), sampler_settings(kv_cache_tokens=256)))

    async def main(address):
        settings = server_settings(model_folder, dims=MIXTURE, replay_routes=True)
        with pytest.raises(UserError, match="start it with --enable-return-routed-experts"):
            await sglang.attach(address, settings)

    with served(server.app()) as address:
        asyncio.run(main(address))


def as_int32(array):
    return base64.b64encode(array.astype(np.int32).tobytes()).decode()


def as_npy(array):
    out = io.BytesIO()
    np.save(out, array.astype(np.uint8))
    return base64.b64encode(out.getvalue()).decode()


ANSWER = Generation([1, 2, 3, 4], [-1.0] * 4, [0] * 4, "length")
TOLD = np.arange(6 * 3 * 2).reshape(6, 3, 2) % NUM_EXPERTS


@pytest.mark.parametrize("encode", [as_int32, as_npy])
def test_both_encodings_give_the_mixture_layers_of_all_tokens(encode):
    routes = routes_of("here", encode(TOLD), ANSWER, 3, MIXTURE)
    np.testing.assert_array_equal(routes[:-1], TOLD[:, [0, 2]])
    assert len(routes) == 7 and len(set(routes[-1, 0])) == NUM_CHOSEN


FLAWS = {
    "nothing": (lambda: None, "does not report the experts"),
    "a token less": (lambda: as_int32(TOLD[1:]), "30 came where 7 tokens have 36"),
    "an expert twice": (lambda: as_int32(np.zeros_like(TOLD)), "same expert twice"),
    "an expert too many": (lambda: as_npy(TOLD + 1), "the model has 8"),
    "a negative one": (lambda: as_int32(TOLD - 1), "experts -1 to"),
    "no base64": (lambda: "%%", "cannot be parsed"),
    "half a number": (lambda: base64.b64encode(b"123").decode(), "cannot be parsed"),
    "half a file": (lambda: base64.b64encode(b"\x93NUMPY").decode(), "cannot be parsed"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_experts_that_cannot_be_are_no_answer(flaw):
    make, said = FLAWS[flaw]
    with pytest.raises(InfraFailure, match=said):
        routes_of("here", make(), ANSWER, 3, MIXTURE)


def test_an_answer_that_was_cut_may_say_nothing():
    cut = replace(ANSWER, finish="abort")
    assert routes_of("here", None, cut, 3, MIXTURE) is None
