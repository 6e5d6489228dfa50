import asyncio
from dataclasses import replace

import pytest
import torch
from closeness import assert_logprobs
from sections import sampler_settings

from pentad.core.dims import ModelDims
from pentad.core.types import Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.registry import create_model

TINY = ModelDims(
    family="qwen3",
    vocab_size=37,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    qk_norm=True,
    tie_embeddings=True,
    max_position=128,
    initializer_range=0.5,  # distributions far from uniform
)
WINDOWED = replace(TINY, sliding_window=7, sliding_layers=(True, False))


@pytest.fixture
def tiny_dims():
    return TINY


@pytest.fixture
def windowed_dims():
    return WINDOWED


def request(name, prompt, n=1, *, seed=0, **params):
    """n continuations with seeds that differ from those of every other name."""
    params = SamplingParams(**({"max_new_tokens": 12} | params))
    seeds = tuple(hash((seed, i)) ^ sum(map(ord, name)) * 7919 for i in range(n))
    return Request(id=name, prompt_ids=tuple(prompt), params=params, seeds=seeds)


@pytest.fixture
def make_request():
    return request


@pytest.fixture
def make_sampler():
    made = []

    def make(dims=TINY, seed=1, decode=None, version=-1, **settings):
        model = create_model(dims, seed=seed)
        defaults = {"max_running": 64, "kv_cache_tokens": 8192, "block_size": 4}
        sampler = EmbeddedSampler(
            model, sampler_settings(**(defaults | settings)), decode=decode, version=version
        )
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        asyncio.run(sampler.close())


@pytest.fixture
def generate():
    """All requests submitted before the first step; a list of generations for each."""

    def run(sampler, requests):
        async def main():
            return await asyncio.gather(*(sampler.generate(r) for r in requests))

        return asyncio.run(main())

    return run


@torch.no_grad()
def forced_logits(model, prompt, ids, temperature=1.0):
    """Logits of the whole vocabulary at each of `ids`, by one forward over the sequence."""
    whole = torch.tensor([*prompt, *ids])
    hidden = model(whole, torch.arange(len(whole)), causal_attend)
    return (model.logits(hidden) / temperature)[len(prompt) - 1 : -1]


@pytest.fixture
def teacher_forced_logits():
    return forced_logits


@pytest.fixture
def check_exact():
    """Every generation's log-probs against the teacher-forced forward."""

    def check(sampler, requests, results):
        for r, generations in zip(requests, results, strict=True):
            for g in generations:
                assert len(g.ids) == len(g.logprobs) == len(g.versions) > 0
                temperature = r.params.temperature or 1.0
                logits = forced_logits(sampler.engine.model, r.prompt_ids, g.ids, temperature)
                assert_logprobs(g.logprobs, logits, g.ids)

    return check
