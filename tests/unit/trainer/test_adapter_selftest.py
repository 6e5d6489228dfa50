"""The self-test of an adapter: a sampler that does not compute with it is found before step 1."""

import asyncio

import pytest

from pentad.core.errors import RunError
from pentad.core.types import Generation
from pentad.trainer.sampling.selftest import check_adapter

MOVED, BASE = -1.5, -1.0


class Learner:
    """Every token has one log-prob, which shaken factors move."""

    def __init__(self):
        self.calls, self.is_shaken = [], False

    async def call(self, method, **given):
        self.calls.append(given["is_on"])
        self.is_shaken = given["is_on"]

    async def run(self, function):
        return function()

    def call_all(self, method, rows, tag="actor"):
        value = MOVED if tag == "actor" and self.is_shaken else BASE
        return [[value] * len(ids) for ids in rows]


class Sampler:
    def __init__(self, learner, is_deaf):
        self.learner, self.is_deaf, self.logprob = learner, is_deaf, BASE

    async def publish(self):
        if not self.is_deaf:
            self.logprob = MOVED if self.learner.is_shaken else BASE

    async def generate(self, request):
        drawn = {"ids": [1, 2], "logprobs": [self.logprob] * 2, "versions": [0, 0]}
        return [Generation(**drawn, finish="stop") for _ in request.seeds]


def outcome(is_deaf: bool):
    learner = Learner()
    sampler = Sampler(learner, is_deaf)
    call = check_adapter(learner, [sampler], [(3, 4)], sampler.publish, temperature=1.0, seed=0)
    try:
        return asyncio.run(call)
    finally:
        assert learner.calls == [True, False], "the factors are put back"


def test_a_sampler_that_ignores_the_adapter_is_found():
    with pytest.raises(RunError, match="log-probs by 0.5 and the sampler's by 0, and they are 0.5"):
        outcome(is_deaf=True)


def test_both_sides_move_alike():
    found = outcome(is_deaf=False)
    assert (found.trainer, found.sampler, found.apart) == (0.5, 0.5, 0.0)
